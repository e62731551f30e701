"""Recurrent layers (state-space models, gated delta rule, short convolutions) of hybrid models on packed sequences.

A recurrent layer of transformers takes a batch of sequences and, for decoding, a cache of its states. Packed, it would
carry its state from one sequence to the next. `segment_recurrent_layers` gives such layers a class that calls the
family's own code, and its kernels, on right-padded rows with one sequence each. Attention and all other layers stay
packed. The load probe checks the results.

Shapes: T packed tokens, B sequences, L tokens of the longest sequence, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from realign.models.network.heads import read_body
from realign.models.network.passes import similar_lengths

if TYPE_CHECKING:  # transformers is slow to import
    from transformers.cache_utils import Cache, LinearAttentionLayer

RowsForward: TypeAlias = Callable[[Tensor, Any], Tensor]
"""Runs a recurrent layer on rows [B, L, H] with a cache of transformers, or None."""

States: TypeAlias = Mapping[str, Tensor]
"""States of one layer by name; the first axis is the sequences."""

_KINDS = ("conv", "recurrent")
_CACHES = ("cache_params", "past_key_values")
# one per thread, since passes of a model can run side by side
_CONTEXT: ContextVar[Any] = ContextVar("realign_context", default=None)


class RecurrentContext(Protocol):
    """Which tokens a recurrent layer processes as one sequence, in one call of a model."""

    def recur(self, layer: int, forward: RowsForward, hidden_TH: Tensor) -> Tensor:
        """Run the recurrent layer with index `layer` on packed tokens; return [T, H]."""
        ...


class _Segmented:
    """Class of recurrent layers, in addition to their own."""

    def forward(self, hidden_states: Tensor, *args: Any, realign_context: Any = None, **others: Any) -> Any:
        """Run sequence by sequence within the call of a packed model, else as the family does."""
        own: Any = super()
        context: RecurrentContext | None = _CONTEXT.get() if realign_context is None else realign_context
        if context is None:
            return own.forward(hidden_states, *args, **others)
        layer: Any = self
        name = _cache_keyword(type(layer))
        # set by `on_rows`: the context brings the cache, and padding after a sequence needs no mask
        keywords = {k: v for k, v in others.items() if k not in (*_CACHES, "attention_mask")}

        def on_rows(hidden_BLH: Tensor, cache: Any) -> Tensor:
            out: Tensor = own.forward(hidden_BLH, attention_mask=None, **keywords, **{name: cache})
            return out

        return context.recur(layer.layer_idx, on_rows, hidden_states[0])[None]


class _Parent:
    """Class of the model and of modules with a recurrent layer, in addition to their own.

    It passes the context of a call on to recurrent layers, where a family does not (mamba, jamba).
    """

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Add the context to the keywords, with which gradient checkpointing calls this module in the backward pass."""
        own: Any = super()
        if (context := _CONTEXT.get()) is not None:
            keywords.setdefault("realign_context", context)
        return own.__call__(*args, **keywords)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Run the module, with the context of this call for its recurrent layers."""
        own: Any = super()
        token = _CONTEXT.set(keywords.get("realign_context"))
        if not _takes_others(type(self)):
            keywords.pop("realign_context", None)
        try:
            return own.forward(*args, **keywords)
        finally:
            _CONTEXT.reset(token)


def segment_recurrent_layers(module: nn.Module) -> None:
    """Let the recurrent layers of a model run on packed sequences, in place. Idempotent.

    A recurrent layer is a module with a convolution over tokens that takes a cache of transformers.
    """
    parts = list(module.modules())
    layers = {id(part) for part in parts if _is_recurrent(part)}
    for part in parts:
        if id(part) in layers:
            _extend(part, _Segmented)
        elif any(id(child) in layers for child in part.children()):
            _extend(part, _Parent)
    # the call of the whole model sets the context for parents that get no keywords from their family
    if layers:
        _extend(read_body(module), _Parent)


def has_recurrent_layers(module: nn.Module) -> bool:
    """Return whether a model has recurrent layers, before or after `segment_recurrent_layers`."""
    return any(isinstance(part, _Segmented) or _is_recurrent(part) for part in module.modules())


def _is_recurrent(part: nn.Module) -> bool:
    convolves = any(isinstance(child, nn.Conv1d) for child in part.children())
    return convolves and hasattr(part, "layer_idx") and bool(_cache_keyword(type(part)))


def _extend(part: nn.Module, extension: type) -> None:
    """Put `extension` before the class of a module."""
    if not isinstance(part, extension):  # another class, not a wrapper: names of weights stay as they are saved
        part.__class__ = type(type(part).__name__, (extension, type(part)), {})


def _cache_keyword(kind: type) -> str:
    """Return the name of the cache among the parameters of a module's own class; empty if it takes none."""
    return next((name for name in _CACHES if name in _parameters(kind)), "")


