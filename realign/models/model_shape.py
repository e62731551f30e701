"""Sizes of a model, read from its config without weights."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from realign.models.files.model_folder import quiet_transformers
from realign.models.network.heads import Head, is_encoder_decoder
from realign.models.network.trains import All, Trained
from realign.models.network.unpacked import UNPACKED_FAMILIES
from realign.models.parts import divide_layers, sizes_for_stages

_ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""Names in configs of the number of experts that compute a token."""
_PYTHON_ACTIVATIONS = frozenset({"gelu_new", "gelu_fast", "gelu_python", "quick_gelu"})
"""Activation functions of transformers that consist of several operators."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, as numbers of elements."""

    family: str
    parameters: int
    """Weights of the loaded model, without adapters."""
    in_layers: int
    """Weights of all layers."""
    in_experts: int
    """Weights of the experts in all layers."""
    experts: int
    """Experts of a layer; 0 without a mixture of experts."""
    experts_per_token: int
    matrices: int
    """Weights of the linear layers in all layers."""
    trained: int
    """Weights that train, including adapters."""
    adapters: int
    """Weights of the adapters."""
    layers: int
    sizes: tuple[int, ...]
    """Weights of each layer by which stages are divided; see `sizes_for_stages`."""
    hidden: int
    queries: int
    """Query heads times head size."""
    keys: int
    """Key-value heads times head size."""
    heads: int
    mlp: int
    """Inner size of the feed-forward layer, for all experts that compute a token."""
    mlp_tensors: int
    """Tensors of the size `mlp` that autograd saves in a feed-forward layer."""
    layer_norms: bool
    """Whether norms are those of torch, which save only their input."""
    qk_norm: bool
    words: int
    """Vocabulary of the language-model head; 0 for a scalar head."""
    embeddings: int
    """Weights of embeddings and language-model head."""
    tied: bool
    head_trains: bool
    norms_train: bool
    unpacked: bool
    """Whether the family runs unpacked."""
    pair_tensors: int
    """Tensors with a number for each pair of tokens and each head that autograd saves in a layer without fused
    attention: one for the probabilities, and one for soft-capped scores."""

    @property
    def cache_token(self) -> int:
        """Elements of one token in the KV cache."""
        return 2 * self.layers * self.keys

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return self.in_layers // max(1, self.layers)

    def of_rank(self, tensor: int, expert: int) -> ModelShape:
        """Return the sizes of what a rank gathers and computes, see `Sharding`."""
        experts = self.in_experts // (tensor * expert)
        words = tensor if self.words % tensor == 0 else 1
        return replace(
            self,
            in_layers=(self.in_layers - self.in_experts) // tensor + experts,
            in_experts=experts,
            queries=self.queries // tensor,
            keys=self.keys // tensor,
            heads=self.heads // tensor,
            mlp=self.mlp // tensor,
            words=self.words // words,
            embeddings=self.embeddings // words,
        )

    def of_stage(self, own: range, *, first: bool, last: bool) -> ModelShape:
        """Return the sizes of a stage of a pipeline with some of the layers.

        Args:
            own: the layers.
            first: whether the stage has the embeddings.
            last: whether it has the head.
        """
        of_layers = len(own) / self.layers
        head = self.words * self.hidden
        embeddings = self.embeddings if self.tied or not self.words else self.embeddings - head
        outside = self.parameters - self.in_layers - self.embeddings  # the final norm and a scalar head
        in_layers = round(self.in_layers * of_layers)
        parameters = in_layers + first * embeddings + last * (head + outside)
        of_all = self.trained * parameters // self.parameters
        return replace(
            self,
            parameters=parameters,
            in_layers=in_layers,
            in_experts=round(self.in_experts * of_layers),
            matrices=round(self.matrices * of_layers),
            trained=round(self.trained * of_layers) if self.adapters else of_all,
            adapters=round(self.adapters * of_layers),
            layers=len(own),
            words=last * self.words,
            embeddings=first * embeddings + last * head,
            tied=False,
            head_trains=last and self.head_trains,
        )

    def stages(self, n: int) -> list[range]:
        """Return the layers of each stage of a pipeline."""
        return divide_layers(self.sizes, n)


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
    config = _read_config(path, head, trust_remote_code=trust_remote_code)
    return shape_of(config, head, trust_remote_code=trust_remote_code, trains=trains, trainable=trainable, path=path)


def without_memory(path: str, head: Head, *, trust_remote_code: bool, trains: Trained) -> Any:
    """Return the model in a folder or hub repository, prepared to train, on the meta device.

    Raises:
        OSError: the config cannot be read.
    """
    config = _read_config(path, head, trust_remote_code=trust_remote_code)
    with _on_meta():
        module = head.auto_class(config).from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
        trains.prepare(module, path=path, seed=0)
    return module


