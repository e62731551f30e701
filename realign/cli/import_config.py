"""`realign import TOOL [FILE] [SETTING ...]`: the command that reproduces the gradient of another tool's config.

The rules are data, in `realign/config/names.yaml`. The proof feeds random batches to the tool's loss and to realign's,
where the tool is installed; it needs a checkout, since the referee is no part of the package.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from realign.config.aliases import describe, plain, tables, translate
from realign.config.command_line import prepare, quote_text
from realign.config.errors import ConfigError, join_messages, suggest
from realign.safe_yaml import load_yaml

_PLACEHOLDER = re.compile(r"\{([\w.]+?)(?:\|([\w.]+?))?(-1)?\}")
LINK = re.compile(r"\$\{([\w.]+)\}")
REFEREE = Path(__file__).parents[2] / "benchmarks" / "referee"
_MOST_SETTINGS = 2_000
"""Limit of the settings of a config, so that a file that is no config ends with an error."""
_LONGEST_FILE = 100_000
"""Limit of the characters of a file, since reading YAML takes a second for each 50,000 of them."""
LONGEST_VALUE, DEEPEST = 4_000, 4
"""Limits of the characters of a value, and of the lists in each other. The grammar of overrides takes exponential time
for nested lists."""
_USAGE = "realign import trl|trl-dpo|trl-kto|verl|openrlhf|areal [FILE.yaml] [SETTING ...]"


class Imported(NamedTuple):
    """A config of another tool, in realign."""

    overrides: list[str]
    """The overrides of the command line."""
    refused: list[str]
    """A line for each setting without an equivalent."""
    by_hand: list[str]
    """A line for each setting that has no key of the same meaning and unit."""
    loss: dict[str, Any]
    """The tool's settings that decide the loss, with its defaults."""
    proof: dict[str, Any]
    """The tool in the referee, and what to compare there."""


def import_config(_: argparse.Namespace | None, words: Sequence[str]) -> int:
    """Run `realign import`: print the command, what it lacks, and the proof."""
    known = {name: table["tool"] for table in tables().values() for name in table.get("import", {})}
    if not words or words[0] not in known:
        raise ConfigError(f"{_USAGE}{suggest(words[0], known) if words else ''}")
    tool, rest = words[0], list(words[1:])
    file = rest.pop(0) if rest and not rest[0].startswith("-") and "=" not in rest[0] else None
    given = {**(_of_file(file) if file else {}), **_of_words(rest)}
    if not given:
        raise ConfigError(f"no settings. {_USAGE}")
    imported = translate_config(tool, given)
    print("realign " + " \\\n    ".join(shlex.quote(word) for word in imported.overrides))
    for title, lines in (("No equivalent", imported.refused), ("Set by hand, or leave out", imported.by_hand)):
        if lines:
            print(f"\n{title}")
            print("\n".join(f"  {line}" for line in lines))
    print(f"\n{_proof(known[tool], imported)}")
    return 0


def translate_config(tool: str, given: Mapping[str, Any]) -> Imported:
    """Translate the settings of a config, which may be nested in names with dots.

    Raises:
        ConfigError: a value is out of range in realign.
    """
    unread = {name: why for name, value in given.items() if (why := _why_unread(value))}
    given = {name: value for name, value in given.items() if name not in unread}
    table = next(table for table in tables().values() if tool in table.get("import", {}))
    rules = table["import"][tool]
    canonical = _canonical(given, table, rules["defaults"])
    sections = {
        f"{section}.{name}": value
        for section, defaults in rules.get("sections", {}).items()
        if any(name.startswith(f"{section}.") for name in canonical)
        for name, value in defaults.items()
    }
    settings = {**rules["defaults"], **sections, **canonical}
    applied = [rule for rule in rules["rules"] if _applies(rule, settings)]
    own = dict(_pairs(_fill(word, settings) for rule in applied for word in rule.get("set", ())))
    refused = [plain(_fill(rule["refuse"], settings)) for rule in applied if "refuse" in rule]
    named = {name for rule in applied for name in _names(rule)}
    base = [f"{key}={value}" for key, value in own.items()]
    base += [word for word in rules["missing"] if word.partition("=")[0] not in own]
    by_hand = [f"{name}: {why}" for name, why in unread.items()]
    translations, typed = dict[str, str](), {*given, *_aliases(given, table)}
    for name, value in settings.items():
        if name in named or name not in typed or value is None:  # a default that matters has a rule
            continue
        word = f"{name}={_text(value)}"
        try:
            if not describe(name):
                raise ConfigError(f"{name}: not known to realign")
            words = translate(prepare([*base, word])).overrides
            translations |= dict(_pairs(words[len(base) :]))
        except ConfigError as error:
            by_hand.append(str(error))
    merged = {**dict(_pairs(base)), **{key: value for key, value in translations.items() if key not in own}}
    overrides = [f"{key}={value}" for key, value in merged.items()]
    _check(overrides)
    loss = {name: settings[name] for name in rules["defaults"]}
    proof = {"peer": rules.get("peer", tool), "kinds": rules.get("proof")}
    return Imported(overrides, refused, by_hand, loss, proof)


