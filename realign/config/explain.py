"""Convert exceptions of Hydra, OmegaConf and the YAML parser to one-line messages."""

from __future__ import annotations

import ast
import dataclasses
import re
from contextlib import suppress
from typing import Any, get_args, get_type_hints

from realign.config.construct import wrong_type
from realign.config.errors import EXAMPLES, PLAIN, not_a_component, one_line, suggest, unknown_key


def explain(error: Exception) -> str:
    """Return a one-line message for an exception of Hydra, OmegaConf or the YAML parser."""
    from hydra.core.config_store import ConfigStore
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import (
        ConfigAttributeError,
        ConfigKeyError,
        MissingMandatoryValue,
        OmegaConfBaseException,
        ValidationError,
    )

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).strip("/").rpartition("/")
        given = {file.removesuffix(".yaml") for file in ConfigStore.instance().repo.get(group, ())}  # `register_file`
        options = [option for option in error.options or () if option not in given]
        return f"unknown {group or 'config'} {name!r}{suggest(name, options)}"
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        quoted = f". Quote text with special characters twice: '{key}=\"{value}\"'" if value else ""
        return one_line(f"cannot read the override {error.override!r}: {_first_line(error.message)}{quoted}")
    if match := re.search(r"Ambiguous value for argument '(.+?)=(.*?)'", str(error)):
        key, value = match.groups()
        return (
            f"{key}={value}: a comma separates the values of a sweep. For a sweep, add -m; for a list, write "
            f"'{key}=[{value}]'; for a decimal number, use a point."
        )
    if match := re.search(r"Could not delete from config. '(.+?)' does not exist", str(error)):
        return f"~{match[1]}: {match[1]} is not set. `realign --cfg job` shows the keys that are set."
    chain = (error, error.__cause__, error.__context__)
    cause = next((e for e in chain if isinstance(e, OmegaConfBaseException)), error)
    if not isinstance(cause, OmegaConfBaseException):
        return one_line(str(error).split("\nSee http")[0])
    file = re.match(r"In '(.+?)': ", str(error))
    where = f"{file[1]}.yaml: " if file else ""
    key = cause.full_key or ""
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if key in ("experiment", "algorithm"):
            return f"{where}{key}=NAME chooses a file, and there are no keys below {key}"
        return f"{where}{unknown_key(key, _siblings(key, cause.object_type))}"
    if isinstance(cause, MissingMandatoryValue):
        return f"{where}{key} is missing: give it a value"
    if isinstance(cause, ValidationError) and (mistake := _mistyped(key, _first_line(cause))):
        return f"{where}{mistake}"
    if match := re.search(r"trying to access (\S+): node `(\S+)` is not a container", str(cause)):
        return f"{where}{match[2]} is null or a single value, but {key} takes the value of {match[1]}"
    return one_line(f"{where}{key}: {_first_line(cause)}" if key else f"{where}{_first_line(cause)}")


def _mistyped(key: str, message: str) -> str | None:
    """Return a message for OmegaConf's message about a value that violates the schema; None if it is ambiguous."""
    from realign.config.experiment import ExperimentConfig

    null = message.endswith("is not Optional")
    if key in EXAMPLES:
        kind = re.match("Cannot assign (\\w+) to ", message)
        return not_a_component(key, "null" if null else PLAIN.get(kind[1] if kind else "", "a single value"))
    annotation: Any = ExperimentConfig
    for name in key.split("."):
        annotation = get_type_hints(annotation).get(name) if dataclasses.is_dataclass(annotation) else None
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if annotation is None or len(kinds) != 1:
        return None
    if "is not a ListConfig" in message:
        return f"{key} takes a list: write '{key}=[VALUE]', with commas between several"
    if null:
        return f"{key} must not be null; expected {kinds[0].__name__}"
    found = re.search(r"[Vv]alue:? '?(.*?)'?(?: of type '(\w+)'| is not a valid|$)", message)
    found = found or re.search(r"Cannot convert '(?:\w+)' to string: '(.*)'()", message)
    if found is None:
        return None
    raw = found[1]
    if found[2] != "str":
        with suppress(ValueError, SyntaxError):
            raw = ast.literal_eval(raw)
    return str(wrong_type(raw, kinds[0], key))


def _siblings(key: str, owner: object) -> list[str]:
    """Return the valid keys at the level of `key`; at the root, also the config groups."""
    names = [f.name for f in dataclasses.fields(owner)] if dataclasses.is_dataclass(owner) else []
    return names if "." in key else [*names, "experiment", "algorithm"]


def _first_line(text: object) -> str:
    return str(text).strip().split("\n")[0]
