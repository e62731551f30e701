"""What an environment says, as token ids: text as it is, or the tokenizer's chat template around it.

Only given tokens are made here, once. What was sampled is never decoded and encoded again: the template is rendered for
an answer of no importance, and what it writes behind that answer is what follows the sampled one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realign.api.environment import Observation

_QUESTION, _ANSWER = "any question", "the-answer-b7e1"  # what follows is looked at; no template has this word itself


@dataclass(frozen=True)
class TurnWriter:
    """Writes observations.

    Plain: text is encoded without start tokens, and nothing is put around it. Chat: text becomes one message of `role`,
    messages stay what they are, and all of an observation are rendered together (some templates put consecutive tool
    messages into one turn). Token ids are taken as they are under both.

    Raises:
        ValueError: chat is asked for, and the tokenizer has no chat template.
    """

    tokenizer: Any
    chat: bool = False
    role: str = "tool"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chat and not self.tokenizer.chat_template:
            raise ValueError("chat=true, but the tokenizer has no chat template; use chat=false")

    def opening(self, observation: Observation) -> list[int]:
        """What follows the prompt.

        Raises:
            ValueError: it is no observation, or needs a chat template, which has been written around the prompt before.
        """
        text, ids, messages = parted(observation)
        if messages or (self.chat and text):
            raise ValueError(
                "the chat template has closed the prompt before reset is asked, and nothing can be put into it: reset "
                'returns "" or token ids; what the policy must read stands in the row'
            )
        return self._known(ids) if ids is not None else self._encode(text)

    def between(self, observation: Observation, sampled: Sequence[int]) -> list[int]:
        """What stands between a sampled turn and the next one.

        Args:
            observation: what the environment says.
            sampled: the tokens of the turn; an end token of the template that it has already is not written again. Of
                a turn that was cut off, none.

        Raises:
            ValueError: it is no observation, or there is no template for messages, or that failed.
        """
        text, ids, messages = parted(observation)
        if ids is not None:
            return self._known(ids)
        if not self.chat:
            if messages:
                raise ValueError("chat messages need chat=true")
            return self._encode(text)
        written = self._encode(self._behind_answer(messages or [{"role": self.role, "content": text}]))
        return written[1:] if written and sampled and written[0] == sampled[-1] else written

    def _behind_answer(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the template writes behind the content of an answer that these messages and a new turn follow."""
        before = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        try:
            whole = self.tokenizer.apply_chat_template(
                [*before, *map(dict, messages)], tokenize=False, add_generation_prompt=True, **self.options
            )
        except Exception as error:  # templates are programs: they raise of their own will, and for want of a key
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
        _, answer, behind = str(whole).partition(_ANSWER)
        if not answer:
            raise ValueError("the chat template does not show what the assistant said; use chat=false")
        return behind

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        except TypeError as error:  # half of a character of two, as broken JSON may hold
            raise ValueError(f"the tokenizer refuses {shortened(text)}: {error}") from error

    def _known(self, ids: Sequence[int]) -> list[int]:
        words = len(self.tokenizer)
        if odd := [i for i in ids if not 0 <= i < words]:
            raise ValueError(f"token id {odd[0]} is unknown: the tokenizer has ids 0 to {words - 1}")
        return list(ids)


def parted(observation: Any) -> tuple[str, list[int] | None, list[Mapping[str, Any]]]:
    """An observation as text, as token ids (None: it is none), as messages; one of the three.

    Raises:
        ValueError: it is none of them.
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
        f"the observation is {shortened(observation)}, expected text, a list of token ids, or a list of chat messages "
        "with 'role' and 'content'"
    )


def shortened(value: Any) -> str:
    """A value and its type, for messages."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:80] + '...'} ({type(value).__name__})"
