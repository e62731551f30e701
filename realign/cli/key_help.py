"""`realign help [overrides] [KEY]`: print type, default, valid values and meaning of config keys."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from realign.config.aliases import described, index
from realign.config.errors import ConfigError
from realign.config.help import Section, find_keys, is_root, section
from realign.config.help_entries import Entry

INDENT = "  "


def key_help(words: Sequence[str], config_dir: Path | None = None, width: int = 100) -> str:
    """Return the help for the keys among `words`; the other words are overrides, which select the experiment.

    A key may also be a name of another tool, or the last name of keys such as `kl`: then the text names the full keys.

    Raises:
        ConfigError: a key does not exist, or an override is invalid.
    """
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    keys = [word for word in words if word not in overrides] or [""]
    if bad := [key for key in keys if key.startswith("-")]:
        raise ConfigError(f"{bad[0]!r} is no config key. Write realign help KEY, such as interfaces.actor.kl.")
    return "\n\n".join("\n".join(_of_key(key.strip("."), overrides, config_dir, width)) for key in keys)


def _of_key(key: str, overrides: Sequence[str], config_dir: Path | None, width: int) -> Iterator[str]:
    if key and (key in index() or not is_root(key.partition(".")[0])) and (rows := described(key)):
        yield f"{key}  (a name of other tools)"
        for row in rows:
            yield from textwrap.wrap(row, width, initial_indent=INDENT, subsequent_indent=INDENT * 3)
        yield ""
        yield "`realign help KEY` describes one of these keys."
    elif key and "." not in key and not is_root(key) and (full := find_keys(key)):
        yield f"{key}  (the last name of a key)"
        yield from (f"{INDENT}{one}" for one in full)
        yield ""
        yield f"`realign help {full[0]}` describes the first one."
    else:
        yield from _lines(section(key, overrides, config_dir), width)


def _lines(found: Section, width: int) -> Iterator[str]:
    about = [found.name] if found.name else []
    about += [f"experiment={found.experiment}"] if found.experiment else []
    yield (found.key or "Config keys") + (f"  ({', '.join(about)})" if about else "")
    if found.text:
        yield from _wrapped(found.text, width, INDENT)
    if found.own is not None:
        yield ""
        yield from _facts(found.own, width)
    for entry in found.entries:
        yield ""
        name = entry.key.removeprefix(f"{found.key}.")
        yield INDENT + "   ".join([name, *_short_facts(entry)])
        yield from _wrapped(entry.text, width, INDENT * 3)
    yield ""
    yield from _wrapped(_next_step(found), width, "")


def _facts(entry: Entry, width: int) -> Iterator[str]:
    """Yield type, default, range, value and choices of the key on the command line."""
    default = "none; the key must be set" if entry.default is None else entry.default
    rows = {"type": entry.type, "default": default, "valid": entry.valid, "set to": entry.given or ""}
    for name, value in rows.items():
        if value:
            yield f"{INDENT}{name:<9}{value}"
    if entry.choices:
        yield f"{INDENT}choices"
        longest = max(len(choice.word) for choice in entry.choices)
        for choice in entry.choices:
            head = f"{INDENT * 2}{choice.word:<{longest}}  "
            yield from textwrap.wrap(choice.text, width, initial_indent=head, subsequent_indent=" " * len(head)) or [
                head.rstrip()
            ]


def _short_facts(entry: Entry) -> Iterator[str]:
    kind = entry.type
    if entry.choices:
        words = [choice.word for choice in entry.choices]
        kind = " | ".join(words if len(words) <= 8 else [*words[:7], "..."])
        kind += " | null" if entry.type.endswith("| null") else ""
    yield f"{kind}, {entry.valid}" if entry.valid else kind
    if entry.default is None:
        if entry.given is None and not (entry.component and entry.key.count(".") == 1):
            yield "must be set"
    else:
        yield f"default {entry.default}"
    if entry.given is not None:
        yield f"set to {entry.given}"


def _next_step(found: Section) -> str:
    if not found.entries:
        return f"Set it with {found.key}=VALUE, or in a YAML file."
    below = next((entry.key for entry in found.entries if entry.component), None)
    more = f"`realign help {below}` describes the keys below one of them. " if below else ""
    other = "Add experiment=NAME for the classes and values of another experiment." if found.experiment else ""
    return f"{more}{other}".strip() or f"Set one with {found.entries[0].key}=VALUE, or in a YAML file."


def _wrapped(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent)
