"""The teacher's own prompts. `test_gkd` and `test_ppo_graph` test the rest of the interface."""

from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.errors import DataError
from realign.interfaces import gkd
from realign.interfaces.components import TeacherKL
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from tests.tiny import tiny_engine, tiny_tokenizer

SPEC = MicroBatchSpec(60)
ROWS = [{"prompt": "2+3=", "hint": "the sum is 5: 2+3="}, {"prompt": "7=", "hint": "x"}]


def rollout(engine, **sampling):
    """Return two responses to each prompt, of different lengths, with an observation in the second one."""
    tokenizer = tiny_tokenizer()
    prompts = [[torch.tensor(tokenizer(row["prompt"])["input_ids"])] for row in ROWS]
    data = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": prompts})
    config = GenerationConfig(n=2, max_new_tokens=9, stop_token_ids=[5, 6, 7], **sampling)
    out = engine.generate(data, config, seed=0)
    return out.with_metadata(row=ROWS)


def by_hand(engine, ids, given):
    """Return the log-probs and hidden states of the last tokens of a text, alone in a pass."""
    alone = SequenceSample.from_sequences(["x"], {"input_ids": [[ids]]})

    def hook(output, mb):
        return mb.with_tokens(x=output.logprobs(), h=output.hidden_states())

    out = engine.forward(alone, MicroBatchSpec(), hook)
    return out["x"][given:], out["h"][given:]


def hint_of(row, response):
    return f"{row['hint']} not {response} "


@pytest.mark.parametrize("prompt", ["hint", f"{__name__}:hint_of"])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 9, "sampling_replay": True}], ids=["plain", "top_k"])
def test_responses_are_scored_after_the_teachers_prompt(prompt, sampling):
    engine, tokenizer = tiny_engine("llama"), tiny_tokenizer()
    data = rollout(engine, **sampling)
    loss_mask = data["loss_mask"].clone()
    loss_mask[loss_mask.nonzero()[3]] = False  # such as an observation: read, but not scored
    data = data.with_tokens(loss_mask=loss_mask)
    teacher = ReferenceInterface(hidden_states=True, prompt=prompt)
    needed = data.select([*teacher.keys("inference").needs, *({"sampling_mask"} & data.keys)])
    out = teacher.inference(Model("teacher", engine, tokenizer), needed, SPEC)
    assert out.keys == teacher.keys("inference").writes
    columns = zip(
        *(x.sequences(k) for x, k in ((data, "input_ids"), (data, "prompt_mask"), (data, "loss_mask"))), strict=True
    )
    for s, (ids, given, scored) in enumerate(columns):
        row, response = ROWS[s // 2], ids[~given]
        text = tokenizer.decode(response, skip_special_tokens=True)
        their = tokenizer(hint_of(row, text) if ":" in prompt else row["hint"])["input_ids"]
        logprobs, hidden = by_hand(engine, torch.tensor([*their, *response.tolist()]), len(their))
        logprobs_T, states = (x.sequences(k)[s] for x, k in ((out, "logprobs"), (out, "hidden")))
        assert (logprobs_T[given] == 0).all()
        assert (logprobs_T[~given][~scored[~given]] == 0).all()
        where = scored[~given]
        torch.testing.assert_close(states[~given][where], hidden[where], atol=1e-5, rtol=1e-4)
        if not sampling:
            torch.testing.assert_close(logprobs_T[~given][where], logprobs[where], atol=1e-5, rtol=1e-4)
        else:  # normalized over fewer tokens
            assert (logprobs_T[~given][where] > logprobs[where]).all()


@pytest.mark.parametrize(
    ("prompt", "rows", "message"),
    [
        ("solution", ROWS, "row 'a': the teacher's prompt: no column 'solution'; found"),
        ("hint", [ROWS[0], {"hint": ""}], "row 'b': the teacher's prompt 'hint' is empty"),
        ("hint", [ROWS[0], {"hint": "y" * 200}], "row 'b': the teacher's prompt has 200 tokens and the response"),
    ],
)
def test_prompts_that_cannot_be_read_are_errors_that_name_the_row(prompt, rows, message):
    engine = tiny_engine("llama")
    data = rollout(engine).with_metadata(row=rows)
    with pytest.raises(DataError, match=message):
        ReferenceInterface(prompt=prompt).inference(Model("t", engine, tiny_tokenizer()), data, SPEC)


def test_the_graphs_pass_rows_to_a_teacher_with_its_own_prompts():
    policy = PPOActorInterface(generation=GenerationConfig(n=2, top_p=0.9), advantage=TeacherKL())
    for build, actor in ((dataflow, policy), (gkd.dataflow, gkd.GKDInterface())):
        for prompt, read in (("", set()), ("hint", {"prompt_mask", "row"})):
            teacher = ReferenceInterface(prompt=prompt, hidden_states=build is gkd.dataflow)
            graph = build({"actor": actor, "teacher": teacher})
            (call,) = (rpc for rpc in graph.rpcs if rpc.model == "teacher")
            assert {"prompt_mask", "row"} & set(call.inputs) == read
            assert ("row" in graph.dataset_keys) == bool(prompt)
