"""What a user reads when a config is wrong: one line that names the key, what was found, and the nearest choice."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable

MANY = 24


class ConfigError(ValueError):
    """A mistake in the configuration, told in one line."""


def suggest(word: str, known: Iterable[object]) -> str:
    """The end of a message about an unknown name: the nearest valid one, and all of them unless they are many."""
    names = sorted({str(name) for name in known})
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return hint + (f" (valid: {', '.join(names) or 'none'})" if len(names) <= MANY else "")


def one_line(text: object) -> str:
    """`text` without line breaks."""
    return " ".join(str(text).split())


def explain(error: Exception) -> str:
    """The message of an exception of Hydra, OmegaConf or the YAML parser, in one line and in our words."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).strip("/").rpartition("/")
        return f"unknown {group or 'config'} {name!r}{suggest(name, error.options or ())}"
    if isinstance(error, OverrideParseException):
        return one_line(f"cannot read the override {error.override!r}: {_first_line(error.message)}")
    chain = (error, error.__cause__, error.__context__)
    cause = next((e for e in chain if isinstance(e, OmegaConfBaseException)), error)
    if not isinstance(cause, OmegaConfBaseException):
        return one_line(str(error).split("\nSee http")[0])
    file = re.match(r"In '(.+?)': ", str(error))
    where = f"{file[1]}.yaml: " if file else ""
    key = cause.full_key or ""
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return f"{where}unknown key {key!r}{suggest(_last(key), _siblings(key, cause.object_type))}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{where}{key} is missing: give it a value"
    return one_line(f"{where}{key}: {_first_line(cause)}" if key else f"{where}{_first_line(cause)}")


def _siblings(key: str, owner: object) -> list[str]:
    """What could have stood in place of `key`; at the root also the config groups."""
    names = [f.name for f in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    return names if "." in key else [*names, "experiment", "algorithm"]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _first_line(text: object) -> str:
    return str(text).strip().split("\n")[0]
