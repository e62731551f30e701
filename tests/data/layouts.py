"""Rows as other tools write them, and the text that they become. `python docs/layouts.py` writes the page's table."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from tests.data.chat_templates import assistant, user


class Layout(NamedTuple):
    """A row of a tool.

    Attributes:
        tool: The tools that write it.
        columns: The columns and keys, for the page.
        data: Name of the data class.
        row: The row.
        text: One text for each sequence, without `<|im_start|>` and newlines, with trained tokens in brackets. A string
            that begins with `error: ` is a part of the message.
        reading: What realign makes of it, for the page.
        settings: Settings of the data class.
    """

    tool: str
    columns: str
    data: str
    row: dict[str, Any]
    text: str | tuple[str, ...]
    reading: str
    settings: Mapping[str, Any] = MappingProxyType({})


CHAT = {"template": "chat"}
ASK = [user("q"), assistant("a")]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
ADD = {"type": "function", "function": {"name": "add"}}
TOOL = '# Tools{"type": "function", "function": {"name": "add"}}<|im_end|>'
PAIR = ("user:q<|im_end|>assistant:[[a<|im_end|>]]", "user:q<|im_end|>assistant:[[b<|im_end|>]]")
ANSWERED = PAIR[0]
TWO = [user("q"), assistant("a"), user("r"), assistant("b")]


def marked(key: str, value: Any) -> dict[str, Any]:
    """Return a row whose first answer has a key."""
    return {"messages": [user("q"), assistant("a", **{key: value}), user("r"), assistant("b")]}


LAYOUTS = [
    Layout("OpenAI, TRL", "`messages`", "SupervisedData", {"messages": ASK}, ANSWERED, "a conversation"),
    Layout(
        "OpenAI, TRL",
        "`messages`, `tools`",
        "SupervisedData",
        {"messages": ASK, "tools": [ADD], "parallel_tool_calls": False},
        f"system:{TOOL}{ANSWERED}",
        "a conversation with tools; `functions` is the same",
    ),
    Layout(
        "OpenAI, Mistral",
        "`weight` of a message",
        "SupervisedData",
        marked("weight", 0),
        "user:q<|im_end|>assistant:a<|im_end|>user:r<|im_end|>assistant:[[b<|im_end|>]]",
        "0: the turn isn't in the loss. Fractions are refused",
    ),
    Layout(
        "axolotl",
        "`train`, `training` of a message",
        "SupervisedData",
        {"conversations": [*SHAREGPT[:1], {**SHAREGPT[1], "train": False}, *SHAREGPT]},
        "user:q<|im_end|>assistant:a<|im_end|>user:q<|im_end|>assistant:[[a<|im_end|>]]",
        "false: the turn isn't in the loss. `true` for a user's turn is refused",
    ),
    Layout(
        "axolotl",
        "`train_detail` of a message",
        "SupervisedData",
        marked("train_detail", [{"begin_offset": 0, "end_offset": 0, "train": False}]),
        "error: message 1: train_detail=",
        "refused: a turn is in the loss, or not",
    ),
    Layout(
        "verl",
        "`trainable`, `loss_mask` of a message",
        "SupervisedData",
        marked("loss_mask", 0),
        "user:q<|im_end|>assistant:a<|im_end|>user:r<|im_end|>assistant:[[b<|im_end|>]]",
        "false or 0: the turn isn't in the loss",
    ),
    Layout(
        "ms-swift",
        "`loss`, `loss_scale` of a message",
        "SupervisedData",
        marked("loss", False),
        "user:q<|im_end|>assistant:a<|im_end|>user:r<|im_end|>assistant:[[b<|im_end|>]]",
        "false or 0: the turn isn't in the loss. Fractions are refused",
    ),
    Layout(
        "LLaMA-Factory",
        "`loss_weight` of a message",
        "SupervisedData",
        {"messages": [{**user("q"), "loss_weight": 0.0}, {**ASK[1], "loss_weight": 0.0}, user("r"), assistant("b")]},
        "user:q<|im_end|>assistant:a<|im_end|>user:r<|im_end|>assistant:[[b<|im_end|>]]",
        "0: the turn isn't in the loss. Fractions are refused",
    ),
    Layout(
        "torchtune",
        "`masked` of a message",
        "SupervisedData",
        marked("masked", True),
        "user:q<|im_end|>assistant:a<|im_end|>user:r<|im_end|>assistant:[[b<|im_end|>]]",
        "true: the turn isn't in the loss",
    ),
    Layout(
        "ShareGPT, LLaMA-Factory",
        "`conversations` (`from`, `value`), `system`",
        "SupervisedData",
        {"conversations": SHAREGPT, "system": "s"},
        f"system:s<|im_end|>{ANSWERED}",
        "a conversation; `system`, `system_prompt` or `system_message` becomes its system message",
    ),
    Layout(
        "ms-swift",
        "`conversation` (`human`, `assistant`), `system`",
        "SupervisedData",
        {"system": "s", "conversation": [{"human": "q", "assistant": "a"}]},
        f"system:s<|im_end|>{ANSWERED}",
        "a conversation",
    ),
    Layout(
        "Anthropic, Bedrock",
        "`system`, `messages` with text parts",
        "SupervisedData",
        {
            "system": "s",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
            ],
        },
        f"system:s<|im_end|>{ANSWERED}",
        "a conversation, if the template reads parts. Other parts are refused",
    ),
    Layout(
        "TRL, verl",
        "`messages`, `chat_template_kwargs`, `enable_thinking`",
        "SupervisedData",
        {"messages": ASK, "chat_template_kwargs": {"mark": "!", "other": None}, "enable_thinking": True},
        f"!thinking{ANSWERED}",
        "variables of the template for this row; `data.template_options` wins",
    ),
    Layout(
        "Alpaca, LLaMA-Factory",
        "`instruction`, `input`, `output`",
        "SupervisedData",
        {"instruction": "Translate.", "input": "q", "output": "a"},
        "user:Translate.|q<|im_end|>assistant:[[a<|im_end|>]]",
        "the prompt is instruction, newline, input",
        CHAT,
    ),
    Layout(
        "Alpaca, LLaMA-Factory",
        "... with `system`, `history`",
        "SupervisedData",
        {"instruction": "r", "input": "", "output": "b", "system": "s", "history": [["q", "a"]]},
        "system:s<|im_end|>user:q<|im_end|>assistant:[[a<|im_end|>]]user:r<|im_end|>assistant:[[b<|im_end|>]]",
        "earlier turns, whose answers are learned, too",
        CHAT,
    ),
    Layout(
        "ms-swift",
        "`query`, `response`, `history`, `system`",
        "SupervisedData",
        {"query": "r", "response": "b", "history": [["q", "a"]], "system": None},
        "user:q<|im_end|>assistant:[[a<|im_end|>]]user:r<|im_end|>assistant:[[b<|im_end|>]]",
        "as in Alpaca",
        CHAT,
    ),
    Layout(
        "TRL, OpenRLHF",
        "`prompt`, `completion` (or `response`, `output`), strings",
        "SupervisedData",
        {"prompt": "q ", "completion": "a"},
        "q [[a<|im_end|>]]",
        "plain text, or with `data.template=chat` a user message and its answer",
        {"template": "plain"},
    ),
    Layout(
        "TRL",
        "`prompt`, `completion`, lists",
        "SupervisedData",
        {"prompt": ASK[:1], "completion": ASK[1:]},
        ANSWERED,
        "messages. A completion may begin with the messages of the prompt",
    ),
    Layout(
        "any",
        "a response that repeats the prompt",
        "SupervisedData",
        {"prompt": "1+1=", "response": "1+1=2"},
        "error: repeats the prompt",
        "refused, unless `data.repeated_prompt` is remove or keep",
        CHAT,
    ),
    Layout(
        "LLaMA-Factory, ms-swift, verl",
        "`<image>` in the text, `images`",
        "SupervisedData",
        {"messages": [user("<image>q"), assistant("a")], "images": ["a.png"]},
        "error: 'images' belongs to the prompt",
        "images with `data.images_column=images`, otherwise refused; `videos` and `audios` are refused",
    ),
    Layout(
        "Dolly, SQuAD",
        "`context` beside a prompt that doesn't contain it",
        "SupervisedData",
        {"instruction": "q", "context": "c", "response": "a"},
        "error: 'context' belongs to the prompt",
        "refused",
        CHAT,
    ),
    Layout(
        "TRL, OpenRLHF, verl",
        "`prompt`, `chosen`, `rejected`",
        "PreferenceData",
        {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"},
        tuple(f"system:s<|im_end|>{text}" for text in PAIR),
        "a pair, as strings or messages; also with `system`, `history`, `instruction` and `input`",
        CHAT,
    ),
    Layout(
        "TRL, UltraFeedback",
        "`chosen`, `rejected`, whole conversations",
        "PreferenceData",
        {"prompt": "q", "chosen": ASK, "rejected": [user("q"), assistant("b")], "messages": ASK},
        PAIR,
        "a pair after the common messages",
    ),
    Layout(
        "LLaMA-Factory, axolotl",
        "`conversations` (or `messages`), `chosen`, `rejected`, one message each",
        "PreferenceData",
        {
            "conversations": SHAREGPT[:1],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
        PAIR,
        "a pair after the conversation",
    ),
    Layout(
        "ms-swift",
        "`messages`, `rejected_response` (or `rejected_messages`)",
        "PreferenceData",
        {"messages": ASK, "rejected_response": "b"},
        PAIR,
        "a pair: the last message, and the rejected one",
    ),
    Layout(
        "ms-swift",
        "`query`, `response`, `rejected_response`",
        "PreferenceData",
        {"query": "q", "response": "a", "rejected_response": "b"},
        PAIR,
        "a pair",
        CHAT,
    ),
    Layout(
        "OpenAI",
        "`input`, `preferred_output`, `non_preferred_output`",
        "PreferenceData",
        {
            "input": {"messages": ASK[:1], "tools": [ADD], "parallel_tool_calls": True},
            "preferred_output": ASK[1:],
            "non_preferred_output": [assistant("b")],
        },
        tuple(f"system:{TOOL}{text}" for text in PAIR),
        "a pair",
    ),
    Layout(
        "TRL",
        "`prompt`, `completion`, `label`",
        "UnpairedData",
        {"prompt": "q", "completion": "a", "label": True},
        ANSWERED,
        "a response, desirable or not",
        CHAT,
    ),
    Layout(
        "LLaMA-Factory, ms-swift",
        "`messages` (or `conversations`), `label` (or `kto_tag`)",
        "UnpairedData",
        {"messages": ASK, "kto_tag": False},
        ANSWERED,
        "the last message is the response",
    ),
    Layout(
        "Alpaca, LLaMA-Factory",
        "`instruction`, `input`, `output`, `kto_tag`",
        "UnpairedData",
        {"instruction": "Translate.", "input": "q", "output": "a", "kto_tag": True},
        "user:Translate.|q<|im_end|>assistant:[[a<|im_end|>]]",
        "the prompt is instruction, newline, input",
        CHAT,
    ),
    Layout(
        "verl",
        "`data_source`, `prompt`, `reward_model.ground_truth`, `extra_info`",
        "PromptData",
        {
            "data_source": "d",
            "prompt": ASK[:1],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {"index": 0},
        },
        "user:q<|im_end|>assistant:",
        "messages; all columns reach the reward function",
    ),
    Layout(
        "TRL, open-r1",
        "`prompt`, a string, with `system_prompt` and `answer`",
        "PromptData",
        {"prompt": "q", "system_prompt": "s", "answer": "a"},
        "system:s<|im_end|>user:q<|im_end|>assistant:",
        "a user message with `data.template=chat`, plain text with `plain`",
        CHAT,
    ),
    Layout(
        "Alpaca",
        "`instruction`, `input`, `output`",
        "PromptData",
        {"instruction": "Translate.", "input": "q", "output": "a"},
        "user:Translate.|q<|im_end|>assistant:",
        "the prompt; `output` reaches the reward function",
        CHAT,
    ),
]
