"""Names of settings in other tools, from `names.yaml`: what they are in realign, on the command line and in help.

A name with exactly one key of the same meaning and unit is accepted, and a note shows the key. A name whose meaning or
unit differs, or that fits several keys of the experiment, is an error that says what to set (ADR 25).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from realign.config.allocation import allocation_answer
from realign.config.errors import ConfigError, join_messages
from realign.config.experiment import ExperimentConfig, has_experiment
from realign.config.files import GROUPS
from realign.config.index import class_at
from realign.config.keys import find_keys
from realign.config.places import ROOTS
from realign.config.trees import get
from realign.config.words import TARGET, is_word

if TYPE_CHECKING:
    from realign.config.composition import Composed

_CHOOSES = ("experiment", "algorithm")
"""Config groups that decide which keys exist."""
_OWN_ROOTS = ("data", "evaluation", "interfaces", "models", "rollout", "runtime")
"""Root keys of realign that other tools use too. A user's own class may have a key below them that the table lists."""
_TABLE = Path(__file__).with_name("names.yaml")
_OBJECTS = ("realhf_names", "realhf_keys")
"""Tables of names that are no settings, but Python objects and keys of a batch."""
IMPORTED = ("TRL", "verl", "OpenRLHF", "AReaL")
"""Tools whose configs `realign import` translates."""
_SHOWN = 2
"""Most messages about names of other tools in one error; a command line with more is another tool's."""
_DEPTH_OF_FIELDS = 3
"""Names in the path of a field of a role's component, such as `interfaces.actor.kl`."""
_FEW = 4
"""Most rows that help shows for the last part of a name; more are unrelated."""


@dataclass(frozen=True)
class Row:
    """What the names of one row of the table are in realign.

    One of `keys`, `overrides` (`set` in the file) and `answer` is given.
    """

    names: tuple[str, ...]
    tool: str = ""
    keys: tuple[str, ...] = ()
    """Keys of the same meaning and unit. `*` matches each role of the experiment that has the key."""
    overrides: tuple[str, ...] = ()
    """Overrides of the same meaning, for a name with a value."""
    answer: str = ""
    """What to do instead, for a name without a key of the same meaning and unit."""
    needs: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values that keys of the config must have, so that `keys` mean the same. None: the key is not set."""
    note: str = ""
    """Remark for the pages and help."""
    cell: str = ""
    """Length of a key of realhf, for the page."""
    typed: bool = True
    """Whether it is a setting; False for the names of Python objects and of keys of a batch."""

    def text(self) -> str:
        """Return what the names are in realign, in Markdown."""
        words = " or ".join(f"`{_of_actor(key)}`" for key in self.keys) or " ".join(
            f"`{_of_actor(word)}`" for word in self.overrides
        )
        return words + (f". {self.note}" if words and self.note else "") or self.answer


COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "evaluate": "to evaluate a saved model, use realign eval MODEL. For evaluations during training, set "
        "evaluation.data.path and evaluation.every_steps.",
        "run": "to train, name an experiment: realign experiment=NAME key=value.",
        "resume": "to resume a run, repeat its command with resume=auto.",
        "sweep": "to start a sweep, add -m: realign -m experiment=NAME seed=0,1.",
        "merge": "to merge an adapter into its base model, use realign export RUN_OR_FOLDER --to DIR --merge.",
        "push": "to upload a model, use realign export RUN_OR_FOLDER --push OWNER/NAME.",
        "list": "`realign --help` lists the experiments and algorithms.",
    }
)
"""Commands of other tools that realign does not have, and what to do instead."""


def import_hint(tools: Sequence[str]) -> str:
    """Return a sentence about the command that translates a whole config of a tool."""
    return f"`realign import {tools[0].lower()} FILE` translates a whole config, script or command of {tools[0]}"


def tools_of(words: Sequence[str]) -> list[str]:
    """Return the tools of `IMPORTED` that have names among the words of a command line."""
    entries = [row for word in words for _, row in _entries(word.lstrip("+~-").partition("=")[0])]
    return [tool for tool in IMPORTED if any(row.tool == tool for row in entries)]


def read_own_yaml(path: Path) -> Any:
    """Return the values of a YAML file of the package."""
    # The parser in Python takes several times as long, and the shell waits for the names at the tab key.
    loader: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    return yaml.load(path.read_text(encoding="utf-8"), loader)


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of `names.yaml` by name, with `rows` as `Row`."""
    read = {}
    for title, table in read_own_yaml(_TABLE).items():
        rows = [_row(row, tool=table["tool"], typed=title not in _OBJECTS) for row in table["rows"]]
        read[title] = MappingProxyType({**table, "rows": rows})
    return MappingProxyType(read)


