"""Chat templates of model families (see templates/SOURCES.yaml), and a conversation in the format of each.

`PYTHONPATH=. python tests/endpoint/chat_families.py` writes the rendered conversations again (templates/*.txt).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from realign.endpoint import Renderer
from realign.endpoint.requests import read_messages

FOLDER = Path(__file__).parent / "templates"
RESPONSE_TEMPLATES: dict[str, Any] = json.loads((FOLDER / "response_templates.json").read_text(encoding="utf-8"))
_MARKS = re.compile(r"<\|?[A-Za-z_]+\|?>|</[a-z_]+>|\[/?[A-Z_]+\]")
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


SYSTEM = {"role": "system", "content": "You calculate."}
QUESTION, NEXT = ({"role": "user", "content": text} for text in ("What is 3 times 4?", "And 5 times 6?"))
_INTEGER = {"type": "integer", "description": "A factor."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two integers.",
            "parameters": {"type": "object", "properties": {"a": _INTEGER, "b": _INTEGER}, "required": ["a", "b"]},
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 3, "b": 4}'}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "multiply", "content": "12"}


@dataclass(frozen=True)
class Family:
    """What a chat template writes and keeps."""

    name: str
    """Name of the file."""
    bos: str
    eos: str
    call: str
    """What a policy samples to call the tool; empty for a family without tools."""
    answer: str
    """What a policy samples as its answer."""
    parts: str = ""
    """Its response template; empty for none."""
    system: bool = True
    """Whether the template accepts a system message."""
    reasoning: bool = False
    """Whether the sampled texts contain reasoning."""
    keeps_calls: bool = True
    """Whether the text of a tool call and its result continues the sampled text."""
    keeps_answers: bool = True
    """Whether the next question continues the sampled text."""


_JSON_CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
_XML_CALL = (
    "<tool_call>\n<function=multiply>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n</function>\n"
    "</tool_call>"
)
_LLAMA_CALL = '{"name": "multiply", "parameters": {"a": 3, "b": 4}}'
_HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
_HARMONY_CALL = ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 3, "b": 4}'
WHY, THEN, SAID = "I call the tool.", "The tool said 12.", "It is 12."
FAMILIES = (
    Family("qwen2_5", "<|endoftext|>", "<|im_end|>", _JSON_CALL, SAID, "qwen3"),
    Family(
        "qwen3",
        "<|endoftext|>",
        "<|im_end|>",
        f"<think>\n{WHY}\n</think>\n\n{_JSON_CALL}",
        f"<think>\n{THEN}\n</think>\n\n{SAID}",
        "qwen3",
        reasoning=True,
        keeps_answers=False,
    ),
    Family(
        "qwen3_5_think",
        "<|endoftext|>",
        "<|im_end|>",
        f"{WHY}\n</think>\n\n{_XML_CALL}",
        f"{THEN}\n</think>\n\n{SAID}",
        "qwen3_5",
        reasoning=True,
        keeps_answers=False,
    ),
    Family("llama3", "<|begin_of_text|>", "<|eot_id|>", "", SAID),
    Family("llama3_2", "<|begin_of_text|>", "<|eot_id|>", _LLAMA_CALL, SAID, "llama3"),
    Family("gemma", "<bos>", "<end_of_turn>", "", SAID, system=False),
    Family("gemma3", "<bos>", "<end_of_turn>", "", SAID),
    Family(
        "gemma4",
        "<bos>",
        "<turn|>",
        f"<|channel>thought\n{WHY}\n<channel|><|tool_call>call:multiply{{a:3,b:4}}<tool_call|><|tool_response>",
        f"<|channel>thought\n{THEN}\n<channel|>{SAID}",
        "gemma4",
        reasoning=True,
        keeps_answers=False,
    ),
    Family(
        "gptoss",
        "<|startoftext|>",
        "<|return|>",
        f"{_HARMONY.format(WHY)}{_HARMONY_CALL}<|call|>",
        f"{_HARMONY.format(THEN)}<|channel|>final<|message|>{SAID}",
        "gptoss",
        reasoning=True,
        keeps_answers=False,
    ),
    Family(
        "hermes2_pro",
        "<|begin_of_text|>",
        "<|im_end|>",
        _JSON_CALL,
        SAID,
        "qwen3",
        keeps_answers=False,  # a tool result that is not the last message has another line end
    ),
    Family(
        "mistral_nemo",
        "<s>",
        "</s>",
        '[TOOL_CALLS][{"name": "multiply", "arguments": {"a": 3, "b": 4}, "id": "call00001"}]',
        SAID,
        keeps_calls=False,  # it writes the system message into the last question only, if no tool result follows
        keeps_answers=False,
    ),
    Family("mistral_v13", "<s>", "</s>", '[TOOL_CALLS]multiply[ARGS]{"a": 3, "b": 4}', SAID),
    Family("smollm2", "<|im_start|>", "<|im_end|>", "", SAID),
)
_OWN_ENDS = ("<|tool_response>", "<|call|>")
"""Tokens that end a tool call in place of the end token."""


@cache
def family_renderer(family: Family) -> Renderer:
    """Return a renderer, which the tests of a family share, since each has a process for its chat template."""
    return Renderer(family_tokenizer(family))


def sampled(family: Family) -> list[str]:
    """Return the texts that a policy samples in the conversation, with their end tokens."""
    said = [family.call, family.answer] if family.call else [family.answer]
    return [text if text.endswith(_OWN_ENDS) else text + family.eos for text in said]


def histories(family: Family) -> list[list[dict[str, Any]]]:
    """Return the messages of the requests: before each sampled text, and with the next question."""
    why, then = ({"reasoning_content": text} if family.reasoning else {} for text in (WHY, THEN))
    first = [SYSTEM, QUESTION] if family.system else [QUESTION]
    called = [*first, {"role": "assistant", "content": None, "tool_calls": [CALL], **why}, RESULT]
    asked = [first, called] if family.call else [first]
    return [*asked, [*asked[-1], {"role": "assistant", "content": SAID, **then}, NEXT]]


def rendered(family: Family, messages: list[dict[str, Any]]) -> str:
    """Return the prompt that the endpoint renders for these messages, with a fixed date."""
    tools, options = TOOLS if family.call else None, {"date_string": "26 Jul 2024"}
    text = family_renderer(family).render(read_messages(messages), tools, options)
    return re.sub(r"Current date: \d{4}-\d\d-\d\d", "Current date: 2024-07-26", text)


def written(family: Family) -> str:
    """Return the whole conversation as text: prompts, and sampled texts in between."""
    prompts = [f"[prompt]\n{rendered(family, messages)}" for messages in histories(family)]
    said = [f"[sampled]\n{text}" for text in sampled(family)]
    return "\n".join(part for pair in zip(prompts, [*said, ""], strict=True) for part in pair)


@cache
def _template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def family_tokenizer(family: Family, *, parses: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with the family's marks as tokens. Only its first and its end token are special."""
    text = _template(family.name)
    marks = sorted({*_MARKS.findall(text), family.bos, family.eos})
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(_BYTES)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(mark, special=mark in (family.bos, family.eos), normalized=False) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=family.bos, eos_token=family.eos)
    tokenizer.chat_template = text
    if parses and family.parts:
        tokenizer.response_template = RESPONSE_TEMPLATES[family.parts]
    return tokenizer


if __name__ == "__main__":
    for each in FAMILIES:
        (FOLDER / f"{each.name}.txt").write_text(written(each), encoding="utf-8")
