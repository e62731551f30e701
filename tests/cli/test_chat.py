from __future__ import annotations

import io
import shutil

import pytest

from realign.api import GenerationConfig
from realign.cli import commands as cli
from realign.cli.chat import chat_of
from realign.config.errors import ConfigError
from realign.data import Template
from realign.errors import DataError
from tests.data.text_tokenizer import TURNS
from tests.table_sampler import TableSampling
from tests.tiny import save_tiny, tiny_tokenizer

SHORT = ["generation.max_new_tokens=4", "generation.fixed_length=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("chat") / "model"))


def answers(words: list[str], lines: list[str]) -> list[str]:
    said: list[str] = []
    chat_of(words).talk(lines, said.append)
    return said


def test_settings_become_fields(folder):
    chat = chat_of([folder, "generation.temperature=0.5", "template=plain", "model.dtype=bfloat16", "seed=3"])
    assert (chat.model.path, chat.model.dtype.value, chat.seed) == (folder, "bfloat16", 3)
    assert (chat.generation, chat.template) == (GenerationConfig(temperature=0.5), Template.plain)


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


def test_an_answer_ends_where_the_model_has_no_more_positions(folder):
    unlimited = answers([folder], ["a"])  # the default is 256 tokens, and the model has 128 positions
    assert unlimited == answers([folder, "generation.max_new_tokens=127"], ["a"])
    with pytest.raises(DataError, match=r"exceeds the context window of the model \(128\)"):
        answers([folder, "generation.max_new_tokens=200", "generation.fixed_length=true"], ["a"])


def test_each_plain_line_is_answered_alone_and_two_talks_are_equal(folder):
    both = answers([folder, *SHORT, "generation.greedy=true"], ["a", "b", "", "a"])
    assert len(both) == 3  # an empty line produces no answer
    assert both[0] == both[2]
    sampled = [answers([folder, *SHORT], ["a", "a"]) for _ in range(2)]
    assert sampled[0] == sampled[1]
    assert sampled[0][0] != sampled[0][1]


def test_prefix_and_suffix_stand_around_a_line_and_n_answers_are_shown(folder):
    greedy = [folder, *SHORT, "generation.greedy=true"]
    assert answers([*greedy, "prefix=x", "suffix=y"], ["a"]) == answers(greedy, ["xay"])
    assert len(answers([folder, *SHORT, "generation.n=3"], ["a"])) == 3


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


def test_system_needs_a_chat_template(folder):
    with pytest.raises(ConfigError, match="system applies only to template=chat"):
        answers([folder, "system=x"], ["a"])


def test_the_command_answers_the_lines_of_stdin(folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert cli.main(["chat", folder, *SHORT]) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers([folder, *SHORT], ["a", "b"]))
    assert cli.main(["chat"]) == 2
    assert "realign chat expects one model" in capsys.readouterr().err
    assert cli.main(["--config-dir", "x", "chat", folder]) == 2


def test_an_external_sampler_answers_and_is_closed(folder):
    TableSampling.opened.clear()
    words = [folder, *SHORT, "model.sampler._target_=tests.table_sampler.TableSampling", "model.sampler.words=97"]
    said = answers(words, ["a", "a"])
    assert len(said) == 2
    assert said != answers([folder, *SHORT], ["a", "a"])
    assert "closed" in TableSampling.opened[0].stopped
    with pytest.raises(ValueError, match=r"models\.chat\.sampler\.words=-1 must not be negative"):
        answers([*words[:-1], "model.sampler.words=-1"], ["a"])
