"""Test the index: it tells what the imported classes tell, and a damaged, old or foreign file changes nothing."""

from __future__ import annotations

import importlib
import os
import sys

import pytest

from realign.config import index
from realign.config.classes import described
from realign.config.index import class_at, indexed, object_at
from realign.config.places import ROOTS
from realign.config.words import words_of

SHIPPED = [indexed(path) for path in index._shipped()["classes"]]


def test_the_index_tells_what_the_imported_classes_tell():
    assert len(SHIPPED) > 150
    for cls in SHIPPED:
        assert _told(cls) == _told(described(object_at(cls.path)))


def _told(cls):
    """Return what is known about a class. Python caches a union and an equal one in another order as the same."""
    fields = {x: field._replace(types=sorted(field.types, key=repr)) for x, field in cls.fields.items()}
    return vars(cls) | {"fields": fields}


def test_every_root_is_in_the_index_and_every_shipped_word_has_one_class():
    for root in ROOTS.values():
        assert all(indexed(path) for path in (root.kind, root.default) if path is not None), root
    for cls in SHIPPED:
        for field in cls.fields.values():
            for base in filter(None, (indexed(member.path) for member in field.types)):
                shipped = [[c for c in named if indexed(c.path)] for named in words_of(base).values()]
                assert all(len(classes) <= 1 for classes in shipped), base


@pytest.mark.parametrize("name", ["realign.api", "realign.data", "realign.engines", "realign.runtime"])
def test_names_that_packages_export_lead_to_the_class(name):
    module = importlib.import_module(name)
    for exported in module.__all__:
        thing = getattr(module, exported)
        read = indexed(f"{name}.{exported}")
        assert read is None or read.path == f"{thing.__module__}.{thing.__qualname__}"
    assert class_at("realign.api.ModelInterface") == class_at("realign.api.interface.ModelInterface")


A = """\
from dataclasses import dataclass
from realign.settings import Settings
@dataclass
class A(Settings):
    size: int = 1
"""
B = """\
from dataclasses import dataclass
from little.a import A
@dataclass
class B(A):
    more: float = 0.5
"""
C = A.replace("class A", "class C")


@pytest.fixture
def little(tmp_path, monkeypatch):
    """A small package in place of realign, with an empty cache folder; the modules that reading its index imports."""
    imports: list[str] = []
    import_again = index._import

    def counted(module: str):
        imports.append(module)
        sys.modules.pop(module, None)
        return import_again(module)

    package = tmp_path / "little"
    package.mkdir()
    for name, text in {"__init__": "", "a": A, "b": B, "c": C}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.setattr(index, "_import", counted)
    monkeypatch.setattr(index, "ROOT", package)
    monkeypatch.setattr(index, "FILE", package / "index.json")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    yield package, imports
    for name in [name for name in sys.modules if name.partition(".")[0] == "little"]:
        del sys.modules[name]


ALL = ["little", "little.a", "little.b", "little.c"]


def read(imports: list[str]) -> list[str]:
    """Return the modules that a new process imports for the index."""
    imports.clear()
    index._shipped.__wrapped__()
    return list(imports)


def fields() -> dict[str, list[str]]:
    """Return the fields of each class in the index."""
    classes = index._shipped.__wrapped__()["classes"]
    return {path.removeprefix("little."): list(told["fields"]) for path, told in classes.items()}


def file_of(package):
    (path,) = (package.parent / "cache" / "realign" / "index").iterdir()
    return path


def test_after_an_edit_only_its_module_and_those_that_import_it_are_read_again(little):
    package, imports = little
    read(imports)
    (package / "c.py").write_text(C.replace("size", "length"))
    assert read(imports) == ["little.c"]
    (package / "a.py").write_text(A.replace("size", "length"))
    assert read(imports) == ["little.a", "little.b"]
    (package / "d.py").write_text(C.replace("class C", "class D"))
    assert read(imports) == ["little.d"]
    (package / "c.py").unlink()
    assert read(imports) == []
    assert fields() == {"a.A": ["length"], "b.B": ["length", "more"], "d.D": ["size"]}
    assert read(imports) == []


def test_a_class_that_a_field_names_for_the_first_time_is_found_wherever_it_is(little):
    package, imports = little
    (package / "a.py").write_text(A + "class Plain: pass\n")
    read(imports)
    (package / "c.py").write_text(
        C.replace("size: int = 1", "size: Plain").replace("@", "from little.a import Plain\n@")
    )
    assert read(imports) == ["little.c", *ALL]
    assert "a.Plain" in fields()


@pytest.mark.parametrize("text", ["", "x", "[]", "\x00\xff", '{"files": 1}', '{"files": {"little": 1}}'])
def test_a_damaged_file_is_written_again(little, text):
    package, imports = little
    read(imports)
    file_of(package).write_text(text)
    assert read(imports) == ALL
    assert read(imports) == []


def test_the_file_of_a_wheel_spares_the_imports(little):
    package, imports = little
    (package / "index.json").write_bytes(index.build())
    os.utime(package / "b.py", (1, 1))  # as an installation does
    assert read(imports) == []
    (package / "c.py").write_text(C.replace("size", "length"))
    assert read(imports) == ["little.c"]
    assert fields()["c.C"] == ["length"]


def test_a_cache_that_others_can_write_to_or_that_cannot_be_written_is_not_used(little, monkeypatch):
    package, imports = little
    read(imports)
    file_of(package).parent.chmod(0o777)
    assert read(imports) == read(imports) == ALL
    (package.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(package.parent / "file"))
    assert read(imports) == read(imports) == ALL
