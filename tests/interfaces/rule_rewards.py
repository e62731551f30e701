"""A model and batches for reward functions."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch

from realign.api import MicroBatchSpec, Model, SequenceSample
from realign.interfaces.rule_reward import RuleRewardInterface

LETTERS = "?abcdefgh"


class Letters:
    """Tokenizer of letters. Token 0 is special."""

    added_tokens_decoder = MappingProxyType({})

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[LETTERS.index(letter) for letter in text] for text in texts]}

    def decode(self, ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
        return "".join(LETTERS[i] for i in ids if i or not skip_special_tokens)

    def batch_decode(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]


MODEL = Model("reward", None, Letters(), seed=3)


def batch(*groups: list[list[int]], prompt: int = 1) -> SequenceSample:
    """Return each response after a prompt of one token. The token is 1 for the first group, 2 for the second, and so
    on."""
    ids = [[[prompt + g, *response] for response in group] for g, group in enumerate(groups)]
    data = SequenceSample.from_sequences([f"p{g}" for g in range(len(groups))], {"input_ids": ids})
    starts = data.cu_seqlens()[:-1].long()
    mask = torch.zeros(len(data["input_ids"]), dtype=torch.bool)
    mask[starts] = True
    rows: list[dict[str, Any]] = [{"price": 10**g} for g in range(len(groups))]
    return data.with_tokens(prompt_mask=mask).with_metadata(row=rows)


def columns(reward: RuleRewardInterface, data: SequenceSample) -> dict[str, list[float | None]]:
    try:
        out = reward.inference(MODEL, data, MicroBatchSpec())
    finally:
        reward.close()
    assert all(x.dtype == torch.float32 for x in out.data.values())
    return {key: [None if math.isnan(x) else x for x in out[key].tolist()] for key in sorted(out.keys)}
