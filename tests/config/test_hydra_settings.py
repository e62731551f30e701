"""Test which settings of Hydra a config may change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from realign.cli.sweep import compose_runs
from realign.config import ConfigError, compose
from realign.config.hydra_settings import LAUNCHERS, check_settings
from tests.config_parts import EXPERIMENT, write_experiment

KEYS = {
    *("sweep.dir", "verbose", "sweeper.params", "sweeper.max_batch_size"),
    *(f"launcher.{name}" for name in LAUNCHERS["submitit_slurm"]),
}
"""Settings that a config may change."""
NEVER = [
    "${graph}",
    "${oc.env:HOME}",
    "a\nb",
    {"_target_": "os.system"},
    [{"_target_": "os.system"}],
    {"()": "os.system", "command": "true"},
]
"""Values that no setting accepts."""


@pytest.mark.parametrize("value", NEVER, ids=repr)
def test_no_setting_accepts_an_interpolation_a_call_or_a_line_break(value):
    for key in KEYS:
        with pytest.raises(ConfigError, match=re.escape(f"hydra.{key.partition('.')[0]}")):
            check_settings(nested(key, value), "submitit_slurm")


def nested(key: str, value: Any) -> Any:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


OTHERS = (
    *("mode", "searchpath", "unknown", "run.unknown", "sweep.mode", "sweeper._target_", "sweeper.unknown"),
    *("launcher._target_", "launcher.setup", "launcher.additional_parameters", "launcher.submitit_folder"),
    *("job.env_set.X", "job.env_copy", "job.name", "job.config", "job_logging.handlers", "callbacks.mine._target_"),
    *("env", "help.template", "overrides.task", "runtime.output_dir", "run.dir", "output_subdir", "sweep.subdir"),
)


@pytest.mark.parametrize("key", OTHERS)
def test_every_other_setting_is_refused(key, tmp_path):
    for value in ("x", None, 1, True, ["x"], {"x": "y"}):
        with pytest.raises(ConfigError, match=re.escape(f"hydra.{key}")):
            check_settings(nested(key, value), "submitit_slurm")
    with pytest.raises(ConfigError, match=re.escape(key.rpartition(".")[2])):
        compose(["experiment=evil"], evil(tmp_path, nested(key, "x")))


def evil(folder: Path, settings: Any, *, defaults: str = "") -> Path:
    """Write a third party's experiment file that changes Hydra's node, and return its folder."""
    head, _, rest = EXPERIMENT.partition("\n")
    return write_experiment(folder, "evil", f"{head}\n{defaults}{rest}{yaml.safe_dump({'hydra': settings})}")


def test_no_file_puts_an_interpolation_in_place_of_the_node(tmp_path):
    with pytest.raises(ConfigError, match="hydra"):
        compose(["experiment=evil"], evil(tmp_path, "${models}"))
    for override in ("hydra=${models}", "++hydra=${models}"):
        with pytest.raises(ConfigError, match="hydra"):
            compose(["experiment=evil", override], evil(tmp_path, {}))


@pytest.mark.parametrize("group", ["hydra/launcher", "hydra/sweeper", "hydra/env", "hydra/output", "hydra/callbacks"])
def test_a_group_of_hydra_in_the_folder_of_somebody_else_is_refused(group, tmp_path):
    evil(tmp_path, {}, defaults=f"defaults: [{{override /{group}: mine}}]\n")
    (tmp_path / group).mkdir(parents=True)
    key = group.replace("/", ".")
    text = f"# @package {key}\n_target_: os.system\n"
    (tmp_path / group / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(key)):
        compose(["experiment=evil"], tmp_path)


GOOD = [
    ["hydra.sweep.dir='sweeps/${name}/${now:%Y%m%d}'"],
    ["hydra.verbose=true"],
    ["hydra.verbose=[realign,hydra]"],
    ["hydra.sweeper.max_batch_size=2"],
    ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5", "hydra.launcher.name=mine"],
    ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=gpu", "hydra.launcher.constraint='a100|h100'"],
    ["hydra/launcher=submitit_slurm", "hydra.launcher.comment='for the paper'", "hydra.launcher.mem_gb=8"],
]


@pytest.mark.parametrize("overrides", GOOD)
def test_folders_resources_and_parameters_of_a_sweep_may_change(overrides, tmp_path):
    write_experiment(tmp_path)
    compose_runs(["experiment=bigram", *overrides], str(tmp_path))
    compose(["experiment=bigram", *overrides], tmp_path)


BAD = [
    "hydra.sweep.dir='${oc.env:HOME}'",
    "hydra.sweep.dir=null",
    "hydra.run.dir=elsewhere",
    "hydra.sweep.dir='${oc.select:hydra.job.env_set}'",
    "hydra.sweep.dir='${now:${oc.env:HOME}}'",
    "hydra.sweep.dir='${hydra:job.name}'",
    "hydra.sweep.dir='${models}'",
    "hydra.sweep.dir='${now:%n}x'",
    "hydra.sweep.dir='${hydra.sweep.x}'",
    "hydra.output_subdir=.hydra",
    "hydra.verbose={a: 1}",
    "hydra.mode=MULTIRUN",
    "hydra.searchpath=[pkg://antigravity]",
    "++hydra.searchpath=[pkg://antigravity]",
    "hydra/job_logging=none",
    "hydra/hydra_logging=disabled",
    "~hydra.job_logging.handlers",
    "hydra.job.env_copy=[HOME]",
    "hydra.job.env_copy=[NOT_SET_ANYWHERE]",
    "hydra.overrides.task=['steps=1']",
    "hydra.overrides.hydra=['hydra.verbose=true']",
    "hydra={verbose: true, unknown: 1}",
]


@pytest.mark.parametrize("override", BAD)
def test_other_values_are_refused(override, tmp_path, monkeypatch):
    import importlib

    imported: list[str] = []
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name, *a: imported.append(name) or real(name, *a))
    write_experiment(tmp_path)
    key = ".".join(re.split(r"[./]", override.lstrip("+~").partition("=")[0])[:2])
    with pytest.raises(ConfigError, match=re.escape(key)) as caught:
        compose_runs(["experiment=bigram", override], str(tmp_path))
    assert "\n" not in str(caught.value)
    assert "antigravity" not in imported


def test_the_value_of_a_variable_that_a_file_asks_for_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError, match=r"hydra\.job\.env_copy=\['HF_TOKEN'\]") as caught:
        compose_runs(["experiment=evil"], str(evil(tmp_path, {"job": {"env_copy": ["HF_TOKEN"]}})))
    assert "hf_secret" not in str(caught.value)


SMUGGLED = [
    {"hydra.job.env_set.X": "y"},
    {"+hydra.job.env_set.X": "y"},
    {"++hydra.job.env_set": "{X: y}"},
    {"hydra": "{verbose: true}"},
    {"hydra.searchpath": "[pkg://antigravity]"},
    {"hydra/job_logging": "none"},
    {"hydra/launcher": "basic,submitit_local"},
]


@pytest.mark.parametrize("params", SMUGGLED)
def test_parameters_of_a_sweep_never_reach_hydra(params, tmp_path):
    with pytest.raises(ConfigError, match="hydra"):
        compose_runs(["experiment=evil"], str(evil(tmp_path, {"sweeper": {"params": params}})))


ALGORITHMS = {
    "evil": "# @package _global_\nhydra: {job: {env_set: {X: y}}}\n",
    "good": "# @package _global_\nsteps: 3\n",
}


@pytest.mark.parametrize(
    ("params", "words"),
    [("evil", []), ("good,evil", []), ("good", ["algorithm=good,evil"]), ("good", ["algorithm=evil"])],
)
def test_a_file_that_a_sweep_chooses_is_checked(params, words, tmp_path):
    (tmp_path / "algorithm").mkdir()
    for name, text in ALGORITHMS.items():
        (tmp_path / "algorithm" / f"{name}.yaml").write_text(text)
    evil(tmp_path, {"sweeper": {"params": {"algorithm": "good"}}})
    compose_runs(["experiment=evil"], str(tmp_path))
    evil(tmp_path, {"sweeper": {"params": {"algorithm": params}}})
    with pytest.raises(ConfigError, match=r"hydra\.job\.env_set\.X"):
        compose_runs(["experiment=evil", *words], str(tmp_path))


@pytest.mark.parametrize("command", ["\ntouch PWNED #", "a\rb", "a\x1b[2Jb"])
def test_output_dir_cannot_add_a_line_to_the_script_of_a_job(command, tmp_path):
    head, _, rest = EXPERIMENT.partition("\n")
    for setting in ({"output_dir": command}, {"hydra": {"launcher": {"comment": command}}}):
        text = f"{head}\ndefaults: [{{override /hydra/launcher: submitit_slurm}}]\n{rest}{yaml.safe_dump(setting)}"
        write_experiment(tmp_path, "evil", text)
        with pytest.raises(ConfigError, match=r"control character|printable"):
            compose_runs(["experiment=evil"], str(tmp_path))
