"""The overrides of a command line: quote what Hydra's grammar cannot read, and convert them to one config layer.

Hydra reads letters outside ASCII, spaces and parentheses only in quotes. A shell removes one pair of quotes, so users
would have to write two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from realign.config.errors import ConfigError
from realign.config.files import EXPERIMENT, is_path
from realign.config.places import ROOTS, spell_out
from realign.config.trees import Path, get
from realign.config.words import NONE, TARGET, is_word

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


_LONGEST_WORD = 100_000
"""Limit of the characters of an override. Hydra reads about 60,000 of them per second."""
_PLAIN_KEY = re.compile(r"[+~]{0,2}[\w@./:-]+")
_PLAIN = re.compile(r"(\+{0,2}|~)[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)*=[\w/:.+-]+", re.ASCII)
"""Most overrides. Hydra reads them as they are, and takes a millisecond to say so."""
_SPECIAL = re.compile(r"""[,'"\[\]{}\\]|\$\{""")
"""Characters whose meaning in Hydra's grammar (lists, mappings, quotes, interpolations) a user may have intended."""


def prepare(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with quotes where needed, and YAML files as experiments.

    Raises:
        ConfigError: an override is too long.
    """
    for word in overrides:
        if len(word) > _LONGEST_WORD:
            raise ConfigError(
                f"{word[:60]!r}...: an override has {len(word):,} characters; at most {_LONGEST_WORD:,} can be read"
            )
    return [quote_override(_with_file(word)) for word in overrides]


def quote_override(word: str) -> str:
    """Return an override whose value Hydra reads as text, with quotes if Hydra's grammar needs them.

    A value with commas, brackets, quotes or interpolations stays unchanged, since it may be a list or a sweep.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.partition("=")
    unchanged = not equals or not value.strip() or not _PLAIN_KEY.fullmatch(key) or _SPECIAL.search(value)
    if unchanged or _PLAIN.fullmatch(word):
        return word
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return f'{key}="{value}"'
    return word


def quote_text(value: str) -> str:
    """Return a text in the quotes of Hydra's grammar, as the value of an override. Interpolations stay in effect."""
    # Hydra reads a backslash as an escape only before a quote
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def is_file(word: str) -> bool:
    """Return whether a word is the path of a YAML file instead of an override."""
    return "=" not in word and is_path(word)


def _with_file(word: str) -> str:
    """Return `experiment='FILE'` for `./my.yaml` and `experiment=./my.yaml`, and other words unchanged."""
    key, _, value = word.partition("=") if not is_file(word) else (EXPERIMENT, "=", word)
    files = value.split(",")
    if key.lstrip("+") != EXPERIMENT or value[:1] in ("'", '"') or not all(map(is_path, files)):
        return word
    return f"{key}={','.join(map(quote_text, files))}"


class Word(str):
    """A word that selects the class of a component whose fields are also set."""


def as_layer(overrides: Sequence[Override], present: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """Return the component values that overrides set, as nested mappings, and the keys that they delete.

    Args:
        overrides: Overrides of one run. Swept overrides and config groups are skipped.
        present: Values of the lower layers. `+key` for a present key is skipped, because applying it is an error.

    Raises:
        ConfigError: two overrides contradict each other.
    """
    tree: dict[str, Any] = {}
    deleted: list[Path] = []
    ours = [override for override in overrides if _is_ours(override)]
    # Keys before the keys below them, so that `a.b=1 a=word` means the same as `a=word a.b=1`.
    for override in sorted(ours, key=lambda override: override.key_or_group.count(".")):
        path = tuple(override.key_or_group.split("."))
        if override.is_delete():
            deleted.append(path)
        elif not (override.is_add() and not isinstance(override.value(), dict) and get(present, path) is not None):
            _put(tree, path, override.value())
    spell_out(tree)
    return tree, deleted


def rewritten(overrides: Sequence[Override], fitted: Mapping[str, Any]) -> Iterator[tuple[Override, str, Any]]:
    """Yield each override with its key and value. Words that are mappings in `fitted` are `_target_`."""
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if _is_ours(override) and not override.is_delete():
            node = get(fitted, tuple(key.split(".")))
            if is_word(value) and isinstance(node, dict):
                key, value = f"{key}.{TARGET}", node[TARGET]
            elif key.endswith(f".{TARGET}") and isinstance(node, str):
                value = node
            else:
                value = _rewritten(value, node)
        yield override, key, value


def _is_ours(override: Override) -> bool:
    """Return whether an override sets or deletes a key of a component."""
    root, _, rest = override.key_or_group.partition(".")
    if root not in ROOTS or override.is_sweep_override() or override.package is not None:
        return False
    # An item of a list (`mcp[0]`) is no component of its own.
    word = is_word(override.value()) and not ROOTS[root].per_role
    return "[" not in rest and (bool(rest) or isinstance(override.value(), dict) or word)


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    for depth, name in enumerate(path[:-1]):
        below = tree.get(name)
        if is_word(below):
            tree[name] = {TARGET: Word(below)}
        elif name in tree and (below is None or below == NONE):
            key = ".".join(path[: depth + 1])
            raise ConfigError(f"{'.'.join(path)} sets a field of {key}, which another override sets to {NONE}")
        elif not isinstance(below, dict):
            tree[name] = {}
        tree = tree[name]
    name = path[-1]
    below = tree.get(name)
    if name == TARGET and below is not None and isinstance(below, Word) != isinstance(value, Word):
        raise ConfigError(f"{below} and {value} are chosen for the same component; remove one of them")
    if not isinstance(value, dict):
        if isinstance(below, dict) and is_word(value):
            _put(below, (TARGET,), Word(value))
        else:
            tree[name] = value
        return
    if is_word(below):
        tree[name] = {TARGET: Word(below)}
    elif not isinstance(below, dict):
        tree[name] = {}
    for key, item in value.items():
        _put(tree[name], (str(key),), item)


def _rewritten(value: Any, fitted: Any) -> Any:
    if is_word(value) and isinstance(fitted, dict):
        return {TARGET: fitted[TARGET]}
    if isinstance(value, dict) and isinstance(fitted, dict):
        return {key: fitted[key] if key == TARGET else _rewritten(item, fitted.get(key)) for key, item in value.items()}
    return value
