"""What executes a graph: `run` in this process, with evaluation, metrics, learning curves and saved models."""

from realign.api import ModelSpec
from realign.runtime.calibration import RewardCalibration
from realign.runtime.dynamic_sampling import DynamicSampling
from realign.runtime.episode_evaluation import EpisodeEvaluation
from realign.runtime.evaluation import Evaluation
from realign.runtime.evaluator import Evaluator
from realign.runtime.experiment import Experiment
from realign.runtime.local import LocalRuntime
from realign.runtime.loss_evaluation import LossEvaluation
from realign.runtime.rollout import Async, OnUpdate, RolloutSpec
from realign.runtime.runtime_spec import Local, Placement, Ray, RuntimeSpec
from realign.runtime.saving import CheckpointSpec
from realign.runtime.signals import Interrupted
from realign.runtime.trackers import TensorBoard, TrackerSpec, WandB
from realign.runtime.tracking import Tracker
from realign.runtime.training import RunResult, run

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
    "TensorBoard",
    "Tracker",
    "TrackerSpec",
    "WandB",
    "run",
]
