"""Config groups: their folders, and the values in their files. `realign --help` imports no slow modules from here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from realign.config.errors import ConfigError
from realign.config.trees import merge
from realign.config.words import NONE, TARGET
from realign.safe_yaml import load_yaml

GROUPS = ("experiment", "algorithm", "runtime", "rollout")
"""Config groups: folders with files that one word selects."""
SCHEME = "realign"
"""Scheme of the URL of `--config-dir` in Hydra's search path, which selects `realign.config.loader.CheckedFiles`."""


def experiments_dir() -> Path:
    """Return the folder with `config.yaml` and the groups: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "experiments", package.parent / "experiments"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no folder of experiments inside {package} or beside it. Reinstall realign.")


def list_experiments(config_dir: Path | None = None) -> dict[str, str]:
    """Return name and description (first comment line) of every experiment, including those of a user's folder."""
    return _listed("experiment", config_dir)


def list_algorithms(config_dir: Path | None = None) -> dict[str, str]:
    """Return name and description (first comment line) of every `algorithm=NAME`, which modifies an experiment."""
    return _listed("algorithm", config_dir)


def _listed(group: str, config_dir: Path | None) -> dict[str, str]:
    folders = [experiments_dir(), *([config_dir] if config_dir is not None else [])]
    files = [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]
    return {path.stem: _header(path) for path in files}


def _header(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line and line.strip("# "):
            return line.strip("# ")
    return ""


def file_values(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """Return the values that the files of a command line and its plain overrides set, without Hydra and its checks.

    For `experiment=NAME` these are the values of `compose_raw`. Of an algorithm, only the classes are: it discards no
    values here.

    Raises:
        OSError: a file cannot be read.
        yaml.YAMLError: a file is no valid YAML.
    """
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides if "=" in word)
    for word in overrides:
        if "=" not in word and word.endswith((".yaml", ".yml")):
            given["experiment"] = word
    chosen = {"runtime": "local", "rollout": "sync"}
    upper = [
        layer
        for group in ("experiment", "algorithm")
        if group in given
        for layer in _layers(group, given[group], config_dir, chosen)
    ]
    chosen |= {group: given[group] for group in chosen if group in given}
    lower = [layer for group, name in chosen.items() for layer in _layers(group, name, config_dir, {})]
    config: dict[str, Any] = {}
    for layer in [*lower, *upper]:
        merge(config, layer)
    for key, value in given.items():
        if (key not in GROUPS and value.isidentifier()) or key.endswith(f".{TARGET}"):
            _put(config, key.split("."), None if value in ("null", NONE) else value)
    return config


def _layers(
    group: str, name: str, config_dir: Path | None, chosen: dict[str, str], above: tuple[Path, ...] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the values of a file and those in its defaults list, lowest first.

    Args:
        group: Config group of the file.
        name: Name in the group, or path.
        config_dir: As for `compose`.
        chosen: Files of other groups, which the defaults list may override, by group.
        above: Files whose defaults lists contain this one.
    """
    folders = [experiments_dir(), *([config_dir] if config_dir is not None else [])]
    paths = [Path(name), *(folder / group / f"{name}.yaml" for folder in folders)]
    path = next((path for path in paths if path.suffix in (".yaml", ".yml") and path.is_file()), None)
    if path is None or path in above:
        return
    text = path.read_text(encoding="utf-8")
    if not isinstance(values := load_yaml(text), dict):
        return
    listed = values.pop("defaults", None)
    entries = list(listed) if isinstance(listed, list) else []
    default = "_global_" if group in ("experiment", "algorithm") else group
    header = next((line.split()[-1] for line in text.splitlines()[:3] if "@package" in line), default)
    for entry in [*entries, *(["_self_"] if "_self_" not in entries else [])]:
        if entry == "_self_":
            yield values if header == "_global_" else {header: values}
        for lower in [f"{key}/{value}" for key, value in entry.items()] if isinstance(entry, dict) else [str(entry)]:
            kind, _, base = lower.strip("/").rpartition("/")  # such as `- /experiment/ppo` or `- /experiment: ppo`
            if kind.startswith("override "):
                chosen[kind.removeprefix("override ").strip("/")] = base
            elif base != "_self_":
                yield from _layers(kind or group, base, config_dir, chosen, (*above, path))


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        below = tree.get(name)
        if not isinstance(below, dict):
            tree[name] = {TARGET: below} if isinstance(below, str) else {}
        tree = tree[name]
    below = tree.get(path[-1])
    if isinstance(below, dict) and isinstance(value, str):
        below[TARGET] = value
    else:
        tree[path[-1]] = value