def _check(overrides: Sequence[str]) -> None:
    """Compose and build, so that the printed command is valid."""
    from realign.config import build_experiment, compose
    from realign.runtime.checks.parts import check_parts

    check_parts(build_experiment(compose(prepare(overrides))))


def _of_file(path: str) -> dict[str, Any]:
    """Read a YAML file as settings with dots.

    Raises:
        ConfigError: it cannot be read, or is no mapping of names to values.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(_LONGEST_FILE + 1)
        if len(text) > _LONGEST_FILE:
            raise ConfigError(f"{path}: more than {_LONGEST_FILE:,} characters are not expected in a config")
        loaded = load_yaml(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: the file cannot be read: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{path}: expected a mapping of settings to values, found {type(loaded).__name__}")
    settings = dict(_flat(loaded, path))
    # values such as ${gconfig.n_samples}, of a name in the file; no resolver runs
    linked = {name: match[1] for name, value in settings.items() if (match := LINK.fullmatch(str(value)))}
    settings |= {name: settings[target] for name, target in linked.items() if target in settings}
    if len(settings) > _MOST_SETTINGS:
        raise ConfigError(f"{path}: {len(settings):,} settings; at most {_MOST_SETTINGS:,} are expected in a config")
    return settings


def _of_words(words: Sequence[str]) -> dict[str, Any]:
    """Read `name=value`, `--name value ...`, `--name=value` and `--flag`."""
    texts_by_key, name = dict[str, list[str]](), ""
    for word in words:
        key, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") or (equals and not name):
            texts_by_key[key] = [value] if equals else []
            name = "" if equals else key
        elif name:
            texts_by_key[name].append(word)
        else:
            raise ConfigError(f"{word!r}: expected name=value or --name value. {_USAGE}")
    try:
        values = {key: [load_yaml(text) for text in texts] for key, texts in texts_by_key.items()}
    except yaml.YAMLError as error:
        raise ConfigError(f"a value cannot be read: {error}") from error
    plain_values = {key: True if not x else x[0] if len(x) == 1 else x for key, x in values.items()}
    return dict(_flat(plain_values, "the command line"))


def _flat(values: Mapping[Any, Any], path: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not re.fullmatch(r"[\w.-]{1,200}", name):
            raise ConfigError(f"{path}: {name[:80]!r} is no name of a setting")
        if isinstance(value, Mapping):
            yield from _flat(value, path, f"{name}.")
        elif isinstance(value, str) and not value.isprintable():
            raise ConfigError(f"{path}: {name}: the value has control characters")
        else:
            yield name, _number(value)


def _why_unread(value: Any) -> str:
    """Return why a value is not translated; empty if it is."""
    text = str(value)
    if len(text) > LONGEST_VALUE:
        return f"the value has {len(text):,} characters"
    if _depth(value) > DEEPEST:
        return f"lists are nested more than {DEEPEST} times"
    return f"{text} is an interpolation, which is not resolved" if "${" in text else ""


def _depth(value: Any) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _number(value: Any) -> Any:
    """Return the number that a text such as `1e-6` is; YAML 1.1 reads it as a text."""
    if isinstance(value, list):
        return [_number(x) for x in value]
    return float(value) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?e[+-]?\d+", value) else value


def _aliases(given: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, str]:
    """Return the name with dots of each flat name of the same row."""
    by_full_name = {}
    for row in table["rows"]:
        bases = list(dict.fromkeys(name.partition("=")[0] for name in row.names))
        if len(bases) == 2 and "." not in bases[0] and bases[0] in given:
            by_full_name[bases[1]] = bases[0]
    return by_full_name


def _canonical(given: Mapping[str, Any], table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by the names that the rules use."""
    names = {old: new for new, old in _aliases(given, table).items() if new in defaults}
    return {names.get(name, name): value for name, value in given.items()}


