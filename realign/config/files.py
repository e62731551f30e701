"""Files of a config: where they are, how they are read, and in which order they are merged.

`realign --help` imports this module, so it has no slow imports.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import dropwhile, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from realign.config.errors import ConfigError, one_line, suggest
from realign.config.places import spell_out
from realign.config.trees import merge
from realign.config.words import NONE, TARGET
from realign.safe_yaml import check_yaml

GROUPS = ("experiment", "algorithm", "runtime", "rollout")
"""Config groups: folders with files that one word selects."""
EXPERIMENT = "experiment"
LAUNCHER = "hydra/launcher"
"""The only group of Hydra that a file may choose from."""
ENDINGS = (".yaml", ".yml")
LAYERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"runtime": ("local",), "rollout": ("sync",), "experiment": (), "algorithm": ()}
)
"""Group -> the files that are chosen without a word for it. The lowest layer is first."""
_AT_ROOT = ("experiment", "algorithm")
"""Groups whose files set keys at the root of the config. Files of other groups set keys below the group's name."""
_HEADER = re.compile(r"\s*#\s*@package\s+(\S+)")
_SELF = "_self_"


@dataclass(frozen=True)
class ConfigFile:
    """One file of a config."""

    source: str
    """Path of the file in its folder, such as experiment/ppo.yaml."""
    label: str
    """The word that chooses it, such as experiment=ppo."""
    values: dict[str, Any]
    """What it sets, from the root of the config, with unresolved interpolations."""
    starts_preset: bool = False
    """Whether it is the lowest file of a preset."""


def experiments_dir() -> Path:
    """Return the folder with the config groups: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "experiments", package.parent / "experiments"):
        if (folder / EXPERIMENT).is_dir():
            return folder
    raise ConfigError(f"no folder of experiments inside {package} or beside it. Reinstall realign.")


def list_experiments(config_dir: Path | None = None) -> dict[str, str]:
    """Return name and description (first comment line) of every experiment, including those of a user's folder."""
    return _list_files(EXPERIMENT, config_dir)


def list_algorithms(config_dir: Path | None = None) -> dict[str, str]:
    """Return name and description (first comment line) of every `algorithm=NAME`, which modifies an experiment."""
    return _list_files("algorithm", config_dir)


def _list_files(group: str, config_dir: Path | None) -> dict[str, str]:
    return {name: next(iter(_header(path)), "") for name, path in _files(group, config_dir).items()}


def _files(group: str, config_dir: Path | None) -> dict[str, Path]:
    folders = [experiments_dir(), *([config_dir] if config_dir is not None else [])]
    return {path.stem: path for folder in folders for path in sorted((folder / group).glob("*.yaml"))}


