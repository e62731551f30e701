"""realign's side of the comparison: a `LocalRuntime` whose steps are executed one at a time."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.peer.work import EOS, Scenario, reward
from realign.api import GenerationConfig, MicroBatchSpec
from realign.data import PromptData
from realign.engines import OptimizerSpec, TransformersModel
from realign.engines.training.stepper import Stepper
from realign.interfaces.components import Critic, KLPenalty, KLPlace
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.policy import PolicyInterface
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.reward_model import RewardModelInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.models import Score, Value
from realign.models.device import DType
from realign.models.network.network import Network
from realign.models.network.passes import ParallelPasses, SharedPrompts
from realign.runtime import Experiment
from realign.runtime.local import LocalRuntime
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.decode import Rollout, RowEntry
from realign.samplers.in_process.settings import InProcessSampling

LEVERS: Mapping[str, Mapping[str, Any]] = {
    "dtype": {"dtype": DType.float32},
    "compiled_decode": {"sampler": InProcessSampling(compiled_decode=CompiledDecode.off)},
    "fused_rollout": {"fused_rollout": False},
    "shared_prompts": {"shared_prompts": SharedPrompts.off},
    "parallel_passes": {"parallel_passes": ParallelPasses.off},
}
"""Optimizations that a setting turns off, and that setting of each model."""


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Score a response with the scenario's reward."""
    return reward(response)


