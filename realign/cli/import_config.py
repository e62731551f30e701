"""`realign import TOOL [FILE] [SETTING ...]`: the command that reproduces a run of another tool.

First it says what the run is: SFT, DPO, GRPO and so on. Then each setting of the file has one of four fates: it is in
the command, it has no equivalent, it is left to the user with a reason, or it is bookkeeping. The rules are data, one
file per tool in `realign/config/imports`; `realign/config/names.yaml` answers the names that no rule reads. The proof
feeds random batches to the tool's loss and to realign's, where the tool is installed; it needs a checkout, since the
referee is no part of the package.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from realign.cli.import_readers import DEEPEST, LONGEST_VALUE, Source, evaluate, read_sources, with_numbers
from realign.config.aliases import plain, read_own_yaml, tables, translate_each
from realign.config.command_line import prepare, quote_text
from realign.config.composition import Composed, compose_layers
from realign.config.errors import ConfigError, join_messages, suggest
from realign.config.trees import get
from realign.errors import RealignError
from realign.own_files import replace_text
from realign.safe_yaml import load_yaml

_PLACEHOLDER = re.compile(r"(?<!\{)\{([^{}]+)\}")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
RULES = Path(__file__).parents[1] / "config" / "imports"
REFEREE = Path(__file__).parents[2] / "benchmarks" / "referee"
_USAGE = "realign import trl|verl|openrlhf|areal [FILE | -] [SETTING ...] [--out experiment.yaml]"
_WIDTH = 116
_FILES = ("experiment", "algorithm")
"""Groups whose files a command chooses."""
_MANY = 3
"""How many times as many settings of another tool a config has before it is that tool's."""


@dataclass
class Imported:
    """A config of another tool, in realign."""

    title: str
    """What it trains, and by what that was recognized."""
    overrides: list[str]
    """The overrides of the command line."""
    loss: dict[str, Any]
    """The tool's settings that decide the loss, with its defaults."""
    proof: dict[str, Any]
    """The tool in the referee, and what to compare there."""
    assumed: list[str] = field(default_factory=list)
    """Overrides that follow from defaults of the tool alone."""
    refused: list[str] = field(default_factory=list)
    """A line for each setting without an equivalent."""
    by_hand: list[str] = field(default_factory=list)
    """A line for each setting that the user has to decide."""
    fates: dict[str, str] = field(default_factory=dict)
    """Name of each given setting -> command, no equivalent, by hand, or bookkeeping."""


def import_config(_: argparse.Namespace | None, words: Sequence[str]) -> int:
    """Run `realign import`: print the command, what it lacks, and the proof."""
    words, out = _without_out(words)
    if not words:
        raise ConfigError(_USAGE)
    tool, kind = _tool_of(words[0])
    sources = read_sources(words[1:])
    imported = translate_source(tool, _chosen(tool, sources), kind)
    sys.stderr.write(f"{imported.title}\n")
    print("realign " + " \\\n    ".join(shlex.quote(word) for word in imported.overrides))
    left = [name for name, fate in imported.fates.items() if fate == "bookkeeping"]
    sections = {
        f"From defaults of {_rules(tool)['tool']} {_rules(tool)['version']}, not from your config": imported.assumed,
        "No equivalent": imported.refused,
        "Set by hand, or leave out": imported.by_hand,
        f"Left out ({len(left)}): bookkeeping, and what the run doesn't use": _folded(_shortened(left)),
    }
    for title, lines in sections.items():
        if lines:
            print(f"\n{title}")
            print("\n".join(f"  {line}" for line in lines))
    if out:
        replace_text(Path(out), experiment_text(imported))
        print(f"\nrealign check ./{out}" if not Path(out).is_absolute() else f"\nrealign check {out}")
    if imported.proof["kinds"] is not False:
        print(f"\n{_proof(_rules(tool)['tool'], imported)}")
    return 0


