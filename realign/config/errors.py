"""What a user reads when a config is wrong: one line that names the key, what was found, and the nearest choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from realign.config.renamed import renamed
from realign.errors import ConfigError as ConfigError  # the name of this module's users

MANY = 24
EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "models": "models.actor.path=MODEL",
        "interfaces": "interfaces.actor.epochs=2",
        "graph": "graph._target_=realign.interfaces.grpo.dataflow",
        "sync": "sync.ref.of=actor",
        "data": "data.path=FILE",
        "dynamic_sampling": "dynamic_sampling.max_batches=5",
        "evaluation": "evaluation.every_steps=20",
        "calibration": "calibration.samples=512",
        "trackers": "trackers.board._target_=realign.runtime.TensorBoard",
        "runtime": "runtime.rpc_timeout_minutes=60",
        "rollout": "rollout.max_staleness=2",
    }
)
"""For each place of components an override that sets a field there."""
PLAIN: Mapping[str, str] = MappingProxyType({"str": "a text", "bool": "a bool", "list": "a list"})
OPTIONAL = ("dynamic_sampling", "evaluation", "calibration")


def suggest(word: str, known: Iterable[object]) -> str:
    """The end of a message about an unknown name: the nearest valid one, and all of them unless they are many."""
    names = sorted({str(name) for name in known})
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return hint + listed(names)


def unknown_key(key: str, known: Iterable[object]) -> str:
    """The message about a key that does not exist: its new name, or the nearest of the keys `known` beside it."""
    return renamed(key) or f"unknown key {key!r}{suggest(key.rpartition('.')[2], known)}"


def listed(names: Iterable[object]) -> str:
    """All valid names, in parentheses; nothing when they are many."""
    known = list(map(str, names))
    return f" (valid: {', '.join(known) or 'none'})" if len(known) <= MANY else ""


def one_line(text: object) -> str:
    """`text` without line breaks."""
    return " ".join(str(text).split())


def not_a_component(key: str, found: str) -> str:
    """The message about a plain value where a component, or a mapping of them, has to stand."""
    example = EXAMPLES.get(key) or f"{key}.{'path' if key.startswith('models.') else 'FIELD'}=VALUE"
    off = f", or switch it off by {key}=null" if key in OPTIONAL else ""
    return f"{key}: expected a component, found {found}; set its fields one by one, such as {example}{off}"
