"""`cache_reference=true`: the reference scores each row once, in any number of epochs and resumptions of a run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from realign.api import Model
from realign.config import build_experiment, compose
from realign.engines.training.transformers_engine import TransformersEngine
from realign.engines.transformers_model import TransformersModel
from realign.errors import CheckpointError, SettingsError
from realign.interfaces.dpo import DPOInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import run
from realign.runtime.reference_cache import REFERENCES
from realign.testing import BigramEngine
from realign.time_machine.replay import replay_steps
from tests.tiny import save_tiny
from tests.torchrun_ranks import Ranks
from tests.toys import BigramModel, Digits, Judged
from tests.toys import experiment as toy

ROWS = [{"prompt": f"{a}+{11 + a}=", "chosen": f"{11 + 2 * a}.", "rejected": f"{a}{11 + a}"} for a in range(8)]
LABELS = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in ROWS[:4]]
LABELS += [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in ROWS[4:]]


@pytest.fixture
def counts(monkeypatch):
    """Count the models that are loaded and the sequences that each role scores."""
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


def test_each_row_is_scored_once_in_two_epochs_of_a_run(files, counts):
    plain = train(files, "plain")
    assert (counts.pop("load ref"), counts.pop("score ref")) == (1, 32)  # two responses of eight rows, in two epochs
    for name in ("first", "second"):
        assert same(plain, train(files, name, cache_reference=True))
        assert (counts.pop("load ref"), counts.pop("score ref")) == (1, 16)


def test_mismatched_pairs_of_kto_are_scored_once_too(files, counts):
    plain = train(files, "plain", "kto")
    once = counts["score ref"]
    assert same(plain, train(files, "first", "kto", cache_reference=True))
    assert once < counts["score ref"] < 2 * once


def test_rows_of_an_evaluation_are_scored_before_training(files, counts):
    held_out = files / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "9+9=", "chosen": "18.", "rejected": "99"}) + "\n")
    plain = train(files, "plain", **{"evaluation.data.path": held_out})
    counts.clear()
    assert same(plain, train(files, "first", cache_reference=True, **{"evaluation.data.path": held_out}))
    assert (counts["load ref"], counts["score ref"]) == (1, 18)


def test_an_overwritten_run_scores_its_rows_again(files, counts):
    train(files, "run", cache_reference=True, save_every_steps=4)
    counts.clear()
    train(files, "run", cache_reference=True, overwrite=True)
    assert counts["score ref"] == 16


SCHEDULE = {"models.actor.optimizer.schedule.total": 8}


def test_a_resumed_run_takes_log_probs_from_its_folder(files, counts):
    plain = train(files, "plain", **SCHEDULE)
    train(files, "resumed", cache_reference=True, steps=3, **SCHEDULE)
    counts.clear()
    for steps, scored in ((5, 4), (8, 0)):  # three steps read six rows, five all eight
        resumed = train(files, "resumed", cache_reference=True, resume="auto", steps=steps, **SCHEDULE)
        assert counts.pop("score ref", 0) == scored
    assert counts["load ref"] == 1
    assert all(torch.equal(resumed[1][key], weight) for key, weight in plain[1].items())


def test_without_an_undamaged_file_a_resumed_run_scores_its_rows_again(files, counts):
    plain = train(files, "plain", **SCHEDULE)
    train(files, "run", cache_reference=True, steps=4, **SCHEDULE)
    shutil.copytree(files / "run", files / "undamaged")
    path = files / "run" / REFERENCES
    content = path.read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1])
    for damaged in (content[:-7], changed, b"", None):
        shutil.rmtree(files / "run")
        shutil.copytree(files / "undamaged", files / "run")
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        counts.clear()
        resumed = train(files, "run", cache_reference=True, resume="auto", **SCHEDULE)
        assert counts["score ref"] == 16
        assert all(torch.equal(resumed[1][key], weight) for key, weight in plain[1].items())
        assert path.read_bytes() == content


def test_a_run_resumes_without_the_setting_but_not_with_other_weights(files, counts):
    train(files, "run", cache_reference=True, steps=2)
    without = {"cache_reference": False, "steps": 4, "resume": "auto"}
    with pytest.warns(UserWarning, match=r"models\.ref: its weights are not compared with .* cache_reference was"):
        train(files, "run", resume_allow="[cache_reference]", **without)
    train(files, "cached", cache_reference=True, steps=2)
    weights = load_file(files / "model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, files / "model" / "model.safetensors", metadata={"format": "pt"})
    for name, changes in (("run", {**without, "steps": 5}), ("cached", {"cache_reference": True, "resume": "auto"})):
        with pytest.raises(CheckpointError, match=r"models\.ref: the weights loaded from .* differ"):
            train(files, name, **changes)


def test_a_replayed_step_reads_the_log_probs_of_its_run(files, counts):
    settings = build_experiment(compose(words(files, "run", cache_reference=True)))
    margins = run(settings).series("rewards/margin")
    counts.clear()
    (step,) = replay_steps(settings, files / "run", [6])
    assert counts["score ref"] == 0
    assert step.metrics["rewards/margin"] == margins[5] != 0


@pytest.mark.slow
def test_two_ranks_score_each_row_once(files, counts):
    _, alone = train(files, "alone")
    for changes, line in (
        ({"steps": 4}, "scored 16 sequences; 0 were"),
        ({"resume": "auto"}, "scored 0 sequences; 32 were"),
    ):
        out = Ranks(files, *words(files, "run", cache_reference=True, **SCHEDULE | changes)).succeeded()
        assert f"Reference: models.ref {line} scored before" in out
    for key, weight in alone.items():
        torch.testing.assert_close(trained(files, "run")[key], weight, rtol=0, atol=1e-4)  # sums round differently


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


def test_a_model_of_the_hub_has_no_hash_before_all_its_weights_are_here(monkeypatch, tmp_path):
    """The memory estimate of a run downloads the config alone; models with equal configs have different weights."""
    save_tiny(tmp_path / "model")
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda path, name: str(hub / name))
    spec = TransformersModel(path="some/model")
    assert spec.hash_of_weights("ref") is None
    index = hub / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (hub / "one.safetensors").write_bytes(b"1")
    assert spec.hash_of_weights("ref") is None
    (hub / "two.safetensors").write_bytes(b"2")
    complete = spec.hash_of_weights("ref")
    assert complete is not None
    (hub / "two.safetensors").write_bytes(b"3")
    assert spec.hash_of_weights("ref") not in (None, complete)


class Counted(BigramEngine):
    """A bigram table that counts the sequences it scores, over all tables."""

    scored: ClassVar[list[int]] = []

    def forward(self, data, *arguments):
        self.scored.append(data.n_sequences)
        return super().forward(data, *arguments)


class CountedModel(BigramModel):
    def load(self, name, *, seed):
        return Model(name, Counted(seed=seed, lr=self.lr), Digits(), seed)


def test_a_model_of_a_user_is_cached_too_and_known_by_its_weights(tmp_path, monkeypatch):
    losses = {}
    for name, cached in {"plain": False, "cached": True}.items():
        monkeypatch.setattr(Counted, "scored", [])
        roles = {"actor": DPOInterface(), "ref": ReferenceInterface()}
        models = {"actor": BigramModel(lr=0.1), "ref": CountedModel()}
        settings = {"graph": dataflow(roles), "interfaces": roles, "models": models, "data": Judged(8)}
        settings |= {"evaluation": None, "steps": 8, "batch_prompts": 2, "output_dir": tmp_path / name}
        made = toy(tmp_path, **settings, cache_reference=cached)
        losses[name] = run(made).series("loss"), sum(Counted.scored)
    assert losses["cached"][0] == losses["plain"][0]
    assert losses["plain"][1] == 2 * losses["cached"][1] > 0
    assert load_file(tmp_path / "cached" / REFERENCES).keys() > {"sha256"}
    more = {"steps": 9, "seed": 1, "cache_reference": True, "resume": "auto", "resume_allow": ["seed"]}
    with pytest.raises(CheckpointError, match=r"models\.ref: the weights loaded differ from those"):
        run(toy(tmp_path, **settings | more))
