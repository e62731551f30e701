"""`compose`: turn overrides and config groups into an `ExperimentConfig` with resolved, type-checked values.

A launch composes once: it reads the files, merges them and the command line, and checks the values. `Composed` is
passed to everything that needs the config.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from realign.config.command_line import as_layer, prepare, rewritten
from realign.config.construct import fill
from realign.config.errors import (
    OPTIONAL,
    ConfigError,
    explain,
    join_messages,
    nearest,
    not_a_component,
    one_line,
    unknown_key,
)
from realign.config.experiment import COMPONENTS, REPORT, SHORTHANDS, ExperimentConfig, has_experiment, unknown_keys
from realign.config.files import GROUPS, LAUNCHER, ConfigFile, Files
from realign.config.hydra_settings import DEFAULT_LAUNCHER, DEFAULTS, check_launcher, check_settings
from realign.config.keys import suggest_keys
from realign.config.layers import Layers
from realign.config.places import ROOTS
from realign.config.secret_variables import check_no_secrets, without_secrets
from realign.config.trees import get, leaves, merge
from realign.config.words import NONE

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_ROOT_KEYS = tuple(field.name for field in fields(ExperimentConfig) if field.name not in REPORT)
_FOLDERS = ("output_dir", "hydra.sweep.dir")


def compose(overrides: Sequence[str] = (), config_dir: Path | str | None = None) -> ExperimentConfig:
    """Compose a config like the command line.

    Args:
        overrides: Overrides, such as `experiment=grpo_arithmetic`, `steps=10`, `interfaces.actor.adv_norm.std=none`.
        config_dir: Your folder with config groups `experiment/` or `algorithm/`.

    Raises:
        ConfigError: the config is invalid; names the key and the nearest valid one in one line.
    """
    return compose_layers(overrides, config_dir).resolve()


def compose_raw(overrides: Sequence[str] = (), config_dir: Path | str | None = None) -> dict[str, Any]:
    """Compose a config like `compose`, as plain values with missing values (`???`) and unresolved interpolations.

    Raises:
        ConfigError: the config is invalid.
    """
    return compose_layers(overrides, config_dir).tree


def compose_layers(
    overrides: Sequence[str] = (), config_dir: Path | str | None = None, base: str | None = None
) -> Composed:
    """Compose a config.

    Args:
        overrides: As for `compose`.
        config_dir: As for `compose`.
        base: Experiment that a file given by its path builds on if it has neither `defaults` nor a `graph`.

    Raises:
        ConfigError: the config is invalid.
    """
    words = prepare(overrides)
    parsed = parse(words)
    chosen = _choices_of(parsed)
    files = Files(chosen, config_dir, base)
    below = _FileLayers(files.read(), chosen, files.choices, config_dir, base)
    for file in below.files:
        # `.hydra/config.yaml` of a run has the keys of REPORT, and can be used as an experiment file.
        values = {key: value for key, value in file.values.items() if key not in (*REPORT, "hydra")}
        _check_file(file, values)
        below.layers.add_file(values, file.label, file.source, file.starts_preset)
    return _with_command_line(below, words, parsed)


def _defaults() -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(ExperimentConfig()).items() if key in _ROOT_KEYS}


@dataclass(frozen=True)
class _FileLayers:
    """The layers below the command line."""

    files: list[ConfigFile]
    chosen: Mapping[str, tuple[str, ...]]
    """Names that the command line chooses for config groups."""
    choices: Mapping[str, tuple[str, ...]]
    """Those names, and the names that files and defaults choose for other groups."""
    config_dir: Path | str | None
    base: str | None
    layers: Layers = field(default_factory=lambda: Layers(_defaults()))


@dataclass(frozen=True)
class Composed:
    """A composed config."""

    tree: dict[str, Any]
    """Plain values with missing values (`???`) and unresolved interpolations."""
    hydra: dict[str, Any]
    """Settings of Hydra, with those of realign."""
    launcher: str
    """Name of the launcher of a sweep."""
    overrides: tuple[str, ...]
    """Overrides of the command line."""
    typed: tuple[str, ...]
    """Those that do not set Hydra's node."""
    below: _FileLayers

    def again(self, overrides: Sequence[str]) -> Composed:
        """Compose another command line. Files are read again only if it chooses others.

        Raises:
            ConfigError: the config is invalid.
        """
        words = prepare(overrides)
        parsed = parse(words)
        if _choices_of(parsed) != self.below.chosen:
            return compose_layers(words, self.below.config_dir, self.below.base)
        return _with_command_line(self.below, words, parsed)

    def resolve(self) -> ExperimentConfig:
        """Resolve every value, so that missing values (`???`) and invalid interpolations fail early.

        Raises:
            ConfigError: a value is missing or invalid; names the key.
        """
        return resolve(self.tree, self.overrides)

    def with_hydra(self) -> DictConfig:
        """Return the tree with a node `hydra`, which can be resolved."""
        _register_resolvers()
        return OmegaConf.create({**self.tree, "hydra": self.hydra})


