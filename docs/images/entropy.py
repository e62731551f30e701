"""Train a policy whose entropy collapses, with and without a target entropy, and draw `entropy.png`.

python docs/images/entropy.py     # about two minutes of processor time

A bigram policy writes three of eight tokens. Its reward is the fraction of tokens that are 1, and from step 150 on the
fraction that are 2. A policy that has collapsed on the first one never samples the second one again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.api.sample import with_response_index
from realign.interfaces.components import EntropyBonus
from realign.interfaces.grpo import GRPOActorInterface
from realign.records.metrics.curves import HELD_OUT, SETTINGS, TRAINING
from realign.testing import BigramEngine

HERE = Path(__file__).parent
WORDS, LENGTH, PROMPTS, GROUP = 8, 3, 8, 8
STEPS, CHANGE, SEEDS, TARGET = 300, 150, range(3), 0.5


def sample(engine: BigramEngine, generator: torch.Generator, wanted: int) -> SequenceSample:
    """Return responses to `PROMPTS` prompts, rewarded by their fraction of the wanted token."""
    logprobs_VV = engine.logits_VV.detach().log_softmax(-1)
    shape = (PROMPTS * GROUP, LENGTH + 1)
    ids_SL, logprobs_SL = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64)
    for t in range(LENGTH):
        row_SV = logprobs_VV[ids_SL[:, t]]
        ids_SL[:, t + 1 : t + 2] = torch.multinomial(row_SV.exp(), 1, generator=generator)
        logprobs_SL[:, t + 1] = row_SV.gather(1, ids_SL[:, t + 1 : t + 2])[:, 0]
    nested = ids_SL.view(PROMPTS, GROUP, -1).tolist()
    data = SequenceSample.from_sequences(range(PROMPTS), {"input_ids": nested})
    mask_T = (torch.arange(LENGTH + 1) > 0).repeat(PROMPTS * GROUP)
    data = data.with_tokens(loss_mask=mask_T, prompt_mask=~mask_T, logprobs=logprobs_SL.view(-1))
    return with_response_index(data).with_sequences(rewards=(ids_SL[:, 1:] == wanted).double().mean(1))


def curve(bonus: EntropyBonus, seed: int) -> dict[str, list[float]]:
    """Train, and return the mean reward and the entropy of each step."""
    generator, engine = torch.Generator().manual_seed(seed), BigramEngine(vocabulary=WORDS, seed=seed, lr=4.0)
    actor, found = GRPOActorInterface(entropy=bonus), {"reward": [], "entropy": []}
    for step in range(STEPS):
        data = sample(engine, generator, 1 if step < CHANGE else 2)
        stats = stat_values(actor.train_step(Model("actor", engine, seed=seed), data, MicroBatchSpec()))
        found["reward"].append(float(data["rewards"].mean()))
        # without a trained token, as all groups have equal rewards, the entropy is not a metric
        found["entropy"].append(stats.get("entropy", found["entropy"][-1] if found["entropy"] else 0.0))
    return found


def main() -> None:
    """Draw reward and entropy of both settings, a line for each seed."""
    import matplotlib.pyplot as plt

    plt.rcParams.update(SETTINGS)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
    kinds = {
        "no bonus": (EntropyBonus(), HELD_OUT),
        f"target {TARGET:g}": (EntropyBonus(target=TARGET, delta=0.01), TRAINING),
    }
    for label, (bonus, color) in kinds.items():
        for seed in SEEDS:
            found = curve(bonus, seed)
            ends = {name: round(sum(values[-50:]) / 50, 2) for name, values in found.items()}
            sys.stdout.write(f"{label}, seed {seed}, mean of the last 50 steps: {ends}\n")
            for panel, (name, values) in zip(axes, found.items(), strict=True):
                smooth = torch.tensor(values).unfold(0, 10, 1).mean(1)
                panel.plot(range(10, STEPS + 1), smooth, color=color, label=label if seed == 0 else None, alpha=0.8)
                panel.set_title("reward" if name == "reward" else "entropy (nats per token)")
    axes[1].axhline(TARGET, color="black", linewidth=0.8, linestyle=":")
    for panel in axes:
        panel.set_xlabel("step (mean of 10)")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(HERE / "entropy.png")


if __name__ == "__main__":
    main()
