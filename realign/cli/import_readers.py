"""What people bring to `realign import`, as flat settings: YAML, shell scripts, launch commands and Python scripts.

Nothing of it runs. A shell script is read as far as it assigns variables and starts a program; `$(...)` and variables
of the environment stay text, and are reported with the setting that contains them.
"""

from __future__ import annotations

import ast
import fnmatch
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from realign.config.errors import ConfigError
from realign.data.hub import is_hub_name
from realign.safe_yaml import load_yaml

MOST_SETTINGS = 2_000
"""Limit of the settings of a config, so that a file that is no config ends with an error."""
LONGEST_FILE = 100_000
"""Limit of the characters of a file, since reading YAML takes a second for each 50,000 of them."""
LONGEST_VALUE, DEEPEST = 4_000, 4
"""Limits of the characters of a value, and of the lists in each other. The grammar of overrides takes exponential time
for nested lists."""
_PROGRAM = re.compile(r"(?:\S*/)?[\w.-]+\.py|(?:verl|openrlhf|trl|areal|recipe|examples)(?:\.\w+)+|trl")
_FLAGS_OF_LAUNCHERS = MappingProxyType(
    {
        "num_processes": "num_processes",
        "num_gpus": "num_processes",
        "nproc_per_node": "num_processes",
        "nnodes": "num_nodes",
        "num_nodes": "num_nodes",
        "config_file": "config_file",
    }
)
"""Options of torchrun, deepspeed and `accelerate launch` that say how many processes train."""
_LINK = re.compile(r"\$\{\s*(?:oc\.select:\s*)?(\.*[\w.]+)\s*(?:,\s*([^${}]*?)\s*)?\}")
_PLAIN_PYTHON = re.compile(r"^(?:from|import) \w", re.MULTILINE)
_OF_TRL = re.compile(r"\w*(?:[PTCO]O|FT|KD|MD|PRM|Reward|Distillation|GOLD)Config|\w+Trainer|LoraConfig|load_dataset")
"""Calls of a script whose arguments are settings."""
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)


class Source(NamedTuple):
    """A config of another tool."""

    settings: dict[str, Any]
    """By names with dots."""
    program: str = ""
    """What it starts or configures: a module, a script with its path, a class, or the path of the file."""
    notes: tuple[str, ...] = ()
    """What the user has to do, and cannot see from the settings."""


def read_sources(words: Sequence[str]) -> list[Source]:
    """Read `[FILE | -] [SETTING ...]`, or a whole launch command.

    Returns:
        What the words mean; several if a script starts several programs.

    Raises:
        ConfigError: a file cannot be read, or is nothing of this.
    """
    words = [word for word in words if word.strip()]
    file = words[0] if words and (words[0] == "-" or _is_file(words)) else None
    typed = _of_command(words[1:] if file else words)
    if file is None:
        return [typed]
    read = read_text(_text_of(file), file)
    return [source._replace(settings={**source.settings, **typed.settings}) for source in read]


def read_text(text: str, path: str) -> list[Source]:
    """Read the text of a YAML file, a Python script, or a shell script.

    Raises:
        ConfigError: it is neither.
    """
    if path.endswith(".py") or (path == "-" and _PLAIN_PYTHON.search(text)):
        return [_of_python(text, path)]
    problem: object = "it starts no program and has no settings"
    if not path.endswith(".sh"):
        try:
            loaded = load_yaml(text)
            if isinstance(loaded, Mapping):
                return [Source(_resolved(dict(_flat(loaded, path)), path), path)]
            problem = f"expected a mapping of settings to values, found {type(loaded).__name__}"
        except yaml.YAMLError as error:
            problem = error
    if path.endswith((".yaml", ".yml", ".json")):
        raise ConfigError(f"{path}: the file cannot be read: {problem}")
    commands = _Shell(path).commands_of(text)
    started = [command for command in commands if any(map(_PROGRAM.fullmatch, command))]
    words = [word for command in commands for word in command]
    if started:
        return [_of_command(command) for command in started]
    first = next((i for i, word in enumerate(words) if word.startswith("--") or "=" in word), None)
    if first is None:
        raise ConfigError(f"{path}: the file cannot be read: {problem}")
    try:
        return [_of_command(words[first:])]
    except ConfigError:
        raise ConfigError(f"{path}: no program that trains is named in it. Give the command that starts one") from None


