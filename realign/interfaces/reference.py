"""The reference policy or the teacher: log-probs of sampled tokens, and hidden states, under frozen weights.

With `prompt`, the teacher reads another prompt than the policy, such as one with the right answer, a hint or feedback
on the response. A policy can then learn from itself (SDFT, arXiv:2601.19897; SDPO, arXiv:2601.20802).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import Keys, Lengths, MicroBatchSpec, Model, ModelInterface, Plan, SequenceSample, Weights
from realign.api.sampling_mask import SAMPLING_MASK, masks_of, with_masks
from realign.cells import read_column
from realign.endpoint.renderer import Renderer
from realign.errors import DataError
from realign.interfaces.components.scoring import score_distributions, score_logprobs, scoring_keys
from realign.rewards.pool.binding import named_arguments
from realign.rewards.pool.functions import load_object
from realign.settings import Range


@dataclass
class ReferenceInterface(ModelInterface):
    """A frozen policy that computes `logprobs` of sampled tokens at the sampler's temperature."""

    OUTPUTS = frozenset({"logprobs"})

    temperature: Annotated[float, Range(ge=0.01, lt=math.inf)] = 1.0
    """Sampling temperature, which divides the logits. Must equal the sampler's; this is checked at launch."""
    hidden_states: bool = False
    """Also return the last hidden states, from which a loss computes the distributions over the whole vocabulary
    (kl.full_vocabulary, distillation). They take one number per hidden unit and token of the batch."""

    prompt: str = ""
    """Prompt under which it scores the responses: a column of the rows (text or chat messages), or a function
    `package.module:function` or `path/to/file.py:function` that gets `row` and the text `response` and returns it.
    Empty: the prompt of the policy."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for prompts that are chat messages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._write: Callable[..., Any] | None = None
        self._names: tuple[str, ...] = ()
        self._renderer: Renderer | None = None

    @property
    def reads_images(self) -> bool:  # type: ignore[override]
        """Whether it scores prompts with images: another prompt than that of the policy is text."""
        return not self.prompt

    @override
    def ineffective(self) -> dict[str, str]:
        return {} if self.prompt else {"template_options": "without prompt. Set prompt"}

    @override
    def open(self) -> None:
        """Load the function of the prompt.

        Raises:
            ConfigError: it does not exist, or takes other arguments.
        """
        if self._write is None and ":" in self.prompt:
            forms = "'package.module:function' or 'path/to/file.py:function'"
            self._write = load_object(self.prompt, "prompt function", forms)
            self._names = named_arguments(self._write, f"prompt function {self.prompt!r}", ("row", "response"))

    @override
    def keys(self, method: str) -> Keys:
        if method != "inference":
            return Keys()
        scoring = scoring_keys(hidden=self.hidden_states)
        rewritten = dict.fromkeys(("prompt_mask", "row") if self.prompt else (), f"prompt={self.prompt}")
        return replace(scoring, needs={**scoring.needs, **rewritten})

    @override
    def plan(self) -> Plan:
        # under another prompt, the current weights of the policy are a teacher too
        weights = Weights.any if self.prompt else Weights.frozen
        return Plan(temperature=self.temperature, temperature_setting="temperature", weights=weights)

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Compute `logprobs` [T] of the sampled tokens, and `hidden` [T, H] with `hidden_states`.

        Raises:
            DataError: a row has no prompt, or a prompt is empty or too long for the model.
        """
        score = score_distributions if self.hidden_states else score_logprobs
        if not self.prompt:
            return score(model, data, mb_spec, self.temperature)
        own_T = _responses(data)
        given, their_T = self._with_prompts(model, data)
        scored = score(model, given, mb_spec, self.temperature)
        back: dict[str, Tensor] = {}
        for key in scored.keys:
            x_T = scored[key].new_zeros(len(own_T), *scored[key].shape[1:])
            x_T[own_T] = scored[key][their_T]
            back[key] = x_T
        return data.select(["input_ids"]).with_tokens(**back).select(back)

    def _with_prompts(self, model: Model, data: SequenceSample) -> tuple[SequenceSample, Tensor]:
        """Return the responses after their other prompts, and a mask [T] of the responses."""
        self.open()
        if self._renderer is None:
            self._renderer = Renderer(model.tokenizer, self.template_options)
        limit = model.engine.capabilities().positions
        lengths, rows = data.lengths["input_ids"], data.metadata["row"]
        own = _responses(data).split(lengths.flat.tolist())
        ids, loss, theirs = [], [], []
        for s, p in enumerate(lengths.prompt_of_sequence.tolist()):
            ids_N, loss_N = data.sequences("input_ids")[s], data.sequences("loss_mask")[s][own[s]]
            response_N = ids_N[own[s]]
            prompt_P = ids_N.new_tensor(self._prompt(data.ids[p], rows[p], ids_N[~own[s]], response_N))
            if limit is not None and len(prompt_P) + len(response_N) > limit:
                raise DataError(
                    f"row {data.ids[p]!r}: the teacher's prompt has {len(prompt_P)} tokens and the response "
                    f"{len(response_N)}, but the model reads at most {limit}. Shorten the prompt, or set a lower "
                    "generation.max_new_tokens."
                )
            ids.append(torch.cat([prompt_P, response_N]))
            loss.append(torch.cat([torch.zeros_like(prompt_P, dtype=torch.bool), loss_N]))
            theirs.append(torch.arange(len(ids[-1]), device=ids_N.device) >= len(prompt_P))
        cut = Lengths(lengths.counts, np.array([len(x) for x in ids], dtype=np.int64))
        packed = {"input_ids": torch.cat([data["input_ids"][:0], *ids]), "loss_mask": torch.cat([own[0][:0], *loss])}
        given = SequenceSample(data.ids).with_data(packed, lengths=cut)
        if SAMPLING_MASK in data:
            masks = zip(masks_of(data), own, strict=True)
            given = with_masks(given, [None if m is None else m.last(int(own_N.sum())) for m, own_N in masks])
        return given, torch.cat(theirs)

    def _prompt(self, name: Any, row: Mapping[str, Any], given_P: Tensor, response_N: Tensor) -> list[int]:
        """Return the tokens of the prompt of a response."""
        assert self._renderer is not None
        if self._write is not None:
            text = self._renderer.decode(response_N.tolist(), before=given_P.tolist(), special=False)
            given = {"row": deepcopy(row), "response": text}
            prompt = self._write(**{name: given[name] for name in self._names})
        else:
            try:
                prompt = read_column(row, self.prompt)
            except DataError as error:
                raise DataError(f"row {name!r}: the teacher's prompt: {error}") from None
        if isinstance(prompt, str):
            ids = self._renderer.encode(prompt)
            first = getattr(self._renderer.tokenizer, "bos_token_id", None)
            if ids and first is not None and given_P[:1].tolist() == [first] != ids[:1]:
                ids = [first, *ids]  # as the policy's prompt begins
        else:
            ids = self._renderer.encode(self._renderer.render(prompt))
        if not ids:
            raise DataError(f"row {name!r}: the teacher's prompt {self.prompt!r} is empty.")
        return ids


def _responses(data: SequenceSample) -> Tensor:
    """Return a mask [T] of all tokens after the prompts, also of observations between sampled tokens."""
    masks = [(~given_N).cumsum(0) > 0 for given_N in data.sequences("prompt_mask")]
    return torch.cat([torch.zeros(0, dtype=torch.bool, device=data["input_ids"].device), *masks])
