"""A chat template renders in this process; its errors name it, and no row can choose another one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realign.chat_template import render
from realign.data import PromptData
from realign.data.writer import Template
from realign.environments.turns import TurnWriter
from realign.errors import DataError
from tests.data.text_tokenizer import make_tokenizer

ECHO = "{{ messages[-1].content }}"
NO = "{% if messages[-1].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + ECHO
ANOTHER = "another text"


def rendered(template: str, content: Any = "x") -> str:
    messages = [{"role": "user", "content": content}]
    return render(make_tokenizer(chat_template=template), messages, {}, add_generation_prompt=True)


@pytest.mark.parametrize("text", ["", "\u00e9\u2028\x00", "\ud800", "x" * 3_000_000])
def test_texts_are_those_of_the_tokenizer(text):
    assert rendered(ECHO, text) == text


def test_an_error_of_a_template_is_one_line_and_the_next_rendering_is_not_affected():
    with pytest.raises(DataError, match=r"^the chat template failed: TemplateError: no$"):
        rendered(NO, "no")
    assert rendered(NO, "yes") == "yes"


def test_no_row_chooses_a_template(tmp_path):
    rows = tmp_path / "rows.jsonl"
    chosen = {"chat_template": ANOTHER}
    row = {"prompt": [{"role": "user", "content": "a", **chosen}], "template_options": chosen, **chosen}
    rows.write_text(json.dumps(row) + "\n")
    tokenizer = make_tokenizer(chat_template=ECHO)
    data = PromptData(str(rows), template=Template.chat)
    sample = data.load(tokenizer).sample([(0, 0)])
    assert sample["prompt_ids"].tolist() == tokenizer("a", add_special_tokens=False)["input_ids"]
    for options in (chosen, {"tokenize": True}, {"add_generation_prompt": False}):
        rows.write_text(json.dumps(row | {"chat_template_kwargs": options}) + "\n")
        with pytest.raises(DataError, match=f"line 1: the options of the chat template name '{next(iter(options))}'"):
            data.load(tokenizer)


def test_a_template_that_fails_for_an_observation_fails_that_episode_only():
    writer = TurnWriter(make_tokenizer(chat_template="{{ messages[-2].content }}" + NO), chat=True)
    with pytest.raises(ValueError, match=r"^the chat template failed: TemplateError: no"):
        writer.between("no", [])
    assert writer.between("a", [])
