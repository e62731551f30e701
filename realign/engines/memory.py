"""Formula of the memory that a transformers model needs for training, scoring and rollout.

It describes a decoder of pre-norm layers with RMSNorm, which is an upper bound for families with simpler layers. Every
size is in bytes. `docs/guides/sizing.md` explains the formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from realign.api.memory import MemoryWork, RoleMemory
from realign.engines.training.optimizer import OptimizerSpec
from realign.functional.logprobs import chunk_tokens
from realign.models.model_shape import ModelShape
from realign.models.network.heads import ValueHead, ValueHidden
from realign.models.network.passes import MIN_ROWS, most_lanes, most_rows
from realign.samplers.in_process.compiled.fusion import CPU_BYTES, FAMILIES
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.decode import LOGIT_ELEMENTS, PREFILL_TOKENS, cache_bytes
from realign.samplers.in_process.settings import InProcessSampling

FP32 = 4
_RUNNING_PAIRS = 2
"""Tensors with a number for each pair of tokens that a layer without fused attention creates and does not save."""
_BF16 = 2
_NF4 = 0.516
"""Bytes per weight in 4-bit NormalFloat with double quantization: half a byte, and its scales."""


@dataclass(frozen=True)
class MemoryModel:
    """Settings of a role that determine its memory; see `TransformersModel` for their meaning."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    """Data type of activations in matrix products."""
    rounded: bool = False
    """Whether products use rounded copies of the weights, see `realign.functional.rounding`."""
    optimizer: OptimizerSpec | None = None
    value_head: ValueHead | None = None
    gradient_checkpointing: bool = False
    load_in_4bit: bool = False
    lanes: int = 1
    """Maximum number of concurrent micro-batches."""
    fused_rollout: bool = True
    sampling: InProcessSampling = field(default_factory=InProcessSampling)
    offload: bool = False
    reshard: bool = True
    keep_rollout: bool = True
    pipeline: int = 1
    """Number of stages."""
    replicate: int = 1
    """Number of groups of ranks that each have all weights."""
    context: int = 1
    """Number of ranks that divide a micro-batch."""
    tensor: int = 1
    """Number of ranks that compute each layer together."""
    expert: int = 1
    """Number of ranks with different prompts that each have some experts."""

    def estimate(self, work: MemoryWork) -> RoleMemory:
        """Return the memory of a role that does this work; in a pipeline, of the stage that needs most."""
        if self.pipeline == 1:
            memory = self._of_stage(work, 1)
        else:
            stages = enumerate(self.shape.stages(self.pipeline))
            memory = max(
                (self._stage(index, own)._of_stage(work, self.pipeline - index) for index, own in stages),
                key=lambda memory: memory.kept + memory.computing,
            )
        return self._with_rollout(memory, work) if work.samples else memory

    def _stage(self, index: int, own: range) -> MemoryModel:
        last = index == self.pipeline - 1
        shape = self.shape.of_stage(own, first=index == 0, last=last)
        return replace(self, shape=shape, value_head=self.value_head if last else None)

    def _of_stage(self, work: MemoryWork, waiting: int) -> RoleMemory:
        """Return the memory without that of rollouts.

        Args:
            work: what the role does.
            waiting: largest number of micro-batches of a step that wait for their gradient.
        """
        shape, ranks, shards = self.shape, work.ranks, work.ranks // self.replicate // self.pipeline
        waiting = max(1, min(waiting, work.optimizer_step_tokens // max(1, work.tokens)))
        trained = (shape.trained + self._value_weights if self.optimizer is not None else 0) // shards
        lanes = self._lanes(work)
        if self.device.type == "cpu" and ranks == 1:
            weights = shape.parameters + shape.adapters + self._value_weights
            rows = most_rows(weights, rounded=self.rounded)
            work = replace(work, tokens=min(work.tokens, lanes * max(work.longest, rows)))
        accumulates = work.optimizer_step_tokens > work.tokens or lanes > 1
        work = replace(work, tokens=-(-work.tokens // self.context))
        on_device = 0 if self.offload and ranks > 1 else 1
        rank = replace(self, shape=shape.of_rank(self.tensor, self.expert))
        memory = RoleMemory(
            device=str(self.device),
            weights=on_device * self._weights // shards,
            references=sum(self._reference(layers) for layers in work.references),
            casts=self._casts if ranks == 1 else rank._gathered,
            accumulates=accumulates,
        )
        if work.trains and self.optimizer is not None:
            copies = 1 if lanes == 1 else lanes + 2
            memory = replace(
                memory,
                moments=on_device * round(trained * moment_bytes(self.optimizer)),
                average=on_device * FP32 * trained * (self.optimizer.ema_decay is not None),
                gradients=FP32 * trained * copies + rank._embedding_gradient,
                activations=rank._activations(work.tokens, work, waiting),
                head=rank._head(work.tokens, lanes),
            )
            if ranks > 1:
                memory = rank._reducing(memory, work)
        if work.scores:
            scoring = rank._scoring(work.tokens, lanes) + rank._running_pairs(work.tokens, work)
            memory = replace(memory, scoring=scoring)
        return memory

    @property
    def _bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def _half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def _value_weights(self) -> int:
        spec = self.value_head
        if spec is None:
            return 0
        return spec.layers * self.shape.layer + self._head_weights(spec, 1) + self._q_weights

    @property
    def _q_weights(self) -> int:
        """Return the number of weights of the Q heads; their target heads have as many, which do not train."""
        spec = self.value_head
        if spec is None or spec.q_heads is None:
            return 0
        return spec.q_heads.n * self._head_weights(spec, self.shape.words)

    def _head_weights(self, spec: ValueHead, outputs: int) -> int:
        hidden = self.shape.hidden
        if spec.hidden is ValueHidden.mlp:
            return 2 * hidden * (hidden + 1) + outputs * (2 * hidden + 1)
        return outputs * (hidden + 1)

    @property
    def _weights(self) -> int:
        shape = self.shape
        extra = FP32 * (shape.adapters + self._value_weights + self._q_weights)
        if self.load_in_4bit:
            return round(_NF4 * shape.matrices) + FP32 * (shape.parameters - shape.matrices) + extra
        return FP32 * shape.parameters + extra

    def _reference(self, layers: int | None) -> int:
        """Return the memory of a frozen copy of the top layers; adapters need none."""
        shape = self.shape
        if shape.adapters:
            return 0
        head = shape.words * shape.hidden if shape.head_trains else 0
        return FP32 * ((shape.trained - head) if layers is None else layers * shape.layer) + FP32 * head

    @property
    def _casts(self) -> int:
        """Return the memory of weights in bf16, and of rounded ones in fp32, which last until the backward pass."""
        if self.rounded:
            return (self.dtype.itemsize + _BF16) * (self.shape.in_layers + self.shape.words * self.shape.hidden)
        return self._bytes * self.shape.in_layers if self._half and not self.load_in_4bit else 0

    @property
    def _gathered(self) -> int:
        """Return the memory of the weights that FSDP gathers: embeddings and head in fp32, and layers.

        These are two layers and a buffer of one layer, from which a collective fills them; or all layers.
        """
        layers = 3 * self.shape.layer if self.reshard else self.shape.in_layers + self.shape.layer
        return FP32 * self.shape.embeddings + self._bytes * layers

    def _reducing(self, memory: RoleMemory, work: MemoryWork) -> RoleMemory:
        """Return the memory of a step whose gradients FSDP sums over the ranks, layer by layer.

        The backward pass of a layer needs its gradient in fp32 and the tensors of that layer, and the head needs its
        logits before. The larger of the two counts, since they follow each other. So do the rows of experts and the sum
        of the gradient, during which two more layers are gathered.
        """
        shape, tokens = self.shape, work.tokens
        gathered = 2 * self._bytes * shape.layer * self.reshard
        reduced = max(FP32 * shape.layer, tokens * self._expert_rows - gathered)
        layer = tokens * (3 * self._bytes * shape.mlp + (self._layer_token if self.gradient_checkpointing else 0))
        gradient = FP32 * shape.words * shape.hidden * shape.head_trains
        alone = max(0, memory.head - gradient - reduced - layer)
        return replace(memory, activations=memory.activations + reduced, head=gradient + alone)

    @property
    def _expert_rows(self) -> int:
        """Return the bytes for one token of the rows of its experts in the backward pass of a layer.

        These are the results and their gradient, in fp32 and in the data type of products, and the gradient of the
        inputs and its sum. Ranks that divide experts also send and receive rows.
        """
        shape, exchanged = self.shape, self.tensor * self.expert > 1
        copies = FP32 + self._bytes * (4 + 2 * exchanged)
        return copies * shape.experts_per_token * shape.hidden // self.tensor

    def _lanes(self, work: MemoryWork) -> int:
        if self.shape.unpacked:
            return 1
        most = min(self.lanes, most_lanes(self.shape.trained + self._value_weights))
        return max(1, min(most, work.optimizer_step_tokens // MIN_ROWS, work.tokens // work.longest))

    def _attention_pairs(self, tokens: int, work: MemoryWork) -> int:
        """Return the memory of a tensor with a number for each pair of tokens and each head of a layer.

        The result is 0 with fused attention. Kernels of accelerators also compute soft caps and attention sinks.
        """
        shape = self.shape
        if not shape.pair_tensors or (not shape.unpacked and self.device.type != "cpu"):
            return 0
        longest = min(tokens * self.context, work.prompt + work.response) or tokens
        return tokens * longest * shape.heads * (FP32 + (self._bytes if self._half else 0))

    @property
    def _embedding_gradient(self) -> int:
        """Return the memory of the second gradient of embeddings that are also the head."""
        return FP32 * self.shape.embeddings * (self.shape.tied and self.shape.head_trains)

    def _running_pairs(self, tokens: int, work: MemoryWork) -> int:
        """Return the memory of the pairs of a layer while it runs. A packed model computes one sequence at a time."""
        alone = tokens if self.shape.unpacked else min(tokens, work.prompt + work.response)
        return _RUNNING_PAIRS * self._attention_pairs(alone, work)

    def _activations(self, tokens: int, work: MemoryWork, waiting: int = 1) -> int:
        """Return the memory of the tensors that autograd saves, and of the gradients of one layer's tensors."""
        shape, size = self.shape, self._bytes
        layer = self._layer_token
        inputs = FP32 * shape.hidden
        saved = waiting * shape.layers * (inputs if self.gradient_checkpointing else layer)
        if self.pipeline > 1:  # hidden states that were received or sent, and their gradients
            saved += (waiting + 3) * inputs
        saved += layer if self.gradient_checkpointing else 0
        branch = 0 if self.value_head is None else self.value_head.layers * layer
        final = FP32 * 4 * shape.hidden
        of_layers = shape.pair_tensors * (1 if self.gradient_checkpointing else waiting * shape.layers)
        attention = of_layers * self._attention_pairs(tokens, work) + self._running_pairs(tokens, work)
        return tokens * (saved + branch + final + size * 3 * shape.mlp) + attention

    @property
    def _layer_token(self) -> int:
        """Return the bytes that autograd saves for one token in one layer.

        RMS norms save their input and normalized input in fp32. Linear layers save their input; autocast converts it
        once for each of queries, keys, values, gate and up. Attention saves queries, keys, values and output, and the
        output projection its input. See `ModelShape.mlp_tensors` for feed-forward layers.
        """
        shape, size = self.shape, self._bytes
        norms = 2 * shape.hidden * FP32 * (2 if (shape.norms_train or self._half) and not shape.layer_norms else 1)
        norms += shape.hidden * size * (5 if self._half else 2)
        if shape.qk_norm:
            norms += (shape.queries + shape.keys) * 2 * FP32
        # each rank of `context` has keys and values of its heads, for which fewer key-value heads are repeated
        key_heads = max(1, shape.keys * shape.heads // shape.queries)
        keys = min(shape.queries, math.lcm(key_heads, self.context) // key_heads * shape.keys)
        attention = size * (3 * shape.queries + 2 * keys) + FP32 * shape.heads
        return norms + attention + size * shape.mlp * shape.mlp_tensors

    def _chunk(self, lanes: int) -> int:
        """Return the memory of a chunk of logits: logits and probabilities in fp32, and products in bf16."""
        words = self.shape.words
        return lanes * chunk_tokens(words, self.device) * words * (2 * FP32 + (self._bytes if self._half else 0))

    def _head(self, tokens: int, lanes: int) -> int:
        """Return the memory of the language-model head in a training pass; a scalar head needs little."""
        shape = self.shape
        hidden = FP32 * 2 * tokens * shape.hidden
        if not shape.words:
            return hidden
        gradient = FP32 * lanes * shape.words * shape.hidden * shape.head_trains
        cast = 2 * self._bytes * shape.words * shape.hidden if self._half else 0
        return hidden + gradient + cast + min(self._chunk(lanes), self._chunk_of(tokens))

    def _chunk_of(self, tokens: int) -> int:
        return tokens * self.shape.words * (2 * FP32 + (self._bytes if self._half else 0))

    def _scoring(self, tokens: int, lanes: int) -> int:
        shape = self.shape
        passing = tokens * (FP32 * 3 * shape.hidden + self._bytes * 3 * shape.mlp)
        head = min(self._chunk(lanes), self._chunk_of(tokens)) + FP32 * tokens * shape.hidden if shape.words else 0
        return passing + head

    def _with_rollout(self, memory: RoleMemory, work: MemoryWork) -> RoleMemory:
        shape, length = self.shape, work.prompt + work.response
        row = self._bytes * shape.cache_token * length
        copy = FP32 * shape.parameters if work.ranks > 1 else 0
        made = self._rollout_weights
        if copy and self._fuses:  # layers are gathered one by one, and joined; their fp32 weights are freed
            joined = self._bytes * shape.in_layers
            copy += joined - FP32 * shape.in_layers
            made += FP32 * shape.layer - joined
        kept = copy if self.keep_rollout else 0
        memory = replace(memory, sampling_copy=kept)
        copies = copy - kept + made
        free = None if work.free is None else max(0, work.free - memory.kept - copies)
        limit = cache_bytes(self.device, self.sampling.cache_fraction, free or 0)
        slots = max(1, min(work.sequences, self.sampling.max_slots or limit // max(1, row)))
        prefill = min(work.prompts * work.prompt, max(PREFILL_TOKENS, work.prompt))
        if shape.unpacked:  # prompts run one after another
            prefill = work.prompt
        passing = prefill * (FP32 * 3 * shape.hidden + self._bytes * (3 * shape.mlp + shape.cache_token))
        passing += self._running_pairs(prefill, work)
        logits = min(slots * shape.words, LOGIT_ELEMENTS) * (FP32 if not self._half else 2 * FP32 + self._bytes)
        scores = slots * length * shape.heads * 2 * FP32
        return replace(
            memory,
            cache=slots * row,
            rollout_weights=copies,
            rollout_work=max(passing, logits + scores),
        )

    @property
    def _rollout_weights(self) -> int:
        """Return the memory of the copies of weights that every rollout makes in the dtype of products."""
        shape, size = self.shape, self._bytes
        head = size * shape.words * shape.hidden
        if self._fuses:
            if self.device.type != "cpu" or self._half or self.sampling.compiled_decode is CompiledDecode.off:
                more = self._casts if self.rounded else 0  # torch rounds the joined layers
            else:
                more = (_BF16 if self.rounded else FP32) * shape.in_layers  # the library has its own
            return more + size * shape.in_layers + (head if self._half or self.device.type == "cpu" else 0)
        return self._casts + head if self._half else 0

    @property
    def _fuses(self) -> bool:
        """Whether rollouts join layers, see `Fusion`."""
        shape = self.shape
        known = shape.family in FAMILIES and not shape.adapters and not self.load_in_4bit
        fits = self.device.type != "cpu" or self._bytes * shape.in_layers <= CPU_BYTES
        return self.fused_rollout and known and fits


def moment_bytes(optimizer: OptimizerSpec) -> float:
    """Return the bytes of optimizer state per trained weight, from one step on a small matrix."""
    weight = nn.Parameter(torch.zeros(128, 128))
    weight.grad = torch.zeros_like(weight)
    built = replace(optimizer, lr=optimizer.lr or 0.0).build([weight])  # null: the loaded model sets it
    built.step()
    tensors = [x for state in built.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors if x.numel() > 1) / weight.numel()


__all__ = ["MemoryModel", "moment_bytes"]