def _row(written: Mapping[str, Any], **of_table: Any) -> Row:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}
    return Row(overrides=values.pop("set", ()), **values, **of_table)


@cache
def index() -> Mapping[str, tuple[tuple[str | None, Row], ...]]:
    """Return the rows of each name, without regard to case, each with the value that the row is about (None: any)."""
    by_name: dict[str, dict[tuple[str | None, int], tuple[str | None, Row]]] = {}
    for table in tables().values():
        for row in table["rows"]:
            for written in row.names:
                name, equals, value = written.lower().partition("=")
                entry = (value if equals else None, row)
                for full in (name, *([f"{table['prefix']}.{name}"] if "prefix" in table else [])):
                    # By identity: a row contains a mapping (`needs`), and therefore has no hash.
                    by_name.setdefault(full, {})[entry[0], id(row)] = entry
    return MappingProxyType({name: tuple(entries.values()) for name, entries in by_name.items()})


def names() -> list[str]:
    """Return the short names that completion offers: those that people try first, and TRL's."""
    common = {name for name, rows in index().items() for _, row in rows if row.tool in ("", "TRL")}
    return sorted(name for name in common if "." not in name)


def is_name(name: str) -> bool:
    """Return whether a name, or the part before its first dot, is one of another tool."""
    return bool(_entries(name)) or _tools_of_root(name.partition(".")[0]) != []


def describe(name: str) -> list[str]:
    """Return lines that say what a name of another tool is in realign; none if the name is unknown.

    The name may be the last part of the names (`kl_loss_coef`), or their first part (`trainer`).
    """
    key = name.lower().replace("-", "_")
    named = [(key, entry) for entry in index().get(key, ())]
    if not named:
        named = [(full, entry) for full, entries in index().items() if full.endswith(f".{key}") for entry in entries]
        named = named if len({id(row) for _, (_, row) in named}) <= _FEW else []
    named = named or [
        (full, entry) for full, entries in index().items() if full.startswith(f"{key}.") for entry in entries
    ]
    lines = []
    for full, (value, row) in named:
        written = next((name for name in row.names if name.lower().partition("=")[0] == full), full).partition("=")[0]
        of = f" ({row.tool})" if row.tool else ""
        lines.append(f"{written}{'' if value is None else f'={value}'}{of}: {plain(row.text())}")
    return list(dict.fromkeys(lines))


class _Translated(NamedTuple):
    """A command line without names of other tools."""

    overrides: list[str]
    notes: list[str]
    """A note for each name that was replaced."""
    composed: Composed | None
    """The config without some of the overrides, if names were compared with it. `again` composes all of them."""


