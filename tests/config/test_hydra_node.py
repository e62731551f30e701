"""Test which settings of Hydra's node a config may change."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from realign.config import ConfigError, compose
from realign.config.composition import _default_node, _whole, check_launch, register_schema
from realign.config.hydra_node import LAUNCHERS, check_node
from tests.config_parts import EXPERIMENT, write_experiment

register_schema()

BASE = {"run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "verbose", "sweeper.params", "sweeper.max_batch_size"}
LOCAL = {
    *("launcher.timeout_min", "launcher.cpus_per_task", "launcher.gpus_per_node", "launcher.tasks_per_node"),
    *("launcher.mem_gb", "launcher.nodes", "launcher.name", "launcher.stderr_to_stdout"),
}
SLURM = LOCAL | {
    *("launcher.partition", "launcher.qos", "launcher.comment", "launcher.constraint", "launcher.exclude"),
    *("launcher.gres", "launcher.cpus_per_gpu", "launcher.gpus_per_task", "launcher.mem_per_gpu"),
    *("launcher.mem_per_cpu", "launcher.account", "launcher.signal_delay_s", "launcher.max_num_timeout"),
    "launcher.array_parallelism",
}
ALLOWED = {"basic": BASE, "submitit_local": BASE | LOCAL, "submitit_slurm": BASE | SLURM}
"""Settings that a config may change, by launcher."""
FILLED = {
    *("runtime.version", "runtime.version_base", "runtime.cwd", "runtime.config_sources"),
    *("job.override_dirname", "job.config_name"),
}
"""Settings that Hydra fills after reading all files."""
NEVER = [
    "${graph}",
    "${oc.env:HOME}",
    "a\nb",
    {"_target_": "os.system"},
    [{"_target_": "os.system"}],
    {"()": "os.system", "command": "true"},
]
"""Values that no setting accepts."""


def node(launcher: str = "basic") -> dict[str, Any]:
    return copy.deepcopy(dict(_default_node(launcher)))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all values in a node, including empty mappings."""
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from leaves(below, (*path, str(key)))
    else:
        yield path


def mappings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, Mapping):
        yield path
        for key, below in value.items():
            yield from mappings(below, (*path, str(key)))