def evaluate(expression: str, names: Mapping[str, Any]) -> Any:
    """Return the value of a formula: arithmetic, `a | b` (b if a is null), `a if b > c else d`, and a few functions.

    A formula with a setting that is null or unknown is null.
    """
    return _value(ast.parse(expression.strip(), mode="eval").body, names)


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Eq: operator.eq,
    }
)


def _import_path(name: str, known: Mapping[str, str]) -> str:
    """Return `module:name` of a function that another tool names by a word, or with a dot."""
    module, _, last = name.rpartition(".")
    return known.get(name) or (name if ":" in name or not module else f"{module}:{last}")


def _size(allocation: Any, letter: str) -> int:
    """Return the size of a dimension in an allocation of AReaL, such as 4 for the `d` of `fsdp:d4t2`."""
    match = re.search(f"{letter}(\\d+)", str(allocation))
    return int(match[1]) if match else 1


def _one_function(names: Any, known: Mapping[str, str]) -> str | None:
    names = names if isinstance(names, list) else [names]
    return _import_path(str(names[0]), known) if len(names) == 1 else None


def _functions(names: Any, weights: Any, known: Mapping[str, str]) -> dict[str, Any] | None:
    if not isinstance(names, list) or len(names) == 1:
        return None
    paths = dict(zip(_weights(names, weights), names, strict=False))
    return {
        label: {"function": _import_path(str(paths[label]), known), "weight": weight}
        for label, weight in _weights(names, weights).items()
    }


def _weights(names: Any, weights: Any) -> dict[str, Any]:
    """Return the weights of reward functions by the last part of their names."""
    names = names if isinstance(names, list) else [names]
    weights = weights if isinstance(weights, list) else [weights] * len(names)
    return dict(zip((re.split(r"[.:]", str(name))[-1] for name in names), weights, strict=False))


def _sources(datasets: Any) -> list[dict[str, Any]] | None:
    """Return the sources of a mixture in the form of TRL or of the alignment handbook."""
    keys = {"path": "path", "id": "path", "name": "subset", "config": "subset", "split": "split", "weight": "weight"}
    items = [x for x in datasets if isinstance(x, dict)] if isinstance(datasets, list) else []
    found = [{keys[k]: v for k, v in item.items() if k in keys and v not in (None, "default")} for item in items]
    found = [source for source in found if not str(source.get("split", "")).startswith("test")]
    return [
        {**x, "split": split} if (split := _split(x["path"], x.get("split", "train"))) else x for x in found
    ] or None


def _mixture(paths: str, weights: Any, split: str, label: str) -> str | list[dict[str, Any]]:
    """Return the sources of data sets with commas between them, as OpenRLHF has them; a single one stays a path.

    Args:
        paths: Names of data sets.
        weights: One number for each, with commas, or empty.
        split: Of each.
        label: Column that is called `label` in realign; empty if it has that name.
    """
    names = [name.strip() for name in paths.split(",")]
    if len(names) == 1 and not label:
        return paths
    shares = [float(x) for x in str(weights).split(",")] if weights and len(names) > 1 else [None] * len(names)
    found: list[dict[str, Any]] = []
    for name, share in zip(names, shares, strict=False):
        source: dict[str, Any] = {
            "path": name,
            "weight": share,
            "split": _split(name, split) if len(names) > 1 else None,
        }
        source |= {"columns": {"label": label} if label else None}
        found.append({key: value for key, value in source.items() if value is not None})
    return found


