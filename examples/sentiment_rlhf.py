"""RLHF with a learned reward: imitation, a reward model from pairs of reviews, then PPO on that reward.

    python examples/sentiment_rlhf.py [KEY=VALUE ...]

Flags belong to PPO, such as `steps=300` or `interfaces.actor.kl.coef=0.02`, and with `sft.` or `reward.` to the stages
before. The policy sees only the learned reward; a lexicon, which also labeled the pairs, scores held-out reviews.

For your own: change the files that `prepare` writes. `docs/guides/three-stages.md` has the same with any model.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from stages import flags  # the file beside this one

import realign
from realign.demo.sentiment import prepare

FOLDER = Path("runs/sentiment_rlhf")


def main(words: Sequence[str]) -> realign.Run:
    """Run the three stages; the last one is returned."""
    sft, reward, ppo = flags(words, "sft", "reward")
    task = prepare(FOLDER / "task", seed=0)
    held_out = {"evaluation.data.path": task.held_out, "overwrite": True}
    start = {"models.actor.path": task.model, "data.path": task.demonstrations, "output_dir": FOLDER / "sft"}
    policy = realign.train("sft_sentiment", **start | held_out | sft).folder / "final" / "actor"
    pairs = {"data.path": task.pairs, "evaluation.data.path": task.held_out_pairs, "overwrite": True}
    pairs |= {"models.reward.path": policy, "calibration.data.path": task.prompts, "output_dir": FOLDER / "reward"}
    judge = realign.train("reward_sentiment", **pairs | reward).folder / "final" / "reward"
    last = {"models.actor.path": policy, "models.reward.path": judge, "data.path": task.prompts}
    return realign.train("ppo_sentiment", **last | held_out | {"output_dir": FOLDER / "ppo"} | ppo)


if __name__ == "__main__":
    print("kindness of held-out reviews, from -1 to 1:", main(sys.argv[1:]).series("eval/reward"))
