"""Read columns of a row by name, and know what their names mean in the formats that people use.

The names below are the only place that says which columns and keys of messages change what a row means. Each is used
as its tools use it, or the row is refused: `check_context` compares what belongs to the prompt with the text that the
row became. All other columns are free to use for reward functions.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from realign.cells import read_column
from realign.errors import DataError

Row: TypeAlias = dict[str, Any]

CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns with whole conversations."""
PROMPTS = ("prompt", "instruction", "query")
"""Columns with a prompt: of most tools, Alpaca and ms-swift."""
CHOSEN = ("chosen", "preferred_output")
REJECTED = ("rejected", "non_preferred_output", "rejected_response", "rejected_messages")
"""Columns with the preferred and the rejected response: of most tools, OpenAI, and ms-swift, whose preferred response
is in the column of responses, or at the end of a conversation."""
RESPONSES = ("completion", "response", "output")
"""Columns with the response to a prompt: of TRL, most tools, and Alpaca."""
OUTSIDE_LOSS = ("masked",)
"""Keys of a message that exclude it from the loss if they are true: torchtune."""
IN_LOSS = ("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale")
"""Keys of a message that exclude it from the loss if they are 0 or false: OpenAI and Mistral, axolotl (`train`,
`training`), verl (`trainable`, `loss_mask`), ms-swift (`loss`, `loss_scale`), LLaMA-Factory (`loss_weight`)."""
PARTLY_IN_LOSS = ("train_detail", "training_detail")
"""Keys of a message that exclude a part of it from the loss: axolotl."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Columns of a row, or keys of a message, with what `<image>` and the like in its text stand for."""
_SYSTEM = ("system", "system_prompt", "system_message")
_TOOLS = ("tools", "functions")
_OPTIONS = ("chat_template_kwargs", "enable_thinking")
CONTEXT: dict[str, str] = {
    **dict.fromkeys(_SYSTEM, "It becomes a system message before chat messages that have none, and with template=chat"),
    "history": "It becomes earlier turns of a string prompt with template=chat",
    "input": "It follows a string prompt in the column 'instruction'. Rename the prompt column, or write it there",
    "context": "Write it into the prompt",
    **dict.fromkeys(MEDIA[:2], "Set images_column to it, for a model with images, if the data class has it"),
    **dict.fromkeys(MEDIA[2:], "realign reads no videos and no audio"),
}
"""Columns that belong to the prompt besides its own column, and how they get there."""


def only_one(row: Mapping[str, Any], names: Iterable[str], setting: str) -> str | None:
    """Return the one column among `names` that the row has, or None if it has none of them. Null is no column.

    Raises:
        DataError: the row has several of them; names the setting that selects one.
    """
    present = [name for name in names if name in row]
    present = [name for name in present if row[name] is not None] or present[:1]
    if len(present) > 1:
        raise DataError(f"found the columns {present}. Set {setting} to one of them.")
    return present[0] if present else None


def pair_or_conversation(row: Mapping[str, Any], prompt: str | None, response: str | None) -> dict[str, str]:
    """Return the columns of a prompt and its response, or of a whole conversation, by the settings that name them.

    Args:
        row: A row of data.
        prompt: Column of the prompt; None recognizes it.
        response: Column of the response; None recognizes it.

    Returns:
        `messages_column`, or `prompt_column` and `response_column`; empty if none fits. A conversation wins over a
        prompt and a response that are in it.

    Raises:
        DataError: several columns fit.
    """
    conversation = only_one(row, CONVERSATIONS, "messages_column") if prompt is None and response is None else None
    prompt = prompt or only_one(row, PROMPTS, "prompt_column")
    response = response or only_one(row, RESPONSES, "response_column")
    if not has(row, conversation) and response is not None:
        return {"prompt_column": prompt or "prompt", "response_column": response}
    if conversation is None:
        return {}
    if has(row, prompt) and has(row, response) and not is_part(row, conversation, str(prompt), str(response)):
        raise DataError(
            f"the columns {conversation!r} and {prompt!r} with {response!r} both fit. Set ignored_columns=[{response}] "
            f"or ignored_columns=[{conversation}] to leave one out."
        )
    return {"messages_column": conversation}


