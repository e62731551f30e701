from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realign.api import RPC, DataflowGraph, Keys, MicroBatchSpec, Model, ModelInterface, SequenceSample
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


def test_an_interface_may_change_its_rows():
    class Careless(ModelInterface):
        needs_engine = False

        def inference(self, model, data, mb_spec):
            for row in data.metadata["row"]:
                row["board"].append(1)
            sizes = [float(len(row["board"])) for row in data.metadata["row"]]
            return data.with_sequences(rewards=torch.tensor(sizes)).select(["rewards"])

    row = {"board": []}
    batch = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1]], [[2]]]}, {"row": [row, row]})
    rpc = RPC("x", "m", "inference", ("input_ids", "row"), ("rewards",))
    for _ in range(2):
        out, _ = call(rpc, Model("m", BigramEngine()), Careless(), batch, MicroBatchSpec())
        assert out["rewards"].tolist() == [1.0, 1.0]
    assert row == {"board": []}


def test_tokens_that_a_call_writes_are_numbered_unless_the_sampler_did_it():
    class Samples(ModelInterface):
        def __init__(self, **keys):
            self.keys_ = keys

        def generate(self, model, data, mb_spec):
            out = SequenceSample.from_sequences(["a"], {"input_ids": [[[1], [2]]]})
            return out.with_sequences(**self.keys_)

    prompts, model = SequenceSample.from_sequences(["a"], {"prompt_ids": [[[1]]]}), Model("m", BigramEngine())
    for keys, numbers in (({}, [0, 1]), ({"response_index": torch.tensor([1, 3])}, [1, 3])):
        rpc = RPC("x", "m", "generate", ("prompt_ids",), ("input_ids",))
        out, _ = call(rpc, model, Samples(**keys), prompts, MicroBatchSpec())
        assert out["response_index"].tolist() == numbers
        other = RPC("y", "m", "generate", ("prompt_ids",), ("greedy",), {"input_ids": "greedy"})
        out, _ = call(other, model, Samples(**keys), out, MicroBatchSpec())
        assert out["response_index"].tolist() == numbers  # of `input_ids`, not of `greedy`


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


@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("input_ids", r"RPC 'gen' writes it\. Add 'input_ids' to the inputs of RPC 'judge_inf'\."),
        ("row_ids", r"The dataset has it\. Add 'row_ids' to the inputs of RPC 'judge_inf'\."),
        (
            "nothing",
            r"No RPC and no dataset provides it \(keys of the graph: input_ids, prompt_ids, rewards, row_ids\)\.",
        ),
    ],
)
def test_a_key_that_an_rpc_does_not_declare_is_named_with_rpc_role_and_producer(key, cure):
    class Reads(ModelInterface):
        def inference(self, model, data, mb_spec):
            return SequenceSample(data.ids, {"rewards": data[key]})

    rpcs = (
        RPC("gen", "actor", "generate", ("prompt_ids",), ("input_ids",)),
        RPC("judge_inf", "judge", "inference", ("scores_in",), ("rewards",), {"scores": "scores_in"}),
    )
    graph = DataflowGraph(
        (rpcs[0], replace(rpcs[1], inputs=("prompt_ids",), rename={})),
        ("prompt_ids", "row_ids"),
        ("rewards", "input_ids"),
    )
    data = {"input_ids": [[[1, 2]]], "scores_in": [[[1.0]]], "row_ids": [[[1]]]}
    batch = SequenceSample.from_sequences(["a"], data)
    message = (
        rf"RPC 'judge_inf' \(inference of role 'judge'\) reads key '{key}', which is not one of its inputs \(scores\)"
    )
    with pytest.raises(ValueError, match=rf"^{message}\. {cure}$") as caught:
        call(rpcs[1], Model("judge", None), Reads(), batch, MicroBatchSpec(), graph)
    assert caught.traceback[-2].name == "__getitem__"  # the traceback leads to the line of the interface


def test_a_declared_key_that_the_interface_removed_keeps_its_message():
    class Removes(ModelInterface):
        def inference(self, model, data, mb_spec):
            return data.select([])["input_ids"]

    batch = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2]]]})
    with pytest.raises(ValueError, match=r"^no packed key 'input_ids' \(keys: none\)$"):
        call(RPC("x", "m", "inference", ("input_ids",), ("s",)), Model("m", None), Removes(), batch, MicroBatchSpec())


def test_keys_for_reports_are_dropped_unless_the_rpc_declares_them():
    class Scores(ModelInterface):
        needs_engine = False

        def keys(self, method):
            return Keys(writes=frozenset({"rewards"}), reports=frozenset({"rewards/a", "rewards/b"}))

        def inference(self, model, data, mb_spec):
            out = {name: torch.ones(1) for name in ("rewards", "rewards/a", "rewards/b")}
            return data.with_sequences(**out).select(out)

    batch = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2]]]})
    for outputs, rename in (
        (("rewards",), {}),
        (("rewards", "rewards/b"), {}),
        (("base", "rewards/base"), {"rewards": "base", "rewards/a": "rewards/base"}),
    ):
        rpc = RPC("x", "m", "inference", ("input_ids",), outputs, rename)
        out, _ = call(rpc, Model("m", None), Scores(), batch, MicroBatchSpec())
        assert out.keys == {"input_ids", *outputs}
