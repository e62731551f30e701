"""What the dimensions of the mesh divide: memory and bytes of collectives of a training step in several processes.

    python -m benchmarks.mesh                                     # all parts, with a sequence of 32,768 tokens
    python -m benchmarks.mesh parts=memory,limit tokens=8192

memory    Peak bytes of the tensors that a step on one sequence creates, in one process and on 4 ranks with context=4.
limit     Whether this step runs if a process may allocate only half of what one process needs (Linux).
traffic   Bytes that a rank sends in a step on 4 ranks, counted, beside the formula in `expected_traffic`.

Counts and bytes do not depend on the load of the machine. The attention of 32,768 tokens takes CPU minutes.
"""

from __future__ import annotations

import json
import math
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
from realign.engines.distributed.ranks import current
from realign.engines.distributed.sharded_engine import ShardedEngine
from realign.engines.network.attention import ATTENTION
from realign.engines.network.passes import ParallelPasses
from realign.engines.network.settings import NetworkSettings
from realign.engines.training.transformers_engine import TransformersEngine
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


class Traffic(TorchDispatchMode):
    """Count the bytes that this rank sends in collectives on tensors, as a ring of ranks transfers them."""

    KINDS = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "alltoall_base_", "send")

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
        elif kind in self.KINDS:
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
    with Traffic() as traffic:
        step(engine, tokens, sequences)
    return traffic.sent


def expected_traffic(tokens: int, sharding: Sharding, scenario: Scenario = WIDE) -> dict[str, float]:
    """Return the bytes that a rank sends in a step of one micro-batch, by operation.

    FSDP gathers each layer for its forward and its backward pass, and the other weights once, and reduces the gradients
    of all. HSDP then sums the gradients of its slices. Context parallelism exchanges queries, keys, values and outputs
    of attention, and their gradients, and sums one number per token. Each of two stages sends hidden states, or their
    gradients, and has half of the weights.

    Args:
        tokens: tokens of the micro-batches of all ranks.
        sharding: the mesh.
        scenario: sizes of the model.
    """
    sizes = sharding.sizes("actor", RANKS)
    stages, replicate, shard, context, _ = sizes.values()
    hidden, head = scenario.hidden, scenario.hidden // scenario.heads
    attention = hidden * (2 * hidden + 2 * scenario.kv_heads * head) + hidden + 2 * scenario.kv_heads * head
    layer = attention + 3 * hidden * scenario.mlp + 2 * hidden
    layers, rest = scenario.layers * layer / stages, (2 * scenario.vocabulary * hidden + hidden) / stages
    own = shard * context
    key_heads = math.lcm(scenario.kv_heads, context)  # repeated for the ranks
    of_rank = tokens * stages / RANKS
    exchanged = 2 * scenario.layers / stages * of_rank * (2 * scenario.heads + 2 * key_heads) * head
    results = 2 * of_rank * context  # of a micro-batch
    return {
        "_allgather_base_": 4 * (2 * layers + rest) * (own - 1) / own,
        "_reduce_scatter_base_": 4 * (layers + rest) * (own - 1) / own,
        "allreduce_": 4 * (2 * (layers + rest) / own * (replicate - 1) / replicate + results * (context - 1) / context),
        "alltoall_base_": 4 * exchanged * (context - 1) / context,
        "send": 4 * of_rank * hidden * (stages - 1),
    }


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
            sent = max(run_ranks(RANKS, traffic_of_step, short, sequences, sharding), key=Counter.total)
            formula = expected_traffic(short, sharding)
            for kind, expected in formula.items():
                if sent[kind] > MIB / 100 or expected:
                    ratio = f"{expected / sent[kind]:.3f}" if sent[kind] else "-"
                    lines.append((name, kind, f"{sent[kind] / MIB:.2f}", f"{expected / MIB:.2f}", ratio))
            found.setdefault("traffic", {})[name] = {"counted": dict(sent), "formula": formula}
        print(table(("mesh", "operation", "MiB sent", "formula", "ratio"), lines), flush=True)
    print(json.dumps({**facts(), **found}))


if __name__ == "__main__":
    main(sys.argv[1:])
