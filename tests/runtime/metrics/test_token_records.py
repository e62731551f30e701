"""Test the records of single tokens."""

from __future__ import annotations

import json

import pytest
import torch

from realign.api.trace import TracedSequence
from realign.runtime.metrics.record_spec import RecordSpec
from realign.runtime.metrics.token_records import pieces, token_records
from realign.testing import random_batch


def decode(ids, skip_special_tokens=True):
    return " ".join(str(int(i)) for i in ids)


def test_a_record_has_the_values_of_the_batch_and_of_the_loss_at_each_token():
    batch = random_batch()
    length = len(batch.sequences("input_ids")[0])
    traces = [
        TracedSequence(batch.ids[0], 0, {"token/ratio": torch.zeros(length), "token/mask": torch.ones(length)}),
        TracedSequence(batch.ids[0], 0, {"token/ratio": torch.full((length,), 1.25)}),  # the last pass counts
    ]
    first = token_records(batch, traces, RecordSpec(), decode)[0]
    ids, given = batch.sequences("input_ids")[0], batch.sequences("prompt_mask")[0]
    assert first["tokens"] == ids.tolist()
    assert first["given"] == given.int().tolist()
    assert first["mask"] == batch.sequences("loss_mask")[0].int().tolist()
    logprobs, reference = (batch.sequences(key)[0] for key in ("logprobs", "ref_logprobs"))
    for t in range(length):
        if given[t]:
            assert first["logprobs"][t] is first["ratio"][t] is first["kl"][t] is None
        else:
            assert first["logprobs"][t] == pytest.approx(float(logprobs[t]), rel=1e-5)
            assert first["kl"][t] == pytest.approx(float(logprobs[t] - reference[t]), abs=1e-5)
            assert first["ratio"][t] == 1.25
    json.dumps(first, allow_nan=False)


def test_the_numbers_of_prompts_responses_and_tokens_are_limited():
    batch = random_batch()
    found = token_records(batch, (), RecordSpec(token_prompts=2, token_responses=1, token_limit=3), decode)
    assert [one["id"] for one in found] == list(batch.ids[:2])
    assert all(len(one["tokens"]) == len(one["logprobs"]) == min(3, one["length"]) for one in found)
    assert token_records(batch, (), RecordSpec(token_prompts=0), decode) == []
    assert token_records(batch.select(["input_ids"]), (), RecordSpec(), decode) == []


def test_a_character_of_several_tokens_belongs_to_its_first_token():
    data = "a é€b".encode()

    def of_bytes(ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")

    found = pieces(list(data), of_bytes)
    assert found == ["a", " ", "é", "", "€", "", "", "b"]
    assert "".join(pieces([0xFF, 0x61], of_bytes)) == "\ufffda"


def test_a_space_that_a_tokenizer_drops_at_the_start_of_a_text_is_kept():
    words = {1: " two", 0: " one"}

    def stripped(ids, skip_special_tokens=True):
        return "".join(words[i] for i in ids).lstrip()

    assert pieces([0, 1], stripped) == ["one", " two"]
