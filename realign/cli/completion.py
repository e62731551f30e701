"""Shell completion: commands, options, experiments, config keys, and words.

The shell calls `realign --complete LINE` at every press of the tab key, so this module imports neither torch nor Hydra.
Keys and words come from the source code of the components that the experiment names, see `realign.config.inspection`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from realign.cli.arguments import options
from realign.config.aliases import names
from realign.config.errors import ConfigError
from realign.config.experiment import REPORT
from realign.config.files import GROUPS, experiments_dir, file_values
from realign.config.inspection import Type, choices, class_at, is_enum, settings_of, types_of
from realign.config.places import ROOTS, Place, place_of
from realign.config.trees import get
from realign.config.words import TARGET, is_word

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
ROOT_KEYS = "realign.config.experiment.ExperimentConfig"
"""Class of the root keys."""
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
    command = next((given for given in before if "=" not in given and not given.startswith("-")), None)
    if command in ("chat", "serve", "export", "report", "view", "compare"):
        return []
    key, equals, value = word.partition("=")
    try:
        if command is not None and command in OPTIONS and key.startswith(f"{command}."):
            return _options_of(command, word)
        if equals:
            return [f"{key}={choice}" for choice in _starting(value, _values(key, before, folder))]
        offered = [] if command else list(COMMANDS)
        offered += [f"{command}."] if command in OPTIONS else []
        offered += [] if command == "help" else options()
        offered += _keys(key, before, folder, takes_value=command != "help")
        return _starting(word, offered)
    except (ConfigError, OSError, yaml.YAMLError):  # completion must not print errors
        return []


def _options_of(command: str, word: str) -> list[str]:
    """Return the completions of an option of a command, or of its value."""
    fields = {f"{command}.{name}": types for name, types in _fields_at(OPTIONS[command]).items()}
    key, equals, value = word.partition("=")
    if not equals:
        return _starting(word, (f"{name}=" for name in fields))
    return [f"{key}={choice}" for choice in _starting(value, _words(fields.get(key, ())))]


def _starting(word: str, offered: Iterable[str]) -> list[str]:
    """Return the candidates that continue a word, without those that a shell could take for more than one word.

    Names come from file names and files, and shells insert them without quotes: `a;rm x` would run a command.
    """
    hidden = not word.startswith("-")
    fitting = (name for name in offered if name.startswith(word) and not (hidden and name.startswith("-")))
    return sorted(name for name in dict.fromkeys(fitting) if _SAFE.fullmatch(name))


# --- keys ---


def _keys(prefix: str, before: list[str], folder: Path | None, *, takes_value: bool) -> Iterator[str]:
    """Yield the keys that are one level below the complete names of a prefix."""
    ending = "=" if takes_value else ""
    path = prefix.split(".")[:-1]
    if not path:
        yield from (f"{group}=" for group in GROUPS if takes_value)
        if prefix:  # only when typed, since there are many
            yield from (f"{name}=" for name in names() if takes_value)
        for name, types in _fields_at(ROOT_KEYS).items():
            if name not in REPORT:
                yield f"{name}." if name in ROOTS or _is_deep(types) else f"{name}{ending}"
        return
    config = _config(before, folder)
    start = ".".join(path)
    if path[0] in ROOTS and ROOTS[path[0]].per_role and len(path) == 1:
        yield from (f"{start}.{role}." for role in config.get(path[0]) or {})
        return
    for name, types in _fields_below(path, config).items():
        deep = _is_deep(types)
        yield f"{start}.{name}." if deep else f"{start}.{name}{ending}"
        if deep and takes_value and _words(types):
            yield f"{start}.{name}="


def _values(key: str, before: list[str], folder: Path | None) -> list[str]:
    """Return the words that are valid for a key."""
    key = key.lstrip("+~-")
    if key in GROUPS:
        return _group(key, folder)
    path = key.split(".")
    if path[0] == "callbacks" and len(path) == 2:
        return [*choices(place_of(("callbacks", path[1])).declared[0]), "null"]
    return _words(_fields_below(path[:-1], _config(before, folder)).get(path[-1], ()))


def _words(types: Iterable[Type]) -> list[str]:
    """Return the valid words of a field: members of enums, words of components, true, false and null."""
    plain = {"bool": ("true", "false"), "None": ("null",)}
    words = [word for member in types for word in (*plain.get(member.name, ()), *choices((member,)))]
    return [] if words == ["null"] else words


def _is_deep(types: Iterable[Type]) -> bool:
    """Return whether a field with these types has fields below it."""
    return any(member.definition is not None and not is_enum(member.definition) for member in types)


def _fields_at(path: str) -> dict[str, tuple[Type, ...]]:
    """Return the types of the fields of the class at an import path."""
    definition = class_at(path)
    fields = settings_of(definition) if definition is not None else {}
    return {name: types_of(field.annotation, field.module) for name, field in fields.items()}


def _fields_below(path: list[str], config: Mapping[str, Any]) -> dict[str, tuple[Type, ...]]:
    """Return the types of the fields below a key."""
    if not path:
        return _fields_at(ROOT_KEYS)
    if path[0] not in ROOTS:
        classes = (member.definition for member in _fields_at(ROOT_KEYS).get(path[0], ()) if member.definition)
        return next((_fields_at(definition.path) for definition in classes if len(path) == 1), {})
    start = 2 if ROOTS[path[0]].per_role else 1
    place, node = place_of(tuple(path[:start])), get(config, tuple(path[:start]))
    for name in path[start:]:
        place, node = place.child(name, _target(place, node)), node.get(name) if isinstance(node, dict) else None
    fields = place.settings(_target(place, node)) or {}
    return {name: types_of(field.annotation, field.module) for name, field in fields.items()}


def _target(place: Place, node: Any) -> Any:
    """Return the `_target_` of a node of the files, where a word may stand for it."""
    target = node.get(TARGET) if isinstance(node, dict) else node
    return place.of_word(target) if is_word(target) else target if isinstance(node, dict) else None


def _config(before: list[str], folder: Path | None) -> dict[str, Any]:
    """Return the values that the words before the cursor set."""
    return file_values([f"experiment={EXAMPLE}", *before], folder)


def _group(group: str, folder: Path | None) -> list[str]:
    folders = [experiments_dir(), *([folder] if folder is not None else [])]
    return sorted({path.stem for place in folders for path in (place / group).glob("*.yaml")})
