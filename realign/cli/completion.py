"""Shell completion: commands, options, experiments, config keys, and words.

The shell calls `realign --complete LINE` at every press of the tab key, so this module imports neither torch nor Hydra.
Keys and words come from the source code of the components that the experiment names, see `realign.config.inspection`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from realign.cli.arguments import options
from realign.config.aliases import names
from realign.config.errors import ConfigError
from realign.config.files import GROUPS, experiments_dir
from realign.config.inspection import (
    ClassSource,
    FieldSource,
    ancestry,
    annotated,
    class_at,
    fields_of,
    find_class,
    is_enum,
    members_of,
    read_module,
)
from realign.config.schema import COMPONENTS, REPORT, ExperimentConfig
from realign.config.words import EXPORTERS, NONE, TARGET, snake_case
from realign.safe_yaml import load_yaml

COMMANDS = (
    "train",
    "check",
    "graph",
    "plan",
    "profile",
    "chat",
    "eval",
    "serve",
    "export",
    "report",
    "view",
    "compare",
    "help",
)
OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "plan": "realign.planning.options.PlanOptions",
        "profile": "realign.runtime.profiling.ProfileOptions",
        "eval": "realign.cli.evaluate.EvalOptions",
    }
)
"""Class of the options of a command, which begin with its name, such as `plan.devices=8`."""
PER_ROLE = ("models", "interfaces", "sync", "evaluations", "trackers", "callbacks")
"""Root keys that map names to components."""
DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "models": "realign.engines.TransformersModel",
        "sync": "realign.api.Sync",
        "evaluation": "realign.runtime.Evaluation",
        "evaluations": "realign.runtime.Evaluation",
        "calibration": "realign.runtime.RewardCalibration",
        "dynamic_sampling": "realign.runtime.DynamicSampling",
        "callbacks": "realign.api.callback.Callback",
    }
)
"""Class of a component whose node names none. A test compares it with `realign.config.places.ROOTS`."""
EXAMPLE = "grpo"
"""Experiment whose keys are offered if the command line names none."""

_SAFE = re.compile(r"[\w.@/+=-]*")
SCRIPTS: Mapping[str, str] = MappingProxyType(
    {
        "bash": """\