def translate_config(tool: str, given: Mapping[str, Any]) -> Imported:
    """Translate settings of a tool, such as `trl`, or of one kind of its configs, such as `trl-dpo`."""
    name, kind = _tool_of(tool)
    return translate_source(name, Source(dict(given)), kind)


def translate_source(tool: str, source: Source, kind: str = "") -> Imported:
    """Translate a config.

    Args:
        tool: File of rules.
        source: The config.
        kind: Kind of config, if the user names it.

    Raises:
        ConfigError: realign has no experiment of this kind, the kind is unknown, or a value is out of range.
    """
    rules = _rules(tool)
    if not source.settings:
        raise ConfigError(f"no settings. {_USAGE}")
    unread = {name: why for name, value in source.settings.items() if (why := _why_unread(value))}
    canonical = _canonical(source.settings, rules)
    kind, reason = (kind, "you named it") if kind else _recognized(rules, canonical, source)
    chosen = rules["kinds"][kind]
    parts = [*(rules["parts"][part] for part in chosen.get("parts", ())), chosen]
    defaults = {name: value for part in parts for name, value in part.get("defaults", {}).items()}
    unknown = {*_canonical(dict.fromkeys(unread, ""), rules)}
    settings = {**defaults, **_of_sections(parts, canonical), **canonical}
    for name, formula in ((name, x) for part in parts for name, x in part.get("let", {}).items()):
        if (value := evaluate(str(formula), settings | dict.fromkeys(unknown))) is not None:
            settings[name] = value
    title = f"{rules['tool']} {rules['version']}: {_fill(chosen['title'], settings, quoted=False)} ({reason})"
    proof = {"peer": rules.get("peer", tool), "kinds": chosen.get("proof")}
    loss = {name: settings[name] for name in chosen.get("defaults", {})}
    imported = Imported(
        title, [], loss, proof, by_hand=[*source.notes, *(f"{name}: {why}" for name, why in unread.items())]
    )
    imported.fates = dict.fromkeys(unread, "by hand")
    own, fates, of_defaults = _apply(parts, settings, {*canonical}, unknown, imported)
    first = {key: own[key] for key in _FILES if key in own}
    files = compose_layers(_words(first))
    imported.assumed = [
        f"{key}={own[key]}"
        for key in of_defaults
        if key not in first and not _same(get(files.tree, tuple(key.lstrip("+").split("."))), own[key])
    ]
    aliases = _aliases(source.settings, rules)
    typed_as = {new: old for old, new in aliases.items() if new in canonical and old not in canonical}
    waiting = {}
    for name, value in canonical.items():
        if name in unknown:
            continue
        given, neutral = typed_as.get(name, name), _neutral_values(rules, name)
        if name in fates:
            imported.fates[given] = fates[name]
        elif value in (None, "", [], {}) or any(_same(value, x) for x in neutral or ()):
            imported.fates[given] = "bookkeeping"
        elif neutral is not None:
            imported.fates[given] = "no equivalent"
            imported.refused.append(f"{given}={_text(value)} is not available.")
        elif _is_bookkeeping(rules, name, settings):
            imported.fates[given] = "bookkeeping"
        else:
            waiting[given] = f"{name}={_text(value)}"
    _add_waiting(waiting, own, files, dict(_pairs(chosen.get("missing", ()))), rules, imported)
    imported.overrides = _words(first | own)
    return imported


