"""Total and named rewards of responses, and `Verifier`, a reward interface that scores given texts.

With a verifier, a run can check rewards on known answers, and compare a policy with a constant answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from realign.api.sample import SequenceSample
from realign.functional import segment_sum

if TYPE_CHECKING:
    from realign.api.model import Model


def total_rewards(data: SequenceSample) -> Tensor:
    """Return the reward [S] of each sequence: `rewards`, plus the sum of `dense_rewards` if the batch has them.

    Counts only dense rewards of tokens in `loss_mask`, if the batch has that key. NaN means a missing reward.
    """
    if "dense_rewards" not in data:
        return data["rewards"]
    dense_T = data["dense_rewards"]
    if "loss_mask" in data:
        dense_T = torch.where(data["loss_mask"], dense_T, 0)
    return data["rewards"] + segment_sum(dense_T, data.cu_seqlens())


def episode_rewards(data: SequenceSample) -> Tensor:
    """Return the total reward [S] of each episode at its first sequence, and NaN at others and where it is missing.

    Every response of a sampler is an episode.
    """
    rewards_S = total_rewards(data)
    return torch.where(data.once_per_episode(torch.ones_like(rewards_S, dtype=torch.bool)), rewards_S, torch.nan)


NAMED = "rewards/"
"""Prefix of the keys [S] of named rewards, such as `rewards/accuracy`. A run reports each of them."""


def named_rewards(data: SequenceSample) -> dict[str, Tensor]:
    """Return the named rewards [S] of a batch by their keys, such as `rewards/accuracy`, in alphabetical order."""
    names = sorted(key for key in data.data if key.startswith(NAMED))
    return {key: data[key] for key in names if len(data[key]) == data.n_sequences}


ANSWER = "{answer}"
"""The part of `Verifier.known_answer_template` that the answer replaces."""


@runtime_checkable
class Verifier(Protocol):
    """A reward interface whose rewards of right and wrong answers can be compared before the first step."""

    known_answer: str | None
    """Column of the data with the right answer; None turns the comparison off."""
    known_answer_template: str
    """Response with the answer at `ANSWER`."""

    def check_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check the first rows of the data.

        Raises:
            ConfigError: no row has a column that a function asks for.
        """
        ...

    def is_cheap(self) -> bool:
        """Return whether `score_texts` costs little for many texts; False for judges, servers and sandboxes."""
        ...

    def why_not_attacked(self) -> str:
        """Return why `realign check` tries no wrong answers, such as a judge that costs money; empty if it does."""
        ...

    def score_texts(self, model: Model, data: SequenceSample, responses: Sequence[Sequence[str]]) -> Tensor:
        """Compute the rewards [S] of texts as responses; NaN for texts without a reward.

        Args:
            model: model of the role, or another one with the same tokenizer.
            data: prompts with `prompt_ids` and `row`.
            responses: texts for each prompt of `data`.
        """
        ...
