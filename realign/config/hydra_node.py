"""Allow-list for the `hydra` node of a composed config.

Hydra instantiates the callbacks, launcher, sweeper and log handlers that its node names, writes to the files that log
handlers name, and sets environment variables. A third-party experiment file can change this node. Therefore each of its
settings must equal Hydra's default, except for output folders, launcher resources and sweep parameters.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from realign.config.errors import ConfigError
from realign.config.explain import explain

_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
LAUNCHERS: Mapping[str, str] = MappingProxyType(
    {
        "hydra._internal.core_plugins.basic_launcher.BasicLauncher": "basic",
        f"{_SUBMITIT}.LocalLauncher": "submitit_local",
        f"{_SUBMITIT}.SlurmLauncher": "submitit_slurm",
    }
)
"""Launchers that may start the runs of a sweep: class -> name for `hydra/launcher=NAME`."""

_OWN = re.compile(r"\$\{(output_dir|name|now:[^{}]*|hydra\.(job|runtime|sweep)\.[\w./]+)\}")
"""Interpolations that a folder may contain."""
_PARAMETER = re.compile(r"[+~]{0,2}(?!hydra(?!\w))[^\W_][\w./@-]*")
"""Keys that the parameters of a sweep may have: those of overrides, except overrides of the `hydra` node."""


def _plain(value: Any) -> bool:
    """Return whether a value is None, a number, or a printable text without an interpolation."""
    if isinstance(value, str):
        return value.isprintable() and "${" not in value
    return value is None or isinstance(value, bool | int | float)


def _folder(value: Any) -> bool:
    return isinstance(value, str) and value != "" and _plain(_OWN.sub("", value))


def _plain_list(value: Any) -> bool:
    return _plain(value) or (isinstance(value, list) and all(map(_plain, value)))


def _plain_mapping(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, Mapping) and all(_plain(name) and _plain_list(one) for name, one in value.items())


def _parameters(value: Any) -> bool:
    """Return whether a value can be the parameters of a sweep. Rejects `_target_`, whose value Hydra would call."""
    return _plain_mapping(value) and all(_PARAMETER.fullmatch(str(name)) for name in value or ())


@dataclass(frozen=True)
class _Rule:
    """Values that a setting may have besides its default."""

    valid: Callable[[Any], bool]
    """Whether a value is allowed."""
    expected: str
    """The allowed values, for messages."""


_VALUE = _Rule(_plain, "a number or a printable text, without interpolations")
_FOLDER = _Rule(
    _folder,
    "a printable text whose interpolations are ${output_dir}, ${name}, ${now:...}, ${hydra.job...}, "
    "${hydra.runtime...} or ${hydra.sweep...}",
)
_RESOURCES = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout"),
    *("partition", "qos", "comment", "constraint", "exclude", "gres", "cpus_per_gpu", "gpus_per_task", "mem_per_gpu"),
    *("mem_per_cpu", "account", "signal_delay_s", "max_num_timeout", "array_parallelism"),
)
"""Settings of submitit's launchers that request resources. No other setting of these launchers may change."""
_ALLOWED: Mapping[str, _Rule] = MappingProxyType(
    {
        "hydra.run.dir": _FOLDER,
        "hydra.sweep.dir": _FOLDER,
        "hydra.sweep.subdir": _FOLDER,
        "hydra.output_subdir": _Rule(lambda value: value is None, ".hydra or null"),
        "hydra.verbose": _Rule(_plain_list, "true, false, or names of loggers"),
        "hydra.sweeper.params": _Rule(
            _parameters, "a mapping of config keys, except Hydra's own, to plain values without interpolations"
        ),
        "hydra.sweeper.max_batch_size": _VALUE,
        "hydra.runtime.choices": _Rule(_plain_mapping, "a mapping of config groups to names"),
        **{f"hydra.launcher.{name}": _VALUE for name in _RESOURCES},
    }
)
"""Settings that may differ from Hydra's default."""
_SET_BY_HYDRA = frozenset(
    {
        *("hydra.runtime.version", "hydra.runtime.version_base", "hydra.runtime.cwd", "hydra.runtime.config_sources"),
        *("hydra.job.override_dirname", "hydra.job.config_name"),
    }
)
"""Settings that Hydra overwrites after it has read all files and overrides, so that no file can change them."""
_SHELL = "Prepare the environment in the shell that starts the sweep. Jobs inherit it."
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "hydra.mode": "Use -m to start a sweep.",
        "hydra.searchpath": "Use --config-dir to add a folder of configs.",
        "hydra.job.env": "Set environment variables in the shell that starts the run.",
        "hydra.launcher.setup": _SHELL,
        "hydra.launcher.additional_parameters": _SHELL,
    }
)
"""Suggestions for messages, by prefix of the key."""


