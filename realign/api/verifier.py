"""`Verifier`: a reward interface that scores given texts, so that a run can check it on known answers, and compare
a policy with a constant answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from realign.api.sample import SequenceSample

if TYPE_CHECKING:
    from realign.api.model import Model

ANSWER = "{answer}"
"""The part of `Verifier.known_answer_template` that the answer replaces."""


@runtime_checkable
class Verifier(Protocol):
    """A reward interface whose rewards of right and wrong answers can be compared before the first step."""

    known_answer: str | None
    """Column of the data with the right answer; None turns the comparison off."""
    known_answer_template: str
    """Response with the answer at `ANSWER`."""

    def is_cheap(self) -> bool:
        """Return whether `score_texts` costs little for many texts; False for judges, servers and sandboxes."""
        ...

    def score_texts(self, model: Model, data: SequenceSample, responses: Sequence[Sequence[str]]) -> Tensor:
        """Compute the rewards [S] of texts as responses; NaN for texts without a reward.

        Args:
            model: model of the role, or another one with the same tokenizer.
            data: prompts with `prompt_ids` and `row`.
            responses: texts for each prompt of `data`.
        """
        ...


__all__ = ["ANSWER", "Verifier"]
