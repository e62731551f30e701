from __future__ import annotations

import pytest
import torch

from benchmarks.peer.side_realign import Side
from benchmarks.peer.work import SCENARIOS, write_prompts
from realign.engines.training.stepper import Stepper
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.policy import PolicyInterface
from realign.models.network.network import Network
from realign.samplers.in_process.decode import Rollout

PATCHED = [(Rollout, "_draw"), (Network, "run"), (Stepper, "step"), (torch.Tensor, "backward")]
PATCHED += [(PolicyInterface, "loss"), (PPOCriticInterface, "loss")]


@pytest.mark.parametrize("name", ["tiny", "tiny_bf16", "ppo_tiny"])
def test_our_side_makes_steps_of_the_given_lengths(name, tmp_path, monkeypatch):
    # a side patches these methods for its whole process; monkeypatch restores them after this test
    for owner, method in PATCHED:
        monkeypatch.setattr(owner, method, getattr(owner, method))
    scenario = SCENARIOS[name]
    scenario.save_models(tmp_path)
    write_prompts(scenario, 2, tmp_path / "prompts.jsonl")
    side = Side(scenario, tmp_path, 2, {})
    for number in (1, 2):
        step = side.step(number)
        assert step["lengths"] == scenario.lengths(number)
        texts = scenario.prompt_texts(2)[(number - 1) * scenario.prompts : number * scenario.prompts]
        assert step["prompt_tokens"] == [len(text) for text in texts]
        assert 0 < step["model_work"] < step["wall"]
