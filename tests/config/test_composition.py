"""Test that the command line composes like `compose`: single runs, sweeps and `--cfg`, with words and presets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from realign.cli.commands import dispatch
from realign.config import ConfigError, ExperimentConfig, build_experiment, compose
from realign.config.files import experiments_dir
from tests.config.components import BASE, HERE, Clip, Gspo, TightClip
from tests.config_parts import bomb

ACTOR = "interfaces.actor"
GSPO = f"{{_target_: {HERE}.Gspo}}"
CHECKOUT = experiments_dir().parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a current folder with experiments and presets in `conf`."""
    clipped = "defaults: [base, _self_]\ninterfaces: {actor: {objective: {low: 0.3, dual: 3}}}\n"
    files = {
        "experiment/base": BASE,
        "experiment/clipped": clipped,
        "experiment/swept": f"{clipped}hydra: {{sweeper: {{params: {{{ACTOR}.objective: 'clip,gspo'}}}}}}\n",
        "algorithm/one": f"interfaces: {{actor: {{objective: {GSPO}}}}}\n",
        "algorithm/two": "interfaces: {actor: {objective: tight_clip}}\n",
    }
    for name, text in files.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if text.startswith("#") else f"# @package _global_\n{text}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configs(*words: str) -> list[ExperimentConfig]:
    """Return the config of each run that a command line starts."""
    started: list[ExperimentConfig] = []

    def start(config, experiment, checked):
        started.append(config)
        checked()
        return 0

    assert dispatch(["--config-dir=conf", *words], start) == 0
    return started


def objectives(*words: str) -> list[object]:
    return [build_experiment(config).interfaces["actor"].objective for config in configs(*words)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"{ACTOR}.objective=clip,gspo,tight_clip"], [Clip(low=0.3, dual=3), Gspo(), TightClip()]),
        ([f"+{ACTOR}.advantage=gae,group_relative"], [Clip(low=0.3, high=0.25, dual=3)] * 2),
        ([f"++{ACTOR}.objective=gspo,tight_clip"], [Gspo(), TightClip()]),
        ([f"{ACTOR}.objective=choice(gspo,tight_clip)"], [Gspo(), TightClip()]),
        ([f"{ACTOR}.objective='gspo','tight_clip'"], [Gspo(), TightClip()]),
        ([f"{ACTOR}.objective=gspo,tight_clip", f"{ACTOR}.objective.low=0.1"], [Gspo(low=0.1), TightClip(low=0.1)]),
        ([f"{ACTOR}.objective.low=0.1,0.2", f"{ACTOR}.objective=gspo"], [Gspo(low=0.1), Gspo(low=0.2)]),
        (["algorithm=one,two"], [Gspo(), TightClip()]),
        (["algorithm=one,two", f"{ACTOR}.objective.low=0.1"], [Gspo(low=0.1), TightClip(low=0.1)]),
        (["algorithm=one", f"{ACTOR}.objective.low=0.1,0.2"], [Gspo(low=0.1), Gspo(low=0.2)]),
    ],
)
def test_a_sweep_trains_what_each_of_its_command_lines_would(here, words, expected):
    assert objectives("-m", "experiment=clipped", *words) == expected


def test_a_mistake_in_a_sweep_is_an_error_before_the_first_run(here):
    with pytest.raises(ConfigError, match="unknown choice 'clipp'"):
        configs("-m", "experiment=clipped", "algorithm=one", f"{ACTOR}.objective=gspo,clipp")


def test_the_run_of_a_command_line_is_that_of_compose(here, monkeypatch):
    words = ["experiment=clipped", f"{ACTOR}.objective.high=0.28", f"{ACTOR}.objective=gspo"]
    (config,) = configs(*words)
    assert config == compose(words, "conf")
    assert len(config.dropped) == 2
    written = yaml.safe_load((here / "runs" / "base" / ".hydra" / "config.yaml").read_text(encoding="utf-8"))
    assert written["interfaces"]["actor"]["objective"] == {"_target_": f"{HERE}.Gspo", "high": 0.28}
    overrides = (here / "runs" / "base" / ".hydra" / "overrides.yaml").read_text(encoding="utf-8")
    assert f"{ACTOR}.objective=gspo" in overrides  # unchanged from the command line


def test_cfg_prints_what_is_trained_and_what_was_dropped(here, capsys):
    assert configs("--cfg", "job", "experiment=clipped", f"{ACTOR}.objective=gspo", f"{ACTOR}.objective.low=0.1") == []
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["interfaces"]["actor"]["objective"] == {"_target_": f"{HERE}.Gspo", "low": 0.1}
    assert printed["dropped"] == [
        f"{ACTOR}.objective.low=0.3 of experiment/clipped.yaml (by the command line)",
        f"{ACTOR}.objective.dual=3 of experiment/clipped.yaml (by the command line)",
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["--config-dir=conf", "experiment=bomb"],
        ["--config-dir=conf", "experiment=base,bomb", "-m"],
        ["--config-dir=conf", "--cfg=job", "experiment=bomb"],
        ["--config-dir=conf", "--info", "config", "experiment=bomb"],
        ["check", "--config-dir=conf", "experiment=bomb"],
        ["graph", "--config-dir=conf", "experiment=base", "algorithm=bomb"],
        ["--config-dir=conf", "--cfg=job", "conf/experiment/bomb.yaml"],
    ],
)
def test_a_file_whose_aliases_repeat_too_many_values_is_refused_by_every_command(words, here):
    for group in ("experiment", "algorithm"):
        (here / "conf" / group / "bomb.yaml").write_text(f"# @package _global_\n{bomb(7)}", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"bomb\.yaml: the file cannot be read: the aliases \(\*name\) repeat too many"
    ):
        dispatch(words, lambda *_: 0)


def test_no_private_name_of_hydra_or_omegaconf_is_used():
    private = re.compile(
        r"hydra\._internal|omegaconf\.(_|base|nodes)|\._(get_node|maybe_dereference_node|set_value|get_full_key|metadata)\b"
        r"|\._is_(none|missing|interpolation)\b|ConfigLoaderImpl"
    )
    files = (CHECKOUT / "realign").rglob("*.py")
    uses = [(file.name, hit[0]) for file in files if (hit := private.search(file.read_text(encoding="utf-8")))]
    assert uses == []