def translate(overrides: Sequence[str], config_dir: Path | str | None = None, base: str | None = None) -> _Translated:
    """Replace names of other tools by keys.

    Args:
        overrides: Overrides of the command line.
        config_dir: As for `compose`.
        base: As for `compose_layers`.

    Raises:
        ConfigError: names have no key of the same meaning and unit in this experiment, or several. Says for each what
            to set.
    """
    theirs = {i: entries for i, word in enumerate(overrides) if (entries := _entries_of(word))}
    own = [word for i, word in enumerate(overrides) if i not in theirs]
    composed = _compose(own, config_dir, base) if theirs else None
    if composed is not None:  # a user's own class may have such a key
        theirs = {i: entries for i, entries in theirs.items() if not _is_own(_parts(overrides[i])[1], composed.tree)}
    new: dict[int, list[str]] = {}
    problems = []
    rows = {i: _rows(overrides[i], entries) for i, entries in theirs.items()}
    fixed = {i for i in rows if any(row.overrides or row.answer for row in rows[i])}
    compared = not fixed
    for i in sorted(rows, key=lambda i: i not in fixed):
        assert composed is not None
        if i not in fixed and not compared:  # what the first ones set may be what the others need
            compared = True
            with suppress(ConfigError):
                composed = composed.again([*own, *(word for words in new.values() for word in words)])
        try:
            new[i] = _replace(overrides[i], rows[i], composed.tree)
        except ConfigError as error:
            problems.append(str(error))
    problems += filter(None, (_foreign(word) for i, word in enumerate(overrides) if i not in theirs))
    if problems:
        tools = [tool for tool in IMPORTED if any(row.tool == tool for found in rows.values() for row in found)]
        if not tools or len(rows) == 1:
            raise ConfigError(join_messages(problems))
        more = f"{len(problems) - _SHOWN} more are to be set. " if len(problems) > _SHOWN else ""
        raise ConfigError(join_messages([*problems[:_SHOWN], f"{more}{import_hint(tools)}"]))
    notes = [f"{overrides[i]} was read as {' '.join(new[i])}" for i in sorted(new)]
    return _Translated([word for i, given in enumerate(overrides) for word in new.get(i, [given])], notes, composed)


def translate_each(words: Mapping[str, str], config: Mapping[str, Any], tool: str) -> dict[str, list[str] | str]:
    """Return what names of one tool are in an experiment.

    Args:
        words: `NAME=VALUE` by any label.
        config: The experiment, composed without these words.
        tool: Whose names they are.

    Returns:
        For each label the overrides, none if the setting is to be left out, or a message that says what to set.
    """
    found: dict[str, list[str] | str] = {}
    for label, word in words.items():
        entries = tuple(entry for entry in _entries_of(word) if entry[1].tool in (tool, ""))
        if not entries:
            found[label] = f"{label}: not known to realign"
            continue
        rows = _rows(word, entries)
        off = _parts(word)[2] in ("=false", "=0", "=0.0", "=''")
        left_out = ("leave it out", "the default", *(["not available."] if off else []))
        if all(row.answer.startswith(left_out) for row in rows):
            found[label] = []
            continue
        try:
            found[label] = _replace(word, rows, config)
        except ConfigError as error:
            found[label] = str(error)
    return found


def plain(text: str) -> str:
    """Return a Markdown text for the terminal, without the targets of links and without quotes around single words."""
    text = re.sub(r" \(\[[^\]]+\]\([^)]*\)\)", "", text)
    return re.sub(r"`([^` ]+)`", r"\1", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text))


def _parts(word: str) -> tuple[str, str, str]:
    """Return the sign (`+`, `~`), the key, and the rest of an override from `=` on."""
    bare = word.lstrip("+~")
    key, equals, value = bare.partition("=")
    return word[: len(word) - len(bare)], key, equals + value


def _entries_of(word: str) -> tuple[tuple[str | None, Row], ...]:
    _, key, value = _parts(word)
    return _entries(key) if value else ()


def _entries(name: str) -> tuple[tuple[str | None, Row], ...]:
    """Return the entries of a name as typed: of the whole name, of its last part, or of a section such as `eval`."""
    name = name.lower().replace("-", "_")
    entries = index().get(name, ())
    if not entries and "." in name:
        section = index().get(name.partition(".")[0], ())
        entries = tuple(entry for entry in section if entry[1].answer or entry[1].keys == ("evaluation",))
        path = name.split(".")
        fields_of_others = index().get(path[-1], ()) if len(path) >= _DEPTH_OF_FIELDS else ()
        # A name that is also realign's own (`lr`) stands at a wrong place, which is reported as such.
        of_field = tuple(of for of in fields_of_others if not any(key.endswith(f".{path[-1]}") for key in of[1].keys))
        if not entries and of_field and path[0] in ("interfaces", "models") and not find_keys(name):
            entries = of_field  # unless a component has such a field, see `_is_own`
    elif not entries and name not in (*(own.name for own in fields(ExperimentConfig)), *GROUPS):
        ends = {full: ended for full, ended in index().items() if full.endswith(f".{name}")}
        entries = next(iter(ends.values()), ())
        if len({row.text() for ended in ends.values() for _, row in ended if row.typed}) > len(entries):
            return ()  # names of several things
    return tuple(entry for entry in entries if entry[1].typed)


