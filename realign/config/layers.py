"""Layers of a config: the files, from the lowest to `algorithm=`, and the command line as the highest layer.

A layer that selects a class for a component discards the fields that lower layers set for another class. Fields for the
same class are merged. A preset first discards what lower layers set in the settings of its algorithm, which the classes
of the interfaces name. Values are plain: interpolations are text until all layers are merged. Classes are imported only
if two layers select different classes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realign.config.command_line import Word
from realign.config.errors import ConfigError
from realign.config.inspection import algorithm_settings
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

    def __post_init__(self) -> None:
        self._view = self.tree
        """What the next layer is compared with: the tree, without the keys that the command line deletes."""

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
            self._reset_algorithm(label)
        self._lay(upper, label)
        self.sources |= {path: source for path, _ in leaves(upper, ())}
        merge(self.tree, upper)

    def add_command_line(self, tree: dict[str, Any], deleted: Sequence[Path]) -> dict[Path, str]:
        """Discard what the overrides of the command line replace. The caller then applies them to `tree`.

        Args:
            tree: Values of the overrides, nested. A `Word` represents the class of a component with further keys.
            deleted: Keys that `~` removes.

        Returns:
            The import path of the class for each key whose word must be rewritten.

        Raises:
            ConfigError: a word is invalid.
        """
        self._view = copy.deepcopy(self.tree)
        for path in deleted:
            remove(self._view, path)
        return self._lay(tree, None)

    def dropped(self, final: Mapping[str, Any]) -> list[str]:
        """Return the discarded keys whose values differ from the final ones, with their file and the higher layer."""
        return [str(drop) for drop in self.drops if get(final, drop.path, MISSING) != drop.value]

    def of_presets(self, typed: Container[str]) -> dict[str, str]:
        """Return the preset, such as algorithm=gspo, for each key of which it has the last word."""
        set_by = {".".join(path).removesuffix(f".{TARGET}"): source for path, source in self.sources.items()}
        presets = {key: source for key, source in set_by.items() if source.startswith("algorithm/")}
        named = {key: source.removesuffix(".yaml").replace("/", "=") for key, source in presets.items()}
        return {key: preset for key, preset in named.items() if key not in typed and f"{key}.{TARGET}" not in typed}

    # --- presets ---

    def _reset_algorithm(self, by: str) -> None:
        """Discard the values of the settings that make up the algorithm, so that the defaults of the class apply."""
        for role in self.tree["interfaces"]:
            path = ("interfaces", role)
            chosen = place_of(path).chosen(self._text(self._mapping(path).get(TARGET)))
            for name in () if chosen is None else algorithm_settings(chosen):
                self._drop((*path, *name.split(".")), by)

    # --- class selection ---

    def _lay(self, upper: dict[str, Any], by: str | None) -> dict[Path, str]:
        """Discard the lower values that do not apply to the classes that `upper` selects.

        Returns:
            The import path for each word of `upper` whose component has fields.
        """
        rewritten: dict[Path, str] = {}
        for root in [root for root in upper if root in ROOTS]:
            for path, value in _root_places(root, upper[root]):
                if isinstance(value, dict):
                    self._lay_component(place_of(path), path, value, by, rewritten)
        return rewritten

    def _lay_component(
        self, place: Place, path: Path, upper: dict[str, Any], by: str | None, rewritten: dict[Path, str]
    ) -> None:
        """Apply a mapping of the upper layer to the component at `path`; `by` is None for the command line."""
        # A lower word and upper fields: the word becomes a mapping first, or merging would replace it by the fields.
        word = get(self._view, path)
        if is_word(word) and TARGET not in upper and (below := place.of_word(word)) is not None:
            self._replace(path, {TARGET: below})
        if isinstance(upper.get(TARGET), Word):
            upper[TARGET] = rewritten[path] = _resolved(place, upper[TARGET])
        if upper:
            self._expand(path)
        lower = self._mapping(path)
        below, target = lower.get(TARGET), upper.get(TARGET)
        if target is not None and lower and target != below:
            # The classes are compared, since a word and an import path can name the same one.
            old, new = place.chosen(self._text(below)), place.chosen(self._text(target))
            if old is not None and new is not None and old != new:
                # Two actors share most settings, so those that the new class has too are kept. Nested components share
                # names only: `low` is 0.2 for the clip objective, but 3e-4 for gspo.
                if place.is_root:
                    self._refit(path, (place, below), (place, target), upper, by)
                else:
                    self._drop(path, by)
        # Read again, since `_drop` may have removed the lower class.
        chosen = self._text(target if target is not None else self._mapping(path).get(TARGET))
        for name in upper:
            if name != TARGET:
                self._lay_field(place.child(name, chosen), (*path, name), upper, by, rewritten)

    def _lay_field(
        self, place: Place, path: Path, owner: dict[str, Any], by: str | None, rewritten: dict[Path, str]
    ) -> None:
        """Apply one field of the upper layer to the value at `path`; `owner` is the mapping that contains the field."""
        value, lower = owner[path[-1]], get(self._view, path)
        if is_word(value) and isinstance(lower, dict):
            target = place.of_word(value)
            if target is None:
                return
            owner[path[-1]] = value = {TARGET: target}
            rewritten[path] = target
        if isinstance(value, dict):
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

    # --- changes ---

    def _drop(self, path: Path, by: str | None) -> None:
        """Discard all values at a path, and record those of files."""
        if not has(self._view, path):
            return
        for leaf, value in list(leaves(get(self._view, path), path)):
            if (source := self.sources.pop(leaf, None)) is None:  # a default of the schema, which nobody has written
                continue
            self.drops.append(Dropped(leaf, value, source, by or "the command line"))
        remove(self._view, path)
        remove(self.tree, path)

    def _expand(self, path: Path) -> None:
        """Replace an interpolation of a whole component by one interpolation per value, so that a layer can set some.

        Otherwise, an override would replace the interpolation, and so all other values.
        """
        text = get(self._view, path)
        source = re.fullmatch(r"\$\{([\w.]*\w)\}", text) if isinstance(text, str) else None
        component = self._mapping(path)
        if source is not None and component:
            self._replace(path, _links(component, source[1]))

    def _replace(self, path: Path, value: dict[str, Any]) -> None:
        """Replace a value by a mapping of the same meaning."""
        if (source := self.sources.pop(path, None)) is not None:
            self.sources |= {leaf: source for leaf, _ in leaves(value, path)}
        # Both are the same object until `add_command_line` copies the view.
        for tree in (self.tree, self._view):
            if has(tree, path):
                get(tree, path[:-1])[path[-1]] = copy.deepcopy(value)

    # --- access ---

    def _mapping(self, path: Path) -> dict[str, Any]:
        """Return the mapping at a path of the view, with interpolations resolved; empty if there is none."""
        node = self._text(get(self._view, path))
        return node if isinstance(node, dict) else {}

    def _text(self, target: Any) -> Any:
        return self._interpolated(target) if isinstance(target, str) and "${" in target else target

    def _interpolated(self, text: str) -> Any:
        try:
            # As a further key of the whole tree, since an interpolation may refer to any key from the root.
            value = OmegaConf.select(OmegaConf.create({**self._view, "_asked_": text}), "_asked_")
        except OmegaConfBaseException:
            return None  # a higher layer sets the key, or resolving the config reports it
        return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


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


def _resolved(place: Place, word: Word) -> str:
    target = place.of_word(word.text)
    if target is None:
        raise ConfigError(f"{place.key}={word.text} is not a component, but a further key sets a field of it")
    return target


def _root_places(root: str, node: Any) -> Iterator[tuple[Path, Any]]:
    if ROOTS[root].per_role:
        for role, value in node.items() if isinstance(node, dict) else ():
            yield (root, role), value
    else:
        yield (root,), node
