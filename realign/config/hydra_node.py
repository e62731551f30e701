"""What a config may say to Hydra itself: folders, launchers, sweepers, and where its log goes; never what to call.

Hydra calls whatever stands under `hydra.callbacks`, what its launcher and sweeper are given as `_target_`, and what a
log handler names as its class, with any arguments. A file of experiments from somebody else must not reach that.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from realign.config.errors import ConfigError

_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
_LAUNCHERS = {
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher": "basic",
    f"{_SUBMITIT}.LocalLauncher": "submitit_local",
    f"{_SUBMITIT}.SlurmLauncher": "submitit_slurm",
}
"""What may start the runs of a sweep: the class, and its name as `hydra/launcher=NAME`."""
_SHELL = ("setup", "teardown", "srun_args", "additional_parameters", "python")
"""Settings of a launcher that become commands, or parts of one, in the script of a job."""
_SWEEPERS = re.compile(r"(hydra\._internal\.core_plugins|hydra_plugins)\.[\w.]+")
_LOG_CLASSES = re.compile(r"logging\.(StreamHandler|FileHandler|NullHandler|Formatter)|colorlog\.\w*Formatter")
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_BUILT = ("callbacks", "launcher", "sweeper", "job_logging", "hydra_logging")
_OWN_VALUE = re.compile(r"\$\{(hydra[.:]|now:)[^{}]*\}")


def without_hydra(composed: DictConfig) -> DictConfig:
    """The config without Hydra's own node, which is refused if it would make Hydra call something.

    Raises:
        ConfigError: names the key.
    """
    node = OmegaConf.to_container(composed.hydra, resolve=False)
    assert isinstance(node, dict)
    _check({str(key): value for key, value in node.items()})
    rest = copy.copy(composed)
    with open_dict(rest):
        del rest["hydra"]
    return rest


def _check(node: Mapping[str, Any]) -> None:
    if found := node.get("callbacks"):
        raise ConfigError(f"hydra.callbacks: Hydra would call what stands here, which no config may; found {found}")
    _check_launcher(node.get("launcher"))
    for part in _BUILT:
        for key, value in _leaves(node.get(part), f"hydra.{part}"):
            _check_leaf(key, value)


def _check_launcher(node: Any) -> None:
    target = node.get("_target_") if isinstance(node, Mapping) else node
    if not isinstance(node, Mapping) or str(target) not in _LAUNCHERS:
        valid = ", ".join(f"hydra/launcher={name}" for name in _LAUNCHERS.values())
        raise ConfigError(
            f"hydra.launcher: {target!r} is not among what Hydra may be told to use ({valid}); nothing was called"
        )
    for name in _SHELL:
        if found := node.get(name):
            raise ConfigError(
                f"hydra.launcher.{name}: {found!r} would become part of the script of a job, which no config may "
                "write; prepare the environment in the shell that starts the sweep, which a job inherits"
            )


def _check_leaf(key: str, value: Any) -> None:
    name = key.rpartition(".")[2]
    text = value if isinstance(value, str) else ""
    if key == "hydra.launcher._target_":
        return
    if key == "hydra.sweeper._target_":
        valid = _SWEEPERS.fullmatch(text) is not None
    elif name == "class":
        valid = _LOG_CLASSES.fullmatch(text) is not None
    elif text.startswith("ext://"):
        valid = text in _STREAMS
    elif re.fullmatch(r"\$\{.*\}", text):  # may bring in a whole node, with all of this
        valid = _OWN_VALUE.fullmatch(text) is not None
    else:
        valid = name not in ("_target_", "()", "factory") and not text.startswith("cfg://")
    if not valid:
        raise ConfigError(f"{key}: {value!r} is not among what Hydra may be told to use; nothing was called")


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from _leaves(value, f"{key}[{i}]")
    else:
        yield key, node
