"""Load every row of the page on data formats, and compare what it shows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from realign import data
from realign.config.construct import fill
from realign.data.encoding import decode_row
from realign.records.metrics.samples import row_text
from tests.data.chat_templates import CHATML, chat_tokenizer
from tests.docs import pages

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"
BLOCKS = pages.blocks(PAGE.read_text(encoding="utf-8"))
EXAMPLES = [(one, other) for one, other in pairwise([*BLOCKS, None]) if one.language.startswith("jsonl")]


@pytest.mark.parametrize(("example", "following"), EXAMPLES, ids=[f"line {one.line}" for one, _ in EXAMPLES])
def test_an_example_is_read_as_the_page_shows(example, following, tmp_path):
    _, kind, *settings = example.language.split()
    file = tmp_path / "rows.jsonl"
    file.write_text(example.code, encoding="utf-8")
    fields = dict(setting.split("=", 1) for setting in settings)
    values = {name: json.loads(value) if value in ("true", "false") else value for name, value in fields.items()}
    spec = fill(getattr(data, kind), {"path": str(file), **values}, "data")
    spec.check("data")
    tokenizer = chat_tokenizer(CHATML)
    dataset = spec.load(tokenizer)
    assert len(dataset) == 1
    shown = row_text(decode_row(dataset.sample([(0, 0)]), tokenizer), color=False).plain
    if following is not None and following.language == "text":
        assert shown.splitlines()[1:] == following.code.splitlines()


def test_the_page_has_examples_of_every_data_class_with_responses_or_prompts():
    kinds = {example.language.split()[1] for example, _ in EXAMPLES}
    assert kinds == {"SupervisedData", "PreferenceData", "UnpairedData", "RewardedData", "PromptData"}
    assert sum(following is not None and following.language == "text" for _, following in EXAMPLES) >= 8
