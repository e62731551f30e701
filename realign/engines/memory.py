"""Formula of the memory that a transformers model needs for training, scoring and rollout.

It describes a decoder of pre-norm layers with RMSNorm, which is an upper bound for families with simpler layers. Every
size is in bytes. `docs/guides/sizing.md` explains the formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from realign.api.memory import MemoryWork, RoleMemory
from realign.engines.files.pretrained import quiet_transformers
from realign.engines.network.cpu_lanes import MIN_ROWS
from realign.engines.network.heads import Head, ValueHead, ValueHidden
from realign.engines.network.trains import All, Trained
from realign.engines.sampling.slots import CACHE_FRACTION, LOGIT_ELEMENTS, PREFILL_TOKENS, cache_bytes
from realign.engines.sampling.weight_fusion import CPU_BYTES, FAMILIES
from realign.engines.training.optimizer import OptimizerSpec
from realign.functional.logprobs import chunk_tokens

FP32 = 4
NF4 = 0.516
"""Bytes per weight in 4-bit NormalFloat with double quantization: half a byte, and its scales."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, as numbers of elements."""

    family: str
    parameters: int
    """Weights of the loaded model, without adapters."""
    in_layers: int
    """Weights of all layers."""
    matrices: int
    """Weights of the linear layers in all layers."""
    trained: int
    """Weights that train, including adapters."""
    adapters: int
    """Weights of the adapters."""
    layers: int
    hidden: int
    queries: int
    """Query heads times head size."""
    keys: int
    """Key-value heads times head size."""
    heads: int
    mlp: int
    """Inner size of the feed-forward layer, for all experts that compute a token."""
    qk_norm: bool
    words: int
    """Vocabulary of the language-model head; 0 for a scalar head."""
    embeddings: int
    """Weights of embeddings and language-model head."""
    tied: bool
    head_trains: bool
    norms_train: bool

    @property
    def cache_token(self) -> int:
        """Elements of one token in the KV cache."""
        return 2 * self.layers * self.keys

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return self.in_layers // max(1, self.layers)


def read_shape(
    path: str, head: Head, *, trust_remote_code: bool = False, trains: Trained | None = None, trainable: bool = True
) -> ModelShape:
    """Return the sizes of the model in a folder or hub repository. Reads its config, but no weights.

    Args:
        path: folder or hub name.
        head: output of the model.
        trust_remote_code: whether to run code in the folder or repository.
        trains: weights that the optimizer changes; None means all.
        trainable: whether the role has an optimizer.

    Raises:
        OSError: the config cannot be read.
    """
    from transformers import AutoConfig

    labels = {"num_labels": 1} if head.is_scalar else {}
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **labels)
    return shape_of(config, head, trust_remote_code=trust_remote_code, trains=trains, trainable=trainable, path=path)


def shape_of(
    config: Any,
    head: Head,
    *,
    trust_remote_code: bool = False,
    trains: Trained | None = None,
    trainable: bool = True,
    path: str = "",
) -> ModelShape:
    """Return the sizes of the model with this transformers config; see `read_shape`."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet_transformers():
        kind = head.auto_class(config.model_type)
        module = kind.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
        loaded = sum(p.numel() for p in module.parameters())
        layers = _layers(module)
        in_layers = sum(p.numel() for p in layers.parameters())
        matrices = sum(p.numel() for p in layers.parameters() if p.ndim >= 2)
        (trains or All()).prepare(module, path=path, seed=0)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad) if trainable else 0
    text = config.get_text_config()
    names = {name for name, _ in layers.named_modules()}
    queries = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // queries
    last: Any = None if head.is_scalar else module.get_output_embeddings()
    given = module.get_input_embeddings().weight
    return ModelShape(
        family=config.model_type,
        parameters=loaded,
        in_layers=in_layers,
        matrices=matrices,
        trained=trained,
        adapters=sum(p.numel() for p in module.parameters()) - loaded,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        queries=queries * size,
        keys=(getattr(text, "num_key_value_heads", None) or queries) * size,
        heads=queries,
        mlp=_mlp(text),
        qk_norm=any(name.endswith("q_norm") for name in names),
        words=0 if last is None else len(last.weight),
        embeddings=given.numel() + (0 if last is None or last.weight is given else last.weight.numel()),
        tied=last is not None and last.weight is given,
        head_trains=trainable and last is not None and last.weight.requires_grad,
        norms_train=trainable and any(p.requires_grad and p.ndim == 1 for p in layers.parameters()),
    )


def _layers(module: Any) -> nn.Module:
    """Return the list of layers; a model without one is treated as a single layer."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=module.base_model)


