"""Test the predicted traffic against the bytes that ranks give to collectives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from realign.api import MicroBatchSpec
from realign.engines import Sharding
from realign.engines.memory import MemoryModel
from realign.models import Causal
from realign.models.model_shape import shape_of
from realign.ranks import current
from realign_planner.traffic import traffic
from tests.engines.distributed.run_ranks import run_ranks
from tests.engines.distributed.scenarios import load, plain_loss, weight
from tests.tiny import random_sample, save_tiny

SIZE = 4
PROMPTS = 16 * SIZE
SUMS = ("allreduce_", "all_reduce")
GATHERS = ("_allgather_base_", "all_gather_into_tensor")
EXCHANGES = ("_reduce_scatter_base_", "reduce_scatter_tensor", "alltoall_base_", "all_to_all_single")


class SentBytes(TorchDispatchMode):
    """Adds up the bytes that this rank sends to other ranks, as a ring of ranks transfers them."""

    def __init__(self, tensor: int) -> None:
        super().__init__()
        self._tensor = tensor
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the input of a collective, and call it."""
        namespace, name = func._schema.name.split("::")
        if name in (*SUMS, *GATHERS, *EXCHANGES):
            functional = namespace == "_c10d_functional"
            x: Tensor = args[0][0] if name == "allreduce_" else args[0] if functional else args[1]
            # functional collectives have the name of their group, and are those of tensor parallelism
            group = args[1 if name == "allreduce_" else 2]
            n = self._tensor if functional else dist.ProcessGroup.unbox(group).size()
            times = 1.0 if name in GATHERS else (2 if name in SUMS else 1) / n
            self.total += times * (n - 1) * x.numel() * x.element_size()
        if name == "send":
            self.total += sum(x.numel() * x.element_size() for x in args[0])
        return func(*args, **(kwargs or {}))


def sent(folder: Path, model: str, sharding: Mapping[str, int]) -> tuple[float, float]:
    """Return the bytes that this rank sends in a micro-batch with gradient, counted and predicted."""
    engine: Any = load(folder, model, sharding=Sharding(**sharding)).engine
    data = random_sample([(32,)] * PROMPTS)
    data = data.with_tokens(loss_mask=torch.ones_like(data["loss_mask"]))
    part = engine._own_part("traffic", data)
    with SentBytes(sharding.get("tensor", 1)) as counted:
        engine.accumulate(part, MicroBatchSpec(), plain_loss, weight(data))
    shape = shape_of(engine.network.module.config, Causal())
    formula = MemoryModel(shape, torch.device("cpu"), torch.float32, **sharding)
    predicted = traffic(formula, current().size, len(part["input_ids"]), trains=True)
    return counted.total, sum(vars(predicted).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sharding"),
    [
        ("llama", {}),
        ("llama", {"replicate": 2}),
        ("llama", {"replicate": 4}),
        ("llama", {"context": 2}),
        ("llama", {"context": 2, "tensor": 2}),
        ("llama", {"tensor": 2}),
        ("llama", {"replicate": 2, "tensor": 2}),
        ("llama", {"pipeline": 2}),
        ("llama", {"pipeline": 2, "tensor": 2}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"expert": 2}),
        ("qwen3_moe", {"tensor": 2}),
        ("qwen3_moe", {"tensor": 2, "expert": 2}),
        ("qwen3_moe", {"replicate": 2, "expert": 2}),
    ],
    ids=str,
)
def test_ranks_send_what_the_plan_predicts(tmp_path: Path, model: str, sharding: dict[str, int]) -> None:
    save_tiny(tmp_path / model, family=model, vocab_size=100)
    results = run_ranks(SIZE, sent, tmp_path, model, sharding)
    counted = sum(total for total, _ in results) / SIZE  # tokens of one rank may go to few experts
    assert counted == pytest.approx(results[0][1], rel=0.05)
