from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from realign.demo.arithmetic import prepare

FILE = Path(__file__).parents[2] / "benchmarks" / "tf_adam.py"


@pytest.fixture(scope="module")
def study_module():
    spec = importlib.util.spec_from_file_location("tf_adam", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tf_adam"] = module  # dataclasses look up their own module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tf_adam"]


@pytest.mark.slow
def test_the_study_runs_and_eps_hat_moves_the_policy_less_at_first(study_module, tmp_path, capsys):
    task = prepare(tmp_path, seed=0, demonstrations=1)
    reward = tmp_path / "length.py"
    reward.write_text("def score(prompt, response, row):\n    return len(response)\n")
    picture = tmp_path / "study.png"
    words = [
        task.model,
        task.prompts,
        "--steps",
        "2",
        "--batch-prompts",
        "4",
        "--first",
        "1",
        "--scales",
        "0.01",
        "--picture",
        picture,
    ]
    words += ["--reward", f"{reward}:score"]
    study_module.main([str(word) for word in words])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = report["loss x 0.01"]
    assert found["first: lr_scale"]["eps-hat"] < found["first: lr_scale"]["PyTorch"] < 1
    for metric in ("ratio_variance", "approx_kl"):
        assert 0 < found[f"first: {metric}"]["fraction"] < 1
    assert picture.read_bytes()[:4] == b"\x89PNG"