def _mlp(config: Any) -> int:
    """Return the inner size of the feed-forward layer, for all experts that compute a token."""
    for name in ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner"):
        if (found := getattr(config, name, None)) is not None:
            return int(found) * int(getattr(config, "num_experts_per_tok", None) or 1)
    return 4 * int(config.hidden_size)


@dataclass(frozen=True)
class MemoryModel:
    """Settings of a role that determine its memory; see `TransformersModel` for their meaning."""

    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    optimizer: OptimizerSpec | None = None
    value_head: ValueHead | None = None
    gradient_checkpointing: bool = False
    load_in_4bit: bool = False
    lanes: int = 1
    """Maximum number of concurrent micro-batches."""
    fused_rollout: bool = True
    max_slots: int | None = None
    cache_fraction: float = CACHE_FRACTION
    offload: bool = False
    reshard: bool = True

    def estimate(self, work: MemoryWork) -> RoleMemory:
        """Return the memory of a role that does this work."""
        shape, ranks = self.shape, work.ranks
        trained = (shape.trained + self._value_weights if self.optimizer is not None else 0) // ranks
        lanes = self._lanes(work)
        accumulates = work.optimizer_step_tokens > work.tokens or lanes > 1
        on_device = 0 if self.offload and ranks > 1 else 1
        found = RoleMemory(
            device=str(self.device),
            weights=on_device * self._weights // ranks,
            references=sum(self._reference(layers) for layers in work.references),
            casts=self._casts + self._gathered(ranks),
            accumulates=accumulates,
        )
        if work.trains and self.optimizer is not None:
            copies = 1 if lanes == 1 else lanes + 2
            found = replace(
                found,
                moments=on_device * round(trained * moment_bytes(self.optimizer)),
                average=on_device * FP32 * trained * (self.optimizer.ema_decay is not None),
                gradients=FP32 * trained * copies + self._embedding_gradient,
                activations=self._activations(work.tokens),
                head=self._head(work.tokens, lanes),
            )
        if work.scores:
            found = replace(found, scoring=self._scoring(work.tokens, lanes))
        return self._with_rollout(found, work) if work.samples else found

    @property
    def _bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def _half(self) -> bool:
        return self.dtype != torch.float32

    @property
    def _value_weights(self) -> int:
        spec, hidden = self.value_head, self.shape.hidden
        if spec is None:
            return 0
        inner = 2 * hidden * (hidden + 1) if spec.hidden is ValueHidden.mlp else 0
        return spec.layers * self.shape.layer + inner + hidden + 1

    @property
    def _weights(self) -> int:
        shape = self.shape
        extra = FP32 * (shape.adapters + self._value_weights)
        if self.load_in_4bit:
            return round(NF4 * shape.matrices) + FP32 * (shape.parameters - shape.matrices) + extra
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
        """Return the memory of the bf16 weights, which autograd keeps until the backward pass."""
        return self._bytes * self.shape.in_layers if self._half and not self.load_in_4bit else 0

    def _gathered(self, ranks: int) -> int:
        """Return the memory of the weights that FSDP gathers: embeddings and head, and two layers or all layers."""
        if ranks == 1:
            return 0
        layers = 2 * self.shape.layer if self.reshard else self.shape.in_layers
        return FP32 * (self.shape.embeddings + layers)

    def _lanes(self, work: MemoryWork) -> int:
        longest = max(1, work.prompt + work.response)
        return max(1, min(self.lanes, work.optimizer_step_tokens // MIN_ROWS, work.tokens // longest))

    @property
    def _embedding_gradient(self) -> int:
        """Return the memory of the second gradient of embeddings that are also the head."""
        return FP32 * self.shape.embeddings * (self.shape.tied and self.shape.head_trains)

    def _activations(self, tokens: int) -> int:
        """Return the memory of the tensors that autograd saves, and of the gradients of one layer's tensors."""
        shape, size = self.shape, self._bytes
        layer = self._layer_token
        inputs = FP32 * shape.hidden
        saved = shape.layers * (inputs if self.gradient_checkpointing else layer)
        saved += layer if self.gradient_checkpointing else 0
        branch = 0 if self.value_head is None else self.value_head.layers * layer
        final = FP32 * 4 * shape.hidden
        return tokens * (saved + branch + final + size * 3 * shape.mlp)

    @property
    def _layer_token(self) -> int:
        """Return the bytes that autograd saves for one token in one layer.

        Norms save their input and normalized input in fp32. Linear layers save their input; autocast converts it once
        for each of queries, keys, values, gate and up. Attention saves queries, keys, values and output, and the output
        projection its input. A gated feed-forward layer saves gate, activated gate, up and product, and other
        activation functions save about as much.
        """
        shape, size = self.shape, self._bytes
        norms = 2 * shape.hidden * FP32 * (2 if shape.norms_train or self._half else 1)
        norms += shape.hidden * size * (5 if self._half else 2)
        if shape.qk_norm:
            norms += (shape.queries + shape.keys) * 2 * FP32
        attention = size * (3 * shape.queries + 2 * shape.keys) + FP32 * shape.heads
        return norms + attention + size * shape.mlp * 4

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

    def _with_rollout(self, found: RoleMemory, work: MemoryWork) -> RoleMemory:
        shape, length = self.shape, work.prompt + work.response
        row = self._bytes * shape.cache_token * length
        copies = self._rollout_weights(work)
        free = None if work.free is None else max(0, work.free - found.kept - copies)
        limit = cache_bytes(self.device, self.cache_fraction, free or 0)
        slots = max(1, min(work.sequences, self.max_slots or limit // max(1, row)))
        prefill = min(work.prompts * work.prompt, max(PREFILL_TOKENS, work.prompt))
        passing = prefill * (FP32 * 3 * shape.hidden + self._bytes * (3 * shape.mlp + shape.cache_token))
        logits = min(slots * shape.words, LOGIT_ELEMENTS) * (FP32 if not self._half else 2 * FP32 + self._bytes)
        scores = slots * length * shape.heads * 2 * FP32
        return replace(found, cache=slots * row, rollout_weights=copies, rollout_work=max(passing, logits + scores))

    def _rollout_weights(self, work: MemoryWork) -> int:
        """Return the memory of the weights from which a rollout samples."""
        shape, size = self.shape, self._bytes
        whole = FP32 * shape.parameters if work.ranks > 1 else 0
        head = size * shape.words * shape.hidden
        fused = self.fused_rollout and shape.family in FAMILIES and not shape.adapters and not self.load_in_4bit
        joined = size * shape.in_layers
        if self.device.type == "cpu" and joined > CPU_BYTES:
            fused = False
        if fused:
            return whole + joined + (head if self._half or self.device.type == "cpu" else 0)
        return whole + (self._casts + head if self._half else 0)


def moment_bytes(optimizer: OptimizerSpec) -> float:
    """Return the bytes of optimizer state per trained weight, from one step on a small matrix."""
    weight = nn.Parameter(torch.zeros(128, 128))
    weight.grad = torch.zeros_like(weight)
    built = optimizer.build([weight])
    built.step()
    tensors = [x for state in built.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors if x.numel() > 1) / weight.numel()


__all__ = ["MemoryModel", "ModelShape", "moment_bytes", "read_shape", "shape_of"]
