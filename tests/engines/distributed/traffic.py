"""Counts the bytes that a rank gives to collectives, and the formula of `docs/adr/0044-mesh.md` for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realign.api import MicroBatchSpec
from realign.engines import Sharding
from tests.engines.distributed.scenarios import load, plain_loss, weight
from tests.tiny import random_sample

KINDS = {"allreduce": "all-reduce", "all_reduce": "all-reduce", "alltoall": "all-to-all", "all_to_all": "all-to-all"}
KINDS |= {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
LENGTHS = ((8,), (8,), (8,), (8,))
"""Prompts of equal length, so that each part of the batch has as many rows and one micro-batch."""


class Traffic(TorchDispatchMode):
    """Counts the elements of floating-point tensors that go into collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the inputs of a collective, and call it."""
        namespace, _, name = str(func).partition(".")
        if namespace in ("c10d", "_c10d_functional"):
            kind = next((kind for part, kind in KINDS.items() if part in name), None)
            # An operator that writes into a tensor has it as its first argument, except where it works in place.
            given = args[0] if kind == "all-reduce" or namespace == "_c10d_functional" else args[1]
            if kind is not None:
                self.elements[kind] += sum(
                    x.numel() for x in tree_leaves(given) if isinstance(x, Tensor) and x.is_floating_point()
                )
        return func(*args, **(kwargs or {}))


def counted(folder: Path, model: str, sharding: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the elements that one training pass gives to collectives, and those of the formula."""
    engine: Any = load(folder, model, sharding=Sharding(**sharding)).engine
    data = random_sample(LENGTHS)
    part = engine._own_part("traffic", data)
    with Traffic() as traffic:
        engine.accumulate(part, MicroBatchSpec(), plain_loss, weight(data))
    expected = formula(engine, len(part["input_ids"]), int(part["loss_mask"].sum()), **sharding)
    return dict(traffic.elements), {kind: n for kind, n in expected.items() if n}


def formula(engine: Any, rows: int, trained: int, *, tensor: int = 1, expert: int = 1) -> dict[str, int]:
    """Return the elements that one training pass should give to collectives, for all-to-all the mean over ranks."""
    config = engine.network.module.config
    layers, hidden = config.num_hidden_layers, config.hidden_size
    own = {name: p.to_local().numel() for name, p in engine.network.weights.sharded.items()}
    elements = Counter({"all-reduce": 1})  # whether a loss reached the head
    # FSDP: the root is gathered once, and a layer in each direction; gradients are summed once.
    shards = {name: p.device_mesh["shard"].size() for name, p in engine.network.weights.sharded.items()}
    elements["all-gather"] += sum(n * (2 if ".layers." in name else 1) for name, n in own.items() if shards[name] > 1)
    elements["reduce-scatter"] += sum(n * shards[name] for name, n in own.items() if shards[name] > 1)
    experts = getattr(config, "num_experts", 0) and getattr(config, "num_experts_per_tok", 0)
    if tensor > 1:
        # Forward: outputs of attention and of a dense feed-forward layer. Backward: their inputs.
        elements["all-reduce"] += layers * rows * hidden * (2 if experts else 4)
        elements["all-reduce"] += rows * hidden  # embeddings
        elements["all-reduce"] += trained * hidden  # gradient of the inputs of the head
        elements["all-gather"] += 4 * trained  # statistics of the logits
        heads = sum(n for name, n in own.items() if "_norm." in name and "self_attn" in name)
        elements["all-reduce"] += heads  # gradients of the norms of heads
    if experts and tensor * expert > 1:
        traveling = rows // tensor * experts * hidden
        elements["all-to-all"] += layers * 4 * traveling  # to the experts and back, and their gradients
        if tensor > 1:
            elements["all-gather"] += layers * rows // tensor * (2 * hidden + experts)
    return dict(elements)
