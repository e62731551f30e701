"""`compose`: turn overrides and config groups into an `ExperimentConfig` with resolved, type-checked values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realign.config.construct import fill
from realign.config.errors import OPTIONAL, ConfigError, joined, nearest, not_a_component, one_line
from realign.config.experiment import COMPONENTS, REPORT, SHORTHANDS, ExperimentConfig, unknown_keys
from realign.config.explain import explain
from realign.config.folders import GROUPS, SCHEME
from realign.config.hydra_node import check_folders, check_node, launcher_of, node_of, without_hydra
from realign.config.places import ROOTS
from realign.config.secret_variables import check_no_secrets, without_secrets
from realign.config.shell_words import prepare

ROOT_KEYS = tuple(field.name for field in fields(ExperimentConfig) if field.name not in REPORT)
KNOWN_ROOTS = frozenset({*ROOT_KEYS, *REPORT, *GROUPS, "hydra"})


def compose(overrides: Sequence[str] = (), config_dir: Path | str | None = None) -> ExperimentConfig:
    """Compose a config like the command line, without a Hydra application.

    Args:
        overrides: Overrides, such as `experiment=grpo_arithmetic`, `steps=10`, `interfaces.actor.adv_norm.std=none`.
        config_dir: Your folder with config groups `experiment/` or `algorithm/`.

    Raises:
        ConfigError: the config is invalid; names the key and the nearest valid one in one line.
    """
    return resolve(_composed(overrides, config_dir), overrides)


def compose_raw(overrides: Sequence[str] = (), config_dir: Path | str | None = None) -> dict[str, Any]:
    """Compose a config like `compose`, as plain values with missing values (`???`) and unresolved interpolations.

    Raises:
        ConfigError: the config is invalid.
    """
    plain = OmegaConf.to_container(_composed(overrides, config_dir), resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _composed(overrides: Sequence[str], config_dir: Path | str | None) -> DictConfig:
    # Imported here, so that `realign --help` does not import Hydra.
    from hydra.errors import HydraException
    from yaml import YAMLError

    overrides = prepare(overrides)
    check_words(overrides)
    register_schema()

    try:
        _refuse_search_path(overrides)
        return without_hydra(_checked(overrides, config_dir))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_explained(error, overrides, config_dir)) from error


def check_words(overrides: Sequence[str]) -> None:
    """Check that every word is an override, and detect overrides split by a space.

    Raises:
        ConfigError: a word of the command line is not an override.
    """
    for before, word in zip(["", *overrides], overrides, strict=False):
        if "=" not in word and not word.startswith("~"):
            torn = f" Remove the space after =: {before}{word}." if before.endswith("=") else ""
            raise ConfigError(f"{word!r} is not an override. Write key=value.{torn}")
        if not word.lstrip("+~").partition("=")[0].strip():
            raise ConfigError(f"{word!r} is not an override: its key is missing. Write key=value.")


def _explained(error: Exception, overrides: Sequence[str], config_dir: Path | str | None) -> str:
    """Return the message of a Hydra error. For an unknown root key, suggest nested keys of the same name."""
    message = explain(error)
    unknown = {word: root for word in overrides if (root := _root(word)) not in KNOWN_ROOTS}
    if not message.startswith("unknown key") or not unknown:
        return message
    others = [word for word in overrides if word not in unknown]
    whole: Any = {}
    with suppress(Exception):  # another error, which is reported when the names of these keys are right
        whole = OmegaConf.to_container(without_hydra(_whole([*search_path(config_dir), *others])), resolve=False)
    typed = {_root(word) for word in others if "." in word.partition("=")[0]}
    nested = unknown_keys(whole, [root for root in ROOTS if root in typed])
    return joined([*(_unknown_root(root, whole) for root in unknown.values()), *nested])


def _root(word: str) -> str:
    """Return the first name of the key of an override."""
    return re.split(r"[=./@:]", word.lstrip("+~"), maxsplit=1)[0]


def _unknown_root(name: str, config: Any) -> str:
    """Return the message about an unknown root key: the nearest one, or nested keys of the same name."""
    if near := nearest(name, [*ROOT_KEYS, *GROUPS]):
        return f"unknown key {name!r}; did you mean {near!r}?"
    keys = [key for key, _ in _leaves(config) if key.rpartition(".")[2] == name]
    others = "`realign help` lists the keys, and docs/migration.md names of TRL, verl, OpenRLHF, AReaL and realhf"
    return f"unknown key {name!r}" + (f"; did you mean {' or '.join(keys[:3])}?" if keys else f". {others}.")


def resolve(composed: DictConfig, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Resolve every value of a composed config, so that missing values (`???`) and invalid interpolations fail early.

    Args:
        composed: The config.
        overrides: Overrides of the command line. If values are missing, their misspelt keys are reported first.

    Raises:
        ConfigError: a value is missing or invalid; names the key.
    """
    try:
        _clear_shorthands(composed)
        unresolved = OmegaConf.to_container(composed, resolve=False)
        _check_roles(unresolved)
        # OmegaConf's search for missing values does not find interpolations of a missing value
        if missing := sorted(key for key, value in _leaves(unresolved) if value == "???"):
            raise ConfigError(_missing(missing, unresolved, overrides))
        with without_secrets():
            plain = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(plain, dict)
    return config_of({str(key): value for key, value in plain.items()})


