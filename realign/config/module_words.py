"""Words for shipped interfaces, data and models: `_target_: grpo` is the interface in `realign.interfaces.grpo`.

A word is the name of a module, and selects the first dataclass in it whose name ends as its package says. So a new
algorithm has its word without a table. Modules are read without importing them, since composing a config must not
import torch. Other text stays as it is, and building reports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from realign.config.errors import ConfigError, nearest
from realign.config.inspection import read_module
from realign.config.trees import Path as Key
from realign.config.trees import get
from realign.config.words import TARGET, is_word


class Package(NamedTuple):
    """A package whose modules are words."""

    name: str
    ending: str
    """End of the names of the classes that its words select."""


INTERFACES = Package("realign.interfaces", "Interface")
DATA = Package("realign.data", "Data")
MODELS = Package("realign.engines", "Model")
KEYS: Mapping[str, Package] = MappingProxyType(
    {
        r"interfaces\.\w+": INTERFACES,
        r"models\.\w+": MODELS,
        "data": DATA,
        r"(evaluation|evaluations\.\w+)\.(reward|metrics\.\w+)": INTERFACES,
        r"(evaluation|evaluations\.\w+|calibration)\.data": DATA,
    }
)
"""Package of the words of each key, a regular expression."""
DEEPEST = 4
"""Number of names of the longest key."""
_IN_MAPPING = re.compile(rf"(\{{(?:[^{{}}]*,)?\s*{TARGET}:\s*)(\w+)(\s*[,}}].*)", re.DOTALL)
"""A mapping of the command line whose `_target_` is a word."""


def target_of(key: str, word: Any) -> str | None:
    """Return the import path of the class that a word selects at a key; None if it selects none."""
    package = next((package for pattern, package in KEYS.items() if re.fullmatch(pattern, key)), None)
    if package is None or not is_word(word):
        return None
    module = read_module(f"{package.name}.{word}")
    classes = () if module is None else module.definitions.values()
    return next((cls.path for cls in classes if cls.dataclass and cls.name.endswith(package.ending)), None)


def spell_out(values: dict[Any, Any]) -> dict[Key, dict[str, Any]]:
    """Replace the words of a file, alone or as a `_target_`, by import paths. Return the changed components."""
    changed = {}
    for path, word in list(_words(values, ())):
        if (target := target_of(".".join(path), word)) is not None:
            node = get(values, path)
            changed[path] = {**(node if isinstance(node, dict) else {}), TARGET: target}
            get(values, path[:-1])[path[-1]] = changed[path]
    return changed


def with_target(override: str) -> str:
    """Return an override in which a word that selects a shipped class is an import path; others stay as they are.

    A sweep has several words: `interfaces.actor=ppo,grpo`.

    Raises:
        ConfigError: a word resembles one of the key. The message names that one.
    """
    key, _, value = override.partition("=")
    at = key.lstrip("+").removesuffix(f".{TARGET}")
    if (match := _IN_MAPPING.fullmatch(value)) is not None and (target := target_of(at, match[2])) is not None:
        return f"{key}={match[1]}{target}{match[3]}"
    targets = [target_of(at, word.strip()) for word in value.split(",")]
    if is_word(value) and (near := nearest(value, words_at(at))) and near != value:
        raise ConfigError(f"{at}: unknown choice {value!r}; did you mean {near!r}?")
    if None in targets:
        return override
    sign = key[: len(key) - len(key.lstrip("+"))]
    return f"{sign}{at}.{TARGET}={','.join(filter(None, targets))}"


def words_at(key: str) -> list[str]:
    """Return the words of a key."""
    package = next((package for pattern, package in KEYS.items() if re.fullmatch(pattern, key)), None)
    folder = None if package is None else Path(__file__).parents[1] / package.name.partition(".")[2]
    names = () if folder is None else sorted(path.stem for path in folder.glob("*.py"))
    return [name for name in names if target_of(key, name) is not None]


def _words(node: Any, path: Key) -> Iterator[tuple[Key, Any]]:
    """Yield the words below a node with the keys of their components."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, Mapping) and len(path) < DEEPEST:
        yield path, get(node, (TARGET,))
        for name, inner in node.items():
            yield from _words(inner, (*path, str(name)))
