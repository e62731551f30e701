"""Dialogues in one string, as in Anthropic's HH-RLHF, whose turns begin with `Human:` and `Assistant:`."""

from __future__ import annotations

import re
from itertools import takewhile

from realign.data.messages import Message
from realign.data.rendering import Segment
from realign.errors import DataError

ASSISTANT = "\n\nAssistant:"
_TURN = re.compile(r"\n\n(Human|Assistant):")


def common_prompt(chosen: str, rejected: str) -> str:
    """Return the common start of two dialogues, up to and including their last common `Assistant:`.

    Raises:
        DataError: they have no common turn of the assistant.
    """
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    common = chosen[: sum(1 for _ in same)]
    end = common.rfind(ASSISTANT)
    if end < 0:
        raise DataError(
            f"there is no prompt column, and chosen and rejected have no common {ASSISTANT!r}, at which a prompt would "
            "end. Set prompt_column."
        )
    return common[: end + len(ASSISTANT)]


def dialogue_segments(prompt: str, text: str) -> list[Segment]:
    """Return a dialogue, split into the prompt that it begins with, the assistant turns after it, and the rest."""
    segments = [Segment(prompt)]
    begin, trained = len(prompt), True
    for turn in _TURN.finditer(text, len(prompt)):
        if turn[1] == "Human" and trained:
            segments.append(Segment(text[begin : turn.start()], trained=True))
            begin, trained = turn.start(), False
        elif turn[1] == "Assistant" and not trained:
            segments.append(Segment(text[begin : turn.end()]))
            begin, trained = turn.end(), True
    segments.append(Segment(text[begin:], trained))
    return segments


def dialogue_messages(text: str) -> list[Message]:
    """Return a dialogue as chat messages, without the whitespace around their contents.

    Raises:
        DataError: the text does not begin with a turn.
    """
    start, *turns = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if start.strip() or not turns:
        raise DataError("the text is not a dialogue: it must begin with 'Human:' or 'Assistant:'.")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[name], "content": content.strip()} for name, content in zip(turns[::2], turns[1::2], strict=True)
    ]