def _with_command_line(below: _FileLayers, words: Sequence[str], parsed: Sequence[Override]) -> Composed:
    """Apply the overrides of the command line to the layers of files."""
    for override in parsed:
        if override.key_or_group.partition(".")[0] in REPORT:
            raise ConfigError(f"{override.input_line}: only realign sets {override.key_or_group}")
    launcher, hydra = _hydra_settings(below, parsed)
    values = [override for override in parsed if not _is_group(override) and _root(override.key_or_group) != "hydra"]
    known = [override for override in values if _root(override.key_or_group) in _ROOT_KEYS]
    if len(known) < len(values):
        raise ConfigError(_unknown(below, values, known))
    config, tree = _apply_overrides(below, known)
    typed_roots = _typed_roots(known)
    if unknown_keys(tree, [root for root in typed_roots if root not in ROOTS]):
        raise ConfigError(join_messages(unknown_keys(tree, typed_roots)))  # those of the components, too
    _check_values(tree)
    typed = tuple(word for word, override in zip(words, parsed, strict=True) if not override.is_hydra_override())
    _register_resolvers()
    config["hydra"] = hydra
    _check_folders(config, tree)
    return Composed(tree, hydra, launcher, tuple(words), typed, below)


def _hydra_settings(below: _FileLayers, parsed: Sequence[Override]) -> tuple[str, dict[str, Any]]:
    """Return the launcher and the settings of Hydra that files and command line set, after checking them."""
    nodes = [file.values.get("hydra", {}) for file in below.files]
    launcher = check_launcher(*below.choices.get(LAUNCHER, (DEFAULT_LAUNCHER,)))
    for override in parsed:
        key = override.key_or_group
        if (key.startswith("hydra/") and key != LAUNCHER) or (_root(key) == "hydra" and override.is_delete()):
            named = key.replace("/", ".")
            raise ConfigError(
                f"{override.input_line}: {named}: a config cannot change this setting of Hydra. Remove it."
            )
        if key.startswith("hydra.sweeper.params"):
            raise ConfigError(f"{key}: write the parameters of a sweep as overrides, such as -m seed=0,1.")
        if _root(key) == "hydra" and key != LAUNCHER:
            node = override.value()
            for name in reversed(key.split(".")[1:]):
                node = {name: node}
            nodes.append(node)
    if LAUNCHER in below.choices and Path(below.config_dir or "", LAUNCHER, f"{launcher}.yaml").exists():
        raise ConfigError(f"hydra.launcher={launcher}: a launcher of --config-dir is not allowed. Remove its file.")
    settings = copy.deepcopy({key: dict(value) for key, value in DEFAULTS.items()})
    for node in nodes:
        check_settings(node, launcher)
        merge(settings, node)
    return launcher, settings