class _Absent:
    """The value of a key that does not exist."""

    def __repr__(self) -> str:
        return "(removed)"


_ABSENT = _Absent()


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return the config without the `hydra` node."""
    rest = copy.copy(composed)
    with open_dict(rest):
        del rest["hydra"]
    return rest


def node_of(composed: DictConfig) -> dict[str, Any]:
    """Return the `hydra` node as plain values with unresolved interpolations.

    Raises:
        ConfigError: the `hydra` node is an interpolation.
    """
    if OmegaConf.is_interpolation(composed, "hydra"):
        raise ConfigError("hydra: an interpolation cannot replace Hydra's own node. Remove it.")
    node = OmegaConf.to_container(composed.hydra, resolve=False)
    assert isinstance(node, dict)
    return {str(key): value for key, value in node.items()}


def launcher_of(node: Mapping[str, Any]) -> str:
    """Return the name of the launcher that a `hydra` node selects.

    Raises:
        ConfigError: the launcher is not allowed.
    """
    launcher = node.get("launcher")
    target = launcher.get("_target_") if isinstance(launcher, Mapping) else launcher
    name = LAUNCHERS.get(str(target)) if isinstance(launcher, Mapping) else None
    if name is None:
        valid = ", ".join(f"hydra/launcher={name}" for name in LAUNCHERS.values())
        key = "hydra.launcher._target_" if isinstance(launcher, Mapping) else "hydra.launcher"
        raise ConfigError(f"{key}={_shown(target)}: this launcher is not allowed. Use one of: {valid}.")
    return name


def check_node(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that a `hydra` node differs from `expected` only in allowed settings.

    Args:
        found: Node of a composed config, as returned by `node_of`.
        expected: Node that Hydra composes with the same launcher and command line, without other files.

    Raises:
        ConfigError: another setting differs; names the setting and its value.
    """
    for key, value in _deviations(found, expected, "hydra"):
        if rule := _ALLOWED.get(key):
            raise ConfigError(f"{key}={_shown(value)}: this value is not allowed. Expected {rule.expected}.")
        hint = next((text for start, text in _HINTS.items() if key.startswith(start)), "Keep its default.")
        raise ConfigError(f"{key}={_shown(value)}: a config cannot change this setting of Hydra. {hint}")


def check_folders(composed: DictConfig) -> None:
    """Check that no resolved output folder contains a control character.

    A launcher writes `hydra.sweep.dir`, which can contain `output_dir`, into the shell script of a job. A line break
    would start a new command.

    Raises:
        ConfigError: a folder contains a control character; names the setting and its value.
    """
    for key in ("output_dir", "hydra.run.dir", "hydra.sweep.dir"):
        try:
            value = OmegaConf.select(composed, key)
        except InterpolationToMissingValueError:  # such as output_dir=???, which a launcher cannot resolve either
            continue
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error)) from error
        if not str(value).isprintable():
            raise ConfigError(f"{key}={_shown(value)}: the folder contains a control character. Remove it.")


def _deviations(found: Any, expected: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield key and value of each setting that differs without being allowed to."""
    if key in _SET_BY_HYDRA or _same(found, expected):
        return
    if expected is not _ABSENT and key in _ALLOWED:
        if not _ALLOWED[key].valid(found):
            yield key, found
    elif isinstance(found, Mapping) and isinstance(expected, Mapping):
        for name in sorted({*found, *expected}, key=str):  # env_copy before env_set, whose values can be secrets
            below = f"{key}.{name}" if str(name).isprintable() else f"{key}.{name!r}"
            yield from _deviations(found.get(name, _ABSENT), expected.get(name, _ABSENT), below)
    else:
        yield key, found


def _same(found: Any, expected: Any) -> bool:
    """Return whether two settings are equal in type and value. `_deviations` compares nonempty mappings."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        return not found and not expected
    return type(found) is type(expected) and bool(found == expected)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
