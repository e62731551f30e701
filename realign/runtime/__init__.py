"""Runtimes that execute a graph: `run`, with evaluation, metrics, learning curves and saved models."""

from realign.api import ModelSpec
from realign.run_settings import CheckpointSpec
from realign.runtime.evaluation.base import Evaluator
from realign.runtime.evaluation.calibration import RewardCalibration
from realign.runtime.evaluation.episodes import EpisodeEvaluation
from realign.runtime.evaluation.generation import Evaluation
from realign.runtime.evaluation.loss import LossEvaluation
from realign.runtime.experiment import Experiment
from realign.runtime.local import LocalRuntime
from realign.runtime.rollout.dynamic_sampling import DynamicSampling
from realign.runtime.rollout.spec import Async, OnUpdate, RolloutSpec
from realign.runtime.run_experiment import run
from realign.runtime.runtime_spec import Local, Placement, Ray, RuntimeSpec
from realign.runtime.training import RunResult
from realign.signals import Interrupted

__all__ = [
    "Async",
    "CheckpointSpec",
    "DynamicSampling",
    "EpisodeEvaluation",
    "Evaluation",
    "Evaluator",
    "Experiment",
    "Interrupted",
    "Local",
    "LocalRuntime",
    "LossEvaluation",
    "ModelSpec",
    "OnUpdate",
    "Placement",
    "Ray",
    "RewardCalibration",
    "RolloutSpec",
    "RunResult",
    "RuntimeSpec",
    "run",
]
