"""Prompts for rollouts, and how to compare the responses."""

from __future__ import annotations

import torch

from realign.api import SequenceSample
from tests.tiny import VOCAB, tiny_engine

LENGTHS = (7, 1, 12, 4)


UNTIED = {"tie_word_embeddings": False}
"""Settings without tied embeddings. With them, a model with random weights repeats one token."""


def prompts(lengths=LENGTHS, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=g) for n in lengths]


def sample_of(prompt_list):
    ids = [f"p{i}" for i in range(len(prompt_list))]
    return SequenceSample.from_sequences(ids, {"prompt_ids": [[p] for p in prompt_list]})


def responses(out):
    return [x[m].tolist() for x, m in zip(out.sequences(), out.sequences("loss_mask"), strict=True)]


def check_equal(got, want):
    assert responses(got) == responses(want)
    torch.testing.assert_close(got["logprobs"], want["logprobs"], atol=1e-5, rtol=1e-5)


def same(a, b):
    return a.lengths["input_ids"] == b.lengths["input_ids"] and all(torch.equal(a[k], b[k]) for k in a.data)


def other_engine():
    return tiny_engine(model={"seed": 7})


def numbered_prompts(ids, length=3):
    one = {i: [2 + (i * 3 + k) % 11 for k in range(length + i % 4)] for i in ids}
    return SequenceSample.from_sequences(ids, {"prompt_ids": [[one[i]] for i in ids]})
