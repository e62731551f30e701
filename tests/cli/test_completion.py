"""Test shell completion: its candidates, its speed-relevant imports, and the script of bash in a real bash."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from realign.cli.completion import completions, script
from tests.config_parts import write_experiment
from tests.processes import printed_without

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("realign che", ["check", "checkpoint."]),
        ("realign pr", ["precompute_ref_log_probs=", "print_samples_every_steps=", "profile"]),
        (
            "realign experiment=grpo_",
            [
                "experiment=grpo_agent",
                "experiment=grpo_arithmetic",
                "experiment=grpo_environment",
                "experiment=grpo_reasoning",
            ],
        ),
        ("realign algorithm=rl", ["algorithm=rloo"]),
        ("realign help interfaces.actor.k", ["interfaces.actor.keep_best", "interfaces.actor.kl."]),
        ("realign experiment=ppo interfaces.c", ["interfaces.critic."]),
        ("realign experiment=grpo interfaces.actor.kl.t", ["interfaces.actor.kl.target="]),
        ("realign interfaces.actor.kl.place=", [f"interfaces.actor.kl.place={x}" for x in ("loss", "none", "reward")]),
        ("realign interfaces.actor.objective=gs", ["interfaces.actor.objective=gspo"]),
        ("realign experiment=sft shuffle=", ["shuffle=false", "shuffle=true"]),
        ("realign models.actor.trains=lora models.actor.trains.r", ["models.actor.trains.rank="]),
        ("realign algorithm=rloo interfaces.actor.objective.", []),  # Reinforce has no fields
        ("realign interfaces.actor.advantage=gae interfaces.actor.advantage.l", ["interfaces.actor.advantage.lam="]),
        ("realign interfaces.actor.objective.d", ["interfaces.actor.objective.dual="]),  # the default of the field
        ("realign graph.", []),  # no config sets the parameter `interfaces`
        ("realign callbacks.stop=e", ["callbacks.stop=early_stopping"]),
        ("realign callbacks.stop=n", ["callbacks.stop=null"]),
        ("realign callbacks.stop=early_stopping callbacks.stop.p", ["callbacks.stop.patience="]),
        ("realign microbatch.n", ["microbatch.n_microbatches="]),
        ("realign rollout=async rollout.max_s", ["rollout.max_staleness="]),
        ("realign grad", ["grad_accum=", "grad_clip=", "gradient_accumulation_steps=", "gradient_checkpointing="]),
        ("realign --shell-completion ", ["bash", "fish", "zsh"]),
        ("realign --mul", ["--multirun"]),
        ("realign plan pl", ["plan."]),
        ("realign profile experiment=grpo profile.st", ["profile.start=", "profile.steps="]),
        ("realign profile profile.start=", []),
        ("realign check plan.dev", []),
        ("realign chat ", []),
        ("realign serve ", []),
        ("realign experiment=nothing_like_this interfaces.", []),
        ("realign interfaces.actor.nothing.x", []),
    ],
)
def test_candidates(line, expected):
    assert completions(line) == expected


OWN = """\
from dataclasses import dataclass
from realign.api import GenerationConfig as Sampling
from realign.interfaces.grpo import GRPOActorInterface
raise AssertionError("imported")
@dataclass
class Base(GRPOActorInterface):
    my_coef: float = 0.5
    generation: Sampling | None = None
class Mine(Base):
    my_switch: bool
class Loop(Loop):
    pass
"""


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("interfaces.actor.my", ["interfaces.actor.my_coef=", "interfaces.actor.my_switch="]),
        ("interfaces.actor.my_switch=t", ["interfaces.actor.my_switch=true"]),
        ("interfaces.actor.advantage=ga", ["interfaces.actor.advantage=gae"]),
        ("interfaces.actor.kl.pl", ["interfaces.actor.kl.place="]),
        ("interfaces.actor.generation.temp", ["interfaces.actor.generation.temperature="]),
        ("interfaces.actor._target_=own_classes.Missing interfaces.actor.my", []),
        ("interfaces.actor._target_=own_classes.Loop interfaces.actor.my", []),
        ("callbacks.mine._target_=own_classes.Mine callbacks.mine.my", []),
        ("interfaces.", ["interfaces.actor.", "interfaces.reward."]),
    ],
)
def test_fields_of_own_classes_are_offered_and_nothing_is_imported(tmp_path, monkeypatch, typed, expected):
    write_experiment(tmp_path / "conf")
    (tmp_path / "own_classes.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(
        "defaults: [/experiment/bigram]\ninterfaces: {actor: {_target_: own_classes.Mine}}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert completions(f"realign --config-dir conf ./own.yaml {typed}") == expected


def test_completion_imports_neither_torch_nor_hydra(tmp_path):
    line = "realign experiment=grpo interfaces.actor.kl."
    out = printed_without({"torch", "hydra", "transformers"}, ["--complete", line], tmp_path)
    assert "interfaces.actor.kl.coef=" in out.splitlines()
    out = printed_without({"torch", "hydra", "transformers"}, ["--shell-completion", "bash"], tmp_path)
    assert out.rstrip("\n") == script("bash")


def test_names_that_a_shell_would_run_are_not_offered(tmp_path):
    write_experiment(tmp_path)
    for name in (
        "bigram;touch PWNED",
        "bigram$(touch PWNED)",
        "bigram`x`",
        "bigram x",
        "bigram'",
        "bigram|x",
        "bigram&x",
    ):
        write_experiment(tmp_path, name)
    assert completions(f"realign --config-dir {tmp_path} experiment=big") == ["experiment=bigram"]
    text = "interfaces: {actor: {}, 'a;touch PWNED': {}}\n"
    (tmp_path / "own.yaml").write_text(text)
    assert completions(f"realign {tmp_path}/own.yaml interfaces.a") == ["interfaces.actor."]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("realign experiment=grpo_ar", "grpo_arithmetic"),  # bash splits words at =
        ("realign experiment=grpo interfaces.actor.kl.pl", "interfaces.actor.kl.place="),
    ],
)
def test_bash_replaces_the_word_at_the_cursor(tmp_path, typed, expected):
    (tmp_path / "realign").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m realign "$@"\n')
    (tmp_path / "realign").chmod(0o755)
    code = f"""\
PATH={tmp_path}:$PATH
eval "$(realign --shell-completion bash)"
compopt() {{ :; }}
COMP_LINE='{typed}'; COMP_POINT=${{#COMP_LINE}}
_realign
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(["bash", "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.split(), done.stderr) == ([expected], "")
