"""slime's losses: `loss_function` of its Megatron backend, on advantages and rewards from its own functions.

slime has no wheel, so `slime=PATH` names a checkout. Of its files, only `FILES` are imported. Log-probs and values are
those of the batch, where slime computes them from logits.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from argparse import Namespace
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

STUBS = ("slime", "megatron", "ray", "sglang", "sglang_router", "wandb")
DECORATORS = ("ray.remote",)
BACKEND = "slime/backends/megatron_utils"
FILES = (
    f"{BACKEND}/cp_utils.py",
    "slime/utils/distributed_utils.py",
    "slime/utils/ppo_utils.py",
    f"{BACKEND}/loss.py",
    "slime/ray/rollout.py",
)
"""In an order in which each imports only files before it."""
DEFAULTS = {
    "advantage_estimator": "grpo",
    "custom_advantage_function_path": None,
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "normalize_advantages": False,
    "calculate_per_token_loss": False,
    "eps_clip": 0.2,
    "eps_clip_high": None,
    "eps_clip_c": None,
    "value_clip": 0.2,
    "gamma": 1.0,
    "lambd": 1.0,
    "kl_coef": 0.0,
    "kl_loss_type": "k1",
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "use_unbiased_kl": False,
    "entropy_coef": 0.0,
    "use_opd": False,
    "use_opsm": False,
    "use_tis": False,
    "get_mismatch_metrics": False,
    "use_rollout_logprobs": False,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "recompute_loss_function": False,
    "allgather_cp": False,
    "qkv_format": "thd",
}
"""Of `slime/utils/arguments.py`, where a loss reads them."""
ONE_PROCESS = {
    **dict.fromkeys(("get_context_parallel_world_size", "get_data_parallel_world_size"), 1),
    **dict.fromkeys(("get_context_parallel_group", "get_data_parallel_group"), None),
    "is_pipeline_last_stage": True,
    "get_context_parallel_rank": 0,
}
"""What `megatron.core.mpu` returns in a run of one process."""


@cache
def modules() -> tuple[ModuleType, ModuleType]:
    """Import the files of the checkout, and return those with the loss and with the normalization of rewards."""
    torch.compiler.set_stance("force_eager")  # compiling needs a C++ compiler and minutes
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    core: Any = importlib.import_module("megatron.core")
    core.mpu = SimpleNamespace(**{name: lambda *_, x=x, **__: x for name, x in ONE_PROCESS.items()})
    root = next(Path(folder) for folder in sys.path if (Path(folder) / FILES[0]).is_file())
    loaded = []
    for file in FILES:
        name = file.removesuffix(".py").replace("/", ".")
        importlib.import_module(name.rpartition(".")[0])
        spec = importlib.util.spec_from_file_location(name, root / file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        loaded.append(module)
    return loaded[-2], loaded[-1]


def run(kind: str, batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the loss, or the advantages [S, R]."""
    loss: Any = modules()[0]
    args = Namespace(**{**DEFAULTS, **settings}, global_batch_size=len(new), loss_type=f"{kind}_loss")
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip

    def rows(x: Tensor) -> list[Tensor]:
        return [row[exists] for row, exists in zip(x, batch["exists"], strict=True)]

    lengths = batch["exists"].sum(-1).tolist()
    named = {"log_probs": "old", "ref_log_probs": "ref", "values": "values"}
    data: dict[str, Any] = {key: rows(batch[name]) for key, name in named.items()}
    data |= {"loss_masks": rows(batch["mask"].int()), "response_lengths": lengths, "total_lengths": lengths}
    data["rollout_mask_sums"] = [mask.sum().clamp(min=1) for mask in data["loss_masks"]]  # a rollout is one response
    data |= {"unconcat_tokens": [], "returns": rows(batch["returns"])}
    if kind != "value":
        data["rewards"] = rewards_of(batch, args)
        loss.compute_advantages_and_returns(args, data)
    if kind == "advantages":
        advantages = torch.zeros_like(new)
        advantages[batch["exists"]] = torch.cat(data["advantages"])
        return advantages * batch["mask"]
    entropy = [torch.zeros_like(row) for row in rows(new)]
    loss.get_log_probs_and_entropy = lambda *_, **__: (None, {"log_probs": rows(new), "entropy": entropy})
    loss.get_values = lambda *_, **__: (None, {"values": rows(new)})
    # Megatron divides by the second value
    total, divisor, _ = loss.loss_function(args, data, 1, len(new), new)
    return total / divisor


def rewards_of(batch: Mapping[str, Tensor], args: Namespace) -> list[float]:
    """Return the rewards as the rollout hands them to training."""
    sizes = batch["group"].bincount()
    args.n_samples_per_prompt, args.rollout_batch_size = int(sizes.max()), len(sizes)
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    samples = [SimpleNamespace(get_reward_value=lambda args, x=x: x) for x in batch["rewards"].tolist()]
    return modules()[1].RolloutManager._post_process_rewards(manager, samples)[1]