def has(row: Mapping[str, Any], name: str | None) -> bool:
    """Return whether a row has a column that isn't null."""
    return name is not None and row.get(name) is not None


def is_part(row: Mapping[str, Any], whole: str, *columns: str) -> bool:
    """Return whether all texts of some columns are in the column `whole`, too."""
    texts = {leaf.strip() for leaf in _leaves(row[whole]) if isinstance(leaf, str)}
    return all(isinstance(x, str) and x.strip() in texts for column in columns for x in _leaves(row[column]))


def overlap(columns: Mapping[str, str | None]) -> str | None:
    """Return a message if one of two columns contains the other, such as `messages` and `messages.1.content`."""
    given = [(setting, name) for setting, name in columns.items() if name is not None]
    for setting, name in given:
        for other, outer in given:
            if setting != other and (name == outer or name.startswith(f"{outer}.")):
                return f"{setting}={name!r}: it is part of {other}={outer!r}. Use different columns."
    return None


def is_given(value: Any) -> bool:
    """Return whether a column has a value: not null, NaN (null in pandas), blank or empty."""
    if isinstance(value, str):
        return bool(value.strip())
    return value is not None and value == value and (not hasattr(value, "__len__") or len(value) > 0)


@dataclass(frozen=True)
class Context:
    """What belongs to the prompt of a row besides the column of the prompt.

    Attributes:
        system: Text of the system message; empty without one.
        history: Pairs of an earlier message by the user and the answer to it.
        tools: JSON schemas of the tools: a list of objects, its JSON text, or None.
        options: Variables for the chat template.
    """

    system: Any = ""
    history: Sequence[Any] = ()
    tools: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Mapping[str, Any], tools_column: str | None, used: Collection[str] = ()) -> Context:
        """Return the context of a row; `tools_column=""` leaves out its tools, and None recognizes them.

        Columns in `used` have another meaning.

        Raises:
            DataError: two columns of the row have the same meaning.
        """
        names = (*_SYSTEM, "history", *_TOOLS, *_OPTIONS)
        given = {name: row[name] for name in names if name not in used and is_given(row.get(name))}
        system = only_one(given, _SYSTEM, "ignored_columns")
        if tools_column is None:
            tools_column = only_one(given, _TOOLS, "tools_column")
        options = given.get(_OPTIONS[0], {})
        if not isinstance(options, Mapping):
            raise DataError(f"the column {_OPTIONS[0]!r} contains a {type(options).__name__}; expected an object.")
        own = {key: value for key, value in options.items() if value is not None}
        return cls(
            system=given[system] if system else "",
            history=given["history"] if isinstance(given.get("history"), list) else (),
            tools=read_column(row, tools_column) if tools_column else None,
            options=own | {name: given[name] for name in _OPTIONS[1:] if name in given},
        )


def beside_prompt(row: Mapping[str, Any], used: Collection[str]) -> list[str]:
    """Return the columns of a row that belong to its prompt, besides those in `used`."""
    return [name for name in (*CONTEXT, *_TOOLS, *_OPTIONS) if name not in used and is_given(row.get(name))]


def check_context(row: Mapping[str, Any], used: Collection[str], text: str) -> None:
    """Check that all columns of a row that belong to its prompt are in the text that the row became.

    Args:
        row: The row.
        used: Columns that settings or recognized names have given another meaning.
        text: The text of the row.

    Raises:
        DataError: a column is missing in the text.
    """
    for name, cure in CONTEXT.items():
        value = row.get(name)
        if name not in used and is_given(value) and not all(_is_in(text, leaf) for leaf in _leaves(value)):
            raise DataError(
                f"the column {name!r} belongs to the prompt, which doesn't contain it. {cure}. To train without it, "
                f"set ignored_columns=[{name}]."
            )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _is_in(text: str, part: Any) -> bool:
    return isinstance(part, str) and (part.strip() in text or json.dumps(part.strip())[1:-1] in text)
