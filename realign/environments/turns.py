"""Encode the observations of an environment as token ids, as plain text or with the tokenizer's chat template.

Sampled tokens are never decoded and encoded again. Instead, the chat template is rendered with a placeholder answer.
The text that the template writes after the placeholder is appended to the sampled turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realign.api.environment import Observation
from realign.chat_template import render
from realign.errors import ConfigError, DataError
from realign.text import brief
from realign.tokenization import Tokens

_QUESTION, _ANSWER = "any question", "the-answer-b7e1"  # only the text after the answer is used


@dataclass(frozen=True)
class TurnWriter:
    """Encodes observations as tokens.

    With `chat=False`, text is encoded without special tokens and nothing is added. With `chat=True`, text becomes one
    message with role `role`, and messages are used unchanged. All messages of an observation are rendered together,
    since some templates merge consecutive tool messages into one turn. Token ids are used unchanged in both modes.

    Raises:
        ConfigError: `chat` is true and the tokenizer has no chat template.
    """

    tokenizer: Any
    chat: bool = False
    role: str = "tool"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chat and not self.tokenizer.chat_template:
            raise ConfigError("chat=true: the tokenizer has no chat template. Set chat=false.")

    def opening(self, observation: Observation) -> list[int]:
        """Encode the observation of `reset`, which follows the prompt.

        Raises:
            ValueError: the observation is invalid, or needs the chat template, which is already applied to the prompt.
        """
        text, ids, messages = split_observation(observation)
        if messages or (self.chat and text):
            raise ValueError(
                "reset returned text or messages, but the chat template has already formatted the prompt. Return "
                '"" or token ids from reset, and put text for the policy into the row'
            )
        return self._check_ids(ids) if ids is not None else self._encode(text)

    def between(self, observation: Observation, sampled: Sequence[int]) -> list[int]:
        """Encode the tokens between a sampled turn and the next one.

        Args:
            observation: observation returned by `step`.
            sampled: tokens of the sampled turn, empty if the turn was truncated. If the turn already ends with the
                template's end token, that token is not repeated.

        Raises:
            ValueError: the observation is invalid, has messages with `chat=False`, or the chat template failed.
        """
        text, ids, messages = split_observation(observation)
        if ids is not None:
            return self._check_ids(ids)
        if not self.chat:
            if messages:
                raise ValueError("the observation contains chat messages, which require chat=true")
            return self._encode(text, sampled)
        written = self._encode(self._behind_answer(messages or [{"role": self.role, "content": text}]))
        end = written.index(sampled[-1]) if sampled and sampled[-1] in written else 0
        # some templates write a blank before the end token
        ended = sampled and written[end : end + 1] == [sampled[-1]] and not self.tokenizer.decode(written[:end]).strip()
        return written[end + 1 :] if ended else written

    def _behind_answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text that the template writes after an assistant answer, with these messages and a new turn."""
        before = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        conversation = [*before, *map(dict, messages)]
        try:
            rendered = render(self.tokenizer, conversation, self.options, add_generation_prompt=True)
        except DataError as error:
            raise ValueError(str(error)) from error
        _, answer, behind = rendered.partition(_ANSWER)
        if not answer:
            raise ValueError("the chat template omits the assistant's message; set chat=false")
        return behind

    def _encode(self, text: str, before: Sequence[int] = ()) -> list[int]:
        try:
            return Tokens(self.tokenizer).encode_following(text, before[-1] if before else None)
        except TypeError as error:  # a lone surrogate, which broken JSON may contain
            raise ValueError(f"the tokenizer cannot encode {abbreviate(text)}: {error}") from error

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        words = len(self.tokenizer)
        if odd := [i for i in ids if not 0 <= i < words]:
            raise ValueError(f"token id {odd[0]} is unknown: the tokenizer has ids 0 to {words - 1}")
        return list(ids)


def split_observation(observation: Any) -> tuple[str, list[int] | None, list[Mapping[str, Any]]]:
    """Return an observation as (text, token ids or None, messages). Exactly one of the three represents it.

    Raises:
        ValueError: the observation has none of these types.
    """
    if isinstance(observation, str):
        return observation, None, []
    items = observation.tolist() if getattr(observation, "ndim", None) == 1 else observation
    if isinstance(items, list | tuple):
        if all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            return "", list(items), []
        if all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in items):
            return "", None, list(items)
    raise ValueError(
        f"the observation is {abbreviate(observation)}, expected text, a list of token ids, or a list of chat messages "
        "with 'role' and 'content'"
    )


def abbreviate(value: Any) -> str:
    """Return a shortened `repr` of a value and its type, for messages."""
    return f"{brief(value, 80)} ({type(value).__name__})"
