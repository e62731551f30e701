"""Which correction keeps learning alive when the sampler is not the trainer: docs/studies/mismatch.md.

    python -m benchmarks.mismatch                       # all cells, 20 seeds; a second call resumes
    python -m benchmarks.mismatch seeds=1 steps=4 results=runs/small.jsonl

A small Llama learns by GRPO to write descriptive words (the task of `benchmarks.curves`). Its sampler is changed by a
known amount, and every change meets every correction, on the same prompts and seeds. The score is the mean reward of
samples of the trained weights themselves, on other prompts. Each run is a line of `results`, and isn't repeated. Seeds
are the outer loop, so an interrupted study has all cells. Prints the table of the page, and draws its picture.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.curves import task
from benchmarks.report import arguments
from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.api.sampler import Completion, sample_of
from realign.api.stats import stat_values
from realign.engines import OptimizerSpec, TransformersModel
from realign.interfaces.components.correction import ImportanceCorrection, RatioRange
from realign.interfaces.grpo import GRPOActorInterface
from realign.samplers.in_process.settings import InProcessSampling

WIDTH, ROWS, QUERY, TOKENS, BATCH, HELD_OUT, LR = 32, 512, 8, 12, 8, 32, 5e-3
SAMPLERS: Mapping[str, str] = {
    "exact": "the trainer itself (`exact=true`)",
    "bf16": "bf16 weights and arithmetic",
    "int8": "int8 weights",
    "noise_0.5": "logits with noise of 0.5",
    "noise_2": "logits with noise of 2",
    "stale_1": "1 step stale",
    "stale_4": "4 steps stale",
    "stale_8": "8 steps stale",
    "temperature_1.5": "samples at temperature 1.5",
    "reports_1.5": "reports log-probs at temperature 1.5",
    "misreports_1": "reports log-probs with noise of 1",
}
"""The changed samplers, KIND_SIZE. Log-probs are those of the draws, except for `reports` and `misreports`."""


def _correction(level: str, cap: float | None, **more: Any) -> dict[str, Any]:
    return {"correction": ImportanceCorrection(weight=RatioRange(level=level, cap=cap), **more)}


CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "recompute": {"recompute": True},
    "token": _correction("token", 2.0),
    "sequence": _correction("sequence", 2.0),
    "rejection": _correction("token", 5.0, rejection=RatioRange(floor=0.5, cap=2.0)),
    "decoupled": _correction("token", None),
}
"""Settings of the policy: ratios to the sampler's log-probs, to recomputed ones, and further weights of the loss."""
DEFAULTS = {
    "seeds": "20",
    "steps": "20",
    "task": "runs/mismatch",
    "results": "benchmarks/mismatch.jsonl",
    "picture": "docs/images/mismatch.png",
}
Run = dict[str, Any]
NATS, KL = "first_logprob_diff_max", "behavior_kl"
"""The largest difference of log-probs in the first step, of which the launch warns, and the mean KL of all steps."""
HEAD = ["sampler", "nats at launch", "`behavior_kl`", *CORRECTIONS, "seeds"]


