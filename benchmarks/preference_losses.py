"""Comparison of the preference losses with TRL: `.bench/venv/bin/python -m benchmarks.preference_losses`.

TRL's trainers and the interfaces of realign compute the loss of the same model on the same random responses. TRL pads
the batch; realign packs it. The table shows, for each method, the relative difference of the losses, and the largest
difference of a gradient relative to the largest gradient. The last line is one JSON object.

`make bench` installs TRL. Where definitions differ, the batch makes them equal:

- TRL averages the likelihood in CPO and ORPO over all tokens of a batch, so all chosen responses have the same length.
- ORPO's likelihood includes the prompt in TRL, so prompts have one token.
- TRL pairs neighbors of a batch for the baseline of KTO, so it receives realign's pairs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging

from realign.api import Mean, MicroBatchSpec, Model, ModelInterface, SequenceSample, Stats, merge_stats
from realign.demo.arithmetic import prepare
from realign.interfaces.dpo import DPOInterface, DPOLoss
from realign.interfaces.kto import KTOInterface, KTOReferenceInterface, mismatch_responses
from realign.interfaces.reward_model import RewardModelInterface

GOAL = 2e-6
PAIRS = 6
Gradients = dict[str, Tensor]


class PerSequence:
    """`ModelOutput` that runs a transformers model on one sequence at a time."""

    def __init__(self, network: Any, data: SequenceSample) -> None:
        self.network, self.data = network, data

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """Return [T] log-probs, 0 at first tokens."""
        found = []
        for ids in self.data.sequences():
            logps_TV = (self.network(ids[None]).logits[0] / temperature).log_softmax(-1)
            found.append(torch.cat([logps_TV.new_zeros(1), logps_TV[:-1].gather(1, ids[1:, None])[:, 0]]))
        return torch.cat(found)

    def scores(self) -> Tensor:
        """Return [S] scores."""
        return torch.cat([self.network(ids[None]).logits[0] for ids in self.data.sequences()])


class Machine:
    """The part of an engine that train steps call. Keeps the gradients of the loss instead of training."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.loss, self.gradients = torch.zeros(()), Gradients()

    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: Callable[..., Any]) -> SequenceSample:
        """See `PipelinableEngine`."""
        with torch.no_grad():
            return post_hook(PerSequence(self.network, data), data)

    def train_batch(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: Any, loss_weight_fn: Any) -> Stats:
        """See `PipelinableEngine`."""
        total, stats = loss_fn(PerSequence(self.network, data), data)
        self.loss = total / loss_weight_fn(data)
        self.gradients = gradients_of(self.network, self.loss)
        return merge_stats([stats, {"loss": Mean(self.loss.detach(), torch.ones(()))}])


def gradients_of(network: Any, loss: Tensor) -> Gradients:
    """Return the gradient of a loss by parameter."""
    network.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


@dataclass
class Method:
    """One method on both sides."""

    interface: ModelInterface
    trainer: str
    """Name of TRL's trainer: DPO, CPO, ORPO, KTO or Reward."""
    settings: dict[str, Any]
    """Settings of TRL's config."""


