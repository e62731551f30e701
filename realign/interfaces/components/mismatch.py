"""Mismatched pairs: the prompts of a batch with responses to other prompts, from which KTO estimates its baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from realign.api import MicroBatchSpec, Model, SequenceSample, derive_seed
from realign.functional import segment_sum
from realign.interfaces.components.scoring import score_logprobs


def mismatched(data: SequenceSample) -> SequenceSample:
    """Replace each response by a response to another prompt of the batch.

    The prompts form one cycle in an order drawn from their ids, so the result does not depend on their order in the
    batch. Response j of a prompt becomes response j of the next prompt in the cycle, counted modulo its number of
    responses. It is cut where the sequence would be longer than the longest sequence of the batch.

    Args:
        data: a batch with `input_ids`, `prompt_mask` and `loss_mask`.

    Returns:
        A sample of the same ids and numbers of responses, with `input_ids` and `loss_mask`. `loss_mask` is False
        everywhere if the batch has only one prompt.
    """
    if len(data) < 2:
        masked = torch.zeros_like(data["loss_mask"])
        return data.select(["input_ids"]).with_tokens(loss_mask=masked)
    counts, longest = data.lengths["input_ids"].counts.tolist(), int(data.lengths["input_ids"].flat.max())
    starts = [sum(counts[:i]) for i in range(len(data))]
    order = sorted(range(len(data)), key=lambda i: derive_seed(0, "mismatched", str(data.ids[i])))
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    ids, prompts, trained = (data.sequences(key) for key in ("input_ids", "prompt_mask", "loss_mask"))

    def joined(own: int, other: int) -> tuple[Tensor, Tensor]:
        prompt = ids[own][prompts[own]]
        response = (~prompts[other]).nonzero()[: longest - len(prompt), 0]
        return (
            torch.cat([prompt, ids[other][response]]),
            torch.cat([torch.zeros_like(prompt, dtype=torch.bool), trained[other][response]]),
        )

    rows = []
    for i, n in enumerate(counts):
        other = following[i]
        rows.append([joined(starts[i] + j, starts[other] + j % counts[other]) for j in range(n)])
    nested = {key: [[pair[k] for pair in row] for row in rows] for k, key in enumerate(("input_ids", "loss_mask"))}
    return SequenceSample.from_sequences(data.ids, nested)


def response_logprobs(model: Model, data: SequenceSample, mb_spec: MicroBatchSpec, temperature: float) -> Tensor:
    """Return [S] the log-prob of each response under the model, summed over its tokens in `loss_mask`."""
    scored = score_logprobs(model, data, mb_spec, temperature)["logprobs"]
    return segment_sum(torch.where(data["loss_mask"], scored, 0), data.cu_seqlens())


__all__ = ["mismatched", "response_logprobs"]
