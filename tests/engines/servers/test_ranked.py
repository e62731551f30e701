"""Servers of a run with several ranks, as torchrun starts it."""

from pathlib import Path

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines import Lora, OptimizerSpec, TransformersModel
from realign.engines.distributed.ranks import current
from realign.engines.servers.vllm import Vllm
from realign.runtime.models import open_sampler
from tests.engines.distributed.run_ranks import run_ranks
from tests.engines.servers.fake_server import FakeServer, logits_from, random_table
from tests.tiny import VOCAB, random_sample, save_tiny

WORDS = VOCAB


def prompts():
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
        found = [model.sampler.generate(prompts(), config, seed=1)]
        data = random_sample([(6,), (4, 3)])
        model.machine.train_batch(data, MicroBatchSpec(100), loss, lambda part: part["loss_mask"].sum())
        model.sampler.sleep()
        model.advance()
        model.sampler.wake()
        found.append(model.sampler.generate(prompts(), config, seed=2))
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
