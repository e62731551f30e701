"""Encoder-decoder models such as T5 and BART: the encoder reads the prompt, and the decoder writes the response.

A sequence of a sample consists of a prompt and a response. The decoder starts with `decoder_start_token_id`, so its
first hidden state predicts the first token of the response. The hidden state that predicts token t has the index t - 1,
as in a causal model. Nothing predicts the tokens of the prompt.

Rollouts use the cache of transformers for self-attention and cross-attention. The encoder reads each prompt once.

Shapes: T packed tokens, S sequences, B rows of a batch, M members of a group, L tokens of a row, N computed tokens, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from realign.api.lengths import IntArray
from realign.api.sample import TOKENS, SequenceSample
from realign.errors import ConfigError, DataError
from realign.functional.logprobs import LMHead
from realign.models.network.heads import read_head
from realign.models.network.images import PromptInput, ids_of
from realign.models.network.passes import similar_lengths
from realign.models.network.unpacked import PROMPT, TOLERANCE, OwnCache, ResponseGroup, probing, relative_error

_LOSS_MASK = "loss_mask"
"""Key that separates the prompt from the response: the response starts at its first token in `loss_mask`."""

PROMPTS, RESPONSES = (5, 9, 1), (4, 1, 6)
"""Lengths of the texts with which a model is probed. The first two share a batch, in which each of them is padded once,
by the encoder or by the decoder. One token is the shortest prompt and response."""

_CACHE = "past_key_values"


class EncoderDecoder:
    """Runs an encoder-decoder model on right-padded rows of one sequence each.

    Attributes:
        module: the model.
        reason: why the model cannot run packed.
        start: the token before the first token of a response.
    """

    def __init__(self, module: Any, reason: str) -> None:
        """Compare padded batches with the model's own forward pass of each sequence.

        Raises:
            ConfigError: the model family is not supported, or its config has no decoder_start_token_id.
        """
        self.module = module
        self.reason = reason
        family = f"model family {module.config.model_type!r}"
        sources = (module.config, getattr(module, "generation_config", None))
        tokens = (getattr(source, "decoder_start_token_id", None) for source in sources)
        start = next((token for token in tokens if token is not None), None)
        if start is None:
            raise ConfigError(f"{family}: config.json has no decoder_start_token_id. Add it.")
        self.start = int(start)
        with probing(module):
            error = self._difference()
        # not `error > TOLERANCE`, which is False for NaN
        if not error <= TOLERANCE:
            raise ConfigError(
                f"{family} is not supported: logits of padded batches differ by {error:.1e} (relative) from its own."
            )

    def _difference(self) -> float:
        """Return the largest relative difference of logits from the model's own forward pass."""
        words = self.module.get_input_embeddings().weight.shape[0]
        prompts, responses = np.array(PROMPTS), np.array(RESPONSES)
        lengths, drawn = prompts + responses, torch.Generator().manual_seed(0)
        ids_T = torch.randint(1, words, (int(lengths.sum()),), generator=drawn).to(
            next(self.module.parameters()).device
        )
        hidden_TH, head = self.whole(ids_T, lengths, prompts), read_head(self.module)
        assert isinstance(head, LMHead)
        texts, states = (x.split(lengths.tolist()) for x in (ids_T, hidden_TH))
        errors = []
        for ids, hidden, prompt in zip(texts, states, PROMPTS, strict=True):
            prompt_ids, decoder_ids = ids[None, :prompt], self._shift_right([ids[prompt:]])
            own = self.module(input_ids=prompt_ids, decoder_input_ids=decoder_ids, use_cache=False).logits[0]
            errors.append(relative_error(head.logits(hidden[prompt - 1 :]), own))
        return max(errors)

    def hidden(self, data: SequenceSample, lengths: IntArray) -> Tensor:
        """Return the decoder's last hidden states [T, H]; 0 where nothing is predicted.

        Args:
            data: a packed batch with `loss_mask`.
            lengths: [S] lengths of its sequences.

        Raises:
            DataError: see `prompt_lengths`.
        """
        return self.whole(data[TOKENS], lengths, prompt_lengths(data, lengths))

    def mask_predicted(self, data: SequenceSample, lengths: IntArray) -> Tensor:
        """Return which tokens the decoder predicts, [T] bool on the host: those of the responses."""
        place = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return torch.from_numpy(place >= np.repeat(prompt_lengths(data, lengths), lengths))

    def whole(self, ids_T: Tensor, lengths: IntArray, prompts: IntArray) -> Tensor:
        """Return the decoder's last hidden states [T, H], given the length of each prompt; see `hidden`."""
        starts, responses = np.cumsum(lengths) - lengths, lengths - prompts
        rows: list[IntArray] = []
        parts: list[Tensor] = []
        # a sequence without a response has no loss: as an empty one, it is in no batch, and its hidden states stay 0
        for batch in similar_lengths(np.where(responses > 0, lengths, 0).tolist()):
            texts = [ids_T[starts[i] : starts[i] + lengths[i]] for i in batch]
            encoded = self.encode([text[: prompts[i]] for i, text in zip(batch, texts, strict=True)])
            written_BL = self._shift_right([text[prompts[i] :] for i, text in zip(batch, texts, strict=True)])
            hidden_BLH = self.decoder(input_ids=written_BL, use_cache=False, **encoded).last_hidden_state
            # the start token predicts the first token of the response: its state stands at the prompt's last token
            parts += [hidden_BLH[row, : responses[i] + 1] for row, i in enumerate(batch)]
            rows += [np.arange(prompts[i] - 1, lengths[i]) + starts[i] for i in batch]
        if not parts:
            return torch.zeros(len(ids_T), self.module.get_output_embeddings().weight.shape[1], device=ids_T.device)
        hidden_NH = torch.cat(parts)
        rows_N = torch.from_numpy(np.concatenate(rows)).to(ids_T.device)
        return hidden_NH.new_zeros(len(ids_T), hidden_NH.shape[1]).index_put((rows_N,), hidden_NH)

    @property
    def decoder(self) -> Any:
        """The decoder without the language-model head."""
        return self.module.get_decoder()

    def encode(self, prompts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the keywords with which the decoder reads these prompts."""
        ids_BL = pad_sequence(list(prompts), batch_first=True)
        lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=ids_BL.device)
        if bool((lengths_B == ids_BL.shape[1]).all()):
            return {"encoder_hidden_states": self.module.get_encoder()(input_ids=ids_BL).last_hidden_state}
        mask_BL = (torch.arange(ids_BL.shape[1], device=ids_BL.device) < lengths_B[:, None]).long()
        hidden_BLH = self.module.get_encoder()(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
        return {"encoder_hidden_states": hidden_BLH, "encoder_attention_mask": mask_BL}

    def _shift_right(self, responses: Sequence[Tensor]) -> Tensor:
        """Return the inputs of the decoder [B, L]: the start token, and the responses."""
        ids_BL = pad_sequence(list(responses), batch_first=True)
        return torch.nn.functional.pad(ids_BL, (1, 0), value=self.start)


def prompt_lengths(data: SequenceSample, lengths: IntArray) -> IntArray:
    """Return the number of prompt tokens of each sequence, [S]; the whole length if no token is in `loss_mask`.

    Raises:
        DataError: the batch has no `loss_mask`, or a sequence is not a prompt followed by one response.
    """
    if _LOSS_MASK not in data:
        raise DataError(
            f"An encoder-decoder model needs the key {_LOSS_MASK!r}, which separates the prompt from the response. Add "
            "it to the keys that the interface reads."
        )
    mask_T, starts, prompt_S = data[_LOSS_MASK].cpu().numpy(), np.cumsum(lengths) - lengths, lengths.copy()
    for s, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        trained = np.flatnonzero(mask_T[start : start + length])
        if not len(trained):
            continue
        if trained[0] == 0:
            raise DataError(
                f"{_LOSS_MASK}: a sequence has no prompt, or the loss includes its prompt. The encoder of an "
                "encoder-decoder model reads the prompt, and no token of it is predicted. Train on responses only."
            )
        if trained[-1] - trained[0] + 1 != len(trained):
            raise DataError(
                f"{_LOSS_MASK}: a sequence has several responses. An encoder-decoder model reads one prompt and writes "
                "one response. Use data with one trained turn (data.train_on_turns=last), and no environment or tools."
            )
        prompt_S[s] = trained[0]
    return prompt_S


class EncoderDecoderCache(OwnCache):
    """Decodes responses with the decoder of an encoder-decoder model. Implements `Decoder`.

    A group stores the tokens that the decoder has read, starting with the start token.
    """

    def __init__(self, model: EncoderDecoder) -> None:
        """Compare decoding with and without the cache of the model."""
        self._model = model
        super().__init__(model.module)

    @override
    def describe(self) -> str:
        text = super().describe()
        return text if self.cached else text.replace("whole text", "whole response")

    @override
    def _whole(self, ids_ML: Tensor) -> Tensor:
        # the first `PROMPT` tokens are the prompt
        members, length = ids_ML.shape
        hidden_TH = self._model.whole(ids_ML.flatten(), np.full(members, length), np.full(members, PROMPT))
        return hidden_TH.view(members, length, -1)

    @override
    def prefill(self, texts: Sequence[PromptInput]) -> tuple[Tensor, list[ResponseGroup]]:
        # the hidden state of a prompt is that of the start token, which predicts the first token of the response
        hidden, states = [], []
        for ids in map(ids_of, texts):
            group = ResponseGroup(ids.new_zeros(1, 0), dict(self._model.encode([ids])))
            start = torch.full((1, 1), self._model.start, device=ids.device)
            hidden.append(self._append(group, start, start)[0])
            states.append(group)
        return torch.stack(hidden), states

    @override
    def _append(self, group: ResponseGroup, tokens_M1: Tensor, positions_M1: Tensor) -> Tensor:
        # the decoder derives its positions from the number of tokens that it has read
        group.ids_ML = torch.cat([group.ids_ML, tokens_M1], 1)
        read_ML = tokens_M1 if self.cached else group.ids_ML
        out = self._model.decoder(input_ids=read_ML, use_cache=self.cached, **group.past)
        if self.cached:
            group.past[_CACHE] = out.past_key_values
        hidden: Tensor = out.last_hidden_state[:, -1]
        return hidden
