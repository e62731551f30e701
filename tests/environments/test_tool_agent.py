from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.environments import Toolbox
from realign.environments.tool_agent import chat
from realign.errors import ConfigError
from realign.interfaces.agent import AgentInterface
from tests.endpoint.chat_families import FAMILIES, family_renderer, sampled
from tests.endpoint.scripted import ScriptedSampler, scripted
from tests.environments.tool_fixtures import multiply

FIXTURES = "tests.environments.tool_fixtures"
AGENT = "realign.environments.tool_agent:chat"
QWEN = next(family for family in FAMILIES if family.name == "qwen2_5")
ROW = {"prompt": "What is 3 times 4?", "answer": "12"}


def episode(texts, row=ROW, *, max_calls=None, **options):
    """Run one episode in which the policy samples these texts."""
    with scripted(family_renderer(QWEN), texts) as (endpoint, session, sampler):
        session.max_calls = max_calls
        arguments = {"tools": Toolbox([multiply]), "reward": f"{FIXTURES}:score", **options}
        result = asyncio.run(chat(endpoint.base_url(session), session.key, row, **arguments))
    return result, session, sampler


def test_tools_are_called_until_the_policy_answers_and_the_answer_is_scored():
    result, session, sampler = episode(sampled(QWEN), system="You calculate.")
    assert result == {"reward": 1.0, "truncated": False}
    assert "<tool_response>\n12\n</tool_response>" in sampler.prompts[1]
    assert all("You calculate." in prompt and '"multiply"' in prompt for prompt in sampler.prompts)
    assert [sequence.calls for sequence in session.capture.sequences()] == [2]


def test_a_question_may_be_a_list_of_messages_in_another_column():
    row = {"messages": [{"role": "user", "content": "What is 3 times 4?"}], "answer": "30"}
    result, _, sampler = episode(["It is 30.<|im_end|>"], row, prompt="messages")
    assert result == {"reward": 1.0, "truncated": False}
    assert "What is 3 times 4?" in sampler.prompts[0]


def test_a_request_that_cannot_be_served_is_answered_with_its_error():
    texts = [sampled(QWEN)[0].replace("multiply", "divide"), "It is 12.<|im_end|>"]
    _, _, sampler = episode(texts)
    assert "error: there is no tool 'divide'" in sampler.prompts[1]


@pytest.mark.parametrize("limit", [{"max_turns": 1}, {"max_calls": 1}])
def test_an_episode_that_reaches_a_limit_is_truncated_and_scored(limit):
    result, _, _ = episode(sampled(QWEN), **limit)
    assert result == {"reward": 0.0, "truncated": True}


@pytest.mark.parametrize(
    ("reward", "error"),
    [(f"{FIXTURES}:no_score", ValueError), (f"{FIXTURES}:group_score", ConfigError), (f"{FIXTURES}:nil", ConfigError)],
)
def test_a_reward_that_cannot_be_used_fails_the_episode(reward, error):
    with pytest.raises(error, match="reward"):
        episode(sampled(QWEN), reward=reward)


def run_of(interface: AgentInterface) -> SequenceSample:
    renderer = family_renderer(QWEN)
    model = Model("agent", None, renderer.tokenizer, external_sampler=ScriptedSampler(renderer, sampled(QWEN)))
    ids = renderer.encode(ROW["prompt"])
    data = SequenceSample.from_sequences(["p"], {"prompt_ids": [[torch.tensor(ids)]]})
    with contextlib.closing(interface):
        interface.open()
        return interface.generate(model, data.with_metadata(row=[ROW]), MicroBatchSpec())


def settings(**changes) -> AgentInterface:
    generation = GenerationConfig(max_new_tokens=200)
    arguments = {"reward": f"{FIXTURES}:score"}
    return AgentInterface(AGENT, arguments, generation=generation, **changes)


def test_functions_of_the_config_are_the_tools_of_a_run():
    out = run_of(settings(tools=[f"{FIXTURES}:multiply"]))
    assert out["rewards"].tolist() == [1.0]
    assert out["turns"].tolist() == [2]