def _rows(word: str, entries: Sequence[tuple[str | None, Row]]) -> list[Row]:
    """Return the rows for the value of an override; an answer that lists the known values if it is none of them."""
    _, key, value = _parts(word)
    given = value.removeprefix("=").strip("'\"").lower()
    if "allocation_mode" in entries[0][1].names and (allocation := allocation_answer(given)) is not None:
        return [Row((key,), "AReaL", answer=allocation)]
    if rows := [row for of, row in entries if of == given] or [row for of, row in entries if of is None]:
        return rows
    known = "; ".join(f"{of}: {plain(row.text())}" for of, row in entries)
    return [Row((key,), entries[0][1].tool, answer=f"the value {given} is not known here. {known}")]


def _replace(word: str, rows: Sequence[Row], config: Mapping[str, Any]) -> list[str]:
    """Return the overrides for a name of another tool.

    Raises:
        ConfigError: there are none of the same meaning.
    """
    sign, key, value = _parts(word)
    if answers := {row.answer: row.tool for row in rows if row.answer}:
        label = key + ("" if any(value is None for value, _ in _entries(key)) else value)
        tools = dict.fromkeys(filter(None, answers.values()))
        of = f" ({', '.join(tools)})" if tools else ""
        raise ConfigError(f"{label}{of}: {' Or: '.join(map(plain, answers))}")
    if fixed := next((row.overrides for row in rows if row.overrides), ()):
        pairs = [item.partition("=") for item in fixed]
        return [f"{_only_key(word, (pattern,), config)}={given}" for pattern, _, given in pairs]
    target = _only_key(word, tuple(dict.fromkeys(key for row in rows for key in row.keys)), config)
    _check_needs(key, value.removeprefix("="), target, rows, config)
    rest = key.partition(".")[2] if target == "evaluation" else ""
    return [f"{sign}{target}{f'.{rest}' if rest else ''}{value}"]


def _only_key(word: str, patterns: Sequence[str], config: Mapping[str, Any]) -> str:
    if len(patterns) == 1 and "*" not in patterns[0]:
        return patterns[0]
    name = _parts(word)[1]
    keys = [key for pattern in patterns for key in _match_keys(pattern, config)]
    root, *role = name.split(".")[:2]
    if root in ROOTS and ROOTS[root].per_role and role:
        keys = [key for key in keys if not key.startswith(f"{root}.") or key.split(".")[1:2] == role]
    if len(keys) > 1:
        raise ConfigError(f"{name} may mean {' or '.join(keys)}. Set the one that you mean.")
    if not keys and not has_experiment(config):
        raise ConfigError(f"{name}: start from an experiment, such as experiment=grpo {word}.")
    if not keys:
        raise ConfigError(f"{name}: no role of this experiment has the key {' or '.join(patterns)}.")
    return keys[0]


def _is_zero(value: str) -> bool:
    """Return whether the text of a value is the number 0."""
    with suppress(ValueError):
        return float(value) == 0
    return False


def _check_needs(name: str, value: str, target: str, rows: Sequence[Row], config: Mapping[str, Any]) -> None:
    """Raise an error if the config gives `target` another meaning than the name has."""
    if target.endswith(".kl.coef") and _is_zero(value):
        return  # no penalty, wherever it would be applied
    role = target.split(".")[1] if target.startswith("interfaces.") else None
    for pattern, allowed in ((p, a) for row in rows for p, a in row.needs.items()):
        root, _, rest = pattern.split(".", 2)
        for other, node in (config.get(root) or {}).items():
            given = get(node, tuple(rest.split(".")))
            # What a linked value will be is not known yet, so it is accepted.
            linked = isinstance(given, str) and given.startswith("${")
            if (role is None or other == role) and not linked and given not in allowed:
                needed = f"{root}.{other}.{rest}"
                raise ConfigError(
                    f"{name} is {target} with {needed}={allowed[0]}, but {needed} is {given} here. Set {target} "
                    f"itself, and {needed} if you want to change it."
                )


