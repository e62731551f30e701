"""The node `hydra` of a config: folder and parameters of a sweep, resources of its jobs, and verbose logs.

realign uses Hydra's names, but not Hydra: it calls nothing that the node names. Values go into the script of a job, so
they are plain. Every other setting of Hydra is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from realign.config.errors import ConfigError
from realign.text import brief

DEFAULT_LAUNCHER = "basic"
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"sweep": {"dir": "${output_dir}/sweep_${now:%Y%m%d_%H%M%S}"}}
)
"""Settings of realign."""

OF_ALL_EXECUTORS = (
    *("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes", "name", "stderr_to_stdout"),
)
"""Settings of jobs that every executor of submitit has."""
_SLURM = (
    *("partition", "qos", "comment", "constraint", "exclude", "gres", "cpus_per_gpu", "gpus_per_task", "mem_per_gpu"),
    *("mem_per_cpu", "account", "signal_delay_s", "max_num_timeout", "array_parallelism"),
)
LAUNCHERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {DEFAULT_LAUNCHER: (), "submitit_local": OF_ALL_EXECUTORS, "submitit_slurm": (*OF_ALL_EXECUTORS, *_SLURM)}
)
"""What may start the runs of a sweep: name -> settings that request resources. Not `setup` and others that run code."""
OF_SUBMITIT: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "submitit_local": {"name": "realign", "timeout_min": 60},
        "submitit_slurm": {"name": "realign", "timeout_min": 60, "signal_delay_s": 120, "max_num_timeout": 0},
    }
)
"""Their defaults, where they are not those of submitit."""

_OWN = re.compile(r"\$\{(output_dir|name|now:[^{}]*)\}")
"""Interpolations that the folder of a sweep may contain."""
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
    return all(map(_plain, value)) if isinstance(value, list) else _plain(value)


def _parameters(value: Any) -> bool:
    """Return whether a value can be the parameters of a sweep: overrides, which realign parses."""
    named = value.items() if isinstance(value, Mapping) else () if value is None else [("", value)]
    return all(_PARAMETER.fullmatch(str(name)) and _plain_list(values) for name, values in named)


class _Rule(NamedTuple):
    """Values that a setting may have."""

    valid: Callable[[Any], bool]
    """Whether a value is allowed."""
    expected: str
    """The allowed values, for messages."""


_VALUE = _Rule(_plain, "a number or a printable text, without interpolations")
_ALLOWED: Mapping[str, _Rule] = MappingProxyType(
    {
        "hydra.sweep.dir": _Rule(
            _folder, "a printable text whose interpolations are ${output_dir}, ${name} or ${now:...}"
        ),
        "hydra.verbose": _Rule(_plain_list, "true, false, or names of loggers"),
        "hydra.sweeper.params": _Rule(
            _parameters, "a mapping of config keys, except Hydra's own, to plain values without interpolations"
        ),
        "hydra.sweeper.max_batch_size": _Rule(
            lambda value: value is None or (type(value) is int and value > 0), "a number of runs, at least 1"
        ),
    }
)
_SHELL = "Prepare the environment in the shell that starts the sweep. Jobs inherit it."
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "hydra.mode": "Use -m to start a sweep.",
        "hydra.run.dir": "Set output_dir.",
        "hydra.searchpath": "Use --config-dir to add a folder of configs.",
        "hydra.job.env": "Set environment variables in the shell that starts the run.",
        "hydra.launcher.setup": _SHELL,
        "hydra.launcher.additional_parameters": _SHELL,
        "hydra.launcher._target_": f"Use one of: {', '.join(f'hydra/launcher={name}' for name in LAUNCHERS)}.",
    }
)
"""Suggestions for messages, by prefix of the key."""


def check_launcher(name: object = None, *others: object) -> str:
    """Return the name of a launcher that may start the runs of a sweep.

    Raises:
        ConfigError: there is no such launcher.
    """
    if name not in LAUNCHERS or others:
        raise ConfigError(
            f"hydra.launcher={brief(name, 200)}: this launcher is not allowed. {_HINTS['hydra.launcher._target_']}"
        )
    return str(name)


def check_settings(node: Any, launcher: str) -> None:
    """Check what a config sets below `hydra`.

    Args:
        node: Plain values with unresolved interpolations.
        launcher: Name of the launcher.

    Raises:
        ConfigError: a setting or its value is not allowed; names both.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"hydra={brief(node, 200)}: expected settings of Hydra, such as hydra.sweep.dir=FOLDER.")
    for key, value in _settings(node, "hydra"):
        rule = _ALLOWED.get(key)
        if rule is None and key.removeprefix("hydra.launcher.") in LAUNCHERS[launcher]:
            rule = _VALUE
        if rule is None:
            hint = next((text for start, text in _HINTS.items() if key.startswith(start)), "Remove it.")
            raise ConfigError(f"{key}={brief(value, 200)}: a config cannot change this setting of Hydra. {hint}")
        if not rule.valid(value):
            raise ConfigError(f"{key}={brief(value, 200)}: this value is not allowed. Expected {rule.expected}.")


def _settings(node: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield key and value of each setting. A mapping with a rule, or without keys, is one setting."""
    for name in sorted(node, key=str):  # env_copy before env_set, whose values can be secrets
        key, value = f"{prefix}.{name}" if str(name).isprintable() else f"{prefix}.{name!r}", node[name]
        if isinstance(value, Mapping) and value and key not in _ALLOWED:
            yield from _settings(value, key)
        else:
            yield key, value