_realign() {
    local line=${COMP_LINE:0:COMP_POINT} word before
    word=${line##*[[:space:]]}
    mapfile -t COMPREPLY < <(realign --complete "$line" 2>/dev/null)
    # bash replaces only the text after the last = or : of the word
    before=${word%"${word##*[=:]}"}
    if [[ -n $before ]]; then COMPREPLY=("${COMPREPLY[@]#"$before"}"); fi
    if [[ ${#COMPREPLY[@]} -gt 0 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
}
complete -o default -F _realign realign""",
        "zsh": """\
_realign() {
    local -a found
    found=("${(@f)$(realign --complete "${BUFFER[1,CURSOR]}" 2>/dev/null)}")
    if [[ -n ${found[1]} ]]; then compadd -Q -S '' -- "${found[@]}"; else _files; fi
}
compdef _realign realign""",
        "fish": "complete -c realign -a '(realign --complete (commandline -cp) 2>/dev/null)'",
    }
)
"""Script of each shell, which it evaluates at its start."""


def script(shell: str) -> str:
    """Return the completion script of a shell."""
    return SCRIPTS[shell]


def completions(line: str) -> list[str]:
    """Return the words that can continue a command line, each as a whole word.

    A key that has keys below it ends with a period, and one that takes a value with `=`.

    Args:
        line: Command line up to the cursor, with the name of the program.
    """
    words = line.split()
    word = words.pop() if words and not line[-1:].isspace() else ""
    before = words[1:]
    folder = next((Path(b) for a, b in pairwise(before) if a in ("--config-dir", "-cd")), None)
    if before[-1:] == ["--shell-completion"]:
        return _starting(word, SCRIPTS)
    command = next((one for one in before if "=" not in one and not one.startswith("-")), None)
    if command in ("chat", "serve", "export", "report", "view", "compare"):
        return []
    key, equals, value = word.partition("=")
    try:
        if command is not None and command in OPTIONS and key.startswith(f"{command}."):
            return _options_of(command, word)
        if equals:
            return [f"{key}={one}" for one in _starting(value, _values(key, before, folder))]
        offered = [] if command else list(COMMANDS)
        offered += [f"{command}."] if command in OPTIONS else []
        offered += [] if command == "help" else options()
        offered += _keys(key, before, folder, takes_value=command != "help")
        return _starting(word, offered)
    except (ConfigError, OSError, yaml.YAMLError):  # completion must not print errors
        return []


def _options_of(command: str, word: str) -> list[str]:
    """Return the completions of an option of a command, or of its value."""
    cls = class_at(OPTIONS[command])
    fields = {f"{command}.{name}": field for name, field in fields_of(cls).items()} if cls is not None else {}
    key, equals, value = word.partition("=")
    if not equals:
        return _starting(word, (f"{name}=" for name in fields))
    return [f"{key}={one}" for one in _starting(value, _words(fields[key]) if key in fields else [])]


def _starting(word: str, offered: Iterable[str]) -> list[str]:
    """Return the candidates that continue a word, without those that a shell could take for more than one word.

    Names come from file names and files, and shells insert them without quotes: `a;rm x` would run a command.
    """
    hidden = not word.startswith("-")
    found = (one for one in offered if one.startswith(word) and not (hidden and one.startswith("-")))
    return sorted(one for one in dict.fromkeys(found) if _SAFE.fullmatch(one))


# --- keys ---


def _keys(prefix: str, before: list[str], folder: Path | None, *, takes_value: bool) -> Iterator[str]:
    """Yield the keys that are one level below the complete names of a prefix."""
    ending = "=" if takes_value else ""
    path = prefix.split(".")[:-1]
    if not path:
        yield from (f"{group}=" for group in GROUPS if takes_value)
        if prefix:  # only when typed, since there are many
            yield from (f"{name}=" for name in names() if takes_value)
        for one in dataclasses.fields(ExperimentConfig):
            if one.name not in REPORT:
                deep = one.name in COMPONENTS or one.name in ("microbatch", "checkpoint", "records")
                yield f"{one.name}." if deep else f"{one.name}{ending}"
        return
    config = _config(tuple(before), folder)
    start = ".".join(path)
    if path[0] in PER_ROLE and len(path) == 1:
        yield from (f"{start}.{role}." for role in config.get(path[0]) or {})
        return
    cls = _class_of(path, config)
    for name, field in fields_of(cls).items() if cls is not None else ():
        deep = any(not isinstance(one, str) and not is_enum(one) for one in _union(field))
        yield f"{start}.{name}." if deep else f"{start}.{name}{ending}"
        if deep and takes_value and _words(field):
            yield f"{start}.{name}="


def _values(key: str, before: list[str], folder: Path | None) -> list[str]:
    """Return the words that are valid for a key."""
    key = key.lstrip("+~-")
    if key in GROUPS:
        return _group(key, folder)
    path = key.split(".")
    if path[0] == "callbacks" and len(path) == 2:
        base = class_at(DEFAULTS["callbacks"])
        return [*_words_of(base), "null"] if base is not None else []
    config = _config(tuple(before), folder)
    owner = find_class("realign.config.schema", "ExperimentConfig") if len(path) == 1 else _class_of(path[:-1], config)
    field = fields_of(owner).get(path[-1]) if owner is not None else None
    return _words(field) if field is not None else []


def _words(field: FieldSource) -> list[str]:
    """Return the valid words of a field: members of enums, words of components, true, false and null."""
    found: list[str] = []
    for one in _union(field):
        if one == "bool":
            found += ["true", "false"]
        elif one == "None":
            found.append("null")
        elif isinstance(one, ClassSource):
            found += list(members_of(one)) if is_enum(one) else _words_of(one)
    return [] if found == ["null"] else found


def _union(field: FieldSource) -> list[ClassSource | str]:
    return [] if field.annotation is None else list(annotated(field.annotation, field.module))


@cache
def _subclasses(path: str) -> tuple[ClassSource, ...]:
    """Return the classes that a word can select for a base class, as `words_of` does for imported classes."""
    base = class_at(path)
    module = read_module(base.module) if base is not None else None
    if base is None or module is None:
        return ()
    candidates = list(module.classes.values())
    if exporter := EXPORTERS.get(path):
        exported = read_module(exporter)
        names = exported.imported if exported is not None else {}
        candidates += [cls for name in names if (cls := find_class(exporter, name)) is not None]
    found = [cls for cls in candidates if base in ancestry(cls) and not cls.abstract and not cls.name.startswith("_")]
    return tuple(cls for cls in found if fields_of(cls) or cls != base)


def _words_of(base: ClassSource) -> list[str]:
    found = [snake_case(cls.name) for cls in _subclasses(base.path)]
    return found if found != [snake_case(base.name)] else []  # a single class needs no word


def _class_of(path: list[str], config: Mapping[str, Any]) -> ClassSource | None:
    """Return the class of the component at a key."""
    node: Any
    if path[0] not in COMPONENTS:
        cls, rest, node = find_class("realign.config.schema", "ExperimentConfig"), path, config
    else:
        start = 2 if path[0] in PER_ROLE else 1
        node = _get(config, path[:start])
        target = node.get(TARGET) if isinstance(node, dict) else None
        cls, rest = class_at(str(target or DEFAULTS.get(path[0], ""))), path[start:]
        if isinstance(node, str) and path[0] in DEFAULTS:
            cls = _chosen(node, DEFAULTS[path[0]]) or cls
    for name in rest:
        field = fields_of(cls).get(name) if cls is not None else None
        if field is None:
            return None
        node = node.get(name) if isinstance(node, dict) else None
        cls = _class_of_field(field, node)
    return cls


def _class_of_field(field: FieldSource, node: Any) -> ClassSource | None:
    if isinstance(node, dict) and TARGET in node:
        return class_at(str(node[TARGET]))
    classes = [one for one in _union(field) if isinstance(one, ClassSource) and not is_enum(one)]
    word = node.get(TARGET, node) if isinstance(node, dict) else node
    if isinstance(word, str):
        for one in classes:
            if (found := _chosen(word, one.path)) is not None:
                return found
    return classes[0] if classes else None


def _chosen(word: str, base: str) -> ClassSource | None:
    return next((cls for cls in _subclasses(base) if snake_case(cls.name) == word), None)


# --- the config of the command line ---


def _group(group: str, folder: Path | None) -> list[str]:
    folders = [experiments_dir(), *([folder] if folder is not None else [])]
    return sorted({path.stem for one in folders for path in (one / group).glob("*.yaml")})


@cache
def _config(before: tuple[str, ...], folder: Path | None) -> dict[str, Any]:
    """Return the values that experiment, algorithm and overrides set. This is an approximation without Hydra."""
    given = dict(word.lstrip("+").partition("=")[::2] for word in before if "=" in word)
    for word in before:
        if "=" not in word and word.endswith((".yaml", ".yml")):
            given["experiment"] = word
    config: dict[str, Any] = {}
    for group in GROUPS:
        name = given.get(group, {"experiment": EXAMPLE, "runtime": "local", "rollout": "sync"}.get(group))
        if name is not None:
            _merge(config, _file(group, name, folder))
    for key, value in given.items():
        if (key not in GROUPS and value.isidentifier()) or key.endswith(f".{TARGET}"):
            _put(config, key.split("."), None if value in ("null", NONE) else value)
    return config


def _file(group: str, name: str, folder: Path | None) -> dict[str, Any]:
    paths = [Path(name), experiments_dir() / group / f"{name}.yaml"]
    paths += [folder / group / f"{name}.yaml"] if folder is not None else []
    path = next((path for path in paths if path.suffix in (".yaml", ".yml") and path.is_file()), None)
    if path is None:
        return {}
    text = path.read_text(encoding="utf-8")
    found = load_yaml(text)
    if not isinstance(found, dict):
        return {}
    config: dict[str, Any] = {}
    for one in found.pop("defaults", None) or ():  # such as `- /experiment/ppo` or `- /experiment: ppo`
        for lower in [f"{a}/{b}" for a, b in one.items()] if isinstance(one, dict) else [str(one)]:
            at, _, base = lower.strip("/").rpartition("/")
            if base != "_self_" and base != path.stem:
                _merge(config, _file(at or group, base, folder))
    default = "_global_" if group in ("experiment", "algorithm") else group
    header = next((line.split()[-1] for line in text.splitlines()[:3] if "@package" in line), default)
    _merge(config, found if header == "_global_" else {header: found})
    return config


def _merge(lower: dict[str, Any], upper: Mapping[str, Any]) -> None:
    for key, value in upper.items():
        below = lower.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and TARGET not in value:
            _merge(below, value)
        elif isinstance(value, dict) and isinstance(below, dict):
            lower[key] = {**below, **value}
        else:
            lower[key] = value


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


def _get(node: Any, path: list[str]) -> Any:
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return node
