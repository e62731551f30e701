from __future__ import annotations

import pytest
import torch

from realign.api import RPC, MicroBatchSpec, Model, ModelInterface, SequenceSample
from realign.errors import RunError
from realign.runtime.calls import call
from realign.testing import BigramEngine


def test_an_interface_gets_the_keys_it_declared_and_must_return_those():
    seen = []

    class Spy(ModelInterface):
        def inference(self, model, data, mb_spec):
            seen.append(data.keys)
            return data.with_sequences(scores=torch.zeros(1)).select(["scores"])

    batch = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2]]], "other": [[[1, 2]]]})
    model = Model("m", BigramEngine())
    out, _ = call(
        RPC("x", "m", "inference", ("input_ids",), ("s",), {"scores": "s"}), model, Spy(), batch, MicroBatchSpec()
    )
    assert seen == [{"input_ids"}]
    assert out.keys == {"input_ids", "other", "s"}
    with pytest.raises(ValueError, match=r"RPC 'x' returned keys \['scores'\], but declares \['t'\]"):
        call(RPC("x", "m", "inference", ("input_ids",), ("t",)), model, Spy(), batch, MicroBatchSpec())


def test_an_input_is_renamed_to_what_the_interface_knows():
    class Needs(ModelInterface):
        def inference(self, model, data, mb_spec):
            return data.rename({"logprobs": "out"}).select(["out"])

    batch = SequenceSample.from_sequences(["a"], {"ref_logprobs": [[[0.5]]]})
    rpc = RPC("x", "m", "inference", ("ref_logprobs",), ("out",), {"logprobs": "ref_logprobs"})
    out, _ = call(rpc, Model("m", BigramEngine()), Needs(), batch, MicroBatchSpec())
    assert out["out"].tolist() == [0.5]


@pytest.mark.parametrize(
    ("method", "outputs", "cure"),
    [
        ("inference", ("out",), r"Lower microbatch\.max_tokens_per_microbatch=64\."),
        ("generate", ("out",), r"Set models\.m\.sampler\.max_slots to decode fewer sequences at once\."),
    ],
)
def test_a_call_without_memory_names_the_setting_that_lowers_its_use(method, outputs, cure):
    class Large(ModelInterface):
        def inference(self, model, data, mb_spec):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        generate = inference

    batch = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2]]]})
    rpc = RPC("x", "m", method, ("input_ids",), outputs)
    with pytest.raises(RunError, match=rf"^RPC 'x': out of memory \(CUDA out of memory\)\. {cure}$"):
        call(rpc, Model("m", BigramEngine()), Large(), batch, MicroBatchSpec(64))
