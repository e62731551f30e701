"""Decode a row as the model gets it, to show which tokens are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from realign.api.sample import SequenceSample
from realign.data.rendering import Segment


@dataclass(frozen=True)
class DecodedSequence:
    """The text of a sequence.

    Attributes:
        segments: Runs of tokens that are trained, or not, as text with special tokens.
        label: Label or reward of the sequence; None without labels.
    """

    segments: list[Segment]
    label: float | None = None


def decoded_row(sample: SequenceSample, decode: Callable[..., str]) -> list[DecodedSequence]:
    """Return the sequences of the first row of a sample as text; empty if the sample has no tokens.

    Args:
        sample: Rows with `input_ids` and `loss_mask`, or with `prompt_ids`.
        decode: Method of the tokenizer.
    """
    row = sample.take(range(min(1, len(sample))))
    if "prompt_ids" in row:
        return [DecodedSequence([Segment(_text(ids, decode))]) for ids in row.sequences("prompt_ids")]
    if not {"input_ids", "loss_mask"} <= row.keys:
        return []
    labels = next((row[key].tolist() for key in ("labels", "rewards") if key in row), [])
    found = []
    for index, (ids, loss) in enumerate(zip(row.sequences("input_ids"), row.sequences("loss_mask"), strict=True)):
        changes = (loss[1:] != loss[:-1]).nonzero()[:, 0] + 1
        runs = zip(ids.tensor_split(changes.tolist()), loss.tensor_split(changes.tolist()), strict=True)
        segments = [Segment(_text(run, decode), bool(trained.any())) for run, trained in runs if len(run)]
        found.append(DecodedSequence(segments, labels[index] if labels else None))
    return found


def _text(ids: Tensor, decode: Callable[..., str]) -> str:
    return decode(ids, skip_special_tokens=False)
