"""What the dimensions of the mesh divide: memory and bytes of collectives of a training step in several processes.

    python -m benchmarks.mesh                                     # all parts, with a sequence of 32,768 tokens
    python -m benchmarks.mesh parts=memory,limit tokens=8192

memory    Peak bytes of the tensors that a step on one sequence creates, in one process and on 4 ranks with context=4.
limit     Whether this step runs if a process may allocate only half of what one process needs (Linux).
traffic   Bytes that a rank sends in a step on 4 ranks, counted, beside the formula of `realign plan`.

Counts and bytes do not depend on the load of the machine. The attention of 32,768 tokens takes CPU minutes.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.memory import MemoryCount, resident
from benchmarks.peer.work import Scenario
from benchmarks.report import arguments, facts, table
from realign.api import MicroBatchSpec, SequenceSample
from realign.engines import OptimizerSpec, Sharding
from realign.engines.distributed.sharded_engine import ShardedEngine
from realign.engines.memory import MemoryModel
from realign.engines.training.transformers_engine import TransformersEngine
from realign.models import Causal
from realign.models.model_shape import shape_of
from realign.models.network.attention import ATTENTION
from realign.models.network.passes import ParallelPasses
from realign.models.network.settings import NetworkSettings
from realign.ranks import current
from realign_planner.traffic import traffic
from tests.engines.distributed.run_ranks import run_ranks

RANKS = 4
MIB = 2**20
BASE = Scenario("mesh", 1, 1, 0, 0, vocabulary=512, hidden=64, layers=2, heads=4, kv_heads=2, mlp=192)
WIDE = replace(BASE, hidden=256, mlp=768)
"""A model whose weights matter, for traffic."""
MESHES = {
    "shard=4": Sharding(),
    "replicate=2, shard=2": Sharding(replicate=2),
    "context=4": Sharding(context=4),
    "shard=2, context=2": Sharding(context=2),
    "pipeline=2, shard=2": Sharding(pipeline=2),
}


OPERATIONS = {
    "shard": ("_allgather_base_", "_reduce_scatter_base_"),
    "replicate": ("allreduce_",),
    "context": ("alltoall_base_",),
    "pipeline": ("send",),
}
"""Operations of each dimension."""


class SentBytes(TorchDispatchMode):
    """Count the bytes that this rank sends in collectives on tensors, as a ring of ranks transfers them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        """Bytes by operation."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operation, and count it if it is a collective."""
        kind = func._schema.name.removeprefix("c10d::")
        if kind == "send":
            self.sent[kind] += sum(x.numel() * x.element_size() for x in args[0])
        elif kind in itertools.chain(*OPERATIONS.values()):
            first = args[0][0] if kind == "allreduce_" else max(args[:2], key=Tensor.numel)
            group = dist.ProcessGroup.unbox(args[1 if kind == "allreduce_" else 2])
            rounds = 2 if kind == "allreduce_" else 1
            self.sent[kind] += rounds * first.numel() * first.element_size() * (group.size() - 1) // group.size()
        return func(*args, **(kwargs or {}))