class ChangedSampler:
    """A copy of the policy that samples with a known error."""

    def __init__(self, network: LlamaForCausalLM, change: str, weights: Mapping[str, Tensor]) -> None:
        self.kind, _, size = change.partition("_")
        self.size = float(size or 0)
        self.network = copy.deepcopy(network)
        if self.kind == "bf16":
            self.network.bfloat16()
        self.past: deque[Mapping[str, Tensor]] = deque(maxlen=1 + (int(self.size) if self.kind == "stale" else 0))
        self.load_weights(weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Receive the weights of a step; a stale sampler uses the oldest that it keeps."""
        self.past.append({name: value.detach().clone() for name, value in weights.items()})
        used = dict(self.past[0])
        for name, value in used.items() if self.kind == "int8" else ():
            level = value.abs().amax(-1, keepdim=True) / 127  # 255 levels in each row of a matrix
            used[name] = (value / level).round() * level if value.dim() > 1 else value
        self.network.load_state_dict(used, strict=False)

    @torch.no_grad()
    def generate(self, data: SequenceSample, config: GenerationConfig, seed: int) -> SequenceSample:
        """Sample `max_new_tokens` tokens for each response. All prompts have the same length."""
        random = torch.Generator().manual_seed(seed % 2**63)
        following = torch.stack(list(data.sequences("prompt_ids"))).repeat_interleave(config.n, 0)
        chosen, reported, cache = [], [], None
        for _ in range(config.max_new_tokens):
            out = self.network(input_ids=following, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[:, -1].float()
            noise = self.size * torch.randn(logits.shape, generator=random)
            logits = logits + noise if self.kind == "noise" else logits
            logits = logits / self.size if self.kind == "temperature" else logits
            following = torch.multinomial(logits.softmax(-1), 1, generator=random)
            logprobs = (logits / self.size if self.kind == "reports" else logits).log_softmax(-1)
            chosen.append(following)
            reported.append((logprobs + noise if self.kind == "misreports" else logprobs).gather(1, following))
        versions = torch.zeros(config.max_new_tokens, dtype=torch.int32)
        pairs = zip(torch.cat(chosen, 1), torch.cat(reported, 1), strict=True)
        return sample_of(data, [Completion(ids, logprobs, versions, False) for ids, logprobs in pairs], config.n)


def prepare(home: Path) -> None:
    """Write `texts.jsonl` and `model`: the task of the curves, with a model that `exact=true` supports."""
    task.prepare(home, width=WIDTH, rows=ROWS, steps=1)
    words = json.loads((home / "model" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=task.POSITIONS,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        stream = [words[word] for text in task.passages(3000, 1) for word in text.split()]
        task._imitate(model, torch.tensor(stream), steps=300)
    model.save_pretrained(home / "model")


def rewards_of(model: Model, data: SequenceSample) -> Tensor:
    """Return the rewards [S] of responses."""
    parts = zip(data.sequences("input_ids"), data.sequences("prompt_mask"), strict=True)
    texts = model.tokenizer.batch_decode([ids[~given].tolist() for ids, given in parts])
    return torch.tensor([task.descriptiveness("", text, {}) for text in texts])


def train(home: Path, sampler: str, correction: str, seed: int, *, steps: int) -> Run:
    """Train once. Return the score of the trained weights, and the mismatch."""
    sampling = InProcessSampling(exact=sampler == "exact")
    spec = TransformersModel(
        path=str(home / "model"), dtype="float32", optimizer=OptimizerSpec(lr=LR), sampler=sampling
    )
    model, budget = spec.load("actor", seed=seed), MicroBatchSpec()
    generation = GenerationConfig(n=8, max_new_tokens=TOKENS, fixed_length=True)
    policy = GRPOActorInterface(generation=generation, **CORRECTIONS[correction])
    texts = [json.loads(line)["prompt"] for line in (home / "texts.jsonl").read_text(encoding="utf-8").splitlines()]
    every = [ids[:QUERY] for ids in model.tokenizer(texts, add_special_tokens=False)["input_ids"]]
    held_out = SequenceSample.from_sequences(range(HELD_OUT), {"prompt_ids": [[ids] for ids in every[-HELD_OUT:]]})
    network = LlamaForCausalLM.from_pretrained(home / "model").eval()
    changed = ChangedSampler(network, sampler, model.engine.weights())
    order = np.random.default_rng(seed).permutation(ROWS - HELD_OUT)

    def score() -> float:
        trained = ChangedSampler(network, "unchanged", model.engine.weights())
        return float(rewards_of(model, trained.generate(held_out, generation, seed=0)).mean())

    made: list[dict[str, float]] = []
    for step in range(steps):
        rows = [int(row) for row in order.take(range(step * BATCH, (step + 1) * BATCH), mode="wrap")]
        prompts = SequenceSample.from_sequences(rows, {"prompt_ids": [[every[row]] for row in rows]})
        if sampler == "exact":
            data = model.sampler.generate(prompts, generation, seed=1000 * seed + step)
        else:
            data = changed.generate(prompts, generation, seed=1000 * seed + step)
        data = data.with_sequences(rewards=rewards_of(model, data))
        if correction != "none":
            data = data.with_tokens(prox_logprobs=policy.inference(model, data, budget)["logprobs"])
        made.append(stat_values(policy.train_step(model, data, budget)))
        changed.load_weights(model.engine.weights())
    kl = [stats[KL] for stats in made if KL in stats]
    return {"score": score(), NATS: made[0][NATS] if made else 0.0, KL: float(np.mean(kl)) if kl else 0.0}


def table(runs: Sequence[Run]) -> tuple[str, list[list[float]]]:
    """Return the table of the page, and the fraction of an exact sampler's learning that is left in each cell."""

    def of(sampler: str, correction: str, what: str = "score") -> Any:
        return np.array([run[what] for run in runs if (run["sampler"], run["correction"]) == (sampler, correction)])

    def text(cell: Any) -> str:
        error = f" ± {100 * cell.std(ddof=1) / len(cell) ** 0.5:.0f}" if len(cell) > 1 else ""
        return f"{cell.mean():.0%}{error}" if len(cell) else ""

    start, end = of("untrained", "none").mean(), of("exact", "none").mean()
    rows, left = [HEAD, ["---"] * len(HEAD)], []
    for sampler, what in SAMPLERS.items():
        cells = [(of(sampler, correction) - start) / (end - start) for correction in CORRECTIONS]
        left.append([float(cell.mean()) if len(cell) else math.nan for cell in cells])
        met = [f"{x.mean():.2g}" if len(x) else "0" for x in (of(sampler, "none", NATS), of(sampler, "token", KL))]
        rows.append([what, *met, *map(text, cells), str(min((len(cell) for cell in cells if len(cell)), default=0))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows), left


def draw(left: Sequence[Sequence[float]], path: Path) -> None:
    """Draw the fraction of the learning that is left in every cell, narrow enough for a phone."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(5.6, 6.0), layout="constrained")).subplots()
    axes.imshow(left, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto")
    for (row, column), value in np.ndenumerate(left):
        if not math.isnan(value):
            color = "white" if value > 0.85 or value < 0.15 else "black"
            axes.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=13, color=color)
    axes.set_xticks(range(len(CORRECTIONS)), CORRECTIONS, rotation=35, ha="left", fontsize=13)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(SAMPLERS)), [name.replace("_", " ") for name in SAMPLERS], fontsize=13)
    figure.savefig(path, dpi=160)


def main(given: Sequence[str] | None = None) -> None:
    """Train what is missing from the results; print the table, and draw the picture."""
    words = arguments(DEFAULTS, given)
    home, results = Path(words["task"]), Path(words["results"])
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    runs: list[Run] = [json.loads(line) for line in lines]
    done = {(run["sampler"], run["correction"], run["seed"]) for run in runs}
    cells = [(s, c) for s in SAMPLERS for c in CORRECTIONS if s != "exact" or c == "none"]
    wanted = [(*cell, seed) for seed in range(1, int(words["seeds"]) + 1) for cell in cells]
    for sampler, correction, seed in [("untrained", "none", 1), *wanted]:
        if (sampler, correction, seed) in done:
            continue
        if not (home / "model" / "config.json").exists():
            prepare(home)
        steps = 0 if sampler == "untrained" else int(words["steps"])
        run = {"sampler": sampler, "correction": correction, "seed": seed}
        runs.append(run | train(home, sampler, correction, seed, steps=steps))
        with results.open("a", encoding="utf-8") as file:
            print(json.dumps(runs[-1]), file=file)
        print(f"  {sampler} {correction} {seed}: {runs[-1]['score']:.2f}", file=sys.stderr, flush=True)
    page, left = table(runs)
    draw(left, Path(words["picture"]))
    print(page)


if __name__ == "__main__":
    main()
