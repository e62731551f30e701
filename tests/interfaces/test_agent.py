from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import replace

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.api.engine import ModelOutput
from realign.api.sample import INDEX_KEYS
from realign.api.sampling_mask import masks_of
from realign.data import PromptData, Template
from realign.engines import SharedModel, TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.environments.event_loops import EnvironmentFailure
from realign.errors import ConfigError, SettingsError
from realign.interfaces.agent import AgentInterface
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from realign.runtime import Async, EpisodeEvaluation, Experiment, run
from realign.runtime.rollout.spec import Sync
from tests.environments.environment_fixtures import Tool
from tests.interfaces.agent_play import batch, lists, play, settings, tokenizer
from tests.table_sampler import TableSampler
from tests.tiny import VOCAB, save_tiny, tiny_engine


def rescored(engine, out: SequenceSample) -> torch.Tensor:
    """Return the log-probs of all tokens of a batch under an engine."""

    def hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(again=output.logprobs())

    return engine.forward(out.select({"input_ids", "sampling_mask"} & out.keys), MicroBatchSpec(), hook)["again"]


def test_an_agent_over_http_samples_the_tokens_of_the_same_environment_in_process():
    rows = [{"prompt": "ab", "script": ["7", "no", "x"]}, {"prompt": "ab", "script": ["+", "?"]}]
    engine, sampler = tiny_engine(), GenerationConfig(n=3, max_new_tokens=6)
    environment = EnvironmentInterface(
        "tests.environments.environment_fixtures:Tool",
        generation=sampler,
        max_turns=4,
        max_episode_tokens=60,
        chat=True,
        role="user",
    )
    Tool.made.clear()
    tool_rows = [row | {"script": [(text, 0.25, False, False, {}) for text in row["script"]]} for row in rows]
    for row in tool_rows:
        row["script"][-1] = ("", 0.25, True, False, {})
    player = Model("agent", engine, tokenizer(), version=3)
    expected = environment.generate(player, batch(tool_rows), MicroBatchSpec())
    out = play(settings("scripted", generation=sampler), batch(rows), engine, version=3)
    assert out.keys == {*settings().keys("generate").writes, *INDEX_KEYS}
    for key in ("input_ids", "loss_mask", "prompt_mask", "versions"):
        assert lists(out, key) == lists(expected, key), key
    for key in ("rewards", "turns"):
        assert out[key].tolist() == expected[key].tolist(), key
    # calls arrive in batches of any size, on which the rounding of log-probs depends
    assert out["logprobs"].tolist() == pytest.approx(expected["logprobs"].tolist(), abs=1e-5)


def test_captured_tokens_are_trained_over_the_tokens_that_they_were_drawn_from():
    """Also a rewritten history, whose earlier responses train in another sequence."""
    engine, config = tiny_engine(), GenerationConfig(n=2, max_new_tokens=6, top_k=7, sampling_replay=True)
    rows = [{"prompt": "ab", "script": ["7", "no", "x"]}, {"prompt": "cd", "script": ["+"]}]
    for agent in ("scripted", "rewriting"):
        interface = settings(agent, generation=config)
        out = play(interface, batch(rows), engine)
        assert out.keys == {*interface.keys("generate").writes, *INDEX_KEYS}
        sampled_T = out["loss_mask"]
        counts_T = torch.cat([mask.counts_N for mask in masks_of(out)])
        assert counts_T.tolist() == [7 if x else 0 for x in sampled_T.tolist()]
        difference_T = (rescored(engine, out) - out["logprobs"])[sampled_T]
        assert difference_T.abs().max() < 1e-4


def test_log_probs_of_captured_tokens_equal_those_of_the_whole_sequence():
    engine = tiny_engine()
    rows = [{"prompt": "ab", "script": ["7", "no", "x"]}, {"prompt": "cd", "script": ["+"]}]
    out = play(settings("scripted", generation=GenerationConfig(n=2, max_new_tokens=6)), batch(rows), engine)
    sampled_T = out["loss_mask"]
    assert int(sampled_T.sum()) > 0
    difference_T = (rescored(engine, out) - out["logprobs"])[sampled_T]
    assert difference_T.abs().max() < 1e-4


def test_an_episode_with_a_rewritten_history_has_several_sequences_with_its_reward():
    out = play(settings("rewriting", generation=GenerationConfig(n=2, max_new_tokens=6)), batch([{"prompt": "ab"}]))
    assert out.lengths["input_ids"].counts.tolist() == [4]
    assert out["rewards"].tolist() == [1.0] * 4
    assert out["turns"].tolist() == [1] * 4