def _split(path: Any, split: str) -> str | None:
    """Return the split to read, which the other tools call train where a config has none. A file has no splits."""
    if isinstance(path, str) and "," in path:  # each source of a mixture has its own
        return None
    return split if split != "train" or (isinstance(path, str) and is_hub_name(path)) else None


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "ceil": lambda x: math.ceil(round(x, 9)),
        "floor": lambda x: math.floor(round(x, 9)),
        "divisor": lambda of, most: next(x for x in range(max(1, min(of, most)), 0, -1) if of % x == 0),
        "min": min,
        "max": max,
        "stem": lambda x: re.split(r"[:.]", str(x))[0],
        "one_function": _one_function,
        "functions": _functions,
        "weights": _weights,
        "sources": _sources,
        "mixture": _mixture,
        "split": _split,
        "size": _size,
        "part": lambda text, mark, i: x[i] if len(x := str(text).split(mark)) > i else None,
        "text": str,
        "options": lambda *words: " ".join(f"{x} {y}" for x, y in pairwise(words) if str(x)[:2] == "--" and y != ""),
        "starts": lambda text, start: str(text).startswith(start),
        "contains": lambda text, word: word in str(text),
    }
)
"""Functions of formulas, besides arithmetic."""


def _value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            return names.get(ast.unparse(node))
        case ast.Subscript(value=base, slice=ast.Constant(value=int(index))):
            items = _value(base, names)
            return items[index] if isinstance(items, list) and index < len(items) else None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return value if (value := _value(left, names)) is not None else _value(right, names)
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if _value(test, names) else other, names)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return None if (number := _value(operand, names)) is None else -number
        case ast.Call(func=ast.Name(id="section"), args=[ast.Constant(value=str(section))]):
            return {x.removeprefix(f"{section}."): y for x, y in names.items() if x.startswith(f"{section}.")} or None
        case ast.Call(func=ast.Name(id=name), args=arguments) if name in _FUNCTIONS:
            values = [_value(x, names) for x in arguments]
            return None if any(value is None for value in values) else _FUNCTIONS[name](*values)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            first, second = _value(left, names), _value(right, names)
            if first is None or second is None or (isinstance(op, ast.Div | ast.FloorDiv | ast.Mod) and not second):
                return None
            try:
                result = _OPERATORS[type(op)](first, second)
            except OverflowError:
                return None
            except TypeError:
                raise ConfigError(f"{ast.unparse(node)}: expected numbers, found {first!r} and {second!r}") from None
            return int(result) if isinstance(result, float) and result.is_integer() else result
        case _:
            raise ConfigError(f"{ast.unparse(node)}: no formula")


# Files


def _is_file(words: Sequence[str]) -> bool:
    """Return whether the first word is a file, and neither a setting nor a program that the others start."""
    first = words[0]
    return not first.startswith("-") and "=" not in first and (len(words) == 1 or not _starts(words))


def _starts(words: Sequence[str]) -> bool:
    return not Path(words[0]).is_file() and any(_PROGRAM.fullmatch(word) for word in words)


