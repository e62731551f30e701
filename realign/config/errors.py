"""Messages of configuration errors: one line that names the key, the value and the nearest valid choice."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from types import MappingProxyType

from realign.errors import ConfigError as ConfigError  # re-export
from realign.text import for_terminal

MANY = 24
NEAR = 0.7
"""Minimum similarity of a suggested name. Unrelated names have up to 0.67, most misspelled ones more than 0.73."""
PREFIX = 4
"""Minimum length of a word that counts as a shortened name."""
EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "models": "models.actor.path=MODEL",
        "interfaces": "interfaces.actor.epochs=2",
        "graph": "graph._target_=realign.interfaces.grpo.dataflow",
        "sync": "sync.ref.of=actor",
        "data": "data.path=FILE",
        "curriculum": "curriculum=pass_rate",
        "dynamic_sampling": "dynamic_sampling.max_batches=5",
        "evaluation": "evaluation.every_steps=20",
        "evaluations": "evaluations.NAME.data.path=FILE",
        "calibration": "calibration.samples=512",
        "trackers": "trackers.board=tensorboard",
        "callbacks": "callbacks.stop=early_stopping",
        "runtime": "runtime.rpc_timeout_minutes=60",
        "rollout": "rollout.max_staleness=2",
    }
)
"""Example override for each root key of components."""
OPTIONAL = ("curriculum", "dynamic_sampling", "evaluation", "calibration")


def suggest(word: str, known: Iterable[object]) -> str:
    """Return the end of a message about an unknown name: the nearest valid one, and all valid ones if they are few."""
    names = sorted({str(name) for name in known})
    near = nearest(word, names)
    hint = f"; did you mean {near!r}?" if near is not None else ""
    return hint + list_names(names)


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that a word most likely means; None if there is none.

    It is a similar name, or one that the word shortens: its beginning, or its first letter and others in their order.
    """
    known = sorted(names)
    if near := difflib.get_close_matches(word, known, n=1, cutoff=NEAR):
        return near[0]
    # Shortened names are too different in length for difflib: `temp` and `temperature` have a similarity of 0.53.
    longer = [name for name in known if len(word) >= PREFIX and (name.startswith(word) or _abbreviates(word, name))]
    return min(longer, key=len, default=None)


def _abbreviates(word: str, name: str) -> bool:
    """Return whether `name` has the first letter of `word`, then its other letters in order, and few others."""
    letters = iter(name)
    return name[:1] == word[:1] and len(name) <= 2 * len(word) and all(letter in letters for letter in word)


def unknown_key(key: str, known: Iterable[object]) -> str:
    """Return the message about an unknown key, with the nearest of the `known` keys at the same level."""
    return f"unknown key {key!r}{suggest(key.rpartition('.')[2], known)}"


def join_messages(messages: Iterable[str]) -> str:
    """Return several messages as one line."""
    first, *others = dict.fromkeys(messages)
    return first + "".join(
        f"{'' if before[-1] in '.?' else '.'} Also: {text}" for before, text in pairwise([first, *others])
    )


def list_names(names: Iterable[object]) -> str:
    """Return all valid names in parentheses; empty if there are more than `MANY`."""
    known = list(map(str, names))
    return f" (valid: {', '.join(known) or 'none'})" if len(known) <= MANY else ""


def one_line(text: object) -> str:
    """Return `text` `for_terminal`, in which each run of whitespace is one space."""
    return for_terminal(" ".join(str(text).split()))


def how_to_disable(key: str) -> str:
    """Return how to disable the optional component that contains a key, for the end of a message; empty for others."""
    root = key.split(".")[0]
    return f"; {root}=null disables the {root.replace('_', ' ')}" if root in OPTIONAL else ""


def not_a_component(key: str, given: str) -> str:
    """Return the message about a plain value in place of a component, or of a mapping of components."""
    if all(part.isidentifier() for part in given.strip("'").split(".")) and "." in given:
        return f"{key}: expected a component, found {given}; to choose your own class, set {key}._target_={given[1:-1]}"
    example = EXAMPLES.get(key) or f"{key}.{'path' if key.startswith('models.') else 'FIELD'}=VALUE"
    off = f", or switch it off by {key}=null" if key in OPTIONAL else ""
    return f"{key}: expected a component, found {given}; set its fields one by one, such as {example}{off}"


def explain(error: Exception) -> str:
    """Return a one-line message for an exception of Hydra, OmegaConf or the YAML parser."""
    from hydra.errors import OverrideParseException
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        quoted = f". Quote text with special characters twice: '{key}=\"{value}\"'" if value else ""
        return one_line(f"cannot read the override {error.override!r}: {_first_line(error.message)}{quoted}")
    cause = next((e for e in (error, error.__cause__) if isinstance(e, OmegaConfBaseException)), None)
    if cause is None:
        return one_line(str(error).split("\nSee http")[0])
    key = cause.full_key or ""
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} is missing: give it a value"
    if match := re.search(r"trying to access (\S+): node `(\S+)` is not a container", str(cause)):
        return f"{match[2]} is null or a single value, but {key} takes the value of {match[1]}"
    return one_line(f"{key}: {_first_line(cause)}" if key else _first_line(cause))


def _first_line(text: object) -> str:
    return str(text).strip().split("\n")[0]
