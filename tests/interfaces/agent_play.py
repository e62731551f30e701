"""Play episodes of an agent with a tiny model."""

from __future__ import annotations

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.interfaces.agent import AgentInterface
from tests.tiny import tiny_engine, tiny_tokenizer

FIXTURES = "tests.environments.agent_fixtures"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


def tokenizer():
    made = tiny_tokenizer()
    made.chat_template = TEMPLATE
    return made


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