def _text_of(path: str) -> str:
    try:
        if path == "-":
            text = sys.stdin.read(LONGEST_FILE + 1)
        else:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(LONGEST_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the file cannot be read: {error}") from error
    if len(text) > LONGEST_FILE:
        raise ConfigError(f"{path}: more than {LONGEST_FILE:,} characters are not expected in a config")
    return text


# YAML


def _flat(values: Mapping[Any, Any], path: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not re.fullmatch(r"[\w.@/-]{1,200}", name):
            raise ConfigError(f"{path}: {name[:80]!r} is no name of a setting")
        if isinstance(value, Mapping) and value:
            yield from _flat(value, path, f"{name}.")
        elif isinstance(value, str) and not re.sub(r"[\n\t]", "", value).isprintable():
            raise ConfigError(f"{path}: {name}: the value has control characters")
        else:
            yield name, with_numbers(value)


def with_numbers(value: Any) -> Any:
    """Return a value with numbers for texts such as `1e-6`, which YAML 1.1 reads as texts, and null for `"null"`."""
    if isinstance(value, list):
        return [with_numbers(x) for x in value]
    if isinstance(value, dict):
        return {key: with_numbers(x) for key, x in value.items()}
    if value == "null":
        return None
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?e[+-]?\d+", value) else value


def _resolved(settings: dict[str, Any], path: str) -> dict[str, Any]:
    """Replace interpolations by the settings that they name. No other resolver runs, such as the environment's."""
    if len(settings) > MOST_SETTINGS:
        raise ConfigError(f"{path}: {len(settings):,} settings; at most {MOST_SETTINGS:,} are expected in a config")

    def full_name(name: str, link: str) -> str:
        dots = len(link) - len(link.lstrip("."))
        return ".".join([*(name.split(".")[:-dots] if dots else ()), link.lstrip(".")])

    for name, value in [*settings.items()]:
        if isinstance(value, str) and (match := _LINK.fullmatch(value)):
            section = f"{full_name(name, match[1])}."
            if copied := {f"{name}.{x[len(section) :]}": f"${{{x}}}" for x in settings if x.startswith(section)}:
                del settings[name]  # a link to a section is one to each of its settings
                settings |= copied

    def resolve(name: str, value: Any, depth: int = 0) -> Any:
        def target(match: re.Match[str]) -> Any:
            full = full_name(name, match[1])
            if full in settings:
                return resolve(full, settings[full], depth + 1)
            return match[0] if match[2] is None else load_yaml(match[2])

        def text(match: re.Match[str]) -> str:
            return "" if (found := target(match)) is None else str(found)

        if not isinstance(value, str) or depth > 20:
            return value
        for _ in range(4):  # interpolations in interpolations
            if len(value) > LONGEST_VALUE or (match := _LINK.search(value)) is None:
                break
            if match[0] == value:
                return target(match)
            value = _LINK.sub(text, value)
        return value

    return {name: resolve(name, value) for name, value in settings.items()}


# Commands


def _of_command(words: Sequence[str]) -> Source:
    """Read a launch command, or settings alone: `name=value`, `--name value ...`, `--name=value`, `--flag`, `~name`."""
    of_settings = bool(words) and (words[0].startswith("--") or "=" in words[0])  # no program precedes them
    start = next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(word) and not of_settings), -1)
    program, rest = (words[start], list(words[start + 1 :])) if start >= 0 else ("", list(words))
    if program == "trl" and rest:
        program = f"trl {rest.pop(0)}"
    flags = {name.replace("-", "_"): x for name, x in _texts(words[: max(start, 0)], "launcher").items()}
    launcher = {_FLAGS_OF_LAUNCHERS[name]: values for name, values in flags.items() if name in _FLAGS_OF_LAUNCHERS}
    texts = _texts(rest, program)
    settings, notes = dict[str, Any](), list[str]()
    for name, of in (("config", texts), ("config_file", launcher)):
        for path in of.pop(name, ()):
            if not Path(path).is_file():
                notes.append(
                    f"--{name} {path}: the file is not there, so its settings are missing; run this where it is"
                )
                continue
            read = read_text(_text_of(path), path)[0].settings
            # a config of accelerate says how processes start, and of that only their number matters
            settings |= read if of is texts else {x: y for x, y in read.items() if x in _FLAGS_OF_LAUNCHERS}
    values = {name: [_yaml_value(text) for text in texts] for name, texts in (launcher | texts).items()}
    single = {name: True if not x else x[0] if len(x) == 1 else x for name, x in values.items()}
    return Source({**settings, **_flat_of(single)}, program, tuple(notes))


def _yaml_value(text: str) -> Any:
    """Return the value of a text. A list in quotes of its own is a list, too."""
    try:
        value = load_yaml(text)
        return load_yaml(value) if isinstance(value, str) and value.startswith("[") else value
    except yaml.YAMLError:
        return text


def _flat_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return dict(_flat(values, "the command line"))