def owner(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def other(value: Any) -> Any:
    """Return a different harmless value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [*value, "x"]
    return {"x": "y"} if isinstance(value, Mapping) else "other"


def choices(path: tuple[str, ...]) -> bool:
    """Return whether a path is in Hydra's list of group choices, whose values are names."""
    return path[:2] == ("runtime", "choices")


@pytest.mark.parametrize("launcher", LAUNCHERS.values())
def test_every_setting_of_hydra_is_refused_unless_it_is_in_the_list(launcher):
    expected = node(launcher)
    paths = list(leaves(expected))
    assert ALLOWED[launcher] <= {".".join(path) for path in paths}
    assert len(paths) > 50
    for path in paths:
        key = ".".join(path)
        if key in FILLED:
            continue
        values = [*NEVER, None, "other", 7, True, ["x"], {}, {"x": "y"}, other(owner(expected, path)[path[-1]])]
        for value in values:
            changed = copy.deepcopy(expected)
            default, owner(changed, path)[path[-1]] = owner(changed, path)[path[-1]], value
            if type(value) is type(default) and value == default:
                continue
            if value not in NEVER and (key in ALLOWED[launcher] or choices(path)):
                continue
            with pytest.raises(ConfigError, match=re.escape(f"hydra.{path[0]}")):
                check_node(changed, expected)


@pytest.mark.parametrize("launcher", LAUNCHERS.values())
def test_a_key_that_hydra_does_not_have_is_refused_and_so_is_one_that_is_missing(launcher):
    expected = node(launcher)
    for path in mappings(expected):
        if choices(path) or path == ("sweeper", "params"):
            continue
        changed = copy.deepcopy(expected)
        owner(changed, (*path, ""))["unknown"] = "x"
        with pytest.raises(ConfigError, match=re.escape(".".join(["hydra", *path, "unknown='x'"]))):
            check_node(changed, expected)
    for path in leaves(expected):
        if ".".join(path) in FILLED or choices(path):
            continue
        changed = copy.deepcopy(expected)
        del owner(changed, path)[path[-1]]
        with pytest.raises(ConfigError, match=re.escape(".".join(["hydra", *path]))):
            check_node(changed, expected)


@pytest.mark.parametrize("launcher", LAUNCHERS.values())
def test_no_part_of_the_node_may_come_from_elsewhere(launcher):
    expected = node(launcher)
    for path in mappings(expected):
        if path:
            changed = copy.deepcopy(expected)
            owner(changed, path)[path[-1]] = "${models.actor}"
            with pytest.raises(ConfigError, match=re.escape(".".join(["hydra", *path]))):
                check_node(changed, expected)


def evil(folder: Path, settings: Any, *, defaults: str = "") -> Path:
    """Write a third party's experiment file that changes Hydra's node, and return its folder."""
    head, _, rest = EXPERIMENT.partition("\n")
    return write_experiment(folder, "evil", f"{head}\n{defaults}{rest}{yaml.safe_dump({'hydra': settings})}")


def nested(path: tuple[str, ...], value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def test_no_file_changes_a_setting_that_is_not_in_the_list(tmp_path):
    whole = node()
    for path in leaves(whole):
        key = ".".join(path)
        if key in ALLOWED["basic"] or choices(path):
            continue
        changed = other(owner(whole, path)[path[-1]])
        if key == "runtime.config_sources":
            changed = [{"path": "other", "schema": "other", "provider": "other"}]
        folder = evil(tmp_path, nested(path, changed))
        if key in FILLED:
            words = ["experiment=evil", f"hydra.searchpath=['file://{folder}']"]
            found = _whole(words).hydra
            assert "other" not in str(owner(found, path)[path[-1]]), key
            continue
        with pytest.raises(ConfigError, match=re.escape(path[-1])):
            compose(["experiment=evil"], folder)


def test_no_file_puts_an_interpolation_in_place_of_the_node(tmp_path):
    with pytest.raises(ConfigError, match="HydraConf"):
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


@pytest.mark.parametrize(
    "head",
    [
        "defaults: [{override /hydra/job_logging: disabled}]\n",
        "hydra: {defaults: [{override /hydra/job_logging: disabled}]}\n",
        "hydra: {defaults: [{/hydra/job_logging: disabled}, _self_]}\n",
    ],
)
def test_defaults_of_the_node_are_refused_although_hydra_ignores_them(head, tmp_path):
    first, _, rest = EXPERIMENT.partition("\n")
    write_experiment(tmp_path, "evil", f"{first}\n{head}{rest}")
    with pytest.raises(ConfigError, match=r"^experiment/evil\.yaml: hydra\.(job_logging|defaults): a config cannot"):
        compose(["experiment=evil"], tmp_path)


def test_a_launcher_of_the_same_name_in_the_folder_of_somebody_else_is_refused(tmp_path):
    evil(tmp_path, {}, defaults="defaults: [{override /hydra/launcher: submitit_slurm}]\n")
    (tmp_path / "hydra" / "launcher").mkdir(parents=True)
    target = next(target for target, name in LAUNCHERS.items() if name == "submitit_slurm")
    settings = node("submitit_slurm")["launcher"] | {"_target_": target, "setup": ["true"]}
    (tmp_path / "hydra" / "launcher" / "submitit_slurm.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.setup"):
        compose(["experiment=evil"], tmp_path)


GOOD = [
    ["hydra.run.dir=elsewhere"],
    ["hydra.run.dir='${output_dir}/${now:%Y%m%d}'"],
    ["hydra.sweep.dir='sweeps/${name}'", "hydra.sweep.subdir='${hydra.job.num}_${hydra.job.override_dirname}'"],
    ["hydra.output_subdir=null"],
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
    check_launch(["experiment=bigram", *overrides], tmp_path)
    compose(["experiment=bigram", *overrides], tmp_path)


def test_a_file_may_change_them_too(tmp_path):
    settings = {
        "sweeper": {"params": {"seed": "1,2", "interfaces.actor.epochs": 2, "+models.actor.lr": 0.1}},
        "launcher": {"timeout_min": 5},
        "sweep": {"dir": "sweeps"},
    }
    evil(tmp_path, settings, defaults="defaults: [{override /hydra/launcher: submitit_local}]\n")
    check_launch(["experiment=evil"], tmp_path)


BAD = [
    "hydra.run.dir='${oc.env:HOME}'",
    "hydra.run.dir=null",
    "hydra.sweep.dir='${oc.select:hydra.job.env_set}'",
    "hydra.sweep.dir='${now:${oc.env:HOME}}'",
    "hydra.sweep.dir='${hydra:job.name}'",
    "hydra.sweep.dir='${models}'",
    "hydra.sweep.dir='${now:%n}x'",
    "hydra.sweep.subdir='\\${x}'",
    "hydra.output_subdir=../up",
    "hydra.output_subdir=/etc",
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
        check_launch(["experiment=bigram", override], tmp_path)
    assert "\n" not in str(caught.value)
    assert "antigravity" not in imported


CALLING = [
    {"_target_": "os.system", "command": "true"},
    {"seed": {"_target_": "os.system"}},
    {"seed": [{"_target_": "os.system"}]},
    {"_args_": [1]},
    {"seed": "${oc.env:HOME}"},
    {"seed": ["${models}"]},
    {"seed": "1\n"},
    {"see\nd": "1"},
    "${models}",
]


@pytest.mark.parametrize("params", CALLING)
def test_parameters_of_a_sweep_are_keys_and_plain_values(params, tmp_path):
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.params"):
        check_launch(["experiment=evil"], evil(tmp_path, {"sweeper": {"params": params}}))


def test_the_value_of_a_variable_that_a_file_asks_for_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ConfigError, match=r"hydra\.job\.env_copy=\['HF_TOKEN'\]") as caught:
        check_launch(["experiment=evil"], evil(tmp_path, {"job": {"env_copy": ["HF_TOKEN"]}}))
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
        check_launch(["experiment=evil"], evil(tmp_path, {"sweeper": {"params": params}}))


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
    check_launch(["experiment=evil"], tmp_path)
    evil(tmp_path, {"sweeper": {"params": {"algorithm": params}}})
    with pytest.raises(ConfigError, match=r"hydra\.job\.env_set\.X"):
        check_launch(["experiment=evil", *words], tmp_path)


@pytest.mark.parametrize("command", ["\ntouch PWNED #", "a\rb", "a\x1b[2Jb"])
def test_output_dir_cannot_add_a_line_to_the_script_of_a_job(command, tmp_path):
    head, _, rest = EXPERIMENT.partition("\n")
    for setting in ({"output_dir": command}, {"hydra": {"launcher": {"comment": command}}}):
        text = f"{head}\ndefaults: [{{override /hydra/launcher: submitit_slurm}}]\n{rest}{yaml.safe_dump(setting)}"
        write_experiment(tmp_path, "evil", text)
        with pytest.raises(ConfigError, match=r"control character|printable"):
            check_launch(["experiment=evil"], tmp_path)
