"""The page about agents: its commands run with its own rows and its own code."""

import os
from pathlib import Path

import pytest

from realign.cli import commands as cli
from tests.data.chat_templates import chat_tokenizer
from tests.docs.pages import blocks, commands
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "agents.md").read_text(encoding="utf-8")
QWEN = (ROOT / "tests" / "endpoint" / "templates" / "qwen2_5.jinja").read_text(encoding="utf-8")
RUNS = [words for words in commands(PAGE) if "experiment=grpo_agent" in words]
SMALL = ["interfaces.actor.generation.n=2", "interfaces.actor.generation.max_new_tokens=4", "batch_prompts=1"]


def first(language: str, part: str) -> str:
    return next(block.code for block in blocks(PAGE) if block.language == language and part in block.code)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(RUNS[0], id="an agent of the page"),
        # tools need the package trl, which only the environment of the slow tests has
        pytest.param(RUNS[1], id="the agent of realign with a tool", marks=pytest.mark.slow),
    ],
)
def test_the_commands_of_the_page_run_with_its_rows_and_its_code(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = chat_tokenizer(QWEN)
    tiny_model("llama", attention="eager", vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained("M")
    tokenizer.save_pretrained("M")
    Path("rows.jsonl").write_text(first("json", '"answer"').strip() + os.linesep)
    Path("mine.py").write_text(first("python", "async def agent(base_url") + first("python", "def multiply"))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["check", *(word.replace("MODEL", "M") for word in words[1:]), *SMALL]) == 0
    # scored by the agent: an episode that fails has no reward
    assert capsys.readouterr().out.count(": reward 0.0\n") == 2
