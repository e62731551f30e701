"""Decoder of encoder-decoder models: rollouts with the cache of transformers for self-attention and cross-attention.

The encoder reads each prompt once. Responses of a prompt that start together share a batch; see `own_cache`.

Shapes: M members of a group, L tokens of a text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from realign.engines.network.encoder_decoder import EncoderDecoder
from realign.engines.network.images import PromptInput, ids_of
from realign.engines.sampling.own_cache import PROMPT, Group, OwnCache

CACHE = "past_key_values"


class EncoderDecoderCache(OwnCache):
    """Decodes responses with the decoder of an encoder-decoder model. Implements `Decoder`.

    A group stores the tokens that the decoder has read, starting with the start token.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        """Compare decoding with and without the cache of the model."""
        self._model = model
        super().__init__(model.module)

    def describe(self) -> str:
        """See `OwnCache.describe`."""
        found = super().describe()
        return found if self.cached else found.replace("whole text", "whole response")

    def _whole(self, ids_ML: Tensor) -> Tensor:
        """See `OwnCache._whole`; the first `PROMPT` tokens are the prompt."""
        members, length = ids_ML.shape
        hidden_TH = self._model.whole(ids_ML.flatten(), np.full(members, length), np.full(members, PROMPT))
        return hidden_TH.view(members, length, -1)

    def prefill(self, texts: Sequence[PromptInput]) -> tuple[Tensor, list[Group]]:
        """See `Decoder.prefill`. The hidden state of a prompt is that of the start token."""
        hidden, states = [], []
        for ids in map(ids_of, texts):
            group = Group(ids.new_zeros(1, 0), dict(self._model.encode([ids])))
            start = torch.full((1, 1), self._model.start, device=ids.device)
            hidden.append(self._append(group, start, start)[0])
            states.append(group)
        return torch.stack(hidden), states

    def _append(self, group: Group, tokens_M1: Tensor, positions_M1: Tensor) -> Tensor:
        """See `OwnCache._append`; positions of the decoder follow from the number of tokens that it has read."""
        group.ids_ML = torch.cat([group.ids_ML, tokens_M1], 1)
        read_ML = tokens_M1 if self.cached else group.ids_ML
        out = self._model.decoder(input_ids=read_ML, use_cache=self.cached, **group.past)
        if self.cached:
            group.past[CACHE] = out.past_key_values
        hidden: Tensor = out.last_hidden_state[:, -1]
        return hidden


__all__ = ["EncoderDecoderCache"]
