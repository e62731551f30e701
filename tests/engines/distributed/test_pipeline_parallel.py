"""Test the stages of a pipeline: what each of them has, in which order it computes, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.api import GenerationConfig, SequenceSample
from realign.engines import Sharding
from realign.engines.distributed.pipeline_parallel import in_stages, one_forward_one_backward
from realign.engines.distributed.sharded_gradients import ShardedGradients
from realign.engines.distributed.sharded_network import ShardedNetwork
from realign.errors import RealignError
from realign.models import Causal, TopLayers, ValueHead
from realign.models.network.probe import TOLERANCE, probe_stages
from tests.engines.distributed import scenarios
from tests.engines.distributed.comparisons import assert_same
from tests.engines.distributed.run_ranks import run_ranks
from tests.tiny import FAMILIES, random_sample, save_tiny, tiny_model

DEEP = {"family": "llama", "num_hidden_layers": 4, "vocab_size": 97}
TWO, FOUR = Sharding(pipeline=2), Sharding(pipeline=4)


def test_a_stage_computes_ahead_for_the_stages_after_it_and_then_alternates() -> None:
    words = {later: "".join("BF"[forward] for forward in one_forward_one_backward(5, later)) for later in range(4)}
    assert words == {0: "FBFBFBFBFB", 1: "FFBFBFBFBB", 2: "FFFBFBFBBB", 3: "FFFFBFBBBB"}


@given(passes=st.integers(0, 20), later=st.integers(0, 8))
def test_every_pass_has_a_gradient_and_few_passes_wait_for_theirs(passes: int, later: int) -> None:
    waiting = [0]
    for forward in one_forward_one_backward(passes, later):
        waiting.append(waiting[-1] + (1 if forward else -1))
    assert len(waiting) == 2 * passes + 1
    assert waiting[-1] == 0
    assert min(waiting) >= 0
    assert max(waiting) <= min(passes, later + 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_these_families_can_be_computed_apart(family: str) -> None:
    model = tiny_model(family)
    assert probe_stages(model, in_stages) <= TOLERANCE
    assert not any("forward" in vars(part) for part in model.modules())  # as it was before


def own_weights(folder: Path, sharding: Sharding, **settings: Any) -> dict[str, Any]:
    """Return which weights a rank has, how many of them, and how many passes waited for their gradient at a time."""
    model = scenarios.load(folder, "deep", sharding=sharding, **settings)
    network = model.engine.network
    waiting, most = 0, 0
    hidden, differentiate = ShardedNetwork._hidden, ShardedGradients.differentiate

    def forward(self: ShardedNetwork, *arguments: Any) -> Any:
        nonlocal waiting, most
        waiting += torch.is_grad_enabled()
        most = max(most, waiting)
        return hidden(self, *arguments)

    def backward(self: ShardedGradients, *arguments: Any) -> None:
        nonlocal waiting
        waiting -= 1
        differentiate(self, *arguments)

    with patch.object(ShardedNetwork, "_hidden", forward), patch.object(ShardedGradients, "differentiate", backward):
        data = random_sample([(30,)] * 7)
        counts = model.engine.train_batch(data, scenarios.BUDGET, scenarios.plain_loss, scenarios.weight)
    return {
        "names": [name.removeprefix("module.") for name, _ in network.named_parameters()],
        "local": sum(p.numel() for p in network.own_parameters()),
        "waiting": most,
        "passes": float(counts["n_microbatches"].total),
        "size": model.engine.capabilities().size,
    }


def test_no_rank_has_the_layers_of_other_stages_and_few_passes_wait_for_their_gradient(tmp_path: Path) -> None:
    save_tiny(tmp_path / "deep", **DEEP)
    whole = scenarios.load(tmp_path, "deep").engine
    sizes = {name: x.numel() for name, x in whole.weights().items()}
    first, last = run_ranks(2, own_weights, tmp_path, TWO)
    assert sorted(first["names"] + last["names"]) == sorted(sizes)
    for stage, layers in ((first, "01"), (last, "23")):
        numbers = {name.split(".")[2] for name in stage["names"] if ".layers." in name}
        assert numbers == set(layers)
        assert stage["local"] == sum(sizes[name] for name in stage["names"])
        assert stage["passes"] == 7
        assert stage["size"] == whole.capabilities().size
    assert "model.embed_tokens.weight" in first["names"]
    assert {"lm_head.weight", "model.norm.weight"} <= set(last["names"])
    assert (first["waiting"], last["waiting"]) == (2, 1)


def on_four(folder: Path) -> dict[str, Any]:
    return {
        "gradient": scenarios.gradient(folder, "deep", sharding=FOUR),
        "grpo": scenarios.grpo(folder, family="deep", sharding=FOUR),
        "own": own_weights(folder, FOUR),
    }


@pytest.mark.slow
def test_four_stages_of_one_layer_train_as_one_process(tmp_path: Path) -> None:
    save_tiny(tmp_path / "deep", **DEEP)
    wanted = {"gradient": scenarios.gradient(tmp_path, "deep"), "grpo": scenarios.grpo(tmp_path, family="deep")}
    for index, results in enumerate(run_ranks(4, on_four, tmp_path)):
        own = results.pop("own")
        assert own["waiting"] == 4 - index
        assert len({name.split(".")[2] for name in own["names"] if ".layers." in name}) == 1
        assert results["gradient"].keys() == wanted["gradient"].keys()
        for name, x in wanted["gradient"].items():
            assert (results["gradient"][name] - x).norm() <= 1e-5 * x.norm(), name
        assert_same(results["grpo"], wanted["grpo"])


def refused(folder: Path) -> dict[str, str]:
    """Return the error messages of settings that stages do not support."""
    branch = Causal(ValueHead(layers=3))
    attempts: Mapping[str, Any] = {
        "layers": partial(scenarios.load, folder, sharding=TWO, trains=TopLayers(1)),
        "branch": partial(scenarios.load, folder, sharding=TWO, head=branch),
        "compiled": partial(scenarios.load, folder, sharding=TWO, torch_compile="eager"),
        "replay": partial(replay, folder),
    }
    messages = {}
    for name, attempt in attempts.items():
        with pytest.raises(RealignError) as raised:
            attempt()
        messages[name] = str(raised.value)
    return messages


def replay(folder: Path) -> None:
    engine = scenarios.load(folder, "qwen3_moe", sharding=TWO).engine
    prompts = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": [[[5, 6, 7]], [[8]]]})
    engine.generate(prompts, GenerationConfig(max_new_tokens=2, router_replay=True), seed=0)


@pytest.mark.slow
def test_what_stages_do_not_support_is_refused_in_one_line_on_every_rank(tmp_path: Path) -> None:
    scenarios.write_models(tmp_path)
    key = "models.actor.sharding.pipeline=2"
    expected = {
        "layers": f"{key}: no weight of stage 0 trains with trains=top_layers. Remove this key, or set "
        "models.actor.trains=lora.",
        "branch": f"{key}: the last stage has 2 layers, but the value head of models.actor copies 3. Set "
        "models.actor.head.value_head.layers to at most 2.",
        "compiled": f"{key}: not supported with torch_compile. Set models.actor.torch_compile=off.",
        "replay": f"models.actor: choices of experts cannot be replayed: {key}: the stages would count changed "
        "choices apart.",
    }
    assert run_ranks(2, refused, tmp_path) == [expected, expected]
