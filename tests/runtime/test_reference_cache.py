"""`cache_reference=true`: the reference scores each row once, in any number of epochs and runs."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from realign.config import build_experiment, compose
from realign.engines.cached_logprobs import LogprobStore, fingerprint
from realign.engines.training.transformers_engine import TransformersEngine
from realign.engines.transformers_model import TransformersModel
from realign.errors import CheckpointError, SettingsError
from realign.runtime import run
from tests.disk import OTHERS
from tests.tiny import save_tiny
from tests.torchrun_ranks import Ranks

ROWS = [{"prompt": f"{a}+{11 + a}=", "chosen": f"{11 + 2 * a}.", "rejected": f"{a}{11 + a}"} for a in range(8)]
LABELS = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS[:4]]
LABELS += [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in ROWS[4:]]


@pytest.fixture
def counts(monkeypatch, tmp_path):
    """Count the models that are loaded and the sequences that each role scores, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counts: Counter[str] = Counter()
    load, forward = TransformersModel.load, TransformersEngine.forward

    def counting_load(self, name, *, seed):
        counts[f"load {name}"] += 1
        return load(self, name, seed=seed)

    def counting_forward(self, data, *args, **kwargs):
        counts[f"score {self.name}"] += data.n_sequences
        return forward(self, data, *args, **kwargs)

    monkeypatch.setattr(TransformersModel, "load", counting_load)
    monkeypatch.setattr(TransformersEngine, "forward", counting_forward)
    return counts


@pytest.fixture
def files(tmp_path):
    save_tiny(tmp_path / "model")
    for name, rows in (("dpo", ROWS), ("kto", LABELS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def words(files, name: str, algorithm: str = "dpo", **changes) -> list[str]:
    """Return the words of a run of two epochs of four steps."""
    settings = {"models.actor.path": files / "model", "data.path": files / f"{algorithm}.jsonl", "steps": 8}
    settings |= {"batch_prompts": 2, "models.actor.optimizer.lr": 1e-2, "output_dir": files / name}
    settings |= {"save_every_steps": "null", **changes}
    given = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
    return [f"experiment={algorithm}", *given]


def train(files, name: str, algorithm: str = "dpo", **changes):
    """Train, and return the metrics and the weights."""
    result = run(build_experiment(compose(words(files, name, algorithm, **changes))))
    timeless = [{k: v for k, v in step.items() if "_s" not in k and "time" not in k} for step in result.history]
    return timeless, trained(files, name)


def trained(files, name: str):
    return load_file(files / name / "final" / "actor" / "model.safetensors")


def same(a, b) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][key], b[1][key]) for key in a[1] | b[1])


def cache_files(files):
    return sorted((files / "cache").rglob("*.safetensors"))


def test_each_row_is_scored_once_in_two_epochs_and_never_in_later_runs(files, counts):
    plain = train(files, "plain")
    assert (counts.pop("load ref"), counts.pop("score ref")) == (1, 32)  # two responses of eight rows, in two epochs
    first = train(files, "first", cache_reference=True)
    assert (counts.pop("load ref"), counts.pop("score ref")) == (1, 16)
    second = train(files, "second", cache_reference=True)
    other_order = train(files, "third", cache_reference=True, seed=1, batch_prompts=4, steps=4)
    assert counts["load ref"] == counts["score ref"] == 0
    assert same(plain, first)
    assert same(plain, second)
    assert not same(plain, other_order)


def test_mismatched_pairs_of_kto_are_cached_too(files, counts):
    plain = train(files, "plain", "kto")
    first = train(files, "first", "kto", cache_reference=True)
    before = counts["score ref"]
    second = train(files, "second", "kto", cache_reference=True)
    assert counts["score ref"] == before
    assert counts["load ref"] == 2
    assert same(plain, first)
    assert same(plain, second)