def test_a_function_with_a_parameter_seed_gets_one_that_repeats_and_differs_by_episode():
    sampler = GenerationConfig(n=3, max_new_tokens=2)
    first, again = (
        play(settings("seeded", generation=sampler), batch([{"prompt": "ab"}]))["rewards"].tolist() for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 3
    same = play(settings("seeded", generation=sampler, same_seed=True), batch([{"prompt": "ab"}]))["rewards"].tolist()
    assert len(set(same)) == 1


ROLES = ["first", "second"]


def test_each_role_of_an_episode_has_its_own_sequences_and_its_own_reward():
    rows = [
        {"prompt": "ab", "turns": ["first", "second", "first"], "reward": 1.0},
        {"prompt": "cd", "turns": ["second"], "reward": 0.5},
    ]
    agent = settings("two_roles", role_names=ROLES, generation=GenerationConfig(n=2, max_new_tokens=3))
    out = play(agent, batch(rows))
    assert out.keys == agent.keys("generate").writes | {"rewards/first", "rewards/second", *INDEX_KEYS}
    assert out.lengths["input_ids"].counts.tolist() == [4, 2]  # a role without a call has no sequence
    assert out["rewards"].tolist() == [1.0, -1.0] * 2 + [-0.5] * 2
    assert out["turns"].tolist() == [2, 1] * 2 + [1] * 2
    assert out["episode"].tolist() == [0, 1, 2, 3, 0, 1]  # each role's part has a reward of its own
    first, second = (out[f"rewards/{role}"].tolist() for role in ROLES)
    assert [x for x in first if x == x] == [1.0] * 2
    assert [x for x in second if x == x] == [-1.0] * 2 + [-0.5] * 2
    assert all((x == x) != (y == y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stranger": True}, "The model must be a role: first, second"),
        ({"returned": 1.0}, "expected the key 'rewards' with a reward for each of first, second"),
        ({"returned": {"rewards": {"first": 1.0}}}, "expected the key 'rewards' with a reward for each"),
        ({"returned": {"rewards": {"first": 1.0, "second": float("nan")}}}, "the reward is nan"),
        ({"returned": {"rewards": 1.0}}, "the agent returned the rewards 1.0"),
        ({"returned": {"reward": 1.0, "rewards": {}}}, "unknown key 'reward'"),
    ],
)
def test_an_episode_without_valid_rewards_of_its_roles_fails(changes, text, caplog):
    row = {"prompt": "ab", "turns": ["first", "second"], "reward": 1.0}
    with caplog.at_level(logging.WARNING):
        out = play(settings("two_roles", role_names=ROLES, max_failed_fraction=1.0), batch([row | changes]))
    assert out["rewards"].isnan().all()
    assert text in caplog.text


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "RuntimeError: the agent broke"),
        ("hang", "no answer within timeout_s=3"),
        ("no call", "made no call of the endpoint"),
        ("text", "the reward is '1' (str)"),
        ("nan", "the reward is nan"),
        ("keys", "unknown key 'score'"),
        ("no reward", "has no key 'reward'"),
        ("too many calls", "limit of 3 calls"),
    ],
)
def test_a_failing_agent_costs_its_own_episode(how, text, caplog):
    data = batch([{"prompt": "ab", "how": how}, {"prompt": "ab", "how": "good"}])
    with caplog.at_level(logging.WARNING):
        out = play(settings("bad", timeout_s=3.0 if how == "hang" else 60.0, max_calls=3), data)
    rewards = out["rewards"].tolist()
    assert math.isnan(rewards[0])
    assert rewards[-1] == 1.0
    assert text in caplog.text
    counts = out.lengths["input_ids"].counts.tolist()
    assert counts == [3 if how == "too many calls" else 1, 1]
    if how == "no call":
        assert lists(out, "input_ids")[0] == data["prompt_ids"][:2].tolist()
        assert lists(out, "loss_mask")[0] == [False, False]


def test_the_run_stops_if_too_many_episodes_fail():
    data = batch([{"prompt": "ab", "how": "raise"}, {"prompt": "ab", "how": "raise"}, {"prompt": "ab", "how": "good"}])
    with pytest.raises(EnvironmentFailure, match="failed in 2 of 3 episodes"):
        play(settings("bad"), data)


def test_an_error_of_the_sampler_is_the_error_of_the_run():
    sampler = TableSampler(torch.zeros(VOCAB, VOCAB))
    sampler.close()
    with pytest.raises(RuntimeError, match="the table is closed"):
        play(settings("plain", max_failed_fraction=1.0), batch([{"prompt": "ab"}]), external_sampler=sampler)


CLIENT = """
import json, os, sys
from openai import OpenAI
row = json.load(sys.stdin)
client = OpenAI(max_retries=0)
out = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": row["prompt"]}])
print("some output")
print(row["reward"])
"""


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_command_reads_its_row_and_endpoint_and_prints_its_reward():
    agent = settings("", command=command(CLIENT), generation=GenerationConfig(n=2, max_new_tokens=6))
    out = play(agent, batch([{"prompt": "ab", "reward": 0.5}, {"prompt": "ab", "reward": '{"reward": 2}'}]))
    assert out["rewards"].tolist() == [0.5, 0.5, 2.0, 2.0]
    assert out["turns"].tolist() == [1] * 4