def _missing(keys: Sequence[str], config: Any, overrides: Sequence[str]) -> str:
    """Return the message about missing values, or about a mistake that may be their cause."""
    typed = {word.lstrip("+~").partition(".")[0] for word in overrides if "." in word.partition("=")[0]}
    if unknown := unknown_keys(config, [root for root in ROOTS if root in typed]):
        return joined(unknown)
    if config["graph"]:
        return f"missing values: {', '.join(keys)}. Set a value, such as {keys[0]}=VALUE."
    if preset := next((owner for owner in config["owners"].values() if owner.startswith("algorithm=")), None):
        kind = "grpo" if "interfaces.actor.objective" in config["owners"] else "dpo"
        return f"{preset} changes an experiment, so choose one too, such as experiment={kind} {preset}."
    return f"missing values: {', '.join(keys)}. Start from experiment=NAME; `realign --help` lists the experiments."


def _clear_shorthands(node: Any) -> None:
    """Set missing values of `SHORTHANDS` to null where the other field is set."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing() or node._is_interpolation():
        return
    for key in list(node):
        if SHORTHANDS.get(str(key)) in node and OmegaConf.is_missing(node, str(key)) and node[SHORTHANDS[str(key)]]:
            node[key] = None
        elif not OmegaConf.is_missing(node, str(key)):
            _clear_shorthands(node._get_node(key))


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every item that is neither a mapping nor a list."""
    if not isinstance(node, dict | list):
        yield path, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _check_roles(config: Any) -> None:
    """Raise an error for a plain value in place of a component, before an interpolation of its fields fails."""
    for place in ("models", "interfaces", "trackers"):
        for role, node in (config.get(place) or {}).items():
            if not isinstance(node, dict) and node is not None and not str(node).startswith("${"):
                raise ConfigError(not_a_component(f"{place}.{role}", repr(node)))


def config_of(plain: Mapping[str, Any]) -> ExperimentConfig:
    """Return the config for plain values, such as those of a saved `config.yaml`. Components stay unchanged."""
    for key in COMPONENTS:
        empty = plain.get(key, {}) is None and key in OPTIONAL
        if not empty and not isinstance(plain.get(key, {}), Mapping):
            raise ConfigError(not_a_component(key, repr(plain[key])))
    values = fill(ExperimentConfig, {key: value for key, value in plain.items() if key not in COMPONENTS}, "")
    return replace(values, **{key: value for key, value in plain.items() if key in COMPONENTS})


def register_schema() -> None:
    """Register the schema that `experiments/config.yaml` is based on with Hydra."""
    from hydra.core.config_store import ConfigStore

    schema = OmegaConf.structured(ExperimentConfig)
    for key in COMPONENTS:
        OmegaConf.set_struct(schema[key], False)
    ConfigStore.instance().store(name="experiment_schema", node=schema)


def search_path(config_dir: Path | str | None) -> list[str]:
    """Return the override that adds a user's folder of config groups to Hydra's search path."""
    quoted = [url.replace("\\", "\\\\").replace("'", "\\'") for url in _search_urls(config_dir)]
    return [f"hydra.searchpath=['{url}']" for url in quoted]


