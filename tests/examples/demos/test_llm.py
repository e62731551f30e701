"""`make llm`: its parts with a tiny model and a substitute of reasoning-gym; as a whole with the real ones (slow)."""

from __future__ import annotations

import json

import pytest

from examples.demos import llm
from tests.data.text_tokenizer import make_tokenizer
from tests.demo.reasoning_package import REAL, REASON
from tests.tiny import tiny_model


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
