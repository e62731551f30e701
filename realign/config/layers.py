"""Layers of a config: the files, from the lowest to `algorithm=`, and the command line as the highest layer.

Each layer is a mapping of plain values, and is merged over those below it, key by key. A layer that selects another
class for a component first discards the fields that lower layers set for the earlier one. A preset first discards what
lower layers set in the settings of its algorithm, which the classes of the interfaces name. Interpolations are text
until all layers are merged.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realign.config.command_line import Word
from realign.config.errors import ConfigError
from realign.config.places import ROOTS, Place, place_of
from realign.config.trees import MISSING, Path, get, has, leaves, merge, remove
from realign.config.words import TARGET, is_word


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
    """The values of the layers so far, from the lowest to the highest."""

    tree: dict[str, Any]
    """Merged values, with unresolved interpolations. Initially the defaults of the schema."""
    sources: dict[Path, str] = field(default_factory=dict)
    """Path of a value -> the highest file that sets it."""
    drops: list[Dropped] = field(default_factory=list)
    """Discarded keys."""

    def add_file(self, upper: dict[str, Any], label: str, source: str, starts_preset: bool = False) -> None:
        """Add a file on top of the files so far.

        Args:
            upper: Plain values, from the root.
            label: Name of the layer, such as experiment=ppo.
            source: Path of the file, for messages.
            starts_preset: Whether it is the lowest file of a preset.

        Raises:
            ConfigError: a word is invalid.
        """
        if starts_preset:
            self._keep(self._without_algorithm(), label)
        lower, upper = self._fitted(upper)
        self._keep(lower, label)
        self.sources |= {path: source for path, _ in leaves(upper, ())}
        merge(self.tree, upper)

    def add_command_line(self, upper: dict[str, Any], deleted: Sequence[Path]) -> dict[str, Any]:
        """Discard what the overrides of the command line replace. The caller then applies them to `tree`.

        Args:
            upper: Values of the overrides, nested. A `Word` represents the class of a component with further keys.
            deleted: Keys that `~` removes.

        Returns:
            The values of the overrides. A word whose component has fields is a mapping with its `_target_`.

        Raises:
            ConfigError: a word is invalid.
        """
        self.tree = copy.deepcopy(self.tree)
        for path in deleted:
            remove(self.tree, path)
        lower, upper = self._fitted(upper)
        self._keep(lower, "the command line")
        return upper

    def list_discarded(self, final: Mapping[str, Any]) -> list[str]:
        """Return the discarded keys whose values differ from the final ones, with their file and the higher layer."""
        return [str(drop) for drop in self.drops if get(final, drop.path, MISSING) != drop.value]

    def of_presets(self, typed: Container[str]) -> dict[str, str]:
        """Return the preset, such as algorithm=gspo, for each key of which it has the last word."""
        set_by = {".".join(path).removesuffix(f".{TARGET}"): source for path, source in self.sources.items()}
        presets = {key: source for key, source in set_by.items() if source.startswith("algorithm/")}
        named = {key: source.removesuffix(".yaml").replace("/", "=") for key, source in presets.items()}
        return {key: preset for key, preset in named.items() if key not in typed and f"{key}.{TARGET}" not in typed}

    def _keep(self, tree: dict[str, Any], by: str) -> None:
        """Continue with `tree`, and note which keys of files it lacks. Defaults of the schema are nobody's."""
        for path, value in leaves(self.tree, ()):
            # A word or an interpolation that has become a mapping is the source of its keys.
            owners = (self.sources.get(path[:depth]) for depth in range(len(path), 0, -1))
            if not has(tree, path) and (source := next(filter(None, owners), None)) is not None:
                self.drops.append(Dropped(path, value, source, by))
        self.sources = {path: source for path, source in self.sources.items() if has(tree, path)}
        self.tree = tree

    def _without_algorithm(self) -> dict[str, Any]:
        """Return the values without the settings that make up the algorithm, so that the class's defaults apply."""
        tree = copy.deepcopy(self.tree)
        for role, node in self.tree["interfaces"].items():
            chosen = place_of(("interfaces", role)).class_of(self._resolved(self._mapping(node).get(TARGET)))
            for name in () if chosen is None else chosen.algorithm:
                remove(tree, ("interfaces", role, *name.split(".")))
        return tree

    # --- one component in two layers ---

    def _fitted(self, upper: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the values so far, without those that do not apply to the classes that `upper` selects, and `upper`.

        In both, words become mappings where the other one sets fields of the component, so that they can be merged.
        """
        lower, upper = copy.deepcopy(self.tree), copy.deepcopy(upper)
        for root in (root for root in upper if root in ROOTS and isinstance(upper[root], dict)):
            for path in [(root, role) for role in upper[root]] if ROOTS[root].per_role else [(root,)]:
                if isinstance(value := get(upper, path), dict):
                    below, above = self._component(place_of(path), get(lower, path, MISSING), value)
                    _put(lower, path, below)
                    _put(upper, path, above)
        return lower, upper

    def _component(self, place: Place, lower: Any, upper: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the lower and the upper value of a component; `MISSING` as the lower one if nothing remains of it."""
        # A lower word and upper fields: the word becomes a mapping first, or merging would replace it by the fields.
        if is_word(lower) and TARGET not in upper and (path := place.of_word(lower)) is not None:
            lower = {TARGET: path}
        if isinstance(upper.get(TARGET), Word):
            upper[TARGET] = _path_of(place, upper[TARGET])
        if upper:
            lower = self._expanded(lower)
        below, target = self._mapping(lower).get(TARGET), upper.get(TARGET)
        if target is not None and self._mapping(lower) and target != below:
            # The classes are compared, since a word and an import path can name the same one.
            old, new = place.class_of(self._resolved(below)), place.class_of(self._resolved(target))
            if old is not None and new is not None and old != new:
                # Two actors share most settings, so those that the new class has too are kept. Nested components share
                # names only: `low` is 0.2 for the clip objective, but 3e-4 for gspo.
                lower = self._refitted(lower, (place, below), (place, target), upper) if place.is_root else MISSING
        chosen = self._resolved(target if target is not None else self._mapping(lower).get(TARGET))
        for name in upper:
            if name != TARGET:
                self._field(place.child(name, chosen), name, lower if isinstance(lower, dict) else {}, upper)
        return lower, upper

    def _field(self, place: Place, name: str, lower: dict[str, Any], upper: dict[str, Any]) -> None:
        """Fit one field of a component in both of its mappings."""
        value = upper[name]
        if is_word(value) and isinstance(lower.get(name), dict) and (path := place.of_word(value)) is not None:
            value = {TARGET: path}
        if isinstance(value, dict):
            below, upper[name] = self._component(place, lower.get(name, MISSING), value)
            if below is not MISSING:
                lower[name] = below
            else:
                lower.pop(name, None)

    def _refitted(self, lower: Any, old: _Chosen, new: _Chosen, upper: dict[str, Any]) -> Any:
        """Return the settings of a root component that apply to its new class.

        Others are unknown fields, and fields of nested components whose default class differs in the new class.
        """
        (old_place, old_target), (new_place, new_target) = old, new
        known = new_place.fields(self._resolved(new_target))
        if known is None or not isinstance(lower, dict):
            return lower
        kept: dict[str, Any] = {}
        for name, node in lower.items():
            if name != TARGET and name not in known:
                continue
            kept[name] = node
            if name == TARGET or not isinstance(node, dict):
                continue
            was, now = old_place.child(name, old_target), new_place.child(name, new_target)
            above = upper.get(name)
            if TARGET in node:
                if now.class_of(self._resolved(node[TARGET])) is None:
                    del kept[name]
            elif was.class_of(None) == now.class_of(None):
                kept[name] = self._refitted(node, (was, None), (now, None), above if isinstance(above, dict) else {})
            elif (cls := was.class_of(None)) is not None:
                if is_word(above) or (isinstance(above, dict) and TARGET in above):
                    kept[name] = {**node, TARGET: cls.path}  # compared with the class that the upper layer selects
                else:
                    del kept[name]
        return kept

    # --- interpolations ---

    def _expanded(self, value: Any) -> Any:
        """Return an interpolation of a whole component as one interpolation per value, so that a layer can set some.

        Otherwise, an override would replace the interpolation, and so all other values.
        """
        source = re.fullmatch(r"\$\{([\w.]*\w)\}", value) if isinstance(value, str) else None
        component = self._mapping(value) if source is not None else {}
        return _links(component, source[1]) if source is not None and component else value

    def _mapping(self, value: Any) -> dict[str, Any]:
        """Return a value that is a mapping, with an interpolation of the whole resolved; empty for another value."""
        node = self._resolved(value)
        return node if isinstance(node, dict) else {}

    def _resolved(self, value: Any) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            # As a further key of the whole tree, since an interpolation may refer to any key from the root.
            found = OmegaConf.select(OmegaConf.create({**self.tree, "_asked_": value}), "_asked_")
        except OmegaConfBaseException:
            return None  # a higher layer sets the key, or resolving the config reports it
        return OmegaConf.to_container(found, resolve=False) if OmegaConf.is_config(found) else found


_Chosen: TypeAlias = tuple[Place, Any]
"""The place of a component, and its `_target_`."""


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    if value is not MISSING:
        get(tree, path[:-1])[path[-1]] = value


def _links(node: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return interpolations of the values of the mapping `node` at the key `source`."""
    # The class is copied, not linked: layers compare classes before interpolations are resolved.
    return {
        key: _links(value, f"{source}.{key}")
        if isinstance(value, dict)
        else value
        if key == TARGET
        else f"${{{source}.{key}}}"
        for key, value in node.items()
    }


def _path_of(place: Place, word: Word) -> str:
    path = place.of_word(word)
    if path is None:
        raise ConfigError(f"{place.key}={word} is not a component, but a further key sets a field of it")
    return path