def test_a_command_gets_no_secrets_except_those_it_should_keep(monkeypatch, caplog):
    monkeypatch.setenv("SEARCH_API_KEY", "s3cret")
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    code = "import os, sys; sys.exit(' '.join(sorted(n for n, v in os.environ.items() if v == 's3cret')) or 'none')"
    for keep, seen in (([], "none"), (["SEARCH_API_KEY"], "SEARCH_API_KEY")):
        caplog.clear()
        agent = settings("", command=command(code), keep_environment=keep, max_failed_fraction=1.0)
        play(agent, batch([{"prompt": "ab"}]))
        assert f"exit code 1: {seen}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"agent": ""}, "set either agent, a function, or command"),
        ({"agent": "plain", "command": ["x"]}, "set either agent, a function, or command"),
        ({"agent": "", "command": ["x"], "arguments": {"a": 1}}, "has no effect with command"),
        ({"agent": "plain", "keep_environment": ["X"]}, "has no effect without command"),
        ({"agent": "plain", "role_names": ["a", "a"]}, "role_names=.*must be different names"),
        ({"agent": "plain", "max_sequence_tokens": 6}, "must be greater than generation.max_new_tokens=6"),
    ],
)
def test_settings_that_exclude_each_other_are_errors(changes, text):
    with pytest.raises(SettingsError, match=text):
        settings(**changes)


@pytest.mark.parametrize(
    ("agent", "arguments", "text"),
    [
        ("nobody", {}, "has no 'nobody'"),
        ("APIError", {}, "expected a function"),
        ("plain", {"speed": 1}, "has no argument 'speed'"),
    ],
)
def test_an_agent_that_cannot_be_called_is_a_configuration_error(agent, arguments, text):
    with pytest.raises(ConfigError, match=text):
        settings(agent, arguments=arguments).open()


@pytest.mark.parametrize("rollout", [Sync(), Async(max_staleness=1)])
def test_a_run_trains_and_evaluates_with_agents(rollout, tmp_path):
    folder = save_tiny(tmp_path / "model")
    tokenizer().save_pretrained(folder)
    rows = [{"prompt": "abcdefgh"[i : i + 2]} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampler = GenerationConfig(n=2, max_new_tokens=6)

    def agent(**changes) -> AgentInterface:
        return settings("seeded", **{"generation": sampler, "max_sequence_tokens": 40, **changes})

    interfaces = {"actor": GRPOActorInterface(generation=sampler), "agent": agent()}
    result = run(
        Experiment(
            name="agents",
            steps=3,
            batch_prompts=2,
            graph=dataflow(interfaces),
            interfaces=interfaces,
            models={
                "actor": TransformersModel(str(folder), optimizer=OptimizerSpec(lr=1e-3)),
                "agent": SharedModel(of="actor"),
            },
            data=PromptData(str(tmp_path / "rows.jsonl"), template=Template.plain),
            evaluation=EpisodeEvaluation(
                PromptData(str(tmp_path / "rows.jsonl"), template=Template.plain),
                every_steps=3,
                episodes=agent(generation=replace(sampler, n=1)),
            ),
            rollout=rollout,
            output_dir=tmp_path / "run",
        )
    )
    assert result.series("missing_rewards") == [0.0] * 3
    assert result.series("turns") == [1.0] * 3
    assert result.series("first_logprob_diff_max")[0] < 1e-4
    assert len(result.series("eval/reward")) == 2


def test_an_agent_may_return_a_reward_for_each_of_its_calls():
    sampler = GenerationConfig(n=1, max_new_tokens=6)
    for agent in ("scripted", "rewriting"):  # in one sequence, and in one of each call
        rows = [
            {"prompt": "ab", "script": ["7", "no"], "returned": [0.25, -1.0]},
            {"prompt": "ab", "script": ["7", "x"]},
        ]
        out = play(settings(agent, generation=sampler), batch(rows))
        index_T, rewards_T, mask_T = (
            torch.cat(out.sequences(key)) for key in ("turn_index", "turn_rewards", "loss_mask")
        )
        assert torch.equal(index_T >= 0, mask_T)
        group_T = torch.arange(out.n_sequences).repeat_interleave(out.cu_seqlens().diff())
        found = [
            [float(rewards_T[(index_T == k) & (out.group_index()[group_T] == prompt)].sum()) for k in range(2)]
            for prompt in range(2)
        ]
        single = {"scripted": 0.5, "rewriting": 1.0}[agent]  # one reward is that of the last call
        assert found == [[0.25, -1.0], [0.0, single]]
        assert {*out["rewards"].tolist()} == {-0.75, single}
        last_T = index_T != torch.cat([index_T[1:], torch.tensor([-2])])
        assert not rewards_T[~last_T].any()
