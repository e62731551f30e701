"""Shell completion: commands, options, experiments, config keys, and words.

The shell calls `realign --complete LINE` at every press of the tab key, so this module imports neither torch nor Hydra.
Keys and words come from `realign.config.index`. Of your own classes, the source is read, and nothing is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from realign.cli.arguments import COMMANDS, OPTION_NAMES
from realign.config.aliases import names
from realign.config.errors import ConfigError
from realign.config.files import GROUPS, experiments_dir, file_values
from realign.config.help import Entry, entries_of, section_of
from realign.config.index import class_at, class_of_source
from realign.config.places import ROOTS, place_of
from realign.config.words import choices

_EXAMPLE = "grpo"
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
        return _candidates_for(word, SCRIPTS)
    command = next((given for given in before if "=" not in given and not given.startswith("-")), "")
    settings = COMMANDS[command].settings if command in COMMANDS else ""
    if command in ("chat", "serve", "export", "report", "compare", "import"):
        return []
    key, equals, value = word.partition("=")
    try:
        if settings and key.startswith(f"{command}."):
            return _options_of(command, word)
        if equals:
            return [f"{key}={choice}" for choice in _candidates_for(value, _values(key, before, folder))]
        offered = [] if command else list(COMMANDS)
        offered += [f"{command}."] if settings else []
        offered += [] if command == "help" else OPTION_NAMES
        offered += _keys(key, before, folder, takes_value=command != "help")
        return _candidates_for(word, offered)
    except (ConfigError, OSError, yaml.YAMLError):  # completion must not print errors
        return []


def _options_of(command: str, word: str) -> list[str]:
    """Return the completions of an option of a command, or of its value."""
    cls = class_at(COMMANDS[command].settings)
    entries = entries_of(cls) if cls is not None else ()
    key, equals, value = word.partition("=")
    if not equals:
        return _candidates_for(word, (f"{command}.{entry.key}=" for entry in entries))
    own = next((entry for entry in entries if f"{command}.{entry.key}" == key), None)
    return [f"{key}={choice}" for choice in _candidates_for(value, _words(own))]


def _candidates_for(word: str, offered: Iterable[str]) -> list[str]:
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
    path = tuple(prefix.split(".")[:-1])
    if not path:
        yield from (f"{group}=" for group in GROUPS if takes_value)
        if prefix:  # only when typed, since there are many
            yield from (f"{name}=" for name in names() if takes_value)
    for entry in section_of(path, _config(before, folder) if path else {}, None, class_of_source).entries:
        yield f"{entry.key}." if entry.component else f"{entry.key}{ending}"
        if path and entry.component and takes_value and entry.choices:
            yield f"{entry.key}="


def _values(key: str, before: list[str], folder: Path | None) -> list[str]:
    """Return the words that are valid for a key."""
    key = key.lstrip("+~-")
    if key in GROUPS:
        return _group(key, folder)
    path = tuple(key.split("."))
    if path[0] in ROOTS and ROOTS[path[0]].per_role and len(path) == 2:  # the role may be new
        return [*choices(place_of(path).field.types), "null"]
    return _words(section_of(path, _config(before, folder), None, class_of_source).own)


def _words(entry: Entry | None) -> list[str]:
    """Return the valid words of a key: members of enums, words of components, true, false and null."""
    types = entry.type.split(" | ") if entry is not None else []
    words = [*(entry.choices if entry is not None else ()), *(("true", "false") if "bool" in types else ())]
    return [*words, "null"] if words and "null" in types else words


def _config(before: list[str], folder: Path | None) -> dict[str, Any]:
    """Return the values that the words before the cursor set."""
    # The words before the cursor come last, and so replace the example.
    return file_values([f"experiment={_EXAMPLE}", *before], folder)


def _group(group: str, folder: Path | None) -> list[str]:
    folders = [experiments_dir(), *([folder] if folder is not None else [])]
    return sorted({path.stem for place in folders for path in (place / group).glob("*.yaml")})
