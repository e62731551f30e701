"""Test that classes read from source agree with the imported classes, and that the cache changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import os
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import pytest

from realign.config import inspection
from realign.config.construct import import_path, import_target
from realign.config.inspection import MISSING, class_at, fields_of, types_of
from realign.config.reference import shipped_components
from realign.interfaces.components.kl import KLPlace


@pytest.fixture(scope="module")
def components():
    """Every shipped component, as read and as imported."""
    return [(definition, import_target(definition.path, "test")) for definition in shipped_components()]


def test_fields_and_texts_are_those_of_the_imported_classes(components):
    assert len(components) > 60
    for definition, cls in components:
        expected = [field for field in dataclasses.fields(cls) if field.init and not field.name.startswith("_")]
        fields = fields_of(definition)
        assert list(fields) == [field.name for field in expected], cls
        for field in expected:
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            assert (inspection.default_of(fields[field.name]) is MISSING) == required, (cls, field.name)
        assert inspection.docstring(definition) == inspect.getdoc(cls), cls
        assert inspection.is_abstract(definition) == inspect.isabstract(cls), cls
        assert {*inspection.algorithm_settings(definition)} == {*getattr(cls, "ALGORITHM_SETTINGS", ())}, cls


def test_defaults_are_those_of_the_imported_classes(components):
    for definition, cls in components:
        made = {field.name: field for field in dataclasses.fields(cls)}
        for name, field in fields_of(definition).items():
            value, factory = inspection.default_of(field), made[name].default_factory
            default = made[name].default if factory is dataclasses.MISSING else factory()
            assert not isinstance(value, inspection.Unknown), (cls, name)
            if value is MISSING:
                continue
            if isinstance(value, inspection.Component):
                assert value.definition.path == import_path(type(default)), (cls, name)
            elif isinstance(value, inspection.Member):
                assert value.name == default.name, (cls, name)
            else:
                assert value == default, (cls, name)


def test_enums_and_their_texts_are_read():
    read = class_at("realign.interfaces.components.kl.KLPlace")
    assert read is not None
    assert inspection.is_enum(read)
    assert list(inspection.members_of(read)) == list(KLPlace.__members__)


def test_members_of_a_union_are_followed_through_imports_and_aliases():
    grpo = class_at("realign.interfaces.grpo.GRPOActorInterface")
    assert grpo is not None
    fields = fields_of(grpo)
    correction = types_of(fields["correction"].annotation, fields["correction"].module)
    assert [member.name for member in correction] == ["Correction", "None"]
    keep = types_of(fields["keep_best"].annotation, fields["keep_best"].module)
    assert [(member.name, str(member.range or "")) for member in keep] == [("int", "at least 1"), ("None", "")]


def test_a_text_comes_from_the_string_after_a_field_or_from_the_docstring():
    text = "Summary.\n\nArgs:\n    first: one\n        and more.\n    second (int): two.\n\nReturns:\n    third: no.\n"
    assert inspection.described_names(text) == {"first": "one and more.", "second": "two."}


def test_a_default_that_only_running_the_code_tells_is_shown_as_written():
    assert inspection.value_of("secrets.token_hex(12)", "realign.settings") == inspection.Unknown(
        "secrets.token_hex(12)"
    )
    assert inspection.value_of("1 / 0", "realign.settings") == inspection.Unknown("1 / 0")


def test_unknown_modules_and_broken_files_are_not_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_source.py").write_text("def (")
    for path in ("broken_source.A", "no_such_module.A", "A", "realign.interfaces.grpo.Nothing"):
        assert class_at(path) is None


@pytest.mark.parametrize("name", ["realign.interfaces.grpo", "realign.api", "realign.engines"])
def test_names_of_packages_lead_to_their_modules(name):
    module = importlib.import_module(name)
    exported = {name: cls for name, cls in vars(module).items() if not name.startswith("_") and isinstance(cls, type)}
    for exported_name, cls in exported.items():
        if cls.__module__.startswith("realign.") and not issubclass(cls, Enum):
            read = inspection.find(name, exported_name)
            assert read is not None, exported_name
            assert read.path == import_path(cls)


# --- the cache ---


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of the import path with one module, and an empty cache."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path, 0.5)
    inspection._read.cache_clear()
    yield tmp_path
    inspection._read.cache_clear()


def write(folder, default):
    text = "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    coef: float = "
    (folder / "cached_module.py").write_text(f"{text}{default}\n")


def read_again():
    """Return the default of the field, as a new process reads it."""
    inspection._read.cache_clear()
    definition = class_at("cached_module.Mine")
    assert definition is not None
    return inspection.default_of(fields_of(definition)["coef"])


def cached(folder):
    (path,) = (folder / "cache" / "realign" / "inspection").iterdir()
    return path


def with_digest(key, body):
    return f"{json.dumps([*key, hashlib.sha256(body.encode()).hexdigest()])}\n{body}"


def test_a_second_process_reads_the_cache(here, monkeypatch):
    assert read_again() == 0.5
    assert cached(here).stat().st_mode & 0o777 == 0o600
    assert cached(here).parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(inspection.ast, "get_docstring", lambda *_: pytest.fail("parsed again"))
    assert read_again() == 0.5


def test_an_edited_file_is_read_again_and_replaces_its_facts(here):
    assert read_again() == 0.5
    write(here, 0.625)
    assert read_again() == 0.625
    assert "0.625" in cached(here).read_text()


@pytest.mark.parametrize("text", ["", "x", "[]\n{}", '{"a": 1}\n{}', "\x00\xff", "[" * 100_000])
def test_a_damaged_file_is_ignored_and_written_again(here, text):
    assert read_again() == 0.5
    whole = cached(here).read_text()
    cached(here).write_text(text)
    assert read_again() == 0.5
    assert cached(here).read_text() == whole


def test_facts_without_their_digest_or_of_another_reader_are_ignored(here, monkeypatch):
    assert read_again() == 0.5
    head, body = cached(here).read_text().split("\n")
    cached(here).write_text(f"{head}\n{body.replace('0.5', '0.7')}")
    assert read_again() == 0.5
    (_, *reader), *key = json.loads(head)[:-1]
    cached(here).write_text(with_digest([[0, *reader], *key], body.replace("0.5", "0.7")))
    assert read_again() == 0.5


def test_a_cache_that_others_can_write_to_is_neither_read_nor_written(here):
    assert read_again() == 0.5
    head, body = cached(here).read_text().split("\n")
    cached(here).write_text(with_digest(json.loads(head)[:-1], body.replace("0.5", "0.7")))
    assert read_again() == 0.7  # the test forges well
    cached(here).parent.chmod(0o777)
    before = cached(here).read_text()
    assert read_again() == 0.5
    assert cached(here).read_text() == before


def test_concurrent_writers_leave_one_complete_file(here):
    inspection._read.cache_clear()
    status = (here / "cached_module.py").stat()
    facts = ("cached_module", str(here / "cached_module.py"), status.st_mtime_ns, status.st_size)
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: inspection._read.__wrapped__(*facts), range(40)))
    assert all(set(module.definitions) == {"Mine"} for module in modules)
    head, body = cached(here).read_text().split("\n")
    assert json.loads(head)[-1] == hashlib.sha256(body.encode()).hexdigest()


def test_without_a_folder_to_write_to_the_source_is_read(here, monkeypatch):
    (here / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(here / "file"))
    assert read_again() == 0.5
