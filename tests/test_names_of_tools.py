"""Test the comparison of the rules of `realign import` with the releases of other tools, on a small stand-in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from names_of_tools import names_of, problems_of

VERL = """\
algorithm: {adv_estimator: gae, brand_new: 1, lam: 0.9}
actor_rollout_ref: {actor: {optim: {lr: 1.0e-06, _target_: x}}, model: {path: "${nothing}"}}
"""
OPENRLHF = """\
for prefix in ("actor", "critic"):
    parser.add_argument(f"--{prefix}.adam.lr", default=1e-6 if prefix == "actor" else 9e-6)
parser.add_argument("--rollout.batch_size", type=int, default=512)
parser.add_argument("--train.novelty", action="store_true")
"""


BASES = {
    "trl/trainer/model_config.py": "class ModelConfig:\n    lora_r: int = 16\n",
    "transformers/training_args.py": "class TrainingArguments:\n    seed: int = 42\n    novelty: bool = False\n",
}


def test_trl_has_the_arguments_of_transformers(tmp_path):
    kinds = ("GRPO", "RLOO", "DPO", "KTO", "SFT", "Reward")
    texts = {f"trl/trainer/{kind.lower()}_config.py": f"class {kind}Config:\n    beta: float = 0.1\n" for kind in kinds}
    for name, text in (texts | BASES).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [line for line in problems_of("trl", tmp_path) if "know" in line] == [
        "TRL: realign import doesn't know novelty"
    ]


def test_a_new_name_and_a_changed_default_are_named(tmp_path):
    (tmp_path / "_generated_ppo_trainer.yaml").write_text(VERL)
    assert problems_of("verl", tmp_path) == [
        "verl: realign import doesn't know algorithm.brand_new",
        "verl: the default of algorithm.lam is 0.9, and 1.0 in imports/verl.yaml",
    ]


@pytest.mark.parametrize("program", ["ppo_ray"])
def test_options_of_a_program_are_read_without_running_it(tmp_path, program):
    (tmp_path / "cli").mkdir()
    for name in (program, "sft", "dpo", "rm"):
        (tmp_path / "cli" / f"train_{name}.py").write_text(OPENRLHF if name == program else "")
    names = dict(names_of("openrlhf", tmp_path))
    assert {*names} == {"rl:actor.adam.lr", "rl:critic.adam.lr", "rl:rollout.batch_size", "rl:train.novelty"}
    assert problems_of("openrlhf", tmp_path) == [
        "OpenRLHF: the default of rollout.batch_size is 512, and 1024 in imports/openrlhf.yaml",
        "OpenRLHF: realign import doesn't know train.novelty of rl",
    ]