METHODS = {
    "DPO": Method(DPOInterface(), "DPO", {"beta": 0.1}),
    "IPO": Method(DPOInterface(kind=DPOLoss.ipo, length_normalized=True), "DPO", {"beta": 0.1, "loss_type": ["ipo"]}),
    "robust DPO": Method(
        DPOInterface(kind=DPOLoss.robust, label_smoothing=0.2),
        "DPO",
        {"beta": 0.1, "loss_type": ["robust"], "label_smoothing": 0.2},
    ),
    "length-normalized DPO": Method(
        DPOInterface(length_normalized=True, beta=5.0), "DPO", {"beta": 5.0, "loss_type": ["sigmoid_norm"]}
    ),
    "SimPO": Method(
        DPOInterface(reference_free=True, length_normalized=True, beta=2.0, target_margin=1.0),
        "CPO",
        {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "CPO": Method(DPOInterface(reference_free=True, sft_coef=1.0), "CPO", {"beta": 0.1, "cpo_alpha": 1.0}),
    "CPO, smoothed": Method(
        DPOInterface(reference_free=True, sft_coef=0.5, label_smoothing=0.1),
        "CPO",
        {"beta": 0.1, "cpo_alpha": 0.5, "label_smoothing": 0.1},
    ),
    "ORPO": Method(
        DPOInterface(kind=DPOLoss.odds_ratio, reference_free=True, length_normalized=True, sft_coef=1.0),
        "ORPO",
        {"beta": 0.1},
    ),
    "KTO": Method(
        KTOInterface(desirable_weight=1.3, undesirable_weight=0.7),
        "KTO",
        {"beta": 0.1, "desirable_weight": 1.3, "undesirable_weight": 0.7},
    ),
    "reward centering": Method(RewardModelInterface(center_coef=0.1), "Reward", {"center_rewards_coefficient": 0.1}),
}


def random_pairs(seed: int, vocabulary: int) -> SequenceSample:
    """Return pairs: prompts of one token, chosen responses of 5 tokens, rejected ones of other lengths."""
    generator = torch.Generator().manual_seed(seed)
    rejected = torch.randint(1, 8, (PAIRS,), generator=generator).tolist()
    rows = [[torch.randint(3, vocabulary, (1 + n,), generator=generator) for n in (5, m)] for m in rejected]
    for first, second in rows:
        second[0] = first[0]
    data = SequenceSample.from_sequences([f"p{i}" for i in range(PAIRS)], {"input_ids": rows})
    given = torch.cat([torch.arange(len(x)) < 1 for row in rows for x in row])
    data = data.with_tokens(prompt_mask=given, loss_mask=~given)
    return data.with_sequences(labels=torch.tensor([1.0, 0.0] * PAIRS), margins=torch.zeros(2 * PAIRS))


def padded(rows: list[Tensor], trained: list[Tensor]) -> dict[str, Tensor]:
    """Pad sequences on the right: input_ids, attention_mask, completion_mask and labels (-100: not trained)."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = pad(rows, batch_first=True), pad([x.long() for x in trained], batch_first=True)
    attention = pad([torch.ones_like(x) for x in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": mask, "labels": labels}


def trl_loss(method: Method, network: Any, reference: Any, tokenizer: Any, data: SequenceSample, out: str) -> Tensor:
    """Compute the loss of TRL's trainer on the batch."""
    from datasets import Dataset

    module, config = trainer_of(method.trainer)
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 2
    if method.trainer == "KTO":
        rows = [{"prompt": "1+1=", "completion": "2", "label": label} for label in (True, False)]
    quiet = {"output_dir": out, "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    extra = {"ref_model": reference} if method.trainer in ("DPO", "KTO") else {}
    args = config(**quiet, **method.settings, per_device_train_batch_size=2)
    trainer = module(
        model=network, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **extra
    )
    ids, trained = list(data.sequences()), list(data.sequences("loss_mask"))
    pairs = padded(ids[::2] + ids[1::2], trained[::2] + trained[1::2])
    labels = pairs.pop("labels")
    if method.trainer == "DPO":
        return trainer._compute_loss(network, pairs, False)
    if method.trainer == "Reward":
        del pairs["completion_mask"]
        return trainer.compute_loss(network, pairs)
    if method.trainer == "KTO":
        other = mismatch_responses(data)
        kl = padded(list(other.sequences()), list(other.sequences("loss_mask")))
        own = padded(ids, trained)
        inputs = {key: own[key] for key in ("input_ids", "attention_mask", "completion_mask")}
        inputs |= {f"KL_{key}": kl[key] for key in ("input_ids", "attention_mask", "completion_mask")}
        return trainer._compute_loss(network, {**inputs, "label": data["labels"] > 0}, False)
    batch = {}
    for name, half in (("chosen", slice(0, PAIRS)), ("rejected", slice(PAIRS, None))):
        batch[f"{name}_input_ids"], batch[f"{name}_attention_mask"] = (
            pairs["input_ids"][half],
            pairs["attention_mask"][half],
        )
        batch[f"{name}_labels"] = labels[half]
    return trainer.get_batch_loss_metrics(network, batch)[0]


def trainer_of(name: str) -> tuple[Any, Any]:
    """Import a trainer of TRL and its config."""
    if name in ("CPO", "ORPO"):
        from importlib import import_module

        module = import_module(f"trl.experimental.{name.lower()}")
    else:
        import trl as module  # type: ignore[import-not-found,no-redef]
    return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")


def compare(method: Method, folder: str, seed: int, out: str) -> dict[str, float]:
    """Return the relative differences of loss and gradients, and both losses."""
    scored = method.trainer == "Reward"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    network, reference = load(folder, scored, 0), load(folder, scored, 1)
    data = random_pairs(seed, network.config.vocab_size)
    if not scored:
        found = KTOReferenceInterface().inference(Model("ref", Machine(reference)), data, MicroBatchSpec())
        data = data.merge(found.rename({"logprobs": "ref_logprobs"}))
    machine = Machine(network)
    method.interface.train_step(Model("actor", machine), data, MicroBatchSpec())
    loss = trl_loss(method, network, reference, tokenizer, data, out)
    theirs = gradients_of(network, loss)
    return {
        "realign": machine.loss.item(),
        "trl": loss.item(),
        "loss": abs(machine.loss.item() - loss.item()) / abs(loss.item()),
        "gradient": largest_difference(machine.gradients, theirs),
    }


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Return the largest difference of an element, relative to the largest element of all."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"only one side has gradients of {sorted(ours.keys() ^ theirs.keys())}")
    scale = max(float(x.abs().max()) for x in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / scale


def load(folder: str, scored: bool, seed: int) -> Any:
    """Load the model in fp32 and add noise to it, so that policy and reference differ."""
    cls, extra = (AutoModelForSequenceClassification, {"num_labels": 1}) if scored else (AutoModelForCausalLM, {})
    torch.manual_seed(seed)
    network = cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **extra)
    if scored:
        network.config.pad_token_id = 0
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn_like(p), alpha=0.02)
    return network.eval()


def main() -> int:
    """Compare all methods on several batches, and print a table and JSON."""
    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of random batches")
    seeds = range(parser.parse_args().seeds)
    with tempfile.TemporaryDirectory() as out:
        folder = str(prepare(Path(out) / "task", seed=0, demonstrations=1).model)
        report = {}
        print(f"{'method':24}{'loss':>12}{'TRL':>12}{'loss diff':>12}{'grad diff':>12}")
        for name, method in METHODS.items():
            rows = [compare(method, folder, seed, out) for seed in seeds]
            report[name] = {key: max(row[key] for row in rows) for key in ("loss", "gradient")}
            first = rows[0]
            largest = report[name]
            print(
                f"{name:24}{first['realign']:12.6f}{first['trl']:12.6f}{largest['loss']:12.1e}{largest['gradient']:12.1e}"
            )
    print(json.dumps(report))
    return 0 if all(x["loss"] <= GOAL for x in report.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
