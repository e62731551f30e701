"""Weights reach a real vLLM exactly, by each way: `REALIGN_TEST_VLLM` names its interpreter."""

import os
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.servers.task import largest_gap, prompts, sampling
from realign.api import GenerationConfig, MicroBatchSpec
from realign.engines import OptimizerSpec, TransformersModel
from realign.samplers.servers.server_settings import Updates
from realign.samplers.servers.vllm import VllmProtocol
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[3]


def loss(output, data):
    return -output.logprobs(temperature=1.0, where_T=data["loss_mask"]).sum(), {}


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("way", ["shared memory", "files", "delta"])
def test_a_real_server_has_the_weights_of_each_update(tmp_path, monkeypatch, way):
    python = os.environ.get("REALIGN_TEST_VLLM", str(ROOT / ".servers/venv/bin/python"))
    if not Path(python).exists():
        pytest.skip("vLLM is not installed: set REALIGN_TEST_VLLM")
    received = []
    receive = VllmProtocol.receive

    async def seen(self, http, folder, base=None):
        received.append((base is not None, await receive(self, http, folder, base)))
        return received[-1][1]

    monkeypatch.setattr(VllmProtocol, "receive", seen)
    path = save_tiny(tmp_path / "model", "llama", hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    model = TransformersModel(str(path), device="cpu", optimizer=OptimizerSpec(lr=1e-3)).load("actor", seed=0)
    more = {"weights_dir": str(tmp_path / "weights")} if way == "files" else {}
    updates = Updates.delta if way == "delta" else Updates.full
    words = {"launch": "", "python": python}
    spec = sampling(words, 64, updates=updates, **more)
    config = GenerationConfig(max_new_tokens=16)
    data = prompts(4)
    with closing(spec.open("actor", model.engine, model.tokenizer)) as sampler:
        for version in (1, 2):
            sample = sampler.generate(data, config, seed=version)
            assert largest_gap(model, sample, 1.0) < 1e-4
            train(model, sample, way)
            sampler.update(model.engine, version)
        assert largest_gap(model, sampler.generate(data, config, seed=3), 1.0) < 1e-4
    assert [by_delta for by_delta, _ in received] == ([False, True, True] if way == "delta" else [])


def train(model, sample, way):
    """Take a step, or change one row, which makes a small delta also in float32."""
    if way == "delta":
        weights = {name: x.clone() for name, x in model.engine.weights().items()}
        next(x for name, x in weights.items() if name.endswith("down_proj.weight"))[0] += 0.5
        model.engine.load_weights(weights)
    else:
        model.engine.train_batch(sample, MicroBatchSpec(), loss, lambda part: part["loss_mask"].sum())
