"""What the planner uses of realign beyond its public API, and nowhere else: the memory model and the checks of meshes.

A change of one of these in realign changes this file.
"""

from realign.api.memory import MemoryWork, RoleMemory
from realign.cli.arguments import compose_line, split_options
from realign.cli.train import build
from realign.engines.memory import FP32, MemoryModel
from realign.models.files.adapters import find_adapter
from realign.models.files.model_folder import check_path, quiet_transformers, readable
from realign.models.network.heads import is_encoder_decoder
from realign.runtime.checks.device_estimate import DeviceEstimate
from realign.runtime.checks.meshes import rank_work
from realign.runtime.processes.placement import ROLLOUT
from realign.runtime.rollout.staleness import Staleness
from realign.safe_yaml import load_yaml
from realign.samplers.in_process.decode import CACHE_BYTES

__all__ = [
    "CACHE_BYTES",
    "FP32",
    "ROLLOUT",
    "DeviceEstimate",
    "MemoryModel",
    "MemoryWork",
    "RoleMemory",
    "Staleness",
    "build",
    "check_path",
    "compose_line",
    "find_adapter",
    "is_encoder_decoder",
    "load_yaml",
    "quiet_transformers",
    "rank_work",
    "readable",
    "split_options",
]
