"""A complete run of every shipped experiment can continue with more steps, as docs/guides/resume.md promises."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from realign.config import build_experiment, compose
from realign.config.folders import list_experiments
from realign.errors import CheckpointError
from realign.runtime import run
from realign.runtime.checkpoint.resume import check_config
from realign.runtime.checkpoint.state import config_of
from tests.test_config import MUST_BE_GIVEN
from tests.tiny import save_tiny

STRETCHED = {
    "deepspeed_chat",
    "dpo",
    "kto",
    "lm_human_preferences",
    "lm_human_preferences_cnndm",
    "lm_human_preferences_reward",
    "lm_human_preferences_reward_cnndm",
    "lm_human_preferences_reward_tldr",
    "lm_human_preferences_tldr",
    "reward_model",
    "reward_sentiment",
    "sft",
    "sft_arithmetic",
    "sft_sentiment",
}
"""Experiments whose learning rate decays over all steps."""


@pytest.mark.parametrize("name", sorted(list_experiments()))
def test_more_steps_are_allowed_for_every_shipped_experiment(name):
    few, many = (
        config_of(build_experiment(compose([f"experiment={name}", *MUST_BE_GIVEN.get(name, []), f"steps={steps}"])))
        for steps in (300, 900)
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_config(few, many, [])
    found = [str(w.message) for w in told]
    assert bool(found) == (name in STRETCHED)
    for message in found:
        assert "schedule.total was 300, is 900" in message
        assert message.endswith("schedule.total=300.")


def test_only_a_length_that_follows_steps_may_differ():
    def config(steps: int, total: int, lr: float = 0.1) -> dict[str, object]:
        return {"steps": steps, "optimizer": {"lr": lr, "schedule": {"kind": "cosine", "total": total}}, "n": steps}

    with pytest.raises(CheckpointError, match=r"checkpoint: n was 3, is 9\. To resume"):
        check_config(config(3, 3), config(9, 9), [])
    for before, after in ((config(3, 5), config(9, 9)), (config(3, 3), config(9, 12)), (config(3, 3), config(3, 4))):
        with pytest.raises(CheckpointError, match=r"optimizer\.schedule\.total was"):
            check_config(before, after, ["n"])
    check_config(config(3, 5), config(9, 5), ["n"])
    with pytest.raises(CheckpointError, match=r"checkpoint: optimizer\.lr was 0\.1, is 0\.2\. To resume"):
        check_config(config(3, 3), config(9, 9, lr=0.2), ["n"])


def test_a_run_with_a_cosine_schedule_continues_with_more_steps(tmp_path):
    save_tiny(tmp_path / "model")
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rates(steps: int, out: Path, *more: str) -> list[float]:
        words = ["experiment=sft", f"models.actor.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl"]
        words += [f"steps={steps}", "batch_prompts=4", f"output_dir={out}", "models.actor.optimizer.schedule.warmup=0"]
        return run(build_experiment(compose([*words, *more]))).series("lr")

    whole = rates(6, tmp_path / "whole")
    few = rates(3, tmp_path / "run")
    assert few[1:] != whole[1:3]
    with pytest.warns(
        UserWarning, match=r"schedule\.total was 3, is 6.* set models\.actor\.optimizer\.schedule\.total=3"
    ):
        continued = rates(6, tmp_path / "run", "resume=auto")
    assert continued == [*few, *whole[3:]]
    kept = rates(8, tmp_path / "run", "resume=auto", "models.actor.optimizer.schedule.total=6")
    assert kept == [*continued, 0.0, 0.0]
