from __future__ import annotations

import io
import shutil

import pytest

from realign.cli import commands as cli
from realign.cli.chat import chat_of
from realign.config.errors import ConfigError
from realign.errors import DataError
from tests.data.text_tokenizer import TURNS
from tests.tiny import save_tiny, tiny_tokenizer

SHORT = ["generation.max_new_tokens=4", "generation.fixed_length=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("chat") / "model"))


def answers(words: list[str], lines: list[str]) -> list[str]:
    said: list[str] = []
    chat_of(words).talk(lines, said.append)
    return said


def test_the_folder_of_a_run_means_its_final_model(folder, tmp_path):
    (tmp_path / "run" / "final").mkdir(parents=True)
    shutil.copytree(folder, tmp_path / "run" / "final" / "actor")
    assert chat_of([str(tmp_path / "run")]).model.path == str(tmp_path / "run" / "final" / "actor")
    assert chat_of(["owner/name"]).model.path == "owner/name"
    with pytest.raises(DataError, match=r"^chat='.*': the folder has no config\.json\."):
        chat_of([str(tmp_path)])
    shutil.copytree(folder, tmp_path / "several" / "final" / "one")
    shutil.copytree(folder, tmp_path / "several" / "final" / "two")
    with pytest.raises(ConfigError, match=r"^chat '.*several': the run has several models\. Choose one: .*/one, "):
        chat_of([str(tmp_path / "several")])


def test_each_plain_line_is_answered_alone_and_two_talks_are_equal(folder):
    both = answers([folder, *SHORT, "generation.greedy=true"], ["a", "b", "", "a"])
    assert len(both) == 3  # an empty line produces no answer
    assert both[0] == both[2]
    sampled = [answers([folder, *SHORT], ["a", "a"]) for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert sampled[0][0] != sampled[0][1]


def test_a_conversation_remembers_what_was_said(folder, tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = [folder, f"model.tokenizer={tmp_path / 'tokenizer'}", *SHORT, "generation.greedy=true"]
    first, second = answers(words, ["a", "b"])
    assert first == answers(words, ["a"])[0]
    plain = [*words, "template=plain"]
    said = f"<|user|>a<|end|>\n<|assistant|>{first}<|end|>\n<|user|>b<|end|>\n<|assistant|>"
    assert second == answers(plain, [said])[0]
    with pytest.raises(ConfigError, match="prefix and suffix apply only to template=plain"):
        answers([*words, "prefix=x"], ["a"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"expects one model \(a folder or hub name\) and key=value settings, found none"),
        (["a", "b"], r"found \['a', 'b'\]"),
        (["a", "generation.temprature=1"], r"unknown key 'generation.temprature'; did you mean 'temperature'\?"),
        (["a", "generation.n=0"], "n=0: must be at least 1"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(ConfigError, match=message):
        chat_of(words)


def test_the_command_answers_the_lines_of_stdin(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert cli.main(["chat", folder, *SHORT]) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers([folder, *SHORT], ["a", "b"]))
    assert cli.main(["chat"]) == 2
    assert "realign chat expects one model" in capsys.readouterr().err
    assert cli.main(["--config-dir", "x", "chat", folder]) == 2
