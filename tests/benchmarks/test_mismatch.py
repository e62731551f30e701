"""The mismatch lab changes its sampler by what it says, resumes, and its page shows its results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import mismatch
from benchmarks.curves import task
from realign.api import GenerationConfig, SequenceSample

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return the folder of the task, with a model that has learned nothing yet."""
    folder = tmp_path_factory.mktemp("task")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "_imitate", lambda *args, **kwargs: None)
        mismatch.prepare(folder)
    return folder


@pytest.fixture
def prompts():
    return SequenceSample.from_sequences([0, 1], {"prompt_ids": [[list(range(2, 10))], [list(range(3, 11))]]})


def sampled(home, prompts, change, updates=0):
    """Return reported log-probs of samples, and those of the network that the sampler was given last, in nats."""
    network = LlamaForCausalLM.from_pretrained(home / "model").eval()
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    sampler = mismatch.ChangedSampler(network, change, weights)
    for _ in range(updates):
        weights = {name: value * 1.5 for name, value in weights.items()}
        sampler.load_weights(weights)
    network.load_state_dict(weights)
    data = sampler.generate(prompts, GenerationConfig(n=4, max_new_tokens=5), seed=1)
    ids = torch.stack(list(data.sequences("input_ids")))
    with torch.no_grad():
        logprobs = network(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return data["logprobs"][data["loss_mask"]], logprobs[:, 7:].flatten()


@pytest.mark.parametrize(
    ("change", "updates", "least", "most"),
    [
        ("unchanged", 3, 0, 1e-5),
        ("stale_1", 0, 0, 1e-5),
        ("stale_1", 1, 1e-2, 99),
        ("int8", 0, 1e-5, 0.1),
        ("bf16", 0, 1e-5, 0.5),
        ("noise_0.5", 0, 0.1, 9),
        ("misreports_0.5", 0, 0.1, 9),
        ("temperature_1.5", 1, 1e-3, 99),
        ("reports_1.5", 1, 1e-3, 99),
    ],
)
def test_a_sampler_differs_by_what_it_says(home, prompts, change, updates, least, most):
    reported, true = sampled(home, prompts, change, updates)
    assert least <= float((reported - true).abs().max()) <= most


def test_a_stale_sampler_uses_the_weights_of_so_many_steps_ago(home):
    network = LlamaForCausalLM.from_pretrained(home / "model")
    sampler = mismatch.ChangedSampler(network, "stale_2", network.state_dict())
    for step in range(1, 5):
        sampler.load_weights({name: torch.full_like(value, step) for name, value in network.state_dict().items()})
    assert float(sampler.network.state_dict()["model.norm.weight"][0]) == 2


@pytest.mark.parametrize("correction", mismatch.CORRECTIONS)
def test_a_run_trains_with_every_correction(home, correction):
    run = mismatch.train(home, "int8", correction, 1, steps=1)
    assert run["score"] >= 0
    assert (run[mismatch.NATS] > 0) == (correction == "none")
    assert (run[mismatch.KL] > 0) == (correction not in ("none", "recompute"))


def test_a_stopped_study_resumes_and_repeats_nothing(tmp_path, monkeypatch, home, capsys):
    trained = []

    def train(home, sampler, correction, seed, *, steps):
        if len(trained) == 5:
            raise KeyboardInterrupt
        trained.append((sampler, correction, seed))
        return {"score": float(len(trained)), mismatch.NATS: 0.1, mismatch.KL: 0.2}

    monkeypatch.setattr(mismatch, "train", train)
    monkeypatch.setattr(mismatch, "SAMPLERS", {"exact": "exact", "int8": "int8"})
    words = [f"results={tmp_path / 'runs.jsonl'}", f"picture={tmp_path / 'a.png'}", f"task={home}", "seeds=2"]
    with pytest.raises(KeyboardInterrupt):
        mismatch.main(words)
    before, trained[:] = list(trained), []
    with pytest.raises(KeyboardInterrupt):
        mismatch.main(words)
    before, trained[:] = before + list(trained), []
    mismatch.main(words)
    cells = 1 + len(mismatch.CORRECTIONS)
    assert len({*before, *trained}) == len(before) + len(trained) == 1 + 2 * cells
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 1 + 2 * cells
    assert "| int8 | 0.1 | 0.2 |" in capsys.readouterr().out
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_the_page_shows_the_results():
    lines = (REPOSITORY / mismatch.DEFAULTS["results"]).read_text(encoding="utf-8").splitlines()
    page = (REPOSITORY / "docs" / "studies" / "mismatch.md").read_text(encoding="utf-8")
    table, left = mismatch.table([json.loads(line) for line in lines])
    assert table in page
    assert [fractions for fractions in left if not fractions] == []