def test_rows_of_an_evaluation_are_scored_before_training(files, counts):
    held_out = files / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "9+9=", "chosen": "18.", "rejected": "99"}) + "\n")
    plain = train(files, "plain", **{"evaluation.data.path": held_out})
    counts.clear()
    assert same(plain, train(files, "first", cache_reference=True, **{"evaluation.data.path": held_out}))
    assert (counts["load ref"], counts["score ref"]) == (1, 18)


def test_other_weights_settings_and_temperatures_have_other_entries(files, counts):
    train(files, "first", cache_reference=True)
    for changes in (
        {"interfaces.actor.temperature": 0.5},
        {"models.actor.attention": "sdpa", "models.actor.shared_prompts": "off"},
    ):
        counts.clear()
        train(files, "changed", cache_reference=True, overwrite=True, **changes)
        assert counts["score ref"] == 16
    weights = load_file(files / "model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, files / "model" / "model.safetensors", metadata={"format": "pt"})
    counts.clear()
    assert same(
        train(files, "new", cache_reference=True), train(files, "plain", **{"models.actor.path": files / "model"})
    )
    assert counts["score ref"] == 16 + 32


def test_a_moved_model_keeps_its_entries(files, counts):
    train(files, "first", cache_reference=True)
    counts.clear()
    (files / "model").rename(files / "moved")
    train(files, "second", cache_reference=True, **{"models.actor.path": files / "moved"})
    assert counts["load ref"] == 0


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "removed"])
def test_damaged_files_are_removed_and_their_entries_computed_again(files, counts, damage):
    plain = train(files, "plain")
    train(files, "first", cache_reference=True)
    [path] = cache_files(files)
    content = path.read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes({"cut": content[:-7], "changed": changed, "empty": b"", "removed": content}[damage])
    if damage == "removed":
        path.unlink()
    counts.clear()
    assert same(plain, train(files, "second", cache_reference=True))
    assert counts["score ref"] == 16
    assert [file.read_bytes() for file in cache_files(files)] == [content]


def test_a_resumed_run_takes_log_probs_from_the_cache(files, counts):
    schedule = {"models.actor.optimizer.schedule.total": 8}
    plain = train(files, "plain", **schedule)
    train(files, "resumed", cache_reference=True, steps=3, **schedule)
    counts.clear()
    resumed = train(files, "resumed", cache_reference=True, resume="auto", **schedule)
    assert counts["score ref"] == 4  # the two rows that three steps did not read
    assert all(torch.equal(resumed[1][key], weight) for key, weight in plain[1].items())


def test_a_run_resumes_after_an_upgrade_but_not_with_other_weights(files, counts, monkeypatch):
    train(files, "run", cache_reference=True, steps=2)
    monkeypatch.setattr("realign.engines.cached_logprobs.code_version", lambda: "that of another torch")
    counts.clear()
    train(files, "run", cache_reference=True, steps=3, resume="auto")
    assert counts["score ref"] == 12  # all pairs of three steps again
    without = {"cache_reference": False, "steps": 4, "resume": "auto"}
    with pytest.warns(UserWarning, match=r"models\.ref: its weights are not compared with .* cache_reference was"):
        train(files, "run", resume_allow="[cache_reference]", **without)
    weights = load_file(files / "model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, files / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"models\.ref: the weights loaded from .* differ"):
        train(files, "run", **{**without, "steps": 5})


@pytest.mark.slow
def test_two_ranks_fill_and_read_the_cache(files, counts):
    _, alone = train(files, "alone")
    for name, line in (("first", "scored 16 sequences; 16 were"), ("second", "scored 0 sequences; 32 were")):
        out = Ranks(files, *words(files, name, cache_reference=True)).succeeded()
        assert f"Cache: models.ref {line} in the cache" in out
    first, second = (trained(files, name) for name in ("first", "second"))
    for key, weight in alone.items():
        torch.testing.assert_close(first[key], weight, rtol=0, atol=1e-4)  # sums of two ranks round differently
        assert torch.equal(second[key], first[key])


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("dpo", {"models.actor.trains": "lora"}),
        ("dpo", {"sync": "{ref: {of: actor, weight: 0.5, every_steps: 2}}"}),
        ("dpo", {"data.streaming": True}),
        ("dpo", {"interfaces.actor.reference_free": True}),
    ],
)
def test_a_reference_that_cannot_be_cached_is_an_error(files, counts, algorithm, changes):
    with pytest.raises(SettingsError, match="cache_reference=true: no role is a frozen model of its own"):
        train(files, "run", algorithm, cache_reference=True, **changes)