def trainer(scenario: Scenario, sharding: Sharding) -> TransformersEngine:
    """Return an engine with random weights; the ranks of a group share it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = scenario.config(max_position_embeddings=2**20)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32).eval()
    settings: dict[str, Any] = {"seed": 0, "optimizer": OptimizerSpec(lr=1e-6)}
    network = NetworkSettings(parallel_passes=ParallelPasses.off)
    if current().size == 1:
        return TransformersEngine("actor", module, scenario.tokenizer(), network, **settings)
    return ShardedEngine("actor", module, scenario.tokenizer(), network, sharding=sharding, **settings)


def step(engine: TransformersEngine, tokens: int, sequences: int = 1) -> None:
    """Train on random sequences, in one micro-batch on each rank."""
    drawn = torch.Generator().manual_seed(1)
    ids = [[torch.randint(3, BASE.vocabulary, (tokens // sequences,), generator=drawn)] for _ in range(sequences)]
    data = SequenceSample.from_sequences(range(sequences), {"input_ids": ids})
    data = data.with_tokens(loss_mask=torch.ones(tokens, dtype=torch.bool))

    def loss(output: Any, part: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
        return -output.logprobs(where_T=part["loss_mask"]).sum(), {}

    engine.train_batch(data, MicroBatchSpec(tokens), loss, lambda part: part["loss_mask"].sum())


def peak_of_step(tokens: int, sharding: Sharding) -> int:
    """Return the peak bytes of the tensors that a step on one sequence creates on this rank."""
    engine = trainer(BASE, sharding)
    with MemoryCount() as count:
        step(engine, tokens)
    return count.peak


def runs_within(limit: int, tokens: int, sharding: Sharding) -> bool:
    """Return whether a step on one sequence allocates no more than `limit` bytes beyond what a short one does."""
    engine = trainer(BASE, sharding)
    step(engine, 64)  # loads libraries and creates the moments
    free = resident("VmSize") + limit
    resource.setrlimit(resource.RLIMIT_AS, (free, resource.RLIM_INFINITY))
    try:
        step(engine, tokens)
    except (RuntimeError, MemoryError) as error:
        if "alloc" not in str(error):
            raise
        return False
    return True


def traffic_of_step(tokens: int, sequences: int, sharding: Sharding) -> Counter[str]:
    """Return the bytes that this rank sends in a step, by operation."""
    engine = trainer(WIDE, sharding)
    with SentBytes() as counted:
        step(engine, tokens, sequences)
    return counted.sent


def expected_traffic(tokens: int, sharding: Sharding) -> dict[str, float]:
    """Return the bytes that `realign plan` expects a rank to send in a step of one micro-batch, by dimension.

    Args:
        tokens: tokens of the micro-batches of all ranks.
        sharding: the mesh.
    """
    sizes = sharding.sizes("actor", RANKS)
    mesh = {name: sizes[name] for name in ("pipeline", "replicate", "context", "tensor")}
    shape = shape_of(WIDE.config(), Causal())
    model = MemoryModel(shape, torch.device("cpu"), torch.float32, optimizer=OptimizerSpec(), **mesh)
    parts = sizes["replicate"] * sizes["shard"]
    return {name: size for name, size in vars(traffic(model, RANKS, tokens / parts, trains=True)).items() if size}


def counted_traffic(tokens: int, sequences: int, sharding: Sharding) -> dict[str, float]:
    """Return the bytes that a rank sends in a step on average over the ranks, by dimension.

    The sums of a number per token over the ranks of `context` are left out.
    """
    ranks = run_ranks(RANKS, traffic_of_step, tokens, sequences, sharding)
    sent: Counter[str] = sum(ranks, Counter())
    kinds = {name: kinds for name, kinds in OPERATIONS.items() if name != "replicate" or sharding.replicate > 1}
    means = {name: sum(sent[kind] for kind in kinds) / RANKS for name, kinds in kinds.items()}
    return {name: size for name, size in means.items() if size}


def main(given: Sequence[str] | None = None) -> None:
    """Measure the requested parts; print tables and a JSON line."""
    words = arguments({"parts": "memory,limit,traffic", "tokens": "32768"}, given)
    parts, tokens = words["parts"].split(","), int(words["tokens"])
    alone, four = Sharding(), Sharding(context=RANKS)
    found: dict[str, Any] = {"tokens": tokens}
    if "memory" in parts or "limit" in parts:
        (one,), ranks = (
            run_ranks(n, peak_of_step, tokens, sharding, seconds=3600) for n, sharding in ((1, alone), (RANKS, four))
        )
        found["memory"] = {"one": one, "largest_of_four": max(ranks), "ratio": round(max(ranks) / one, 3)}
        rows = [("one process", f"{one / MIB:.0f}", "1.00")]
        rows.append(("4 ranks, context=4", f"{max(ranks) / MIB:.0f}", f"{max(ranks) / one:.2f}"))
        print(table((f"step on one sequence of {tokens:,} tokens", "MiB on a rank", "ratio"), rows), flush=True)
    if "limit" in parts:
        limit = found["memory"]["one"] // 2
        fits = {
            name: all(run_ranks(n, runs_within, limit, tokens, sharding, seconds=3600))
            for name, n, sharding in (("one process", 1, alone), ("4 ranks, context=4", RANKS, four))
        }
        found["limit"] = {"bytes": limit, **fits}
        rows_of_limit = [(name, "yes" if runs else "no") for name, runs in fits.items()]
        print(table((f"step with {limit / MIB:.0f} MiB per process", "runs"), rows_of_limit), flush=True)
    if "traffic" in parts:
        short, sequences = 2048, 8
        lines = []
        for name, sharding in MESHES.items():
            counted, formula = counted_traffic(short, sequences, sharding), expected_traffic(short, sharding)
            lines += [
                (name, dimension, f"{counted[dimension] / MIB:.2f}", f"{formula[dimension] / MIB:.2f}")
                for dimension in counted | formula
            ]
            found.setdefault("traffic", {})[name] = {"counted": counted, "formula": formula}
        print(table(("mesh", "dimension", "MiB sent", "formula"), lines), flush=True)
    print(json.dumps({**facts(), **found}))


if __name__ == "__main__":
    main(sys.argv[1:])