def _takes_others(kind: type) -> bool:
    """Return whether a module's own class accepts any keyword."""
    return any(x.kind is x.VAR_KEYWORD for x in _parameters(kind).values())


@cache
def _parameters(kind: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of `forward` of a module's own class."""
    own: Any = next(x for x in kind.__mro__ if not issubclass(x, _Segmented | _Parent) and "forward" in vars(x))
    return inspect.signature(own.forward).parameters


def run_sequences(forward: RowsForward, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Run a recurrent layer on sequences [tokens, H]."""
    out = [x[:0] for x in sequences]
    for rows in similar_lengths([len(x) for x in sequences]):
        # the layers are causal, so padding after a sequence does not change its outputs
        padded_BLH = nn.utils.rnn.pad_sequence([sequences[i] for i in rows], batch_first=True)
        for i, row in zip(rows, forward(padded_BLH, None), strict=True):
            out[i] = row[: len(sequences[i])]
    return out


def run_prompts(layer: int, forward: RowsForward, prompts: Sequence[Tensor]) -> tuple[list[Tensor], list[States]]:
    """Run a recurrent layer on prompts [tokens, H]; also return the states after each prompt, [1, ...]."""
    out: list[Tensor] = list(prompts)
    states: list[States] = [{} for _ in prompts]
    for rows in similar_lengths([len(x) for x in prompts], 1):  # equal lengths: padding would enter the states
        own = _new_layer()
        out_BLH = forward(torch.stack([prompts[i] for i in rows]), _cache_with(layer, own))
        for row, i in enumerate(rows):
            out[i] = out_BLH[row]
            states[i] = {name: x[row : row + 1] for name, x in _states_of(own).items()}
    return out, states


def run_step(layer: int, forward: RowsForward, hidden_BH: Tensor, states: States) -> Tensor:
    """Run a recurrent layer on one token per sequence, and update its states in place; return [B, H]."""
    own = _new_layer()
    # what a prefill would have left behind: with a previous state, the layer runs its decode path
    for name, x in states.items():
        kind, i = name.split(".")
        getattr(own, f"{kind}_states")[int(i)] = x
        getattr(own, f"is_{kind}_states_initialized")[int(i)] = True
        own.has_previous_state[int(i)] = True
        if kind == "conv":
            own.conv_kernel_size[int(i)] = x.shape[-1]
        own.dtype, own.device = x.dtype, x.device
    out_B1H = forward(hidden_BH[:, None], _cache_with(layer, own))
    for name, x in _states_of(own).items():
        if x is not states[name]:  # some families update a state in place, and others replace it
            states[name].copy_(x)
    return out_B1H[:, 0]


def _new_layer() -> LinearAttentionLayer:
    """Return the empty states of a layer."""
    from transformers.cache_utils import LinearAttentionLayer

    return LinearAttentionLayer()


def _cache_with(layer: int, own: LinearAttentionLayer) -> Cache:
    """Return a cache of transformers with the states of a single layer."""
    from transformers.cache_utils import Cache

    # a layer looks up its states by its index in the model
    return Cache(layers=[*(_new_layer() for _ in range(layer)), own])


def _states_of(own: LinearAttentionLayer) -> dict[str, Tensor]:
    """Return the states in a layer's cache of transformers, by name."""
    states = {f"{kind}.{i}": x for kind in _KINDS for i, x in getattr(own, f"{kind}_states").items()}
    return {name: x for name, x in states.items() if x is not None}