class Side:
    """Executes steps and measures the parts of their time."""

    name = "realign"

    def __init__(self, scenario: Scenario, folder: Path, steps: int, options: dict[str, Any]) -> None:
        self.scenario = scenario
        self.spent: dict[str, float] = defaultdict(float)
        self.lengths: list[int] = []
        self.lock = threading.Lock()
        self.inside, self.entered, self.model_work = 0, 0.0, 0.0
        """Running calls in all threads, start of the current period with running calls, and total of such periods."""
        self.patches = ExitStack()
        self.patches.enter_context(forced_lengths(self))  # patched until the process ends
        budget = options.get("max_tokens_per_microbatch", 8192)
        experiment = Experiment(
            name="benchmark",
            steps=steps,
            batch_prompts=scenario.prompts,
            shuffle=False,
            data=PromptData(str(folder / "prompts.jsonl")),
            microbatch=MicroBatchSpec(max_tokens_per_microbatch=budget),
            ratio_tolerance=1e9,  # forced end tokens do not follow the policy
            **(grpo if scenario.algorithm == "grpo" else ppo)(scenario, folder, options.get("device", "cpu")),
        )
        changed = LEVERS[options["without"]] if options.get("without") else {}
        experiment = replace(
            experiment, models={role: replace(model, **changed) for role, model in experiment.models.items()}
        )
        self.runtime = LocalRuntime(experiment)
        self._watch()

    def _watch(self) -> None:
        for model in self.runtime.models.values():
            if model.has_engine:
                self._timed(model.engine, "forward")
        self._timed(self.runtime.models["actor"].engine, "generate")
        owners = (Network, "run"), (Stepper, "step"), (Stepper, "differentiate"), (torch.Tensor, "backward")
        for owner, name in (*owners, (PolicyInterface, "loss"), (PPOCriticInterface, "loss")):
            self._timed(owner, name)

    def _timed(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            started = self._enter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._leave(name, started)

        setattr(owner, name, outer)

    def _enter(self) -> float:
        now = time.perf_counter()
        with self.lock:
            if not self.inside:
                self.entered = now
            self.inside += 1
        return now

    def _leave(self, name: str, started: float) -> None:
        now = time.perf_counter()
        with self.lock:
            self.spent[name] += now - started
            self.inside -= 1
            if not self.inside:
                self.model_work += now - self.entered

    def step(self, number: int) -> dict[str, Any]:
        """Execute a step (from 1)."""
        self.lengths = self.scenario.lengths(number)
        self.spent.clear()
        self.model_work = 0.0
        started = time.perf_counter()
        values, batch = self.runtime.step(number)
        wall = time.perf_counter() - started
        found = [int(m.sum()) for m in batch.sequences("loss_mask")]
        assert found == self.lengths, "wrong response lengths"
        prompts = [int(m.sum()) for m in batch.sequences("prompt_mask")][:: self.scenario.group]
        generate = self.spent["generate"]
        return {
            "wall": wall,
            "rollout": generate,
            "training": wall - generate,
            "model_work": self.model_work,
            "spent": dict(self.spent),
            "calls": {name: value for name, value in values.items() if name.startswith("time/")},
            "prompt_tokens": prompts,
            "lengths": found,
        }


def actor(scenario: Scenario, folder: Path, device: str) -> TransformersModel:
    """Configure the policy: fp32 on a CPU unless the scenario has bf16, bf16 compute with fp32 weights elsewhere."""
    return TransformersModel(
        str(folder / "model"),
        tokenizer=str(folder / "tokenizer"),
        device=device,
        dtype=DType.float32 if device == "cpu" and not scenario.bf16 else DType.bfloat16,
        optimizer=OptimizerSpec(lr=1e-6),
    )


def grpo(scenario: Scenario, folder: Path, device: str) -> dict[str, Any]:
    """Configure GRPO with a rule-based reward, called in this process as in TRL."""
    generation = GenerationConfig(n=scenario.group, max_new_tokens=scenario.max_new)
    interfaces = {
        "actor": GRPOActorInterface(generation=generation),
        "reward": RuleRewardInterface("benchmarks.peer.side_realign:score", workers=0),
    }
    return {
        "graph": dataflow(interfaces),
        "models": {"actor": actor(scenario, folder, device)},
        "interfaces": interfaces,
    }


def ppo(scenario: Scenario, folder: Path, device: str) -> dict[str, Any]:
    """Configure PPO with reference, reward model and critic. The critic is initialized from the reward model."""
    policy = actor(scenario, folder, device)
    learned = replace(policy, path=str(folder / "reward"))
    generation = GenerationConfig(n=scenario.group, max_new_tokens=scenario.max_new)
    interfaces = {
        "actor": PPOActorInterface(
            generation=generation,
            epochs=scenario.epochs,
            critic=Critic.own,
            kl=KLPenalty(KLPlace.reward, coef=0.05),
        ),
        "ref": ReferenceInterface(),
        "reward": RewardModelInterface(),
        "critic": PPOCriticInterface(epochs=scenario.epochs),
    }
    return {
        "graph": dataflow(interfaces),
        "models": {
            "actor": policy,
            "ref": replace(policy, optimizer=None),
            "reward": replace(learned, head=Score(), optimizer=None),
            "critic": replace(learned, head=Value()),
        },
        "interfaces": interfaces,
    }


@contextmanager
def forced_lengths(side: Any) -> Iterator[None]:
    """Force response lengths to `side.lengths`: insert the end token there, and replace earlier end tokens.

    The sampler still draws from the whole distribution, so its work does not change.
    """
    draw = Rollout._draw
    known: dict[str, Any] = {}

    def on(device: torch.device) -> Tensor:
        """Copy the lengths to a device once, since each copy would wait for the device."""
        if known.get("lengths") is not side.lengths or known["tensor"].device != device:
            known.update(lengths=side.lengths, tensor=torch.tensor(side.lengths, device=device))
        found: Tensor = known["tensor"]
        return found

    def forced(self: Rollout, hidden_BH: Tensor, counts_B: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        tokens_B, logprobs_B, kept = draw(self, hidden_BH, counts_B)
        sequences_B = self.rows[RowEntry.SEQUENCE, self.active - len(counts_B) : self.active]
        last_B = counts_B + 1 >= on(counts_B.device)[sequences_B]
        tokens_B = torch.where(last_B, EOS, torch.where(tokens_B == EOS, EOS + 1, tokens_B))
        return tokens_B, logprobs_B, kept

    with patch.object(Rollout, "_draw", forced):
        yield
