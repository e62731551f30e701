"""What servers of vLLM import: files, deltas and their checksum, and the copy of the weights in a server."""

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from realign.samplers.servers.worker import realign_worker
from realign.samplers.servers.worker.realign_worker import WeightReceiver, apply, bits, changes, digest, map_file


def changed_bits(x, seed, fraction):
    """Return a copy in which a fraction of the elements has random bits, also those of NaN and -0."""
    generator = torch.Generator().manual_seed(seed)
    new = x.clone()
    info = torch.iinfo(bits(x).dtype)
    random = torch.randint(info.min, info.max, x.shape, generator=generator).to(bits(x).dtype)
    where = torch.rand(x.shape, generator=generator) < fraction
    bits(new)[where] = random[where]
    return new


@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    fraction=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 999),
)
def test_a_delta_gives_exactly_the_new_bits(shape, dtype, fraction, seed):
    old = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    new = changed_bits(old, seed, fraction)
    delta = changes("w", old, new, new)
    copy = {"w": old.clone()}
    apply(delta, copy)
    apply(delta, copy)  # twice does no harm
    assert torch.equal(bits(copy["w"]), bits(new))
    assert bool(delta) is bool((bits(old) != bits(new)).any())


@pytest.mark.parametrize(
    "part", [lambda x: x[3:5], lambda x: x[:, 300:700], lambda x: x[:, :0]], ids=["rows", "columns", "none"]
)
def test_ranks_describe_their_own_part_of_a_weight(part):
    old = torch.randn(7, 30_000).bfloat16()
    new = changed_bits(old, 0, 0.2)
    copy = {"w": old.clone()}
    apply(changes("w", part(old), part(new), new), copy)
    expected = old.clone()
    part(expected).copy_(part(new))
    assert torch.equal(bits(copy["w"]), bits(expected))


def test_the_digest_shows_each_change():
    weights = {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.ones(2, 2)}
    others = [
        weights | {"a": torch.tensor([0.0, -0.0, 0.0]).bfloat16()},
        weights | {"a": torch.zeros(3, dtype=torch.float16)},
        weights | {"b": torch.ones(4, 1)},
        {"a": weights["a"], "c": weights["b"]},
    ]
    assert len({digest(x) for x in [weights, *others]}) == 5
    assert digest(weights) == digest(dict(reversed(weights.items())))


@pytest.mark.parametrize("header", [b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', b"{}" + b" " * 99])
def test_a_damaged_file_is_refused(tmp_path, header):
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header[:60] + b"1234")
    with pytest.raises(ValueError, match=r"lies outside of the file|longer than the file"):
        map_file(tmp_path / "x")


class Runner:
    """A model runner that keeps what it loads."""

    def reload_weights(self, weights_iterator):
        self.weights = {name: x.clone() for name, x in weights_iterator}


class Worker(WeightReceiver):
    def __init__(self, rank=0):
        self.rank, self.model_runner = rank, Runner()


@pytest.fixture
def folders(tmp_path):
    """Weights before and after an update, and the folder of the delta."""
    old = {"w": torch.randn(20, 30).bfloat16(), "b": torch.randn(30)}
    new = {name: changed_bits(x, 1, 0.1) for name, x in old.items()}
    delta = {key: x for name in old for key, x in changes(name, old[name], new[name], new[name]).items()}
    for name, content in {"old": old, "new": new, "delta": delta}.items():
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors")
    return tmp_path


def test_a_server_applies_a_delta_to_its_copy_and_loads_it(folders):
    worker, second = Worker(), Worker(rank=1)
    assert second.realign_receive(str(folders / "old")) is None
    base = worker.realign_receive(str(folders / "old"))["digest"]
    state = worker.realign_change(str(folders / "delta"), base)
    new = load_file(folders / "new" / "model.safetensors")
    assert state["digest"] == digest(new) != base
    for one in (worker, second):
        one.realign_load(state["paths"])
        assert all(torch.equal(bits(one.model_runner.weights[name]), bits(x)) for name, x in new.items())


def test_a_delta_of_other_weights_changes_nothing(folders):
    worker = Worker()
    assert worker.realign_change(str(folders / "delta"), "of a server that was restarted") == {
        "digest": None,
        "paths": [],
    }
    first = worker.realign_receive(str(folders / "old"))
    assert worker.realign_change(str(folders / "delta"), "of another update") == first


def test_a_copy_that_was_changed_in_part_has_no_digest(folders, monkeypatch):
    worker = Worker()
    base = worker.realign_receive(str(folders / "old"))["digest"]
    monkeypatch.setattr(realign_worker, "apply", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.realign_change(str(folders / "delta"), base)
    assert worker.realign_change(str(folders / "delta"), base)["digest"] is None


def test_a_server_can_import_the_worker_alone():
    """Its environment has torch, but not realign."""
    source = Path(realign_worker.__file__).read_text(encoding="utf-8")
    assert "realign." not in source.replace("realign_worker.", "")
    assert [path.name for path in Path(realign_worker.__file__).parent.glob("*.py")] in (
        ["__init__.py", "realign_worker.py"],
        ["realign_worker.py", "__init__.py"],
    )