def _texts(words: Sequence[str], program: str) -> dict[str, list[str]]:
    """Return the words of each setting."""
    found, name = dict[str, list[str]](), ""
    for word in words:
        key, equals, value = word.lstrip("+").removeprefix("--").partition("=")
        is_flag = word.startswith("--") and len(word) > 2
        if word in ("--", "-m") or (word.startswith("~") and not name):
            name = ""
        elif is_flag or (equals and re.fullmatch(r"[\w.@/]+", key) and (not name or found[name] or "." in key)):
            found[key] = [value] if equals else []
            name = "" if equals else key
        elif name:
            found[name].append(word.removesuffix(","))
        elif program == "":
            raise ConfigError(f"{word!r}: expected name=value or --name value")
    return found


class _Shell:
    """Just enough of a shell to read a launch script: variables, arrays, here-documents, tests, sourced files."""

    def __init__(self, path: str = "") -> None:
        self.variables: dict[str, str | list[str]] = {"HOME": str(Path.home()), "PWD": os.getcwd()}
        self.variables |= dict.fromkeys(("0", "BASH_SOURCE"), path)
        self.commands: list[list[str]] = []
        self.read = {Path(path).resolve()}
        self.blocks: list[list[Any]] = []
        """For each open `if`, `case` or loop: its kind, whether it runs now, whether a branch ran, and its word."""

    def commands_of(self, text: str) -> list[list[str]]:
        """Return the commands of a script with their words expanded."""
        text = text.replace("\r\n", "\n") + "\n\n"  # the last line may end in a backslash
        text = re.sub(r"^[ \t]*#.*\n", "", text, flags=re.MULTILINE)
        document = re.compile(
            r"^.*?(?:read .*?(\w+)|cat\b[^<\n]*)\s*<<-?\s*['\"]?(\w+)['\"]?.*\n([\s\S]*?)\n\s*\2\s*$", re.M
        )
        text = document.sub(lambda m: f'{m[1]}="{m[3]}"' if m[1] else "", text).replace("\\\n", " ")
        words, word, array, end, position, redirected = list[str](), None, "", "", 0, False
        piece = re.compile(
            r"""(?P<space>[ \t]+)|(?P<comment>(?<=\s)\#[^\n]*)|(?P<redirect>&?\d*[<>]+(?:&\d)?)|'(?P<single>[^']*)'"""
            r"""|(?P<end>\n|;;|;|&&|\|\||[|&()])|\\(?P<escape>.)|(?P<plain>[^\s'"\\$;&|()<>]+)""",
            re.DOTALL,
        )
        while position < len(text):
            if text[position] == "$":
                value, position = self._dollar(text, position)
                whole = "$(" in value or bool(word and "=" in word)
                parts = value if isinstance(value, list) else [value] if whole else value.split()
                if parts:
                    *before, word = [(word or "") + parts[0], *parts[1:]]
                    words += before
                continue
            if text[position] == '"':
                end_of_quote = _end_of_quote(text, position)
                value = self._inside(text[position + 1 : end_of_quote - 1])
                position = end_of_quote
                if isinstance(value, list):
                    words += value
                else:
                    word = (word or "") + value
                continue
            match = piece.match(text, position)
            if match is None:
                position += 1
                continue
            kind, position = match.lastgroup, match.end()
            if kind in ("single", "escape", "plain"):
                word = (word or "") + match[kind]
            elif kind == "end" and match[0] == "(" and word is not None and re.fullmatch(r"\w+\+?=", word):
                array, word, words = word, None, []
            else:
                if word is not None:  # the file of a redirection is no word of the command
                    words, word, redirected = words if redirected else [*words, word], None, False
                redirected = kind in ("space", "comment") and redirected
                if kind == "redirect":
                    redirected = not match[0][-1].isdigit()
                if array and kind == "end" and match[0] == ")":
                    self._assign(array, words)
                    array, words = "", []
                elif kind == "end" and not array:
                    self._run(words, end, match[0])
                    words, end = [], match[0]
        return self.commands

    @property
    def _runs(self) -> bool:
        return all(block[1] for block in self.blocks)

    def _run(self, words: list[str], before: str, after: str) -> None:
        if not words:
            if self.blocks and self.blocks[-1][0] == "case" and after == ";;":
                self.blocks[-1][1] = None
            return
        head, rest = words[0], words[1:]
        block: list[Any] = self.blocks[-1] if self.blocks else ["", True, True, ""]
        if block[0] == "case" and block[1] is None and head != "esac":  # patterns of a clause
            # of a value that only a run knows, such as the kind of the device, the first
            matches = not block[2] and ("$(" in block[3] or any(fnmatch.fnmatchcase(block[3], x) for x in words))
            block[2] = block[2] or matches
            block[1] = True if matches and after == ")" else None if after == "|" else matches
        elif head in ("if", "elif"):
            if head == "if":
                self.blocks.append(block := ["if", False, not self._runs, ""])
            block[1] = not block[2] and self._holds(rest)
            block[3] = "condition"
        elif block[3] == "condition" and head != "then":
            holds = not block[2] and self._holds(words)
            block[1] = (block[1] and holds) if before == "&&" else (block[1] or holds)
        elif head == "then":
            block[2], block[3] = block[2] or block[1], ""
            self._run(rest, before, after)
        elif head == "else":
            block[1], block[2] = not block[2], True
            self._run(rest, before, after)
        elif head == "case":
            self.blocks.append(["case", None, False, rest[0] if rest else ""])
        elif head in ("for", "while", "until"):
            self.blocks.append(["loop", self._runs, True, ""])
            if head == "for" and len(rest) > 2 and self._runs:
                self.variables[rest[0]] = rest[2]  # once, with the first value
        elif head in ("fi", "esac", "done"):
            del self.blocks[-1:]
        elif head in ("do", "{", "time", "exec", "nohup", "export", "local", "declare", "readonly"):
            self._run(rest, before, after)
        elif self._runs:
            while words and _ASSIGNMENT.fullmatch(words[0]):
                name, value = words[0].split("=", 1)
                self._assign(f"{name}=", value)
                words = words[1:]
            if words[:1] in (["source"], ["."]) and words[1:]:
                file = Path(words[1]).resolve()
                if file.is_file() and file not in self.read:
                    self.read.add(file)
                    self.commands_of(_text_of(words[1]))
                words = []
            self.commands += [words] if words else []
            if "-c" in words[:-1] and {"bash", "sh"} & {*words}:
                self.commands_of(words[words.index("-c") + 1])
        if block[0] == "case" and after == ";;":
            block[1] = None

    def _assign(self, target: str, value: str | list[str]) -> None:
        name, added = target.rstrip("=").removesuffix("+"), target.endswith("+=")
        if self._runs:
            before = self.variables.get(name, value[:0]) if added else value[:0]
            before = [before] if isinstance(value, list) and isinstance(before, str) else before
            self.variables[name] = before + value  # type: ignore[operator]

    def _holds(self, words: list[str]) -> bool:
        """Return whether a test such as `[ -n "$x" ]` holds; False for one that a reader cannot know."""
        inner = [word for word in words if word not in ("[", "]", "[[", "]]", "{")]
        known = ["" if re.match(r"\$[\w{(]", word) else word for word in inner]
        match known:
            case ["!", *others]:
                return not self._holds(others)
            case [("-n" | "-z") as sign, text]:
                return bool(text) == (sign == "-n")
            case [first, ("=" | "=="), second]:
                return fnmatch.fnmatchcase(first, second)
            case [first, "!=", second]:
                return not fnmatch.fnmatchcase(first, second)
            case [first, ("-eq" | "-ne" | "-gt" | "-lt" | "-ge" | "-le") as sign, second]:
                with suppress(ValueError):
                    return bool(getattr(operator, sign[1:])(int(first or 0), int(second)))
        return False

    def _inside(self, text: str) -> str | list[str]:
        """Return the content of double quotes: several words for an array alone, such as "${ARGS[@]}"."""
        found, position = "", 0
        while position < len(text):
            if text[position] == "$" and position + 1 < len(text):
                value, end = self._dollar(text, position)
                if isinstance(value, list) and (position, end) == (0, len(text)):
                    return value
                found, position = found + (" ".join(value) if isinstance(value, list) else value), end
            else:
                escaped = text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$", "`")
                found, position = found + text[position + escaped], position + 1 + escaped
        return found

    def _dollar(self, text: str, start: int) -> tuple[str | list[str], int]:
        """Return the value of the expansion at `start`, and where it ends. What is not known stays text."""
        following = text[start + 1 : start + 2]
        if following in ("{", "("):
            end = _closing(text, start + 1)
            raw, inner = text[start:end], text[start + 2 : end - 1]
            if following == "(":
                return (self._arithmetic(inner[1:-1]) if inner.startswith("(") else self._folder(inner) or raw), end
            match = re.fullmatch(r"([\w@*]+)(\[[@*0]\])?(?::?([-=+])(.*))?", inner, re.DOTALL)
            if match is None:
                return raw, end
            name, items, sign, default = match.groups()
            if name in ("@", "*"):
                return [], end
            value = self.variables.get(name)
            if sign == "+":
                return ("" if value in (None, "") else self._inside(default)), end
            if value in (None, "") and sign:
                return self._inside(default.strip("\"'")), end
            if items and not isinstance(value, list):
                return [] if value is None else [value], end
            return (raw if value is None else value if items or isinstance(value, str) else value[:1]), end
        match = re.compile(r"\w+|[@*?#$!]").match(text, start + 1)
        if match is None:
            return "$", start + 1
        if match[0] in ("@", "*"):
            return [], match.end()
        return self.variables.get(match[0], match.group(0).join(("$", ""))), match.end()

    def _folder(self, command: str) -> str | None:
        """Return what `dirname FILE` and `cd FOLDER && pwd` print, by which scripts find their own folder."""
        match = re.fullmatch(r"\s*(dirname|cd)\s+(?:-\w*\s+)*(.+?)\s*(?:>\S+|2>&1|\s)*(&&\s*pwd\s*)?", command)
        if match is None or (match[1] == "cd") != bool(match[3]):
            return None
        path = match[2].removeprefix('"').removesuffix('"')
        value = self._inside(path)
        if isinstance(value, list) or re.search(r"\$[\w{(]", value):
            return None
        return str(Path(value).parent) if match[1] == "dirname" else os.path.normpath(value)

    def _arithmetic(self, text: str) -> str:
        names = {name: int(x) for name, x in self.variables.items() if isinstance(x, str) and x.isdigit()}
        try:
            found = evaluate(str(self._inside(text)).replace("/", "//"), names)
        except (SyntaxError, ConfigError):
            found = None
        return f"$(({text}))" if found is None else str(found)


def _end_of_quote(text: str, start: int) -> int:
    """Return the end of the double quotes that open at `start`. A command in them may have quotes of its own."""
    position = start + 1
    while position < len(text) and text[position] != '"':
        if text[position] == "$" and text[position + 1 : position + 2] in ("(", "{"):
            position = _closing(text, position + 1)
        else:
            position += 1 + (text[position] == "\\")
    return position + 1


def _closing(text: str, start: int) -> int:
    """Return the end of the bracket that opens at `start`."""
    opening, depth = text[start], 0
    closing = {"{": "}", "(": ")"}[opening]
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == closing)
        if depth == 0:
            return i + 1
    return len(text)


# Python


def _of_python(text: str, path: str) -> Source:
    """Read a script that trains with TRL: keyword arguments of its config, trainer and adapter that are literals."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: the file cannot be read: {error}") from error
    names: dict[str, ast.expr] = {}
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    trains = any(map(_makes_a_trainer, tree.body))
    own = dict.fromkeys(functions, "reward.py" if trains else path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = node.value
        elif (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Call)
        ):
            first = node.targets[0].elts[0]  # model, tokenizer = load(...)
            if isinstance(first, ast.Name) and _loads_a_model(node.value):
                names[first.id] = node.value
    settings, program = dict[str, Any](), path
    for node in ast.walk(tree):
        called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if not isinstance(node, ast.Call) or not _OF_TRL.fullmatch(called):
            continue
        given = {keyword.arg: _literal(keyword.value, names, own) for keyword in node.keywords if keyword.arg}
        if called == "load_dataset":
            given = _of_dataset([_literal(x, names, own) for x in node.args], given)
        elif called == "LoraConfig":
            renamed = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": "lora_task_type"}
            given = {"use_peft": True, **{renamed.get(name, name): x for name, x in given.items()}}
        elif called.endswith("Trainer"):
            # without a config, the trainer has the defaults of its own
            program = f"{called.removesuffix('Trainer')}Config" if program == path and "args" not in given else program
            unread = ("args", "train_dataset", "eval_dataset", "peft_config", "processing_class", "callbacks")
            given = {name: x for name, x in given.items() if name not in unread}
            given = {"model_name_or_path" if name == "model" else name: x for name, x in given.items()}
        else:
            program = called
        settings = {**settings, **given}
    if program == path:
        raise ConfigError(
            f"{path}: no config with literal values, such as GRPOConfig(beta=0.04). Give the command that starts the "
            "script"
        )
    moved = [name for name in functions if f"reward.py:{name}" in str(settings.get("reward_funcs"))] if trains else []
    why = f"realign imports the file of a reward, and importing {path} would start its training"
    notes: tuple[str, ...] = (
        (f"move {', '.join(moved)}, and what it needs, to a file reward.py: {why}",) if moved else ()
    )
    if any(isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".map") for node in ast.walk(tree)):
        notes += (
            "the script changes its rows with map: write them by dataset.to_json('rows.jsonl'), and set data.path",
        )
    return Source(_flat_of(settings), program, notes)


def _makes_a_trainer(statement: ast.stmt) -> bool:
    """Return whether a statement at the top of a script makes a trainer when the script is imported."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return False
    if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
        return False
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func).endswith("Trainer") for call in calls)


def _loads_a_model(call: ast.Call) -> bool:
    return ast.unparse(call.func).endswith(".from_pretrained")


def _literal(node: ast.expr, names: Mapping[str, ast.expr], own: Mapping[str, str], depth: int = 0) -> Any:
    """Return the value of an expression: a literal, a name of one, or one of the `own` functions as `FILE:NAME`."""
    if isinstance(node, ast.Name) and node.id in own:
        return f"{own[node.id]}:{node.id}"
    if isinstance(node, ast.Name) and node.id in names and depth < 5:
        return _literal(names[node.id], names, own, depth + 1)
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, names, own, depth + 1) for item in node.elts]
    loaded = next((x for x in ast.walk(node) if isinstance(x, ast.Call) and _loads_a_model(x)), None)
    if loaded is not None:
        named = [x.value for x in loaded.keywords if x.arg in ("model_name", "pretrained_model_name_or_path")]
        return _literal([*loaded.args, *named, loaded.func][0], names, own, depth + 1)
    if isinstance(node, ast.JoinedStr):
        parts = [names.get(ast.unparse(x.value)) if isinstance(x, ast.FormattedValue) else x for x in node.values]
        if all(isinstance(part, ast.Constant) for part in parts):
            return "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return f"$({ast.unparse(node)[:80]})"


def _of_dataset(positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `load_dataset` reads, by the names of TRL's command line."""
    path, subset = [*positional, None, None][:2]
    files = given.get("data_files")
    if files is not None and path in ("json", "csv", "parquet"):
        path = files
    found = {"dataset_name": path or given.get("path"), "dataset_config": subset or given.get("name")}
    splits = given.get("split")
    names = ("dataset_train_split", "dataset_test_split")
    found |= dict(zip(names, splits if isinstance(splits, list) else [splits], strict=False))
    return {name: value for name, value in found.items() if value is not None}


__all__ = ["DEEPEST", "LONGEST_VALUE", "Source", "evaluate", "read_sources", "read_text", "with_numbers"]