def _read_config(path: str, head: Head, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    labels = {"num_labels": 1} if head.is_scalar else {}
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **labels)


@contextmanager
def _on_meta() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet_transformers():
        yield


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
    with _on_meta():
        kind = head.auto_class(config)
        module = kind.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
        # Counted before `prepare`, which adds adapters.
        loaded = sum(p.numel() for p in module.parameters())
        layers = _layers(module)
        in_layers = sum(p.numel() for p in layers.parameters())
        of_experts = [p for p in layers.parameters() if p.ndim == 3]
        matrices = sum(p.numel() for p in layers.parameters() if p.ndim >= 2)
        (trains or All()).prepare(module, path=path, seed=0)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad) if trainable else 0
    text = config.get_text_config()
    names = {name for name, _ in layers.named_modules()} | {name for name, _ in layers.named_parameters()}
    queries = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // queries
    last: Any = None if head.is_scalar else module.get_output_embeddings()
    given = module.get_input_embeddings().weight
    pair = is_encoder_decoder(config)
    unpacked = pair or config.model_type in UNPACKED_FAMILIES
    return ModelShape(
        family=config.model_type,
        parameters=loaded,
        in_layers=in_layers,
        in_experts=sum(p.numel() for p in of_experts),
        experts=len(of_experts[0]) if of_experts else 0,
        experts_per_token=_active_experts(text, len(of_experts[0])) if of_experts else 0,
        matrices=matrices,
        trained=trained,
        adapters=sum(p.numel() for p in module.parameters()) - loaded,
        layers=len(layers) if pair else text.num_hidden_layers,
        sizes=tuple(sizes_for_stages(module, layers)),
        hidden=text.hidden_size,
        queries=queries * size,
        keys=(getattr(text, "num_key_value_heads", None) or queries) * size,
        heads=queries,
        mlp=_mlp(text),
        mlp_tensors=_mlp_tensors(text, layers),
        layer_norms=any(isinstance(part, nn.LayerNorm) for part in layers.modules()),
        qk_norm=any(name.endswith("q_norm") for name in names),
        words=0 if last is None else len(last.weight),
        embeddings=given.numel() + (0 if last is None or last.weight is given else last.weight.numel()),
        tied=last is not None and last.weight is given,
        head_trains=trainable and last is not None and last.weight.requires_grad,
        norms_train=trainable and any(p.requires_grad and p.ndim == 1 for p in layers.parameters()),
        unpacked=unpacked,
        pair_tensors=_pair_tensors(text, names, fused=not unpacked or getattr(module, "_supports_sdpa", False)),
    )


def _layers(module: Any) -> nn.ModuleList:
    """Return the layers, with those of an encoder; a model without a list of layers is treated as a single layer."""
    stacks = [module.get_encoder(), module.get_decoder()] if is_encoder_decoder(module.config) else [module]
    return nn.ModuleList(itertools.chain.from_iterable(map(_largest_list, stacks)))


def _largest_list(stack: Any) -> Iterable[nn.Module]:
    # A layer may contain lists itself, such as experts. The list of layers has more weights than any list inside it.
    lists = [part for part in stack.modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda part: sum(p.numel() for p in part.parameters()), default=[stack.base_model])


def _active_experts(text: Any, experts: int) -> int:
    """Return how many of a layer's experts compute a token; all of them if the config doesn't say."""
    return next((value for name in _ACTIVE_EXPERTS if isinstance(value := getattr(text, name, None), int)), experts)


def _mlp(config: Any) -> int:
    """Return the inner size of the feed-forward layer, for all experts that compute a token."""
    # Experts first: configs of such families may also have an intermediate_size, that of their dense layers.
    for name in ("moe_intermediate_size", "intermediate_size", "ffn_dim", "n_inner", "d_ff"):
        if (size := getattr(config, name, None)) is not None:
            return int(size) * int(getattr(config, "num_experts_per_tok", None) or 1)
    # GPT-2 leaves n_inner empty.
    return 4 * int(config.hidden_size)


def _pair_tensors(config: Any, names: Collection[str], *, fused: bool) -> int:
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return 2
    return int(not fused or any(name.endswith("sinks") for name in names))


def _mlp_tensors(config: Any, layers: nn.Module) -> int:
    """Return the number of tensors that autograd saves in a feed-forward layer.

    A gated layer saves gate, activated gate, up and product. A layer of two matrices saves the input of its activation
    function and the result. Activation functions that are written in Python save several more tensors.
    """
    size = {config.hidden_size, _mlp(config)}
    first = next(iter(layers.children()), layers)
    matrices = [p for p in first.parameters() if p.ndim == 2 and set(p.shape) == size]
    return 2 if len(matrices) == 2 and getattr(config, "activation_function", None) not in _PYTHON_ACTIVATIONS else 4
