"""TRL's losses: the methods of `GRPOTrainer`, `DPOTrainer` and `KTOTrainer`, on an object with only their settings."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("trl",)
STUBS: tuple[str, ...] = ()
DECORATORS: tuple[str, ...] = ()


class Accelerator:
    """One process."""

    device, num_processes, process_index, sync_gradients = torch.device("cpu"), 1, 0, True

    def gather(self, x: Tensor) -> Tensor:
        """Return what all processes have."""
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        """Return the sum or the mean over one process."""
        return x


def run(kind: str, batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Return the loss, or the advantages [S, R]."""
    if kind == "dpo":
        return dpo(batch, new, settings)
    if kind == "kto":
        return kto(batch, new, settings)
    return grpo(kind, batch, new, settings)


def grpo(kind: str, batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Run `_generate_and_score_completions` with the batch's responses and rewards, then `_compute_loss`."""
    from trl import GRPOConfig, GRPOTrainer

    accumulation = {"per_device_train_batch_size": len(new), "gradient_accumulation_steps": 1}
    sizes = set(batch["group"].bincount().tolist())
    assert len(sizes) == 1, "TRL needs groups of one size"
    config = GRPOConfig(
        output_dir="unused",
        report_to=[],
        use_cpu=True,
        bf16=False,
        num_generations=sizes.pop(),
        **accumulation,
        **settings,
    )
    trainer = SimpleNamespace(args=config, **{k: getattr(config, k) for k in vars(config) if k not in ("mesh",)})
    trainer.accelerator, trainer.model = Accelerator(), SimpleNamespace(training=True, is_gradient_checkpointing=False)
    trainer.epsilon_low = config.epsilon
    trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    nothing = ("environment_factories", "environments", "tools", "pad_to_multiple_of", "processing_class")
    for name in nothing:
        setattr(trainer, name, None)
    trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = trainer.log_multimodal = False
    trainer.current_gradient_accumulation_steps = 1
    trainer._metrics = {"train": defaultdict(list)}
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
    trainer._tokenizer, trainer.eos_token_ids = SimpleNamespace(pad_token_id=0), [1]
    several = config.multi_objective_aggregation == "normalize_then_sum"
    rewards = batch["named"] if several else batch["rewards"][:, None]
    trainer.reward_weights = torch.tensor(config.reward_weights or [1.0])
    trainer.reward_func_names, trainer.reward_funcs = (
        [f"reward {k}" for k in range(rewards.shape[1])],
        [None] * rewards.shape[1],
    )
    lengths = batch["exists"].sum(-1).tolist()
    # the last token says whether a response ended
    ids = [[2] * (n - 1) + [2 if cut else 1] for n, cut in zip(lengths, batch["truncated"].tolist(), strict=True)]
    tool_mask = batch["mask"] | (batch["exists"] & batch["truncated"][:, None])
    tools = [tool_mask[s, :n].int().tolist() for s, n in enumerate(lengths)]
    trainer._generate = lambda prompts: ([[2]] * len(ids), ids, tools, ["text"] * len(ids), None, {}, None, None)
    trainer._calculate_rewards = lambda *_: rewards
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch["old"], None, None)
    trainer.ref_model = object()
    inputs = GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "text"}] * len(ids))
    inputs["old_per_token_logps"], inputs["ref_per_token_logps"] = batch["old"], batch["ref"]
    if kind == "advantages":
        return inputs["advantages"][:, None] * batch["mask"]
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


class Network:
    """A model whose log-probs are given. TRL's losses ask for nothing else."""

    training, is_gradient_checkpointing, _modules = True, False, None

    def __init__(self, rows: dict[tuple[int, ...], Tensor]) -> None:
        self.rows = rows

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        logprobs = torch.stack([self.rows[tuple(ids)] for ids in input_ids.tolist()])
        logprobs = torch.where(labels[:, 1:] == -100, 0, logprobs)
        nothing = torch.zeros_like(logprobs)
        return SimpleNamespace(log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def preference_inputs(batch: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Return inputs whose first token is the number of the row."""
    exists, mask = batch["exists"][order], batch["mask"][order]
    ids = torch.cat([order[:, None], exists.long()], 1)
    attention = torch.nn.functional.pad(exists.long(), (1, 0)).index_fill(1, torch.tensor([0]), 1)
    completion = torch.nn.functional.pad(mask.long(), (1, 0))
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def networks(inputs: dict[str, Tensor], order: Tensor, new: Tensor, ref: Tensor) -> tuple[Network, Network]:
    """Return the policy and the reference on these inputs."""
    keys = [tuple(ids) for ids in inputs["input_ids"].tolist()]
    return tuple(Network(dict(zip(keys, x[order], strict=True))) for x in (new, ref))  # type: ignore[return-value]


def preference_trainer(config: Any, model: Network, ref_model: Network, settings: dict[str, Any]) -> SimpleNamespace:
    """Return an object with the settings of a trainer."""
    trainer = SimpleNamespace(args=config, **{k: getattr(config, k) for k in vars(config) if k not in ("mesh",)})
    trainer.accelerator, trainer.model, trainer.ref_model = Accelerator(), model, ref_model
    trainer.aux_loss_enabled = trainer.precompute_ref_logps = False
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = {"train": defaultdict(list)}, 0, 1
    return trainer


def dpo(batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Run `DPOTrainer._compute_loss`."""
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, **settings)
    order = torch.cat([torch.arange(0, len(new), 2), torch.arange(1, len(new), 2)])
    inputs = preference_inputs(batch, order)
    policy, reference = networks(inputs, order, new, batch["ref"])
    trainer = preference_trainer(config, policy, reference, settings)
    trainer.loss_types, trainer.loss_weights = config.loss_type, [1.0] * len(config.loss_type)
    return DPOTrainer._compute_loss(trainer, policy, inputs, False)


def kto(batch: dict[str, Tensor], new: Tensor, settings: dict[str, Any]) -> Tensor:
    """Run `KTOTrainer._compute_loss`, with the responses that realign pairs with other prompts for the baseline."""
    from trl import KTOConfig, KTOTrainer

    config = KTOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False, **settings)
    order = torch.arange(len(new))
    inputs = preference_inputs(batch, order) | {"label": order % 2 == 0}
    policy, reference = networks(inputs, order, new, batch["ref"])
    trainer = preference_trainer(config, policy, reference, settings)
    trainer.calculate_KL = True
    trainer._compute_kl_logps = lambda model, _: batch["kl_new" if model is policy else "kl_ref"]
    return KTOTrainer._compute_loss(trainer, policy, inputs, False)
