"""Test that runtime and config only read declared attributes, and never check the class of an interface."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import realign
import realign.interfaces
from realign.api import ModelInterface

ROOT = Path(realign.__file__).parent
FILES = sorted(path for room in ("runtime", "config") for path in (ROOT / room).rglob("*.py"))
REFLECTION = {"getattr", "hasattr", "setattr", "delattr", "vars"}
ALLOWED = {
    ("config/__init__.py", "getattr"): "the package's names are imported on first use",
    ("config/experiment.py", "getattr"): "fields of a dataclass, listed by dataclasses.fields",
    ("config/experiment.py", "vars"): "fields of the experiment",
    ("config/construct.py", "getattr"): "fields and constructors of a component class",
    ("config/convert.py", "getattr"): "whether an annotation is a Protocol",
    ("config/places.py", "getattr"): "fields of a component, listed by its constructor",
    ("config/component_classes.py", "vars"): "classes that a module defines",
    ("config/help_entries.py", "vars"): "fields of a default",
    ("config/targets.py", "getattr"): "attributes of a module on an import path",
    ("config/targets.py", "hasattr"): "whether a module is a package",
    ("config/targets.py", "vars"): "names that a module or class defines",
    ("config/construct.py", "vars"): "whether a class is itself a dataclass",
    ("config/words.py", "getattr"): "whether a class is a Protocol",
    ("config/words.py", "vars"): "classes that a module defines",
    ("runtime/processes/agreement.py", "getattr"): "fields of a dataclass, listed by dataclasses.fields",
    ("runtime/local.py", "vars"): "fields of a dataclass of this module",
    ("runtime/ray/host.py", "getattr"): "its own verbs by name",
    ("runtime/ray/wire_format.py", "getattr"): "a dtype of torch by name",
    ("runtime/ray/wire_format.py", "hasattr"): "whether a tuple is a named one",
}
"""Files that use reflection, and its purpose. It is never used on interfaces, model specs, engines, datasets or
evaluators."""

CATCHES = {
    "config/composition.py": "an override that Hydra cannot read",
    "config/targets.py": "a class that is compared with a Protocol",
    "runtime/checkpoint/folder.py": "a manifest of another shape",
    "runtime/metrics/records.py": "a line of a file of another shape",
    "runtime/models.py": "a saved state of another shape",
    "runtime/run_checkpoints.py": "a saved state of another shape",
}
"""Files that catch missing attributes, and the objects concerned."""


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def interface_classes() -> set[str]:
    """Return the names of all interface classes of realign."""
    found = {ModelInterface.__name__}
    for module in pkgutil.walk_packages(realign.interfaces.__path__, "realign.interfaces."):
        classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        found |= {name for name, cls in classes if issubclass(cls, ModelInterface)}
    return found


def test_reflection_is_used_where_it_is_listed_and_nowhere_else():
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in FILES
        for call in calls(path)
        if (name := name_of(call.func)) in REFLECTION
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_asks_for_the_class_of_an_interface(path):
    known = interface_classes()
    asked = [
        (call.lineno, name)
        for call in calls(path)
        if name_of(call.func) in ("isinstance", "issubclass")
        for node in ast.walk(call.args[1])
        if isinstance(node, ast.Name | ast.Attribute) and (name := name_of(node)) in known
    ]
    assert asked == []


def test_the_lack_of_an_attribute_is_caught_for_files_and_classes_only():
    caught = {
        str(path.relative_to(ROOT))
        for path in FILES
        for handler in ast.walk(ast.parse(path.read_text()))
        if isinstance(handler, ast.ExceptHandler) and handler.type is not None
        for node in ast.walk(handler.type)
        if isinstance(node, ast.expr) and name_of(node) == "AttributeError"
    }
    assert caught == set(CATCHES)