def _search_urls(config_dir: Path | str | None) -> list[str]:
    """Return the value of Hydra's search path that `search_path` sets."""
    if config_dir is None:
        return []
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir={config_dir}: this folder does not exist.")
    return [f"{SCHEME}://{folder}"]


def check_launch(overrides: Sequence[str], config_dir: Path | str | None = None) -> str:
    """Check the `hydra` node in every run that a command line starts, and return the name of its launcher.

    Args:
        overrides: As for `compose`. For a sweep (`seed=1,2`), each combination is composed.
        config_dir: As for `compose`.

    Raises:
        ConfigError: the config is invalid; names the key.
    """
    from hydra.errors import HydraException
    from yaml import YAMLError

    check_words(overrides)
    register_schema()
    try:
        _refuse_search_path(overrides)
        given = _choices(overrides)
        whole = _checked([choice.text for choice in given if choice.values == [choice.text]], config_dir)
        params = [f"{key}={value}" for key, value in (whole.hydra.sweeper.get("params") or {}).items()]
        swept = {choice.key: choice.values for choice in [*_choices(params), *given]}  # the command line has precedence
        if params or any(len(values) > 1 for values in swept.values()):
            for words in product(*swept.values()):
                _checked(words, config_dir)
        return launcher_of(node_of(whole))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(_explained(error, overrides, config_dir)) from error


def _refuse_search_path(overrides: Sequence[str]) -> None:
    """Raise an error for overrides of Hydra's search path, before the config is composed.

    A search path can name a Python package, which Hydra would import to read configs from it.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for text, one in zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True):
        if one.key_or_group == "hydra.searchpath":
            raise ConfigError(f"{one_line(text)}: this setting of Hydra cannot be changed. Use --config-dir.")


def _checked(overrides: Sequence[str], config_dir: Path | str | None) -> DictConfig:
    """Compose the whole config, and check the `hydra` node.

    Raises:
        ConfigError: the `hydra` node changes a setting that no config may change.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = [*search_path(config_dir), *overrides]
    whole = _whole(words)
    found = node_of(whole)
    given: dict[str, list[str]] = {"hydra": [], "task": []}
    for word, one in zip(words, OverridesParser.create().parse_overrides(words), strict=True):
        given["hydra" if one.is_hydra_override() else "task"].append(word)
    default = _default_node(launcher_of(found))
    check_node(found, {**default, "overrides": given, "searchpath": _search_urls(config_dir)})
    composed = without_hydra(whole)
    check_no_secrets(composed, _leaves(OmegaConf.to_container(composed, resolve=False)))
    check_folders(whole)
    return whole


@cache
def _default_node(launcher: str) -> Mapping[str, Any]:
    """Return the `hydra` node composed with a launcher, without files and overrides of the user."""
    return MappingProxyType(node_of(_whole([f"hydra/launcher={launcher}"])))


def _whole(overrides: Sequence[str]) -> DictConfig:
    """Compose the whole config with Hydra, including the `hydra` node."""
    from hydra.errors import ConfigCompositionException

    from realign.config.loader import whole_config

    try:
        return whole_config(overrides)
    except KeyError as error:  # Hydra reads environment variables that the config names
        raise ConfigCompositionException(
            f"hydra.job.env_copy: the environment variable {error} is not set. Keep the default of this setting."
        ) from error
    except (AttributeError, AssertionError, TypeError, RecursionError) as error:  # OmegaConf merges into null
        raise ConfigCompositionException(
            f"overrides {' '.join(overrides)}: incompatible ({one_line(str(error).splitlines()[0])}). "
            "Check for an override below a key that is null or a single value."
        ) from error


@dataclass(frozen=True)
class _Choice:
    """An override, and its expansion in the runs of a sweep."""

    text: str
    """The text of the override."""
    key: str
    """Key of the override, including a leading + or ~."""
    values: list[str]
    """The override itself, or one override per value in a sweep."""


def _choices(overrides: Sequence[str]) -> list[_Choice]:
    """Parse overrides, and expand those that are swept."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob

    found = []
    for text, one in zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True):
        key = one.get_key_element()
        if isinstance(one.value(), Glob):
            raise ConfigError(f"{text}: glob is not supported. List the values: {key}=a,b.")
        sweep = one.is_discrete_sweep()
        values = [f"{key}={value}" for value in one.sweep_string_iterator()] if sweep else [text]
        found.append(_Choice(text, key, values))
    return found