def _applies(rule: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    def has(name: str, values: Sequence[Any]) -> bool:
        return any(_same(settings.get(name), value) for value in values)

    wanted, unwanted = rule.get("when", {}), rule.get("unless", {})
    return all(has(*item) for item in wanted.items()) and not any(has(*item) for item in unwanted.items())


def _same(found: Any, value: Any) -> bool:
    if isinstance(found, list) and len(found) == 1:  # such as TRL's loss_type, of which there can be several
        found = found[0]
    if isinstance(found, bool) or isinstance(value, bool) or found is None or value is None:
        return _text(found) == _text(value)
    try:
        return float(found) == float(value)
    except (TypeError, ValueError, OverflowError):
        return str(found).lower() == str(value).lower()


def _names(rule: Mapping[str, Any]) -> Iterator[str]:
    yield from (*rule.get("when", {}), *rule.get("unless", {}))
    for word in rule.get("set", ()):
        for first, second, _ in _PLACEHOLDER.findall(word):
            yield from (name.removesuffix(".0").removesuffix(".1") for name in (first, second) if name)


def _fill(text: str, settings: Mapping[str, Any]) -> str:
    """Replace the placeholders of a rule."""

    def value(name: str) -> Any:
        if name in settings:
            return settings[name]
        base, _, index = name.rpartition(".")
        items = settings.get(base)
        return items[int(index)] if isinstance(items, list) and index.isdigit() and int(index) < len(items) else None

    def replace(match: re.Match[str]) -> str:
        setting = value(match[1])
        if setting is None and match[2]:
            setting = "none" if match[2] == "none" else value(match[2])
        if not match[3]:
            return _text(setting)
        try:
            return f"{float(setting) - 1:g}"
        except (TypeError, ValueError):
            raise ConfigError(f"{match[1]}={_text(setting)}: expected a number") from None

    # {{ and }} are braces of the text itself, and must not look like a placeholder meanwhile.
    return _PLACEHOLDER.sub(replace, text.replace("{{", "\0").replace("}}", "\1")).replace("\0", "{").replace("\1", "}")


def _text(value: Any) -> str:
    """Return a value as the text of an override."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    text = str(value)
    return text if re.fullmatch(r"[\w@./:+-]*", text) else quote_text(text)


def _pairs(words: Any) -> Iterator[tuple[str, str]]:
    for word in words:
        key, _, value = word.partition("=")
        yield key, value


def _proof(title: str, imported: Imported) -> str:
    """Return a line that says how far the tool's loss and gradient are from those of the command."""
    if not (REFEREE / "__main__.py").exists():
        return f"Proof: not computed. In a checkout of realign, this command compares the losses with {title}'s."
    request = json.dumps(imported.proof | {"settings": imported.loss, "overrides": prepare(imported.overrides)})
    command = [sys.executable, "-m", "benchmarks.referee", "--prove", "-"]
    try:
        done = subprocess.run(
            command, cwd=REFEREE.parents[1], input=request, capture_output=True, text=True, timeout=600, check=False
        )
    except subprocess.TimeoutExpired:
        return "Proof: not computed, since it took more than 10 minutes."
    if done.returncode:
        raise ConfigError(
            join_messages([f"the proof failed: {line}" for line in done.stderr.strip().splitlines()[-1:]])
        )
    return f"Proof: {done.stdout.strip()}"


__all__ = ["Imported", "import_config", "translate_config"]
