"""The teacher's own prompts. `test_gkd` and `test_ppo_graph` test the rest of the interface."""

from __future__ import annotations

import json

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.config import build_experiment, compose
from realign.errors import ConfigError, DataError
from realign.interfaces import gkd
from realign.interfaces.components import TeacherKL
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import run
from tests.tiny import save_tiny, tiny_engine, tiny_tokenizer

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


def test_chat_messages_are_rendered():
    engine, tokenizer = tiny_engine("llama"), tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    data = rollout(engine)
    chat = [row | {"chat": [{"role": "user", "content": row["hint"]}]} for row in ROWS]
    plain = [row | {"text": row["hint"] + ";"} for row in ROWS]
    scored = [
        ReferenceInterface(prompt=column).inference(Model("t", engine, tokenizer), data.with_metadata(row=rows), SPEC)
        for column, rows in (("chat", chat), ("text", plain))
    ]
    assert torch.equal(scored[0]["logprobs"], scored[1]["logprobs"])


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


def test_a_function_that_does_not_exist_is_an_error_before_the_run():
    with pytest.raises(ConfigError, match=r"prompt function 'tests\.interfaces\.test_reference:nothing'"):
        ReferenceInterface(prompt="tests.interfaces.test_reference:nothing").open()
    with pytest.raises(ConfigError, match=r"is called by the names \(row, response\), without 'engine'"):
        ReferenceInterface(prompt="tests.interfaces.test_reference:by_hand").open()


def test_the_graphs_pass_rows_to_a_teacher_with_its_own_prompts():
    policy = PPOActorInterface(generation=GenerationConfig(n=2, top_p=0.9), advantage=TeacherKL())
    for build, actor in ((dataflow, policy), (gkd.dataflow, gkd.GKDInterface())):
        for prompt, read in (("", set()), ("hint", {"prompt_mask", "row"})):
            teacher = ReferenceInterface(prompt=prompt, hidden_states=build is gkd.dataflow)
            graph = build({"actor": actor, "teacher": teacher})
            (call,) = (rpc for rpc in graph.rpcs if rpc.model == "teacher")
            assert {"prompt_mask", "row"} & set(call.inputs) == read
            assert ("row" in graph.dataset_keys) == bool(prompt)


def experiment(tmp_path, prompt):
    save_tiny(tmp_path / "model", "llama")
    rows = [{"prompt": f"{a}+{b}=", "teacher_prompt": f"{a + b}! {a}+{b}="} for a in range(3) for b in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["experiment=self_distillation", f"models.actor.path={tmp_path / 'model'}", "steps=3", "batch_prompts=4"]
    words += [f"data.path={tmp_path / 'rows.jsonl'}", f"interfaces.teacher.prompt={prompt}"]
    words += ["interfaces.actor.generation.max_new_tokens=6", "models.actor.optimizer.schedule.warmup=0"]
    return build_experiment(compose([*words, f"output_dir={tmp_path / 'run'}", "models.actor.device=cpu"]))


def test_a_model_distills_itself_under_another_prompt(tmp_path):
    divergence = run(experiment(tmp_path, "teacher_prompt")).series("divergence")
    assert len(divergence) == 3
    assert all(x > 1e-5 for x in divergence)