def _apply(
    parts: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    given: set[str],
    unknown: set[str],
    imported: Imported,
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Apply the rules.

    Returns:
        The overrides, what became of each setting that a rule names, and the keys that follow from defaults alone.

    Args:
        parts: Lists of rules and formulas.
        settings: All settings, with those of the tool's defaults.
        given: Names of those in the config.
        unknown: Names of those whose value is not known, so that no override has it.
        imported: Gets the lines for the user.
    """
    formulas = {name: str(x) for part in parts for name, x in part.get("let", {}).items()}
    own, fates, of_defaults = dict[str, str](), dict[str, str](), list[str]()
    for rule in (rule for part in reversed(parts) for rule in part.get("rules", ())):
        if not _applies(rule, settings):
            continue
        if "reject" in rule:
            raise ConfigError(plain(_fill(rule["reject"], settings, quoted=False) or rule["reject"]))
        conditions = {*rule.get("when", {}), *rule.get("unless", {})}
        names = set[str]()
        taken = {name for name in given if any(fnmatch.fnmatch(name, x) for x in rule.get("takes", ()))}
        if rule.get("together") and any(_names(word, formulas) & unknown for word in rule["set"]):
            continue
        for word in rule.get("set", ()):
            in_word = _names(word, formulas)
            if in_word & unknown or (filled := _fill(word, settings)) is None:
                continue  # what the config doesn't have
            names |= in_word | taken
            key, _, value = filled.partition("=")
            own[key] = value
            if (in_word | conditions) and not (in_word | _deep(conditions, formulas)) & given:
                of_defaults.append(key)
        lines = [("no equivalent", imported.refused, "refuse"), ("by hand", imported.by_hand, "hand")]
        for fate, found, kind in lines:
            if kind in rule:
                found.append(plain(_fill(rule[kind], settings, quoted=False) or rule[kind]))
                named = {*conditions, *taken, *_names(rule[kind], {})}
                named = (_deep(named, formulas) if fate == "by hand" else named) & given
                fates = dict.fromkeys(named, fate) | fates if fate == "by hand" else fates | dict.fromkeys(named, fate)
        if names or (rule.get("set") and not {"refuse", "hand"} & {*rule}):
            for name in names | _deep(conditions, formulas):
                fates[name] = "command" if fates.get(name) == "by hand" else fates.get(name, "command")
    return own, fates, list(dict.fromkeys(of_defaults))


def _add_waiting(
    waiting: Mapping[str, str],
    own: dict[str, str],
    files: Composed,
    missing: Mapping[str, str],
    rules: Mapping[str, Any],
    imported: Imported,
) -> None:
    """Add the overrides of settings that no rule names, as far as the command stays valid with them.

    Args:
        waiting: `NAME=VALUE` by the name of the setting as it is given.
        own: The command, which gets the overrides.
        files: The files that the command chooses, without its other overrides.
        missing: Placeholders of keys that a command needs.
        rules: Of the tool.
        imported: Gets the lines for the user.
    """
    extras, read = dict[str, dict[str, str]](), settings_of_rules(rules["tool"].lower())
    missing = {key: value for key, value in missing.items() if key.rpartition(".")[0] not in own}
    base = _words(missing | own)
    composed = files.again(base)
    for name, found in translate_each(waiting, composed.tree, rules["tool"]).items():
        if found == f"{name}: not known to realign" and waiting[name].partition("=")[0] in read:
            found = []
        if isinstance(found, str):
            imported.by_hand.append(found)
        elif found:
            if extra := {key: value for key, value in _pairs(found) if key not in own}:
                extras[name] = extra
            if differing := [key for key, value in _pairs(found) if not _same(own.get(key, value), value)]:
                set_already = ", ".join(f"{key}={own[key]}" for key in differing)
                found = f"{waiting[name]}: the command has {set_already} from other settings"
                imported.by_hand.append(found)
        imported.fates[name] = "by hand" if isinstance(found, str) else "command" if found else "bookkeeping"
    together = {key: value for extra in extras.values() for key, value in extra.items()}
    if not together or _problem(composed, [*base, *_words(together)]) is not None:
        _check(composed)
        together = {}
        for name, extra in extras.items():  # one of them at least, so each on its own
            if (problem := _problem(composed, [*base, *_words(together | extra)])) is None:
                together |= extra
            else:
                imported.by_hand.append(f"{name}: {problem}")
                imported.fates[name] = "by hand"
    own |= together
    if left := {key: value for key, value in missing.items() if key not in own}:
        own |= left
        imported.by_hand.append(f"{', '.join(_words(left))}: yours to fill in, since the config doesn't say it")


def _problem(composed: Composed, overrides: Sequence[str]) -> str | None:
    try:
        _check(composed.again(overrides))
    except RealignError as error:
        return str(error)
    return None


def _check(composed: Composed) -> None:
    """Build the experiment, so that the printed command is valid."""
    from realign.config import build_experiment
    from realign.runtime.checks.parts import check_parts

    check_parts(build_experiment(composed.resolve()))


# Recognition


@cache
def _rules(tool: str) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", read_own_yaml(RULES / f"{tool}.yaml"))


def _tools() -> list[str]:
    return sorted(path.stem for path in RULES.glob("*.yaml"))


def _tool_of(name: str) -> tuple[str, str]:
    """Return the tool, and the kind of config if the name has one, such as `trl-dpo`."""
    tools = _tools()
    tool, _, kind = name.partition("-")
    if tool not in tools:
        raise ConfigError(f"{_USAGE}{suggest(tool, tools)}")
    if kind and kind not in _rules(tool)["kinds"]:
        raise ConfigError(f"{name}: {_rules(tool)['tool']} has no kind {kind!r}{suggest(kind, _rules(tool)['kinds'])}")
    return tool, kind


def _chosen(tool: str, sources: Sequence[Source]) -> Source:
    """Return the program of a script that the rules know, or the last one."""
    patterns = [pattern for entry in _rules(tool)["recognize"] for pattern in entry.get("program", ())]
    known = [source for source in sources if any(fnmatch.fnmatch(source.program, pattern) for pattern in patterns)]
    known = [source for source in known if source.settings]
    if len(known) > 1:
        note = (
            f"this is the first of {len(known)} programs that the script starts; give the line of another one by itself"
        )
        return known[0]._replace(notes=(note, *known[0].notes))
    return next((x for x in [*known, *reversed(sources)] if x.settings), sources[-1])


def _recognized(rules: Mapping[str, Any], settings: Mapping[str, Any], source: Source) -> tuple[str, str]:
    """Return the kind of a config, and by what it was recognized.

    Raises:
        ConfigError: realign has no such experiment, nothing says what it is, or it is another tool's.
    """
    counts = {tool: len(settings_of_rules(tool) & {*source.settings}) for tool in _tools()}
    tool = max(counts, key=lambda name: counts[name])
    if counts[tool] > _MANY * max(1, counts[rules["tool"].lower()]):
        known = f"{counts[tool]} of these settings are {_rules(tool)['tool']}'s"
        raise ConfigError(
            f"{known}, and {counts[rules['tool'].lower()]} {rules['tool']}'s: use `realign import {tool}`"
        )
    naming = [source.program, *(str(settings.get(name, "")) for name in rules.get("naming", ()))]
    words = {word for text in naming for word in re.split(r"[^a-z0-9]+", text.lower())}

    def why(entry: Mapping[str, Any], by: str) -> str | None:
        known: Iterable[str] = entry.get(by, ())
        if by == "program":
            return source.program if any(fnmatch.fnmatch(source.program, pattern) for pattern in known) else None
        if by == "when":
            return next(iter(known), None) if by in entry and _applies({"when": known}, settings) else None
        if by == "named":
            return next((f"the word {word!r} in a name" for word in known if word in words), None)
        return next((name for name in settings if any(fnmatch.fnmatch(name, pattern) for pattern in known)), None)

    entries = rules["recognize"]
    refusals = [entry for entry in entries if "refuse" in entry and "when" in entry]
    for by, of in (("when", refusals), ("program", entries), ("when", entries), ("has", entries), ("named", entries)):
        for entry in of:
            if (found := why(entry, by)) is None:
                continue
            if "refuse" in entry:
                raise ConfigError(f"{rules['tool']}, recognized by {found}: {plain(entry['refuse'])}")
            return entry["kind"], f"recognized by {found}"
    read = settings_of_rules(rules["tool"].lower())
    if not any(name in read or _is_bookkeeping(rules, name, settings) for name in settings):
        raise ConfigError(f"{rules['tool']} has none of these settings, so this is no config of its training")
    kinds = [f"{rules['tool'].lower()}-{kind}" for kind in rules["kinds"]]
    example = f"`realign import {kinds[0]} FILE`"
    raise ConfigError(f"nothing in this config says what it trains. Say it, as in {example}: {', '.join(kinds)}")


def _neutral_values(rules: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return the values with which a setting that has no equivalent changes nothing; None if it isn't such a one."""
    found = (values for pattern, values in rules["neutral"].items() if fnmatch.fnmatchcase(name, pattern))
    return next(found, None)


def _is_bookkeeping(rules: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> bool:
    entries = ({"names": entry} if isinstance(entry, list) else entry for entry in rules["bookkeeping"])
    return any(
        any(fnmatch.fnmatchcase(name, pattern) for pattern in entry["names"]) and _applies(entry, settings)
        for entry in entries
    )


def _of_sections(parts: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the sections of which one setting is given."""
    return {
        f"{section}.{name}": value
        for part in parts
        for section, defaults in part.get("sections", {}).items()
        if any(name.startswith(f"{section}.") for name in given)
        for name, value in defaults.items()
    }


def _aliases(given: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, str]:
    """Return the name that the rules use of each given name that has another: an older one, or one without dots."""
    found = {name: full for name, full in rules.get("aliases", {}).items() if name in given}
    for row in (row for table in tables().values() if table["tool"] == rules["tool"] for row in table["rows"]):
        bases = list(dict.fromkeys(name.partition("=")[0] for name in row.names))
        if len(bases) == 2 and "." not in bases[0] and "." in bases[1] and bases[0] in given:
            found.setdefault(bases[0], bases[1])
    return found


def _canonical(given: Mapping[str, Any], rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by the names that the rules use. Of two names of a setting, the one that isn't null wins."""
    names = _aliases(given, rules)
    found = {name: value for name, value in given.items() if name not in names}
    for name, full in names.items():
        free = found.get(full) is None and given[name] is not None
        found[full if free else name] = given[name]
    return found


# Rules


def _applies(rule: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    def has(name: str, values: Sequence[Any]) -> bool:
        return any(_same(settings.get(name), value) for value in values)

    wanted, unwanted = rule.get("when", {}), rule.get("unless", {})
    return all(has(*item) for item in wanted.items()) and not any(has(*item) for item in unwanted.items())


def _same(found: Any, value: Any) -> bool:
    if isinstance(found, list) and len(found) == 1:  # such as TRL's loss_type, of which there can be several
        found = found[0]
    if isinstance(found, bool) or isinstance(value, bool) or found is None or value is None:
        return _text(found).lower() == _text(value).lower()
    try:
        return float(found) == float(value)
    except (TypeError, ValueError, OverflowError):
        return str(found).lower() == str(value).lower()


@cache
def settings_of_rules(tool: str) -> Set[str]:
    """Return all settings of a tool that its rules read."""
    rules = _rules(tool)
    parts = [*rules.get("parts", {}).values(), *rules["kinds"].values()]
    formulas = {name: str(x) for part in parts for name, x in part.get("let", {}).items()}
    named = {name for part in parts for name in part.get("defaults", {})} | {*rules.get("aliases", {})}
    for rule in (rule for part in parts for rule in part.get("rules", ())):
        words = [*rule.get("set", ()), rule.get("refuse", ""), rule.get("hand", ""), rule.get("reject", "")]
        named |= {*rule.get("when", {}), *rule.get("unless", {})}.union(*(_names(word, formulas) for word in words))
    return _deep(named, formulas)


def _names(text: str, formulas: Mapping[str, str]) -> set[str]:
    """Return the settings in the placeholders of a text, and in the formulas that they name."""
    names = {name for formula in _PLACEHOLDER.findall(text) for name in _NAME.findall(re.sub(r"'[^']*'", "", formula))}
    return _deep(names, formulas)


def _deep(names: Iterable[str], formulas: Mapping[str, str]) -> set[str]:
    found, waiting = set[str](), list(names)
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += _NAME.findall(re.sub(r"'[^']*'", "", formulas.get(name, "")))
    return found


def _fill(text: str, settings: Mapping[str, Any], quoted: bool = True) -> str | None:
    """Replace the placeholders of a text, which are names or formulas; None if the config lacks what one needs."""
    missing = False

    def replace(match: re.Match[str]) -> str:
        nonlocal missing
        formula = match[1].strip()
        value = evaluate(formula, settings)
        missing |= value is None or value == ""
        return value if isinstance(value, str) and not quoted else _text(value)

    # {{ and }} are braces of the text itself, and must not look like a placeholder meanwhile.
    filled = _PLACEHOLDER.sub(replace, text.replace("{{", "\0").replace("}}", "\1"))
    return None if missing else filled.replace("\0", "{").replace(" \1", "}").replace("\1", "}")


# Texts


def _text(value: Any) -> str:
    """Return a value as the text of an override."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(item)}' for key, item in value.items())}}}"
    text = f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)
    return text if re.fullmatch(r"[\w@./:+-]*", text) else quote_text(text)


def _words(pairs: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in pairs.items()]


def _pairs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, _, value = word.partition("=")
        yield key, value


def _why_unread(value: Any) -> str:
    """Return why a value is not translated; empty if it is."""
    text = str(value)
    if len(text) > LONGEST_VALUE:
        return f"the value has {len(text):,} characters"
    if _depth(value) > DEEPEST:
        return f"lists are nested more than {DEEPEST} times"
    if "$(" in text:
        return f"{text} has to run first"
    if "${" in text:
        return f"{text} is an interpolation, which is not resolved"
    return f"{text} is a variable of your shell" if re.search(r"\$\w", text) else ""


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, items), default=0) if isinstance(value, list | Mapping) else 0


def _shortened(names: Sequence[str]) -> list[str]:
    """Return names, with those of a section as one if they are many."""
    few, sections = 3, dict[str, list[str]]()
    for name in names:
        section = ".".join(name.split(".")[: min(2, name.count("."))])
        sections.setdefault(section, []).append(name)
    return [
        shown
        for section, of in sections.items()
        for shown in (of if len(of) <= few or not section else [f"{section}.* ({len(of)})"])
    ]


def _folded(words: Sequence[str]) -> list[str]:
    return textwrap.wrap(", ".join(words), _WIDTH, break_long_words=False, break_on_hyphens=False)


def _without_out(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the words without `--out FILE`, and the file."""
    words = list(words)
    if "--out" not in words:
        return words, ""
    position = words.index("--out")
    if not (file := "".join(words[position + 1 : position + 2])).endswith((".yaml", ".yml")):
        raise ConfigError(f"--out {file}: expected a file such as experiment.yaml")
    return words[:position] + words[position + 2 :], file


def experiment_text(imported: Imported) -> str:
    """Return the command as an experiment file."""
    layers, overridden, values = list[str](), list[str](), dict[str, Any]()
    for key, text in _pairs(imported.overrides):
        if key in _FILES:
            layers.append(f"/{key}/{text}")
            continue
        if key in ("rollout", "runtime"):
            overridden.append(f"override /{key}: {text}")
            continue
        *above, last = key.lstrip("+").split(".")
        node = values
        for name in above:
            if not isinstance(node.get(name), dict):
                node[name] = {"_target_": node[name]} if name in node else {}
            node = node[name]
        value = with_numbers(load_yaml(text))
        node[last] = {**value, **node[last]} if isinstance(value, dict) and isinstance(node.get(last), dict) else value
    lines = ["# @package _global_", f"# {imported.title}", "defaults:", *(f"  - {x}" for x in [*layers, *overridden])]
    return "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


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


__all__ = ["Imported", "experiment_text", "import_config", "settings_of_rules", "translate_config", "translate_source"]
