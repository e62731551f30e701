"""Test the index: it tells what the imported classes tell, and a damaged, old or foreign file changes nothing."""

from __future__ import annotations

import importlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from realign.config import index
from realign.config.classes import described
from realign.config.index import class_at, indexed, object_at
from realign.config.places import ROOTS
from realign.config.words import words_of

SHIPPED = [indexed(path) for path in index._shipped()["classes"]]
GRPO = "realign.interfaces.grpo.GRPOActorInterface"


def test_the_index_tells_what_the_imported_classes_tell():
    assert len(SHIPPED) > 150
    for cls in SHIPPED:
        assert vars(cls) == vars(described(object_at(cls.path)))


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


def test_a_class_that_is_not_found_or_whose_module_fails_is_none(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_source.py").write_text("def (")
    (tmp_path / "leaving_source.py").write_text("raise SystemExit(3)")
    for path in ("broken_source.A", "leaving_source.A", "no_such_module.A", "A", f"{GRPO}s", "antigravity.A"):
        assert class_at(path) is None


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """An empty cache folder, a small index in place of a built one, and the number of times that it was built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builds: list[bytes] = []

    def build() -> bytes:
        small = {"sources": index._digest(), "classes": {}, "exported": {f"realign.built.{len(builds)}": "x"}}
        builds.append(json.dumps(small).encode())
        return builds[-1]

    monkeypatch.setattr(index, "build", build)
    monkeypatch.setattr(index, "FILE", tmp_path / "index.json")
    return tmp_path, builds


def read() -> int:
    """Return which build the index of a new process is."""
    exported = index._shipped.__wrapped__()["exported"]
    return int(next(iter(exported)).rpartition(".")[2])


def file_of(folder):
    (path,) = (folder / "cache" / "realign" / "index").iterdir()
    return path


def test_a_second_process_reads_the_file(cached):
    folder, _ = cached
    assert [read(), read()] == [0, 0]
    assert file_of(folder).stat().st_mode & 0o777 == 0o600


def test_a_changed_source_file_is_read_again_and_replaces_the_file(cached, monkeypatch):
    folder, _ = cached
    assert read() == 0
    monkeypatch.setattr(index, "ROOT", folder)
    (folder / "one.py").write_text("x = 1")
    assert [read(), read()] == [1, 1]
    (folder / "one.py").write_text("x = 2")
    assert [read(), read()] == [2, 2]


@pytest.mark.parametrize("text", ["", "x", "[]", "\x00\xff", '{"sources": 1}'])
def test_a_damaged_file_is_written_again(cached, text):
    folder, _ = cached
    assert read() == 0
    file_of(folder).write_text(text)
    assert [read(), read()] == [1, 1]


def test_the_file_of_a_wheel_comes_first_and_counts_only_for_its_own_sources(cached):
    folder, builds = cached
    (folder / "index.json").write_bytes(index.build())
    assert [read(), len(builds)] == [0, 1]
    (folder / "index.json").write_bytes(builds[0].replace(index._digest().encode(), b"of another version"))
    assert [read(), read()] == [1, 1]


def test_a_cache_that_others_can_write_to_or_that_cannot_be_written_is_not_used(cached):
    folder, _ = cached
    assert read() == 0
    file_of(folder).parent.chmod(0o777)
    assert [read(), read()] == [1, 2]


def test_without_a_folder_to_write_to_the_index_is_built_each_time(cached, monkeypatch):
    folder, _ = cached
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert [read(), read()] == [0, 1]


def test_concurrent_writers_leave_one_complete_file(cached):
    folder, builds = cached
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: read(), range(40)))
    assert file_of(folder).read_bytes() in builds
