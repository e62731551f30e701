"""What a rollout needs of a model: last hidden states of tokens, with attention told what to do by a context."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from realign.engines.attention import CONTEXT, AttentionContext


class Trunk(Protocol):
    """A model without its last layer."""

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """The last hidden states [N, H] of tokens that stand at `positions_N`."""
        ...


class ModuleTrunk:
    """The modules of a transformers model, as its authors wrote them."""

    def __init__(self, model: Any) -> None:
        self._base = model.base_model

    def __call__(self, ids_N: Tensor, positions_N: Tensor, context: AttentionContext) -> Tensor:
        """See `Trunk`."""
        inputs = {"input_ids": ids_N[None], "position_ids": positions_N[None], CONTEXT: context}
        hidden: Tensor = self._base(**inputs, attention_mask=None, use_cache=False).last_hidden_state
        return hidden[0]
