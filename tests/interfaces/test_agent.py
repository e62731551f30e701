from __future__ import annotations

import json
import logging
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.api.engine import ModelOutput
from realign.environments import EnvironmentFailure
from realign.errors import ConfigError, RealignError, SettingsError
from realign.interfaces.agent import AgentInterface
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface, dataflow
from tests.environments.environment_fixtures import Tool
from tests.samplers import TableSampler
from tests.tiny import VOCAB, tiny_engine, tiny_tokenizer

FIXTURES = "tests.environments.agent_fixtures"
EOS = 2
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


def tokenizer():
    found = tiny_tokenizer()
    found.chat_template = TEMPLATE
    return found


def plain_text_engine():
    """Return an engine that ends most turns after a few tokens, and samples no special token besides the end token."""
    engine = tiny_engine(model={"tie_word_embeddings": False})
    return engine


def batch(rows: list[dict], prompt: str = "ab") -> SequenceSample:
    ids = tiny_tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    data = SequenceSample.from_sequences([f"p{i}" for i in range(len(rows))], {"prompt_ids": [[ids] for _ in rows]})
    return data.with_metadata(row=rows)


def settings(agent: str = "plain", **changes) -> AgentInterface:
    defaults = {"generation": GenerationConfig(max_new_tokens=6), "timeout_s": 60.0, "max_sequence_tokens": 100}
    return AgentInterface(f"{FIXTURES}:{agent}" if agent else "", **(defaults | changes))


def play(interface: AgentInterface, data: SequenceSample, engine=None, **model) -> SequenceSample:
    try:
        player = Model("agent", engine or tiny_engine(), tokenizer(), **model)
        return interface.generate(player, data, MicroBatchSpec())
    finally:
        interface.close()


def lists(out: SequenceSample, key: str) -> list[list]:
    return [x.tolist() for x in out.sequences(key)]


def rescored(engine, out: SequenceSample) -> torch.Tensor:
    """Return the log-probs of all tokens of a batch under an engine."""

    def hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(again=output.logprobs())

    return engine.forward(out.select({"input_ids"}), MicroBatchSpec(), hook)["again"]


# --- capture in a run ---


def test_an_agent_over_http_samples_the_tokens_of_the_same_environment_in_process_bit_by_bit():
    rows = [{"prompt": "ab", "script": ["7", "no", "x"]}, {"prompt": "ab", "script": ["+", "?"]}]
    scripts = [[(text, 0.25, False, False, {}) for text in row["script"]] for row in rows]
    for script in scripts:
        script[-1] = ("", 0.25, True, False, {})
    engine, sampler = tiny_engine(), GenerationConfig(n=3, max_new_tokens=6)
    Tool.made.clear()
    environment = EnvironmentInterface(
        "tests.environments.environment_fixtures:Tool", generation=sampler, max_turns=4, max_episode_tokens=60
    )
    tool_rows = [row | {"script": script} for row, script in zip(rows, scripts, strict=True)]
    player = Model("agent", engine, tokenizer(), version=3)
    expected = environment.generate(player, batch(tool_rows), MicroBatchSpec())
    out = play(settings("scripted", generation=sampler), batch(rows), engine, version=3)
    same = [i for i, ids in enumerate(lists(expected, "input_ids")) if ids in lists(out, "input_ids")]
    assert same
    for key in ("rewards",):
        assert sorted(set(out[key].tolist())) == sorted(set(expected[key].tolist()))