def test_a_cache_that_cannot_be_used_costs_no_run(files, counts):
    plain = train(files, "plain")
    folder = files / "cache" / "realign" / "logprobs"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match=r"Nothing more is cached in .*other users can write to"):
        assert same(plain, train(files, "run", cache_reference=True))
    assert list(folder.iterdir()) == []


def test_a_full_disk_costs_no_run(files, counts, monkeypatch):
    plain = train(files, "plain")
    replace = os.replace

    def full(source, target):
        if "cache" in Path(target).parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UserWarning, match=r"is not writable \(No space left on device\)\. This costs only time"):
        assert same(plain, train(files, "run", cache_reference=True))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda name="a": LogprobStore(name)


def test_processes_that_write_at_the_same_time_keep_the_entries_of_both(store):
    first, second = store(), store()
    for one, keys in ((first, "ab"), (second, "bc")):
        for key in keys:
            one.put(key, torch.tensor([float(ord(key))]))
    first.write()
    second.write()
    third = store()
    assert [third.get(key, 1).item() for key in "abc"] == [97, 98, 99]


def test_folders_are_private_whatever_the_umask(store, tmp_path):
    before = os.umask(0o002)
    try:
        one = store("model")
        one.put("key", torch.zeros(1))
        one.write()
    finally:
        os.umask(before)
    for folder in ("realign", "realign/logprobs", "realign/logprobs/model"):
        assert (tmp_path / "cache" / folder).stat().st_mode & 0o777 == 0o700


def test_a_model_of_the_hub_has_no_address_before_all_its_weights_are_here(monkeypatch, tmp_path):
    """The memory estimate of a run downloads the config alone; models with equal configs have different weights."""
    save_tiny(tmp_path / "model")
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda path, name: str(hub / name))
    spec = TransformersModel(path="some/model")
    assert fingerprint("ref", spec) is None
    index = hub / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (hub / "one.safetensors").write_bytes(b"1")
    assert fingerprint("ref", spec) is None
    (hub / "two.safetensors").write_bytes(b"2")
    complete = fingerprint("ref", spec)
    assert complete is not None
    (hub / "two.safetensors").write_bytes(b"3")
    assert fingerprint("ref", spec) not in (None, complete)


def test_beyond_the_limit_entries_stay_in_memory(store, monkeypatch):
    monkeypatch.setenv("REALIGN_CACHE_GB", "1e-5")
    first = store("a")
    for number in range(4):
        first.put(str(number), torch.zeros(1000))
        if number == 2:
            with pytest.warns(UserWarning, match="the cache is full"):
                first.write()
        else:
            first.write()
    assert [first.get(str(number), 1000) is not None for number in range(4)] == [True] * 4
    assert [store("a").get(str(number), 1000) is not None for number in range(4)] == [True, True, False, False]


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_of_entries_is_ignored(store, kind):
    one = store()
    one.put("key", torch.zeros(3))
    one.write()
    folder = one._cache.folder
    (folder / "there").write_text("secret")
    os.mkfifo(folder / "queue")
    OTHERS[kind](folder / "0.safetensors")
    assert store().get("key", 3) is not None


def test_an_entry_that_is_not_finite_is_no_entry(store):
    one = store()
    one.put("key", torch.tensor([0.0, float("nan")]))
    one.write()
    assert store().get("key", 2) is None


def test_an_entry_of_another_type_or_length_is_no_entry(store, tmp_path):
    written = store()
    written.put("key", torch.zeros(3))
    written.put("double", torch.zeros(3, dtype=torch.float64))
    written.write()
    assert written.get("key", 3) is not None
    assert written.get("key", 2) is None
    assert written.get("double", 3) is None
