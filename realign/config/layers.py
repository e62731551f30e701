"""Layers of a config: the files, from the root file to `algorithm=`, and the command line as the highest layer.

A layer that selects a class for a component discards the fields that lower layers set for another class. Fields for the
same class are merged. A layer that lists a key under `owns` discards all lower values of this key. The layers are
changed before Hydra merges them, so interpolations, packages and deletions follow Hydra's rules. Classes are imported
only if two layers select different classes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from realign.config.command_line import Word
from realign.config.errors import ConfigError, suggest
from realign.config.places import ROOTS, Place, place_of
from realign.config.schema import REPORT
from realign.config.trees import MISSING, Path, delete_leaf, get, has, leaves, merge, node_at, remove
from realign.config.words import NONE, TARGET, is_word, snake_case

OWNS = "owns"
"""Key of a file that lists the config keys that the file owns."""


@dataclass(frozen=True)
class Layer:
    """One config file, as loaded by Hydra."""

    source: str
    """Path of the file, such as experiment/ppo.yaml."""
    config: DictConfig


@dataclass(frozen=True)
class Dropped:
    """A key of a lower layer that a higher layer discarded."""

    path: Path
    value: Any
    source: str
    by: str
    """The layer that discarded it."""

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}={self.value} of {self.source} (by {self.by})"


@dataclass
class Layers:
    """The layers of one config, from the lowest to the highest."""

    files: list[Layer] = field(default_factory=list)
    """Files, lowest layer first."""
    view: dict[str, Any] = field(default_factory=dict)
    """Merged component values of the layers so far, as plain values with unresolved interpolations."""
    drops: list[Dropped] = field(default_factory=list)
    """Discarded keys."""
    owners: dict[str, str] = field(default_factory=dict)
    """Config key -> the layer that owns it, such as algorithm=gspo."""

    def add_file(self, path: str, config: Any) -> None:
        """Add a file, as loaded by Hydra, on top of the files so far. Removes `owns` from it.

        Raises:
            ConfigError: `owns` lists an unknown key, or a word is invalid.
        """
        if not isinstance(config, DictConfig):
            return
        owned = self._pop(config, OWNS)
        for key in REPORT:
            self._pop(config, key)
        whole = OmegaConf.to_container(config, resolve=False)
        assert isinstance(whole, dict)
        upper = {str(key): value for key, value in whole.items() if key in ROOTS and isinstance(value, dict)}
        group, _, name = path.rpartition("/")
        label = f"{group}={name}" if group else f"{path}.yaml"
        self._own(owned, upper, label)
        words = self._lay(upper, label)
        self.files.append(Layer(f"{path}.yaml", config))
        for place, target in words.items():
            self._set_target(place, target)
        merge(self.view, upper)

    def add_command_line(self, tree: dict[str, Any], deleted: Sequence[Path]) -> dict[Path, str]:
        """Add the overrides of the command line on top of the files.

        Args:
            tree: Values of the overrides, nested. A `Word` represents the class of a component with further keys.
            deleted: Keys that `~` removes.

        Returns:
            The import path of the class for each key whose word must be rewritten.

        Raises:
            ConfigError: an override contradicts the owner of its key, or a word is invalid.
        """
        self._check_owned(tree, deleted)
        for path in deleted:
            remove(self.view, path)
        rewritten = self._lay(tree, None)
        merge(self.view, tree)
        return rewritten

    def dropped(self) -> list[str]:
        """Return the discarded keys whose values differ from the final ones, with their file and the higher layer."""
        return [str(drop) for drop in self.drops if get(self.view, drop.path, MISSING) != drop.value]

    # --- class selection ---

    def _lay(self, upper: dict[str, Any], by: str | None) -> dict[Path, str]:
        """Discard the lower values that do not apply to the classes that `upper` selects.

        Returns:
            The import path for each word of `upper` whose component has fields.
        """
        rewritten: dict[Path, str] = {}
        for root, node in upper.items():
            for path, value in _root_places(root, node):
                if isinstance(value, dict):
                    place, lower = place_of(path), get(self.view, path)
                    if is_word(lower) and TARGET not in value and (target := place.of_word(lower)) is not None:
                        self._set_target(path, target)
                    self._lay_component(place, path, value, by, rewritten)
        return rewritten

    def _lay_component(
        self, place: Place, path: Path, upper: dict[str, Any], by: str | None, rewritten: dict[Path, str]
    ) -> None:
        """Apply a mapping of the upper layer to the component at `path`; `by` is None for the command line."""
        if isinstance(upper.get(TARGET), Word):
            upper[TARGET] = rewritten[path] = _resolved(place, upper[TARGET])
        if upper:
            self._expand(path)
        lower = self._mapping(path)
        below, target = lower.get(TARGET), upper.get(TARGET)
        if target is not None and lower and target != below:
            old, new = place.chosen(self._text(below)), place.chosen(self._text(target))
            if old is not None and new is not None and old != new:
                if place.is_root:
                    self._refit(path, (place, below), (place, target), upper, by)
                else:
                    self._drop(path, by)
        chosen = self._text(target if target is not None else self._mapping(path).get(TARGET))
        for name in upper:
            if name != TARGET:
                self._lay_field(place.child(name, chosen), (*path, name), upper, by, rewritten)

    def _lay_field(
        self, place: Place, path: Path, owner: dict[str, Any], by: str | None, rewritten: dict[Path, str]
    ) -> None:
        """Apply one field of the upper layer to the value at `path`; `owner` is the mapping that contains the field."""
        value, lower = owner[path[-1]], get(self.view, path)
        if is_word(value) and isinstance(lower, dict):
            target = place.of_word(value)
            if target is None:
                return
            owner[path[-1]] = value = {TARGET: target}
            rewritten[path] = target
        if not isinstance(value, dict):
            return
        if is_word(lower) and TARGET not in value and (target := place.of_word(lower)) is not None:
            self._set_target(path, target)
        self._lay_component(place, path, value, by, rewritten)

    def _refit(
        self, path: Path, old: tuple[Place, Any], new: tuple[Place, Any], upper: dict[str, Any], by: str | None
    ) -> None:
        """Discard the settings of a root component that do not apply to its new class.

        These are unknown fields, and fields of nested components whose default class differs in the new class.
        """
        (old_place, old_target), (new_place, new_target) = old, new
        known = new_place.fields(self._text(new_target))
        if known is None:
            return
        for name, node in list(self._mapping(path).items()):
            field_path = (*path, name)
            if name == TARGET:
                continue
            if name not in known:
                self._drop(field_path, by)
            elif isinstance(node, dict):
                was, now = old_place.child(name, old_target), new_place.child(name, new_target)
                above = upper.get(name)
                if TARGET in node:
                    if now.chosen(self._text(node[TARGET])) is None:
                        self._drop(field_path, by)
                elif was.chosen(None) == now.chosen(None):
                    self._refit(field_path, (was, None), (now, None), above if isinstance(above, dict) else {}, by)
                elif (cls := was.chosen(None)) is not None:
                    if is_word(above) or (isinstance(above, dict) and TARGET in above):
                        node[TARGET] = cls.path  # compared with the class that the upper layer selects
                    else:
                        self._drop(field_path, by)

    # --- keys that a layer owns ---

    def _own(self, owned: Any, upper: Mapping[str, Any], by: str) -> None:
        """Discard the lower values of the keys that a layer lists under `owns`."""
        if owned is None:
            return
        if not isinstance(owned, list) or not all(isinstance(key, str) for key in owned):
            raise ConfigError(
                f"{by}: {OWNS} takes a list of keys, such as [interfaces.actor.objective], found {owned!r}"
            )
        for key in owned:
            path = tuple(key.split("."))
            self._check_place(path, upper, by)
            self._drop(path, by)
            self.owners[key] = by

    def _check_place(self, path: Path, upper: Mapping[str, Any], by: str) -> None:
        where = f"{by}: {OWNS} lists {'.'.join(path)}"
        if path[0] not in ROOTS:
            raise ConfigError(f"{where}, but there is no {path[0]!r}{suggest(path[0], ROOTS)}")
        if ROOTS[path[0]].per_role and len(path) > 1:
            roles = {*self.view.get(path[0], {}), *upper.get(path[0], {})}
            if path[1] not in roles and difflib.get_close_matches(path[1], roles, cutoff=0.75):
                raise ConfigError(f"{where}, but there is no role {path[1]!r}{suggest(path[1], roles)}")

    def _check_owned(self, tree: Mapping[str, Any], deleted: Sequence[Path]) -> None:
        """Raise an error for overrides that replace an owned component. Fields of its class may be overridden."""
        for key, owner in self.owners.items():
            path = tuple(key.split("."))
            lower, upper = get(self.view, path, MISSING), get(tree, path, MISSING)
            if lower is MISSING:
                continue
            if any(path[: len(gone)] == gone for gone in deleted):
                raise ConfigError(f"~{key} contradicts {owner}, which sets {key}; remove one of them")
            if upper is not MISSING and _contradicts(upper, lower):
                raise ConfigError(
                    f"{key}: {_shown(upper)} contradicts {owner}, which sets it to {_shown(lower)}; remove one of them"
                )

    # --- files ---

    def _drop(self, path: Path, by: str | None) -> None:
        """Discard all values at a path from the files and the view, and record them."""
        if not has(self.view, path):
            return
        for leaf, value in list(leaves(get(self.view, path), path)):
            holders = [layer for layer in self.files if node_at(layer.config, leaf) is not None]
            if by is None and (owned := self._owner_of(leaf)) is not None and holders:
                place, owner = owned
                raise ConfigError(f"{place}: the command line chooses another class than {owner}; remove one of them")
            if holders:
                self.drops.append(Dropped(leaf, value, holders[-1].source, by or "the command line"))
            for layer in holders:
                delete_leaf(layer.config, leaf, len(path))
        remove(self.view, path)
        for key in [key for key in self.owners if tuple(key.split("."))[: len(path)] == path]:
            del self.owners[key]  # a higher layer sets this key now

    def _owner_of(self, path: Path) -> tuple[str, str] | None:
        owned = ((key, by) for key, by in self.owners.items() if path[: key.count(".") + 1] == tuple(key.split(".")))
        return next(owned, None)

    def _set_target(self, path: Path, target: str) -> None:
        """Replace a word by its class in the highest file that contains it, and in the view."""
        self._write(path, {TARGET: target})
        if is_word(get(self.view, path)):
            get(self.view, path[:-1])[path[-1]] = {TARGET: target}

    def _expand(self, path: Path) -> None:
        """Replace an interpolation of a whole component by one interpolation per value, so that a layer can set some.

        For overrides of the command line, Hydra would replace the interpolation, and so all other values.
        """
        text = get(self.view, path)
        source = re.fullmatch(r"\$\{([\w.]*\w)\}", text) if isinstance(text, str) else None
        found = self._mapping(path)
        if source is not None and found:
            get(self.view, path[:-1])[path[-1]] = linked = _links(found, source[1])
            self._write(path, linked)

    def _write(self, path: Path, value: Mapping[str, Any]) -> None:
        """Replace a value in the highest file that contains it."""
        for layer in reversed(self.files):
            if node_at(layer.config, path) is not None:
                with flag_override(layer.config, ["struct", "readonly"], False):
                    node_at(layer.config, path[:-1])[path[-1]] = value
                return

    @staticmethod
    def _pop(config: DictConfig, key: str) -> Any:
        if key not in config or OmegaConf.get_type(config) is not dict:  # the schema contains the keys of `REPORT`
            return None
        with flag_override(config, ["struct", "readonly"], False):
            found = config.pop(key)
        return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found

    # --- access ---

    def _mapping(self, path: Path) -> dict[str, Any]:
        """Return the mapping at a path of the view, with interpolations resolved; empty if there is none."""
        found = get(self.view, path)
        if isinstance(found, str) and "${" in found:
            found = self._interpolated(found)
        return found if isinstance(found, dict) else {}

    def _text(self, target: Any) -> Any:
        return self._interpolated(target) if isinstance(target, str) and "${" in target else target

    def _interpolated(self, text: str) -> Any:
        try:
            value = OmegaConf.create({**self.view, "_asked_": text})._get_node("_asked_")._maybe_dereference_node()  # type: ignore[union-attr]
            if value is None:
                return None  # the key is outside the components, or a higher layer sets it
            return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value._value()
        except OmegaConfBaseException:
            return None


def _links(node: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return interpolations of the values of the mapping `node` at the key `source`."""
    return {
        key: _links(value, f"{source}.{key}")
        if isinstance(value, dict)
        else value
        if key == TARGET
        else f"${{{source}.{key}}}"
        for key, value in node.items()
    }


def _resolved(place: Place, word: Word) -> str:
    target = place.of_word(word.text)
    if target is None:
        raise ConfigError(f"{place.key}={word.text} is not a component, but a further key sets a field of it")
    return target


def _contradicts(upper: Any, lower: Any) -> bool:
    """Return whether an override contradicts the owner of its key. The classes of two mappings are compared later."""
    if isinstance(upper, dict):
        if lower is None or lower == NONE:
            return True
        return is_word(lower) and TARGET in upper and lower != _word_of(upper[TARGET])
    if isinstance(lower, dict):
        return not is_word(upper)
    return bool(upper != lower) and {upper, lower} != {None, NONE}


def _word_of(target: Any) -> str:
    return target.text if isinstance(target, Word) else snake_case(str(target).rpartition(".")[2])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return _word_of(value[TARGET]) if TARGET in value else "a component"
    return NONE if value is None else str(value)


def _root_places(root: str, node: Any) -> Iterator[tuple[Path, Any]]:
    if ROOTS[root].per_role:
        for role, value in node.items() if isinstance(node, dict) else ():
            yield (root, role), value
    else:
        yield (root,), node