def _apply_overrides(below: _FileLayers, overrides: Sequence[Override]) -> tuple[DictConfig, dict[str, Any]]:
    """Return the values of the files with the overrides applied in their order, which can be resolved and plain."""
    # A copy, since `again` applies other command lines to the layers of the same files.
    layers = copy.deepcopy(below.layers)
    upper, deleted = as_layer(overrides, layers.tree)
    fitted = layers.add_command_line(upper, deleted)
    config = OmegaConf.create(layers.tree)
    files = OmegaConf.create(below.layers.tree if any(override.is_delete() for override in overrides) else {})
    for override, key, value in rewritten(overrides, fitted):
        try:
            _apply(config, override, key, value, files)
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error)) from error
        except (AttributeError, AssertionError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(  # a key below a single value
                f"{override.input_line}: incompatible ({one_line(str(error).splitlines()[0])}). "
                "Check for an override below a key that is null or a single value."
            ) from error
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    plain = {str(key): value for key, value in tree.items()}
    keys = (override.key_or_group for override in overrides)
    # For these keys, and only these, `build_experiment` turns a setting without effect into an error. A mapping counts
    # by its leaves.
    set_leaves = (".".join(path) for path, _ in leaves(fitted, ()))
    typed = {*set_leaves, *(key for key in keys if _root(key) not in COMPONENTS)}
    report = {"dropped": layers.list_discarded(plain), "presets": layers.of_presets(typed), "typed": sorted(typed)}
    return config, {**plain, **report}


def _apply(config: DictConfig, override: Override, key: str, value: Any, files: DictConfig) -> None:
    """Apply one override: `key=value`, `+key=value` for a new key, `++key=value` for both, `~key` to delete it.

    `config` lacks the keys of the files that an override deletes.
    """
    if override.package is not None:
        raise ConfigError(f"{override.input_line}: a key has no @. Only a file has a package.")
    if override.is_delete():
        typed = OmegaConf.select(config, key, throw_on_missing=False)
        present = OmegaConf.select(files, key, throw_on_missing=False) if typed is None else typed
        if present is None:
            raise ConfigError(f"~{key}: {key} is not set. `realign --cfg job` shows the keys that are set.")
        if value is not None and value != present:
            raise ConfigError(f"~{key}={value}: {key} is {present}. Remove the value, or correct it.")
        parent, _, name = key.rpartition(".")
        if typed is not None:
            del (OmegaConf.select(config, parent) if parent else config)[name]
        return
    root, _, rest = key.partition(".")
    if not rest:
        _check_values({key: value})
    elif config.get(root, NONE) in (None, NONE) and root in config:
        raise ConfigError(f"{override.input_line}: {key} is a field of {root}, which is null. Remove one of them.")
    # As in Hydra: `+key={...}` merges into a mapping that exists.
    may_exist = not override.is_add() or isinstance(value, dict | list)
    if not may_exist and OmegaConf.select(config, key, throw_on_missing=False) is not None:
        raise ConfigError(
            f"{override.input_line}: Could not append to config. An item is already at '{key}'. Remove the +, or write "
            "++ to set a key that may exist."
        )
    OmegaConf.update(config, key, value, merge=True, force_add=True)


def parse(words: Sequence[str]) -> list[Override]:
    """Parse the overrides of one run.

    Raises:
        ConfigError: a word is no override, or has several values.
    """
    from hydra.core.override_parser.types import ValueType

    parsed = parse_sweep(words)
    for override in parsed:
        if override.is_sweep_override():
            key, _, value = str(override.input_line).partition("=")
            if override.value_type is not ValueType.SIMPLE_CHOICE_SWEEP:
                raise ConfigError(f"{override.input_line}: a sweep needs -m.")
            raise ConfigError(
                f"{key}={value}: a comma separates the values of a sweep. For a sweep, add -m; for a list, write "
                f"'{key}=[{value}]'; for a decimal number, use a point."
            )
    return parsed


def parse_sweep(words: Sequence[str]) -> list[Override]:
    """Parse overrides that may have several values.

    Raises:
        ConfigError: a word is no override.
    """
    # Imported here, so that `realign --help` does not import Hydra.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    _check_words(words)
    try:
        return OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise ConfigError(explain(error)) from error


def _is_group(override: Override) -> bool:
    """Return whether an override chooses a file of a config group."""
    return override.key_or_group in (*GROUPS, LAUNCHER) and not isinstance(override.value(), dict)


def _choices_of(parsed: Sequence[Override]) -> dict[str, tuple[str, ...]]:
    """Return the names that the command line chooses for each config group; none for no file."""
    chosen: dict[str, tuple[str, ...]] = {}
    for override in filter(_is_group, parsed):
        name = override.value()
        group = override.key_or_group
        if override.package is not None or override.is_add() or override.is_force_add():
            raise ConfigError(f"{override.input_line}: a config group takes one word. Write {group}=NAME.")
        names = name if isinstance(name, list) else [name]
        chosen[group] = () if name is None or override.is_delete() else tuple(map(str, names))
    return chosen


def _check_words(overrides: Sequence[str]) -> None:
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


def _unknown(below: _FileLayers, overrides: Sequence[Override], known: Sequence[Override]) -> str:
    """Return the message about unknown root keys: the nearest ones, or nested keys of the same name."""
    tree: dict[str, Any] = {}
    with suppress(ConfigError):  # which is reported when the names of these keys are right
        _, tree = _apply_overrides(below, known)
    nested = unknown_keys(tree, _typed_roots(known))
    unknown = {_root(o.key_or_group): o.key_or_group.lstrip("+~") for o in overrides if o not in known}
    return join_messages([*(_unknown_root(root, key, tree) for root, key in unknown.items()), *nested])


def _typed_roots(overrides: Sequence[Override]) -> list[str]:
    """Return the root keys below which overrides set something."""
    typed = {_root(override.key_or_group) for override in overrides if "." in override.key_or_group}
    return [root for root in _ROOT_KEYS if root in typed]


def _root(word: str) -> str:
    """Return the first name of the key of an override."""
    return re.split(r"[=./@:]", word.lstrip("+~"), maxsplit=1)[0]


def _unknown_root(name: str, key: str, config: Any) -> str:
    """Return the message about the unknown root of a key: the nearest one, or nested keys that end alike."""
    if name in GROUPS:
        return f"{name}=NAME chooses a file, and there are no keys below {name}"
    if near := nearest(name, [*_ROOT_KEYS, *GROUPS]):
        return f"unknown key {name!r}; did you mean {near!r}?"
    keys = [full for full, _ in _leaves(config) if f".{full}".endswith(f".{key}")] or suggest_keys(key)
    others = "`realign help` lists the keys, and docs/migration.md names of TRL, verl, OpenRLHF, AReaL and realhf"
    if keys:
        return f"unknown key {key!r}; did you mean {' or '.join(keys[:3])}?"
    return f"unknown key {name!r}. {others}."


def resolve(tree: dict[str, Any], overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Resolve every value of a composed config, so that missing values (`???`) and invalid interpolations fail early.

    Args:
        tree: Plain values with unresolved interpolations.
        overrides: Overrides of the command line. If values are missing, their misspelt keys are reported first.

    Raises:
        ConfigError: a value is missing or invalid; names the key.
    """
    tree = {key: _without_shorthands(value) for key, value in tree.items()}
    _check_roles(tree)
    # OmegaConf's search for missing values does not find interpolations of a missing value
    if missing := sorted(key for key, value in _leaves(tree) if value == "???"):
        raise ConfigError(_describe_missing(missing, tree, overrides))
    return _resolve(tree)


def _resolve(tree: dict[str, Any]) -> ExperimentConfig:
    """Resolve a tree without missing values."""
    _register_resolvers()
    try:
        with without_secrets():
            plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(plain, dict)
    return config_of({str(key): value for key, value in plain.items()})


_STAND_IN = "file.py:name"
"""Value in place of a missing one, which is a path or a function, while the rest is checked."""


def _describe_missing(keys: Sequence[str], config: Any, overrides: Sequence[str]) -> str:
    """Return the message about missing values, or about a mistake that may be their cause."""
    typed = {word.lstrip("+~").partition(".")[0] for word in overrides if "." in word.partition("=")[0]}
    if unknown := unknown_keys(config, [root for root in ROOTS if root in typed]):
        return join_messages(unknown)
    if mistake := _mistake(keys, config, overrides):
        return mistake
    if has_experiment(config):
        return f"missing values: {', '.join(keys)}. Set a value, such as {keys[0]}=VALUE."
    if preset := next(iter(config["presets"].values()), None):
        # Presets of policies set the objective; the others are losses on preference pairs.
        kind = "grpo" if "interfaces.actor.objective" in config["presets"] else "dpo"
        return f"{preset} changes an experiment, so choose one too, such as experiment={kind} {preset}."
    return f"missing values: {', '.join(keys)}. Start from experiment=NAME; `realign --help` lists the experiments."


def _mistake(missing: Sequence[str], config: Any, overrides: Sequence[str]) -> str | None:
    """Return the message about a mistake in what was typed, found with stand-ins for missing values; None if none is.

    Messages about keys that nobody typed may be about the stand-ins.
    """
    from realign.config.experiment import build_experiment  # imports torch
    from realign.runtime.checks.parts import check_parts

    tree = copy.deepcopy(config)
    for key in missing:
        *path, name = key.split(".")
        get(tree, tuple(path))[name] = _STAND_IN
    typed = {".".join(word.lstrip("+~").partition("=")[0].split(".")[:2]) for word in overrides}
    try:
        check_parts(build_experiment(_resolve(tree)))
    except ConfigError as error:
        text = str(error)
        named = any(text.startswith(key) for key in typed) and not any(text.startswith(key) for key in missing)
        return text if named else None
    except Exception:  # of a class of the user that reads a stand-in
        return None
    return None


def _without_shorthands(node: Any) -> Any:
    """Return a node in which missing values of `SHORTHANDS` are null where the other field is set."""
    if not isinstance(node, dict):
        return node
    unused = {key for key, other in SHORTHANDS.items() if node.get(key) == "???" and node.get(other)}
    return {key: None if key in unused else _without_shorthands(value) for key, value in node.items()}


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every item that is neither a mapping nor a list."""
    if not isinstance(node, dict | list):
        yield path, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _check_roles(config: Any) -> None:
    """Raise an error for a plain value in place of a component, before an interpolation of its fields fails."""
    for place in ("models", "interfaces"):
        for role, node in (config.get(place) or {}).items():
            if not isinstance(node, dict) and node is not None and not str(node).startswith("${"):
                raise ConfigError(not_a_component(f"{place}.{role}", repr(node)))


def config_of(plain: Mapping[str, Any], base: ExperimentConfig | None = None) -> ExperimentConfig:
    """Return the config for plain values, such as those of a saved `config.yaml`. Components stay unchanged.

    Args:
        plain: Values by root key.
        base: Where missing values come from; None: they are the defaults, or errors.
    """
    for key in COMPONENTS:
        value = plain.get(key, {})
        if not isinstance(value, Mapping) and not (value is None and key in OPTIONAL):
            shown = "null" if value is None else "a text" if isinstance(value, str) else repr(value)
            raise ConfigError(not_a_component(key, shown))
    values = fill(ExperimentConfig, {key: value for key, value in plain.items() if key not in COMPONENTS}, "", base)
    return replace(values, **{key: value for key, value in plain.items() if key in COMPONENTS})


def _check_values(tree: Mapping[str, Any]) -> None:
    """Check the values outside of components, as far as they are known before interpolations are resolved.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type.
    """
    # The base fills in what is open, so that only the values that are known can be wrong.
    config_of({key: _drop_open(value) for key, value in tree.items() if not _is_open(value)}, ExperimentConfig())


def _is_open(value: Any) -> bool:
    """Return whether a value is missing or an interpolation."""
    return isinstance(value, str) and (value == "???" or "${" in value)


def _drop_open(value: Any) -> Any:
    return {k: _drop_open(v) for k, v in value.items() if not _is_open(v)} if isinstance(value, dict) else value


def _check_file(file: ConfigFile, values: Mapping[str, Any]) -> None:
    """Check the values of one file, so that the message names it."""
    try:
        if "owns" in values:
            raise ConfigError(
                "remove owns: a preset resets the settings that the class of the actor lists as ALGORITHM_SETTINGS"
            )
        if unknown := [key for key in values if key not in _ROOT_KEYS]:
            raise ConfigError(join_messages(unknown_key(key, [*_ROOT_KEYS, *GROUPS]) for key in unknown))
        _check_values(values)
    except ConfigError as error:
        raise ConfigError(f"{file.source}: {error}") from error


def _check_folders(config: DictConfig, tree: Mapping[str, Any]) -> None:
    """Check that no value reads a secret, and that no folder contains a control character.

    A launcher writes `hydra.sweep.dir`, which can contain `output_dir`, into the shell script of a job. A line break
    would start a new command.

    Raises:
        ConfigError: names the setting and its value.
    """
    check_no_secrets(config, _leaves(tree))
    for key in _FOLDERS:
        try:
            value = OmegaConf.select(config, key)
        except InterpolationToMissingValueError:  # such as output_dir=???, which a launcher cannot resolve either
            continue
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error)) from error
        if not str(value).isprintable():
            raise ConfigError(f"{key}={value!r:.200}: the folder contains a control character. Remove it.")


def _register_resolvers() -> None:
    """Register `${now:...}`, as Hydra does."""
    from hydra.core.utils import setup_globals

    setup_globals()
