"""Runs of tiny models that can be killed and compared: SFT, GRPO, PPO, DPO and others."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realign.api import GenerationConfig, ModelInterface, Sync
from realign.data import (
    LabelKind,
    PassRate,
    Prefer,
    PreferenceData,
    PromptData,
    SupervisedData,
    TextData,
    WithPretraining,
)
from realign.engines import SharedModel, TransformersModel
from realign.engines.shared_model import Share
from realign.engines.training.optimizer import OptimizerSpec, Schedule, ScheduleKind, ScheduleUnit
from realign.functional import KLEstimator
from realign.interfaces import dpo, grpo, ppo, raft, reward_model, rft, sft
from realign.interfaces.components import Critic, KLPenalty, KLPlace, RewardScale, RewardShaping, ValueObjective
from realign.interfaces.critic import PPOCriticInterface, ValueNormalization, ValueScale
from realign.interfaces.reference import ReferenceInterface
from realign.models import Causal, HeadInit, Lora, Score, TopLayers, Value, ValueHead
from realign.records.checkpoint.folder import list_checkpoints
from realign.runtime import (
    CheckpointSpec,
    DynamicSampling,
    Evaluation,
    Experiment,
    LossEvaluation,
    RewardCalibration,
    run,
)
from realign.runtime.run_checkpoints import RunCheckpoints
from tests.tiny import save_tiny

STEPS, ROWS, BATCH = 5, 6, 4
"""Epochs end in the middle of steps 2 and 5, and at the end of step 3."""
SAMPLING = GenerationConfig(n=3, max_new_tokens=5)


@dataclass
class Wandering(ModelInterface):
    """Reward with state, and noise from all global generators, as users write them."""

    needs_engine: ClassVar[bool] = False
    calls: int = field(default=0, init=False)

    def inference(self, model, data, mb_spec):
        self.calls += 1
        rewards = []
        for ids, given in zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True):
            noise = random.random() + np.random.rand() + float(torch.rand(()))
            rewards.append(float((ids[~given] % 3 == 0).float().mean()) + 0.1 * noise + 0.01 * self.calls)
        return data.with_sequences(rewards=torch.tensor(rewards)).select(["rewards"])

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@dataclass
class Plenty(ModelInterface):
    """Reward with the same value for many prompts, which filters drop."""

    needs_engine: ClassVar[bool] = False

    def inference(self, model, data, mb_spec):
        pairs = zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
        rewards = [float(int(ids[~given][0]) % 5 == 0) for ids, given in pairs]
        return data.with_sequences(rewards=torch.tensor(rewards)).select(["rewards"])


def save_files(folder: Path) -> Path:
    save_tiny(folder / "llama")
    save_tiny(folder / "score", head="score", seed=1)
    rows = [{"prompt": f"{i}+{i + 1}=", "response": str(2 * i + 1), "rejected": f"x{i}"} for i in range(ROWS)]
    texts = [{"text": f"the sum of {i} and {i}"} for i in range(5)]
    for name, lines in (("rows", rows), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def trained(files: Path, name: str = "llama", ema_decay: float | None = None, **settings: Any) -> TransformersModel:
    schedule = Schedule(ScheduleKind.cosine, warmup=1, total=9, min_ratio=0.1, unit=ScheduleUnit.train_step)
    optimizer = OptimizerSpec(lr=1e-2, weight_decay=0.1, schedule=schedule, ema_decay=ema_decay)
    return TransformersModel(str(files / name), optimizer=optimizer, **settings)


def prompts(files: Path) -> PromptData:
    return PromptData(str(files / "rows.jsonl"))


def of_sft(files: Path) -> dict[str, Any]:
    data = SupervisedData(str(files / "rows.jsonl"))
    return {
        "graph": sft.dataflow(),
        "interfaces": {"actor": sft.SFTInterface(n_minibatches=2)},
        "models": {"actor": trained(files, dropout=0.1, ema_decay=0.9)},
        "data": data,
        "evaluation": LossEvaluation(data, every_steps=2),
        "save_every_steps": 2,
        "keep_saves": 1,
        "save_best": "-eval/nll",
    }


def of_grpo(files: Path) -> dict[str, Any]:
    actor = grpo.GRPOActorInterface(
        generation=SAMPLING,
        n_minibatches=2,
        recompute=True,
        kl=KLPenalty(KLPlace.loss, 0.1, KLEstimator.k3, target=0.5, horizon=60),
    )
    interfaces = {"actor": actor, "ref": ReferenceInterface(), "reward": Wandering()}
    return {
        "graph": grpo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {"actor": trained(files), "ref": TransformersModel(str(files / "llama"))},
        "evaluation": Evaluation(prompts(files), Wandering(), SAMPLING, every_steps=2),
        "sample_prompts": BATCH,
    }


def of_grpo_with_a_reference_that_follows(files: Path) -> dict[str, Any]:
    sync = {"ref": Sync("actor", weight=0.3, every_steps=2)}
    return of_grpo(files) | {"sync": sync, "evaluation": None}


def of_ppo(files: Path) -> dict[str, Any]:
    """Configure all options with state: two optimizers, averaged weights, adaptive KL, running moments and ptx."""
    actor = ppo.PPOActorInterface(
        generation=SAMPLING,
        epochs=2,
        n_minibatches=2,
        kl=KLPenalty(KLPlace.reward, 0.1, target=0.5, horizon=60),
        reward=RewardShaping(scale=RewardScale.running, center=True, clip=2.0),
        ptx_coef=0.5,
        critic=Critic.own,
        critic_warmup_steps=1,
    )
    critic = PPOCriticInterface(normalization=ValueNormalization(ValueScale.exponential, beta=0.9))
    interfaces = {"actor": actor, "critic": critic, "ref": ReferenceInterface(), "reward": Wandering()}
    return {
        "graph": ppo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {
            "actor": trained(files, ema_decay=0.9, dropout=0.1),
            "critic": trained(files, "score", head=Value(HeadInit.normal)),
            "ref": TransformersModel(str(files / "llama")),
        },
        "data": WithPretraining(prompts(files), TextData(str(files / "texts.jsonl"), block_tokens=9)),
        "sample_prompts": 2,
    }


class PoisonedCritic(PPOCriticInterface):
    """In the second step of a run, every loss is NaN."""

    def train_step(self, model, data, mb_spec):
        if model.version == 1:
            data = data.with_tokens(returns=torch.full_like(data["returns"], torch.nan))
        return super().train_step(model, data, mb_spec)


def of_ppo_in_one_model(files: Path) -> dict[str, Any]:
    """Configure policy, values and the frozen initial policy in one model whose top layer is trained."""
    actor = ppo.PPOActorInterface(
        generation=SAMPLING,
        kl=KLPenalty(KLPlace.reward, 0.1, target=0.5, horizon=60),
        reward=RewardShaping(scale=RewardScale.ref),
        critic=Critic.shared,
        value=ValueObjective(coef=0.5),
    )
    interfaces = {"actor": actor, "critic": PPOCriticInterface(), "ref": ReferenceInterface(), "reward": Wandering()}
    return {
        "graph": ppo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {
            "actor": trained(files, trains=TopLayers(1), head=Causal(ValueHead(layers=1, hidden="mlp"))),
            "critic": SharedModel("actor"),
            "ref": SharedModel("actor", Share.reference),
        },
    }


def of_lora(files: Path) -> dict[str, Any]:
    actor = grpo.GRPOActorInterface(generation=SAMPLING, kl=KLPenalty(KLPlace.reward, 0.1))
    interfaces = {"actor": actor, "ref": ReferenceInterface(), "reward": Wandering()}
    return {
        "graph": grpo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {
            "actor": trained(files, trains=Lora(rank=2, dropout=0.1), dropout=0.1, ema_decay=0.5),
            "ref": SharedModel("actor", Share.reference),
        },
    }


def of_raft(files: Path) -> dict[str, Any]:
    return {
        "graph": raft.dataflow(),
        "interfaces": {
            "actor": raft.RAFTActorInterface(generation=SAMPLING, keep_best=None, keep_share=0.4),
            "reward": Wandering(),
        },
        "models": {"actor": trained(files)},
    }


def of_rft(files: Path) -> dict[str, Any]:
    actor = rft.RFTActorInterface(generation=SAMPLING, n_improve_steps=2)
    return {
        "graph": rft.dataflow(),
        "interfaces": {"actor": actor, "reward": Wandering()},
        "models": {"actor": trained(files)},
    }


def of_dpo(files: Path) -> dict[str, Any]:
    return {
        "graph": dpo.dataflow(),
        "interfaces": {"actor": dpo.DPOInterface(n_minibatches=2), "ref": ReferenceInterface()},
        "models": {"actor": trained(files), "ref": TransformersModel(str(files / "llama"))},
        "data": PreferenceData(str(files / "rows.jsonl"), chosen_column="response", kind=LabelKind.pairs),
    }


def of_a_reward_model(files: Path) -> dict[str, Any]:
    """Configure a calibration that sets gain and bias before training, and again after the last step."""
    calibration = RewardCalibration(prompts(files), before=True, after=True, samples=6, generation=SAMPLING)
    return {
        "graph": reward_model.dataflow(),
        "interfaces": {"reward": reward_model.RewardModelInterface()},
        "models": {
            "reward": trained(files, "score", head=Score()),
            "policy": TransformersModel(str(files / "llama")),
        },
        "data": PreferenceData(str(files / "rows.jsonl"), chosen_column="response"),
        "calibration": calibration,
    }


def of_dynamic_sampling(files: Path) -> dict[str, Any]:
    interfaces = {"actor": grpo.GRPOActorInterface(generation=replace(SAMPLING, n=4)), "reward": Plenty()}
    return {
        "graph": grpo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {"actor": trained(files)},
        "dynamic_sampling": DynamicSampling(generation_prompts=2),
        "batch_prompts": 2,
    }


def of_a_curriculum(files: Path) -> dict[str, Any]:
    curriculum = PassRate(pass_reward=0.5, prefer=Prefer.hard, min_weight=0.05)
    return of_grpo(files) | {"curriculum": curriculum, "evaluation": None}


def of_a_curriculum_with_dynamic_sampling(files: Path) -> dict[str, Any]:
    return of_dynamic_sampling(files) | {"curriculum": PassRate(window=1), "sample_prompts": BATCH}


RUNS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "sft": of_sft,
    "grpo": of_grpo,
    "synced reference": of_grpo_with_a_reference_that_follows,
    "ppo": of_ppo,
    "ppo in one model": of_ppo_in_one_model,
    "lora": of_lora,
    "raft": of_raft,
    "rft": of_rft,
    "dpo": of_dpo,
    "reward model": of_a_reward_model,
    "dynamic sampling": of_dynamic_sampling,
    "curriculum": of_a_curriculum,
    "curriculum with dynamic sampling": of_a_curriculum_with_dynamic_sampling,
}


def experiment(files: Path, out: Path, name: str, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "name": "run",
        "steps": STEPS,
        "batch_prompts": BATCH,
        "data": prompts(files),
        "seed": 3,
        "output_dir": out,
        "checkpoint": CheckpointSpec(every_steps=1, keep=9),
    }
    return Experiment(**(settings | RUNS[name](files) | changes))


class Killed(Exception):
    """Raised by a test to end a run."""


def run_until_killed(made: Experiment, step: int) -> None:
    """Run until the metrics of a step are logged. Like SIGKILL, the end leaves no time to write a checkpoint."""
    with patch.object(RunCheckpoints, "keep", lambda self: None), pytest.raises(Killed):
        run(made, trackers=[Killer(step)])


@dataclass
class Killer:
    """Tracker that ends the run between the metrics of a step and its checkpoint."""

    step: int

    def log(self, step, metrics):
        if step == self.step:
            raise Killed

    def close(self):
        pass


def start_anywhere() -> None:
    """Seed the global generators randomly, as in a new process."""
    random.seed()
    np.random.seed()
    torch.seed()


def started(files: Path, out: Path, name: str, **changes: Any) -> None:
    start_anywhere()
    run(experiment(files, out, name, **changes))


def killed(files: Path, out: Path, name: str, after: int) -> None:
    start_anywhere()
    run_until_killed(experiment(files, out, name), after + 1)
    steps = [c.step for c in list_checkpoints(out / "checkpoints")]
    assert steps[-after:] == list(range(1, after + 1))  # there may be another checkpoint from before the first step


def untimed(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    other = ("_s", "seconds", "settings")
    return [{name: x for name, x in line.items() if not name.endswith(other)} for line in lines]


def assert_same_tree(actual: Any, expected: Any, where: str = "") -> None:
    """Assert equality bit for bit. NaN equals NaN."""
    assert type(actual) is type(expected), where
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected), where
        for key in expected:
            assert_same_tree(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, (x, y) in enumerate(zip(actual, expected, strict=True)):
            assert_same_tree(x, y, f"{where}/{i}")
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert actual.numpy().tobytes() == expected.numpy().tobytes(), where
    else:
        assert actual == expected or (actual != actual and expected != expected), where


def assert_same_run(actual: Path, expected: Path) -> None:
    """Assert equal metrics, samples, saved weights and last checkpoints: optimizers, moments and generators."""
    for name in ("metrics", "samples", "eval_samples"):
        assert untimed(actual / f"{name}.jsonl") == untimed(expected / f"{name}.jsonl"), name
    weights = sorted(path.relative_to(expected) for path in expected.glob("[fsb]*/**/*.safetensors"))
    assert weights == sorted(path.relative_to(actual) for path in actual.glob("[fsb]*/**/*.safetensors"))
    for path in weights:
        assert_same_tree(load_file(actual / path), load_file(expected / path), str(path))
    last, whole = (list_checkpoints(out / "checkpoints")[-1].read() for out in (actual, expected))
    for state in (last, whole):
        del state["records"]  # durations, and their numbers of bytes
    assert_same_tree(last, whole)


def state(out: Path) -> Any:
    """Return the last checkpoint without the entries about place and time of its writing."""
    tree = list_checkpoints(out / "checkpoints")[-1].read()
    tree["saves"].pop("known")
    return {key: x for key, x in tree.items() if key not in ("records", "config", "environment")}
