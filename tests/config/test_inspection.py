"""Test that classes read from source agree with the imported classes."""

from __future__ import annotations

import dataclasses
import importlib
from enum import Enum

import pytest

from realign.config import inspection as source
from realign.config import words
from realign.config.component_classes import shipped_components
from realign.interfaces.components.kl import KLPlace


@pytest.fixture(scope="module")
def components() -> list[type]:
    return shipped_components()


def test_fields_of_source_are_those_of_the_imported_classes(components):
    assert len(components) > 60
    for cls in components:
        read = source.class_at(words.import_path(cls))
        assert read is not None, cls
        known = [field.name for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]
        assert set(known) <= source.fields_of(read).keys(), cls


def test_enums_and_their_texts_are_found():
    read = source.class_at("realign.interfaces.components.kl.KLPlace")
    assert read is not None
    assert source.is_enum(read)
    assert list(source.members_of(read)) == list(KLPlace.__members__)


def test_members_of_a_union_are_followed_through_imports_and_aliases():
    grpo = source.class_at("realign.interfaces.grpo.GRPOActorInterface")
    assert grpo is not None
    field = source.fields_of(grpo)["correction"]
    found = list(source.annotated(field.annotation, field.module))  # type: ignore[arg-type]
    assert [one if isinstance(one, str) else one.name for one in found] == ["Correction", "None"]
    keep = source.fields_of(grpo)["keep_best"]
    assert list(source.annotated(keep.annotation, keep.module)) == ["int", "None"]  # type: ignore[arg-type]


def test_a_text_comes_from_the_string_after_a_field_or_from_the_docstring():
    text = "Summary.\n\nArgs:\n    first: one\n        and more.\n    second (int): two.\n\nReturns:\n    third: no.\n"
    assert source.described_names(text) == {"first": "one and more.", "second": "two."}


def test_unknown_modules_and_broken_files_are_not_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_source.py").write_text("def (")
    for path in ("broken_source.A", "no_such_module.A", "A", "realign.interfaces.grpo.Nothing"):
        assert source.class_at(path) is None


@pytest.mark.parametrize("name", ["realign.interfaces.grpo", "realign.api", "realign.engines"])
def test_names_of_packages_lead_to_their_modules(name):
    module = importlib.import_module(name)
    exported = [one for one in vars(module) if not one.startswith("_") and isinstance(vars(module)[one], type)]
    for one in exported:
        cls = vars(module)[one]
        if cls.__module__.startswith("realign.") and not issubclass(cls, Enum):
            read = source.find_class(name, one)
            assert read is not None, one
            assert read.path == words.import_path(cls)
