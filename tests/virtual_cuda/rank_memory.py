"""Memory of one rank: what torch's `MemTracker` counts in a training step, beside the estimate of `realign check`.

The tensors are fake (shapes without values) and so are the other ranks, so that a model of any size fits any machine.
`python -m benchmarks.gpu_budget parts=memory` prints the table, and `test_rank_memory.py` bounds the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory import MemoryCount
from realign.api import Lengths, MicroBatchSpec, SequenceSample
from realign.api.memory import MemoryWork
from realign.engines import OptimizerSpec
from realign.engines.distributed.sharded_engine import ShardedEngine
from realign.engines.distributed.sharded_network import ShardedNetwork
from realign.engines.distributed.sharding import Sharding
from realign.engines.memory import MemoryModel
from realign.engines.training.transformers_engine import TransformersEngine
from realign.models import Causal
from realign.models.files.unread import Slices, Unread
from realign.models.host import Host
from realign.models.model_shape import shape_of
from realign.models.network.attention import ATTENTION
from realign.models.network.kernels import Backend
from realign.models.network.passes import SharedPrompts
from realign.models.network.settings import NetworkSettings
from tests.tiny import tiny_model

CUDA = torch.device("cuda")
SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "layers": 24, "heads": 14, "kv": 2, "mlp": 4864, "words": 151936, "tied": True},
    "7B": {"hidden_size": 3584, "layers": 28, "heads": 28, "kv": 4, "mlp": 18944, "words": 152064},
    "32B": {"hidden_size": 5120, "layers": 64, "heads": 40, "kv": 8, "mlp": 27648, "words": 152064},
    "72B": {"hidden_size": 8192, "layers": 80, "heads": 64, "kv": 8, "mlp": 29568, "words": 152064},
    "30B of 128 experts": {"hidden_size": 2048, "layers": 48, "heads": 32, "kv": 4, "mlp": 768, "words": 151936},
}
"""Shapes of Qwen2.5, and of Qwen3-30B-A3B."""


@dataclass(frozen=True)
class Case:
    """One rank's training step: a micro-batch of `tokens` and an optimizer step with AdamW, in bf16."""

    model: str
    ranks: int
    tokens: int = 16384
    checkpointing: bool = True
    sharding: Sharding = field(default_factory=Sharding)
    sequences: int = 8
    """Sequences of a micro-batch."""
    microbatches: int = 1
    stage: int = 0
    """Stage of the pipeline whose rank counts."""


@dataclass(frozen=True)
class Bytes:
    """Bytes on one rank."""

    loading: int
    """Peak while the weights are read, on the device and the host."""
    step: int
    """Peak of the second training step, when the optimizer has its moments."""


