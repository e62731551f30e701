"""Servers of a run with several ranks, as torchrun starts it."""

from pathlib import Path

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines import Lora, OptimizerSpec, TransformersModel
from realign.engines.distributed.ranks import current
from realign.engines.servers.vllm import Vllm
from realign.errors import ConfigError
from realign.runtime.models import open_sampler
from tests.engines.distributed.run_ranks import run_ranks
from tests.engines.servers.fake_server import FakeServer, Scoring, logits_from, random_table
from tests.tiny import VOCAB, random_sample, save_tiny

WORDS = VOCAB


def three_prompts():
    return SequenceSample.from_sequences(["a", "b", "c"], {"prompt_ids": [[[1, 2]], [[3]], [[4, 5, 6]]]})


def loss(output, data):
    return -output.logprobs(temperature=1.0, where_T=data["loss_mask"]).sum(), {}


def train_and_sample(folder: Path, url: str, settings: dict):
    """Sample, train a step, and sample again."""
    lora = {"trains": Lora(rank=2, alpha=4)} if settings.get("lora") == "adapter" else {}
    sampler = Vllm(urls=[url], weights_dir=str(folder / "weights"), probe_tolerance=None, **settings)
    step = OptimizerSpec(lr=0.1)
    spec = TransformersModel(str(folder / "llama"), device="cpu", optimizer=step, sampler=sampler, **lora)
    model = spec.load("actor", seed=0)
    open_sampler(spec, model)
    config = GenerationConfig(n=2, max_new_tokens=7)
    try:
        found = [model.sampler.generate(three_prompts(), config, seed=1)]
        data = random_sample([(6,), (4, 3)])
        model.machine.train_batch(data, MicroBatchSpec(100), loss, lambda part: part["loss_mask"].sum())
        model.sampler.sleep()
        model.advance()
        model.sampler.wake()
        found.append(model.sampler.generate(three_prompts(), config, seed=2))
        weights = {name: x.clone() for name, x in model.machine.weights().items()}
    finally:
        model.sampler.close()
    return current().rank, [dict(sample.data) for sample in found], weights, model.sampler.version


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"lora": "adapter", "sleep_level": 2}, marks=pytest.mark.slow)],
    ids=["merged", "adapter"],
)
def test_all_ranks_get_the_responses_of_the_servers_of_rank_0(tmp_path, settings):
    save_tiny(tmp_path / "llama", family="llama", vocab_size=WORDS)
    server = FakeServer("vllm", random_table(0, words=WORDS))
    try:
        (first, *others) = run_ranks(2, train_and_sample, tmp_path, server.url, settings)
    finally:
        server.close()
    assert [first[0], *(rank for rank, *_ in others)] == [0, 1]
    for _, samples, _, version in others:
        assert version == first[3] == 1
        for mine, its in zip(first[1], samples, strict=True):
            assert mine.keys() == its.keys()
            assert all(torch.equal(mine[key], its[key]) for key in mine)
    assert [set(sample["versions"].tolist()) for sample in first[1]] == [{-1, 0}, {-1, 1}]
    if not settings.get("lora"):
        torch.testing.assert_close(server.logits_VV, logits_from(first[2]))
    else:
        assert list(server.adapters) == [server.label]
    assert len([path for path, body in server.requests if path == "/v1/completions"]) == 12


class OfRankZero(Scoring):
    """Weights that rank 0 writes and every rank can score with, as sharded engines do."""

    def save(self, path):
        if current().leader:
            super().save(path)

    def forward(self, data, mb_spec, post_hook):
        current().barrier()
        return super().forward(data, mb_spec, post_hook)


def update_and_wake(folder: Path, url: str):
    """Return the error of an update while the servers sleep, and of waking them; an empty text without one."""
    spec = Vllm(urls=[url], weights_dir=str(folder / "weights"), sleep_level=2)
    sampler = spec.open("actor", OfRankZero(random_table(0).logits_VV), range(12))
    errors = []
    for call in (sampler.sleep, lambda: sampler.update(OfRankZero(random_table(1).logits_VV), 1), sampler.wake):
        try:
            call()
            errors.append("")
        except ConfigError as error:
            errors.append(str(error))
    sampler.close()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("honest", [True, False])
def test_all_ranks_compare_what_servers_sample_with_the_trainer(tmp_path, honest):
    server = FakeServer("vllm", random_table(5))

    def tamper(path, body, found):
        if path == "/v1/completions" and server.sleeps and "token_ids" in found[1]["choices"][0] and not honest:
            choice = found[1]["choices"][0]
            choice["logprobs"]["token_logprobs"] = [0.0] * len(choice["token_ids"])
        return found

    server.tamper = tamper
    try:
        found = run_ranks(2, update_and_wake, tmp_path, server.url)
    finally:
        server.close()
    assert [errors[:2] for errors in found] == [["", ""]] * 2
    assert all(("does not return what it samples" in errors[2]) is not honest for errors in found)
    assert all((errors[2] == "") is honest for errors in found)
