from __future__ import annotations

import pickle
import warnings

import numpy as np
import torch

from realign.api import Mean, SequenceSample
from realign.runtime.ray.wire_format import Array, from_wire, shapes_of, to_wire

SAMPLE = SequenceSample.from_sequences(
    ["a", 7], {"input_ids": [[[1, 2, 3], [4]], [[5, 6]]]}, {"row": [{"x": 1}, None]}
).with_tokens(logprobs=torch.arange(6.0))


def sent(tree):
    return from_wire(pickle.loads(pickle.dumps(to_wire(tree))))


def test_a_sample_comes_as_it_was():
    received = sent(SAMPLE)
    assert (received.ids, received.lengths, received.metadata) == (SAMPLE.ids, SAMPLE.lengths, SAMPLE.metadata)
    assert list(received.data) == ["input_ids", "logprobs"]
    assert all(torch.equal(received[key], SAMPLE[key]) for key in SAMPLE.data)
    assert received.lengths["input_ids"] is received.lengths["logprobs"]  # equal lengths are sent once


def test_every_dtype_and_shape_keeps_its_bits():
    tensors = [torch.randn(3, 2).to(d) for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)]
    tensors += [torch.tensor([True, False]), torch.tensor(3), torch.zeros(0, 4), torch.randn(4, 3).T]
    tensors.append(torch.randn(2).to(torch.float8_e4m3fn))
    for x, received in zip(tensors, sent(tensors), strict=True):
        assert (received.dtype, received.shape) == (x.dtype, x.shape)
        ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (received, x))
        assert torch.equal(ours, theirs)


def test_trees_keep_their_kinds():
    tree = {"a": [1, (torch.ones(1), "x")], 2: Mean(torch.tensor(1.0), torch.tensor(2.0)), "s": {"in": SAMPLE}}
    received = sent(tree)
    assert list(received) == ["a", 2, "s"]
    assert received["a"][1][1] == "x"
    assert isinstance(received["a"][1], tuple)
    assert isinstance(received[2], Mean)
    assert received["s"]["in"].ids == SAMPLE.ids


def test_memory_is_shared_and_read_only_arrays_are_taken_without_a_warning():
    x = torch.arange(4)
    assert to_wire(x).data.ctypes.data == x.data_ptr()
    mapped = np.arange(4)
    mapped.flags.writeable = False  # arrays that Ray maps are read-only
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = from_wire(Array(mapped, "int64"))
    assert received.data_ptr() == mapped.ctypes.data


def test_shapes_for_people():
    assert shapes_of(({"part": SAMPLE}, 3)) == "2 prompts, input_ids [6], logprobs [6]"