class Imagined(Host):
    """Answers for fake tensors and fake ranks: every number is 1, every mask selects all, and all ranks agree."""

    def __init__(self, context: int) -> None:
        self._context = context
        """Number of ranks that divide the tokens of a micro-batch."""

    def numbers(self, x: Tensor) -> list[float]:
        return [1.0] * x.numel()

    def true_indices(self, mask_T: Tensor) -> Tensor:
        return torch.arange(1, len(mask_T) // self._context, device=mask_T.device)

    def digest(self, x: Tensor) -> str:
        return ""

    def rows_of_ranks(self, sent: Tensor, received: Tensor, rows: int) -> tuple[list[int], list[int]]:
        each = [rows // len(sent)] * len(sent)
        each[0] += rows % len(sent)
        return each, each

    def most(self, n: int) -> int:
        return 0  # no rank has more micro-batches than this one, or found an error

    def sums(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def gather(self, x: Any, group: Any = None) -> list[Any]:
        return [x] * torch.distributed.get_world_size(group)


@dataclass(frozen=True)
class Nowhere:
    """A weight of this shape in no file."""

    shape: torch.Size
    mode: FakeTensorMode

    def part(self, slices: Slices, opened: Callable[[Path], Any]) -> Tensor:
        """Return a fake slice."""
        known = [len(range(*part.indices(n))) for part, n in zip(slices, self.shape, strict=False)]
        with self.mode:
            return torch.empty([*known, *self.shape[len(known) :]])


class Unpinned(TorchDispatchMode):
    """Skips pinning memory, which fake tensors do not know."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operator."""
        return args[0] if func is torch.ops.aten._pin_memory.default else func(*args, **(kwargs or {}))


class Allocated(MemoryCount):
    """Counts bytes, without those of tensors that have no memory."""

    def _count(self, x: Tensor) -> None:
        if not x.is_meta:
            super()._count(x)


def config_of(model: str, layers: int | None = None, sizes: Mapping[str, Mapping[str, Any]] = SIZES) -> Any:
    """Return the config of a model, with its own number of layers unless another is given."""
    size = sizes[model]
    experts = {"moe_intermediate_size": size["mlp"], "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    return AutoConfig.for_model(
        "qwen3_moe" if "experts" in model else "qwen2",
        hidden_size=size["hidden_size"],
        num_hidden_layers=layers or size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv"],
        intermediate_size=size["mlp"],
        vocab_size=size["words"],
        tie_word_embeddings=size.get("tied", False),
        **(experts if "experts" in model else {}),
    )


def estimated(case: Case, config: Any) -> int:
    """Return the estimate of `realign check` for the step."""
    model = MemoryModel(
        shape_of(config, Causal()),
        CUDA,
        torch.bfloat16,
        optimizer=OptimizerSpec(),
        gradient_checkpointing=case.checkpointing,
        pipeline=case.sharding.pipeline,
        replicate=case.sharding.replicate,
        context=case.sharding.context,
        tensor=case.sharding.tensor,
        expert=case.sharding.expert,
    )
    work = MemoryWork(
        trains=True,
        scores=False,
        samples=False,
        tokens=case.tokens,
        optimizer_step_tokens=case.tokens * case.microbatches,
        response=case.tokens // case.sequences,
        ranks=case.ranks,
    )
    role = model.estimate(work)
    return role.kept + role.training


def tracked(case: Case, config: Any) -> Bytes:
    """Return what `MemTracker` counts on one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    rank = case.stage * case.ranks // case.sharding.pipeline
    torch.distributed.init_process_group("fake", rank=rank, world_size=case.ranks, store=FakeStore())
    try:
        loading = Allocated()  # `MemTracker` refuses the passes of a probe
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
        settings: dict[str, Any] = {
            "settings": NetworkSettings(
                dtype=torch.bfloat16, attention=Backend.varlen, shared_prompts=SharedPrompts.off
            ),
            "seed": 0,
            "optimizer": OptimizerSpec(lr=1e-6),
            "gradient_checkpointing": case.checkpointing,
            "probed": tiny_model("qwen2").to(CUDA),
            "host": Imagined(case.sharding.context),
        }
        tokenizer = SimpleNamespace(eos_token_id=2)
        if case.ranks > 1:
            _leave_unread(module, mode)
            with loading:
                engine: TransformersEngine = ShardedEngine(
                    "actor", module.eval(), tokenizer, sharding=case.sharding, **settings
                )
        else:
            with loading:
                with mode:
                    module.to_empty(device=CUDA)
                engine = TransformersEngine("actor", module.eval(), tokenizer, **settings)
        with mode:
            data = _batch(case)
        for _ in range(2):
            step = MemTracker()
            step.track_external(*engine.resident())
            with mode, step, Unpinned(), _of_leaves_only(), _of_several_passes(step):
                engine.accumulate(data, MicroBatchSpec(case.tokens), _loss, torch.ones(()))
                engine.apply(torch.ones(()))
        return Bytes(loading.peak, _peak(step))
    finally:
        torch.distributed.destroy_process_group()
        _clear_sharding_prop_cache()  # it refers to the meshes of this process group


def _of_leaves_only() -> Any:
    """Return a context in which `MemTracker` may see slices of weights as parameters, such as those of experts."""
    register = Tensor.register_post_accumulate_grad_hook

    def of_leaf(x: Tensor, hook: Any) -> Any:
        return register(x, hook) if x.is_leaf else SimpleNamespace(remove=lambda: None)

    return patch.object(Tensor, "register_post_accumulate_grad_hook", of_leaf)


def _of_several_passes(tracker: MemTracker) -> Any:
    """Return a context of passes after each other, which `MemTracker` would take for a module that calls itself."""
    hidden = ShardedNetwork._hidden

    def after_reset(self: ShardedNetwork, *arguments: Any) -> Tensor:
        tracker.reset_mod_stats()
        return hidden(self, *arguments)

    return patch.object(ShardedNetwork, "_hidden", after_reset)


def full_depth(case: Case, sizes: Mapping[str, Mapping[str, Any]] = SIZES) -> Bytes:
    """Return what `tracked` would return at full depth, from models of 4 and 6 layers.

    With fewer layers FSDP has fewer of them gathered at once.
    """
    four, six = (tracked(case, config_of(case.model, layers, sizes)) for layers in (4, 6))
    more = (sizes[case.model]["layers"] - 4) / 2
    return Bytes(
        round(four.loading + more * (six.loading - four.loading)), round(four.step + more * (six.step - four.step))
    )


def _leave_unread(module: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the weights of a module without memory by unread ones, and its buffers by empty ones on the device."""
    unread: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            weight = nn.Parameter(Unread.of(Nowhere(p.shape, mode), p.shape, CUDA))
            setattr(part, name, unread.setdefault(id(p), weight))
        for name, x in list(part.named_buffers(recurse=False)):
            setattr(part, name, torch.zeros(x.shape, dtype=x.dtype, device=CUDA))


def _batch(case: Case) -> SequenceSample:
    tokens, sequences = case.tokens * case.microbatches, case.sequences * case.microbatches
    ids = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
    lengths = Lengths.of([[tokens // sequences]] * sequences)
    sample = SequenceSample(tuple(range(sequences))).with_data({"input_ids": ids}, lengths=lengths)
    true = torch.ones(tokens, dtype=torch.bool, device=CUDA)
    return sample.with_tokens(loss_mask=true, prompt_mask=~true)


def _loss(output: Any, part: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
    return -output.logprobs_and_entropy(where_T=part["loss_mask"])[0].sum(), {}


def _peak(tracker: MemTracker) -> int:
    """Return the largest number of bytes on the device."""
    return sum(
        sizes["Total"] for device, sizes in tracker.get_tracker_snapshot("peak").items() if device.type == "cuda"
    )