def _is_own(key: str, config: Mapping[str, Any]) -> bool:
    """Return whether the config has a key, although `names.yaml` lists it."""
    root, _, rest = key.partition(".")
    node = config.get(root) if root in _OWN_ROOTS and rest else None
    names = rest.split(".")
    per_role = root in ROOTS and ROOTS[root].per_role
    if per_role and key.count(".") >= _DEPTH_OF_FIELDS - 1 and isinstance(node, Mapping) and names[0] not in node:
        return True  # a typo in a role, which is reported as such
    if key.count(".") >= _DEPTH_OF_FIELDS - 1 and isinstance(node, Mapping) and isinstance(node.get(names[0]), Mapping):
        node, names = node[names[0]], names[1:]  # of a role
        default = ROOTS[root].default if root in ROOTS else None
        above = [node, *(get(node, tuple(names[: depth + 1])) for depth in range(len(names) - 1))]
        targets = [str(x.get(TARGET, default)) for x in above if isinstance(x, Mapping) and (TARGET in x or x is node)]
        if any(class_at(target) is None for target in targets) or any(isinstance(x, str) for x in above):
            return True  # a class that is not known here may have any field
        if len(names) > 1:
            return get(node, tuple(names), None) is not None
    return isinstance(node, Mapping) and bool(node) and _has(root, node, names)


def _foreign(word: str) -> str:
    """Return the message about a key that only other tools have, and that `names.yaml` lacks; empty for another key."""
    key = _parts(word)[1]
    root, dot, _ = key.partition(".")
    if not dot or root in _OWN_ROOTS or not _tools_of_root(root) or _entries_of(word):
        return ""
    of = f"`realign help {root}` lists the names of {' and '.join(_tools_of_root(root))} that realign knows"
    if root in _CHOOSES:
        return f"unknown key {key!r}: {root}=NAME chooses a file and has no keys below it. {of}."
    return f"unknown key {key!r}. {of}; its own keys of a role begin with models and interfaces."


@cache
def _tools_of_root(root: str) -> list[str]:
    """Return the tools that have names below `root`."""
    below = [row.tool for name, rows in index().items() if name.startswith(f"{root}.") for _, row in rows if row.typed]
    return list(dict.fromkeys(below))


def _compose(overrides: Sequence[str], config_dir: Path | str | None, base: str | None) -> Composed:
    from realign.config import composition

    try:
        return composition.compose_layers(overrides, config_dir, base)
    except ConfigError:  # such as a sweep; other errors are reported later
        choices = [word for word in overrides if word.partition("=")[0] in _CHOOSES]
        return composition.compose_layers(choices, config_dir, base)


def _of_actor(pattern: str) -> str:
    """Return a key or override with `actor` as the role, for examples."""
    return pattern.replace(".*.", ".actor.")


def _match_keys(pattern: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of the experiment that a pattern matches."""
    root, *rest = pattern.split(".")
    nodes = {root: config.get(root)}
    if rest and rest[0] == "*":
        nodes = {f"{root}.{role}": node for role, node in (config.get(root) or {}).items()}
        rest = rest[1:]
    for prefix, node in nodes.items():
        if isinstance(node, Mapping) and node and _has(root, node, rest) and not _follows(node, rest):
            yield ".".join([prefix, *rest])


def _has(root: str, node: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether a component has a key: its node sets the key, or its class has the fields."""
    if get(node, tuple(names), None) is not None:
        return True
    below = get(node, tuple(names[:1]), None)
    if names[0] == "optimizer" or (below is None and names[0] in node):
        return below is not None  # without an optimizer, the model is frozen
    default = ROOTS[root].default if root in ROOTS else None
    cls = class_at(str(node.get(TARGET, default)))
    return cls is not None and names[0] in cls.fields and not is_word(below)


def _follows(node: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether a key takes its value from another key, which is then the one to set."""
    values = (get(node, tuple(names[: depth + 1])) for depth in range(len(names)))
    return any(isinstance(value, str) and value.startswith("${") for value in values)
