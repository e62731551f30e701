"""Records of single tokens for `tokens.jsonl`: text, log-probs, ratio, advantage, KL, entropy, value and version."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from realign.api import SequenceSample
from realign.api.rewards import total_rewards
from realign.api.trace import TracedSequence
from realign.runtime.metrics.record_spec import RecordSpec

PROMPT_TOKENS = 128
"""Number of tokens at the end of a prompt that are recorded."""
COLUMNS: Mapping[str, str] = {
    "logprobs": "logprobs",
    "prox_logprobs": "trainer_logprobs",
    "ref_logprobs": "ref_logprobs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "versions": "versions",
}
"""Column of the record for each key of a batch with one value per token."""
TRACED: Mapping[str, str] = {
    "token/logprob": "trainer_logprobs",
    "token/ratio": "ratio",
    "token/entropy": "entropy",
    "token/advantage": "advantages",
    "token/value": "values",
    "token/kl_penalty": "kl_penalty",
    "token/mask": "mask",
}
"""Column for each value that a loss reports for single tokens. It replaces a column of the batch."""


def token_records(
    batch: SequenceSample,
    traces: Iterable[TracedSequence],
    spec: RecordSpec,
    decode: Callable[..., str],
) -> list[dict[str, Any]]:
    """Return a record for each response of the first prompts of a batch; empty if the batch has no tokens.

    Columns are lists with one entry per token. Values that are not finite, or that no model computed, are null.

    Args:
        batch: the batch of the step, with every key that its calls wrote.
        traces: per-token values from the loss. Of several passes over a response, the last one counts.
        spec: number of prompts, responses and tokens.
        decode: decodes token ids.
    """
    if not {"input_ids", "loss_mask"} <= batch.keys or spec.token_prompts == 0:
        return []
    part = batch.take(range(min(spec.token_prompts, len(batch))))
    lengths = part.lengths["input_ids"]
    columns = {
        name: part.sequences(key)
        for key, name in {"loss_mask": "mask", "prompt_mask": "given", **COLUMNS}.items()
        if key in part.data and part.lengths[key] == lengths
    }
    rewards = total_rewards(part).tolist() if "rewards" in part else None
    traced = {(one.prompt, one.response): one.values for one in traces}
    records, seen = list[dict[str, Any]](), dict[Hashable, int]()
    for row, (owner, ids) in enumerate(zip(part.group_index().tolist(), part.sequences("input_ids"), strict=True)):
        prompt = part.ids[owner]
        response = seen[prompt] = seen.get(prompt, -1) + 1
        if response >= spec.token_responses:
            continue
        found = {name: rows[row] for name, rows in columns.items()}
        found |= {TRACED[key]: x for key, x in traced.get((prompt, response), {}).items() if key in TRACED}
        reward = None if rewards is None else _plain(rewards[row])
        record = {"id": prompt, "response": response, "reward": reward}
        records.append(record | _columns(ids, found, spec.token_limit, decode))
    return records


def _columns(ids: Tensor, found: Mapping[str, Tensor], limit: int, decode: Callable[..., str]) -> dict[str, Any]:
    """Return the columns of one sequence."""
    given = found.get("given")
    prompt = len(ids) if given is None or bool(given.all()) else int((~given.bool()).nonzero()[0, 0])
    start = max(0, prompt - PROMPT_TOKENS) if given is not None else 0
    window = slice(start, start + limit)
    tokens = ids[window].tolist()
    record: dict[str, Any] = {"start": start, "length": len(ids), "tokens": tokens, "text": pieces(tokens, decode)}
    predicted = torch.ones(len(ids), dtype=torch.bool) if given is None else ~given.bool().cpu()
    predicted[0] = False
    for name, x in found.items():
        if name in ("mask", "given"):
            record[name] = x[window].int().tolist()
        elif name == "versions":
            record[name] = [None if version < 0 else version for version in x[window].tolist()]
        else:
            pairs = zip(x[window].tolist(), predicted[window].tolist(), strict=True)
            record[name] = [_plain(value) if here else None for value, here in pairs]
    if "logprobs" in record and "ref_logprobs" in record:
        record["kl"] = [
            None if a is None or b is None else _plain(a - b)
            for a, b in zip(record["logprobs"], record["ref_logprobs"], strict=True)
        ]
    return record


def pieces(tokens: Sequence[int], decode: Callable[..., str]) -> list[str]:
    """Return the text of each token. A character of several tokens belongs to its first one; the others are empty."""
    texts: list[str] = []
    start = 0
    while start < len(tokens):
        before = list(tokens[start - 1 : start]) if start else []
        context = _text(before, decode)
        for end in range(start + 1, min(start + 4, len(tokens)) + 1):
            text = _text([*before, *tokens[start:end]], decode)
            if not text.endswith("\ufffd"):
                break
        else:
            end, text = start + 1, _text([*before, tokens[start]], decode)
        if text.startswith(context) and len(text) > len(context):
            text = text[len(context) :]
        else:
            text = _text(tokens[start:end], decode)
        texts += [text, *[""] * (end - start - 1)]
        start = end
    return texts


def _text(tokens: Sequence[int], decode: Callable[..., str]) -> str:
    return decode(list(tokens), skip_special_tokens=False) if tokens else ""


def _plain(value: float) -> float | None:
    """Return a number with 6 significant digits; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


__all__ = ["token_records"]