def _header(path: Path) -> list[str]:
    """Return the comment at the start of a file, without the line for Hydra."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return [text for line in lines if "@package" not in line and (text := line.strip("# "))]


def about_files(name: str, config_dir: Path | None = None) -> Iterator[tuple[str, list[str], str]]:
    """Yield the override that chooses the preset or experiment of this name, its header, and its settings."""
    for group in ("algorithm", EXPERIMENT):
        if (path := _files(group, config_dir).get(name)) is not None:
            lines = path.read_text(encoding="utf-8").splitlines()
            yield f"{group}={name}", _header(path), "\n".join(dropwhile(lambda line: line.startswith("#"), lines))


def is_path(name: str) -> bool:
    """Return whether a text is the path of a YAML file instead of the name of an experiment."""
    return name.lower().endswith(ENDINGS)


class Files:
    """Reads the files that a command line chooses, and those that they build on.

    Args:
        chosen: Group -> names that the command line chooses.
        config_dir: The user's folder with config groups.
        base: Experiment that a file given by its path builds on if it has neither `defaults` nor a `graph`.
    """

    def __init__(self, chosen: Mapping[str, tuple[str, ...]], config_dir: Path | str | None, base: str | None) -> None:
        self.choices: dict[str, tuple[str, ...]] = dict(chosen)
        """Group -> chosen names. The command line has precedence, then the highest file."""
        self._base = base
        self._folders = [experiments_dir()]
        if config_dir is not None:
            if not Path(config_dir).is_dir():
                raise ConfigError(f"--config-dir={config_dir}: this folder does not exist.")
            self._folders.append(Path(config_dir))

    def read(self) -> list[ConfigFile]:
        """Return the files, the lowest layer first.

        Raises:
            ConfigError: a file does not exist or cannot be read, or its defaults list is invalid.
        """
        layers: list[ConfigFile] = []
        for group in reversed(list(LAYERS)):  # the highest layer first: it decides what the groups below it choose
            for name in reversed(self.choices.setdefault(group, LAYERS[group])):
                layers = self._tree(group, name, ()) + layers
        return layers

    def _tree(self, group: str, name: str, above: Sequence[str]) -> list[ConfigFile]:
        """Return a file and those that it includes. `above` lists the files that include it."""
        source = name if is_path(name) and group == EXPERIMENT else f"{group}/{name}.yaml"
        if source in above:
            raise ConfigError(f"{source}: the defaults list of this file includes the file itself.")
        text = self._text(group, name)
        values = _values(text, source)
        if is_path(name) and self._base is not None and not {"defaults", "graph"} & set(values):
            values["defaults"] = [f"/{EXPERIMENT}/{self._base}", _SELF]
        included = self._read_defaults(values.pop("defaults", None), group, source)
        file = ConfigFile(source, f"{group}={name}", _at_package(values, text, group))
        spell_out(file.values)
        layers: list[ConfigFile] = []
        for entry in reversed(included):
            layers = ([file] if entry is None else self._tree(*entry, (*above, source))) + layers
        if group == "algorithm" and not (above and above[-1].startswith("algorithm/")):
            layers[0] = replace(layers[0], starts_preset=True)
        return layers

    def _read_defaults(self, defaults: Any, group: str, source: str) -> list[tuple[str, str] | None]:
        """Return group and name of each file of a defaults list, and None for the file itself; note what it chooses."""
        if not isinstance(defaults, list | None):
            raise ConfigError(
                f"{source}: defaults takes a list, such as [/experiment/grpo, _self_], found {defaults!r}"
            )
        included: list[tuple[str, str] | None] = []
        for entry in defaults or ():
            if entry == _SELF:
                included.append(None)
            elif isinstance(entry, str) and re.fullmatch(r"/?[\w.-]+(/[\w.-]+)*", entry):
                path = (
                    entry.removesuffix(".yaml") if entry.startswith("/") else f"/{group}/{entry.removesuffix('.yaml')}"
                )
                _, parent, name = path.split("/", 2) if path.count("/") > 1 else ("", group, path[1:])
                included.append((parent, name))
            else:
                self._choose(entry, source)
        if included.count(None) > 1:
            raise ConfigError(f"{source}: defaults lists {_SELF} twice.")
        return included if None in included else [*included, None]

    def _choose(self, entry: Any, source: str) -> None:
        """Note an entry such as `override /rollout: async`. A higher file or the command line has precedence."""
        key, name = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (str(entry), None)
        word, _, group = str(key).partition(" ")
        group = group.strip().removeprefix("/")
        if (word == "override" and group in ("runtime", "rollout", LAUNCHER)) and isinstance(name, str):
            self.choices.setdefault(group, (name,))
            return
        named = (group if word == "override" else str(key).removeprefix("/")).replace("/", ".")
        if named.startswith("hydra."):
            raise ConfigError(f"{source}: {named}: a config cannot change this setting of Hydra. Remove it.")
        raise ConfigError(
            f"{source}: defaults: cannot read {entry!r}. Write the name of a file, such as /experiment/grpo, {_SELF}, "
            "or an override of runtime or rollout, such as {override /rollout: async}."
        )

    def _text(self, group: str, name: str) -> str:
        """Return the text of a file.

        Raises:
            ConfigError: the file does not exist, is too large, or is no text.
        """
        if group == EXPERIMENT and is_path(name):
            path = Path(name).expanduser()
            if not path.is_file():
                raise ConfigError(
                    f"experiment={path}: this file does not exist. `realign --help` lists the experiments."
                )
            return _read(path, f"experiment={path}")
        for folder in self._folders:
            if (path := folder / group / f"{name}.yaml").is_file():
                return _read(path, str(path))
        options = {path.stem for folder in self._folders for path in (folder / group).glob("*.yaml")}
        raise ConfigError(f"unknown {group} {name!r}{suggest(name, options)}")


def file_values(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """Return the values that the files of a command line and its plain overrides set, without checks.

    For `experiment=NAME` these are the values of `compose_raw` without those of the schema. An algorithm discards no
    values here, so of its components only the classes are right.

    Raises:
        ConfigError: as for `Files.read`.
    """
    given = dict(word.lstrip("+").partition("=")[::2] for word in overrides if "=" in word)
    for path in (word for word in overrides if "=" not in word and is_path(word)):
        given[EXPERIMENT] = path
    chosen = {group: (given[group],) for group in GROUPS if group in given}
    config: dict[str, Any] = {}
    for file in Files(chosen, config_dir, None).read():
        merge(config, file.values)
    for key, value in given.items():
        if (key not in GROUPS and value.isidentifier()) or key.endswith(f".{TARGET}"):
            _put(config, key.split("."), None if value in ("null", NONE) else value)
    return config


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


def _read(path: Path, where: str) -> str:
    from yaml import YAMLError

    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: the file cannot be read: {one_line(error)}") from error
    return text


def _values(text: str, source: str) -> dict[str, Any]:
    """Return the values of a YAML text. Numbers and interpolations are read by OmegaConf's rules."""
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        values = copy.deepcopy(_parse(text))
    except (YAMLError, OmegaConfBaseException, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{source}: the file cannot be read: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: expected keys with values, found a list")
    return {str(key): value for key, value in values.items()}


@lru_cache(maxsize=64)
def _parse(text: str) -> Any:
    """Return the values of a YAML text. Experiments share the files below them, and a sweep reads the same files."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _at_package(values: dict[str, Any], text: str, group: str) -> dict[str, Any]:
    """Return the values below the key that the header `# @package KEY` names, or that the group implies."""
    # The header is a comment, so only the text has it.
    header = _HEADER.match(text)
    package = header[1] if header else "_global_" if group in _AT_ROOT else group
    for name in reversed([] if package == "_global_" else package.split(".")):
        values = {name: values}
    return values
