from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import SequenceSample
from realign.config import ConfigError, build
from realign.data import (
    Dataset,
    DataSpec,
    PromptData,
    PromptsWithResponses,
    SupervisedData,
    TextData,
    WithPretraining,
)
from realign.data.combined import PromptsWithPretraining
from realign.errors import DataError, SettingsError
from tests.data.text_tokenizer import EOS, TURNS, characters, make_tokenizer


@dataclass
class Numbers(DataSpec, Dataset):
    """Dataset whose row i is a sequence of i + 1 tokens with the value i."""

    n: int
    keys: tuple[str, ...] = ("input_ids", "loss_mask")

    def load(self, tokenizer):
        return self

    def __len__(self) -> int:
        return self.n

    def sample(self, rows) -> SequenceSample:
        ids = [f"{row}@{epoch}" for epoch, row in rows]
        tokens = SequenceSample.from_sequences(ids, {"input_ids": [[[row] * (row + 1)] for _, row in rows]})
        return tokens.with_tokens(loss_mask=tokens["input_ids"] > 0)


@dataclass
class Prompts(Numbers):
    keys: tuple[str, ...] = ("prompt_ids",)

    def sample(self, rows) -> SequenceSample:
        return super().sample(rows).select(["input_ids"]).rename({"input_ids": "prompt_ids"})


def both(prompts: int, texts: int, per_prompt: int = 1, seed: int = 0) -> PromptsWithPretraining:
    return WithPretraining(Prompts(prompts), Numbers(texts), per_prompt, seed).load(None)


def test_texts_come_along_with_lengths_of_their_own():
    data = both(3, 5, per_prompt=2)
    assert data.keys == ("prompt_ids", "ptx_input_ids", "ptx_loss_mask")
    rows = [(0, 2), (1, 0)]
    sample = data.sample(rows)
    assert sample.keys == set(data.keys)
    assert sample["prompt_ids"].tolist() == [2, 2, 2, 0]
    brought = [row for _, row in data.texts_of(rows)]
    assert sample.lengths["ptx_input_ids"].as_tuples() == tuple((a + 1, b + 1) for a, b in (brought[:2], brought[2:]))
    assert sample["ptx_input_ids"].tolist() == [row for row in brought for _ in range(row + 1)]
    assert sample["ptx_loss_mask"].tolist() == (sample["ptx_input_ids"] > 0).tolist()


unhurried = settings(deadline=None)
sizes = st.integers(1, 7)


@unhurried
@given(sizes, sizes, st.integers(1, 3), st.integers(1, 4), st.integers(0, 9))
def test_trap_c17_both_datasets_are_used_evenly_whatever_their_sizes(prompts, texts, per_prompt, epochs, seed):
    data = both(prompts, texts, per_prompt, seed)
    used = [pair for e in range(epochs) for p in range(prompts) for pair in data.texts_of([(e, p)])]
    assert len(set(used)) == len(used) == epochs * prompts * per_prompt
    times = Counter(row for _, row in used)
    assert max(times.values()) - min(times[row] for row in range(texts)) <= 1


@pytest.fixture
def files(tmp_path):
    def write(name, *rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return {
        "prompts": write("prompts.jsonl", {"prompt": "1+1="}, {"prompt": "2+2="}),
        "texts": write("texts.jsonl", {"text": "abcdef"}),
        "pairs": write("pairs.jsonl", {"prompt": "a", "response": "b"}),
        "preferences": write("preferences.jsonl", {"prompt": "a", "chosen": "b", "rejected": "cd"}),
    }


def test_a_config_node_takes_any_two_data_nodes(files):
    node = {
        "_target_": "realign.data.WithPretraining",
        "prompts": {"_target_": "realign.data.PromptData", "path": files["prompts"]},
        "pretraining": {"_target_": "realign.data.TextData", "path": files["texts"], "block_tokens": 3},
    }
    made = build(node, DataSpec, "data")
    texts = TextData(files["texts"], block_tokens=3)
    assert made == WithPretraining(PromptData(files["prompts"]), texts)
    dataset = made.load(make_tokenizer())
    sample = dataset.sample([(0, 0), (0, 1)])
    assert sorted(x.tolist() for x in sample.sequences("ptx_input_ids")) == [characters("abc"), characters("def")]
    assert (dataset.longest_sequence, dataset.longest_text) == (4, 3)
    assert sample.metadata["row"] == ({"prompt": "1+1="}, {"prompt": "2+2="})
    with pytest.raises(ConfigError, match=r"data\.pretraining\._target_: Table is not a DataSpec"):
        build({**node, "pretraining": {"_target_": "realign.data.row_sources.Table"}}, DataSpec, "data")


def test_datasets_that_do_not_fit_are_named(files):
    with pytest.raises(SettingsError, match="sequences_per_prompt=0: must be at least 1"):
        both(1, 1, per_prompt=0)
    with pytest.raises(DataError, match="pretraining: the dataset contains no rows"):
        both(1, 0)
    with pytest.raises(DataError, match=r"the dataset has keys \['prompt_ids'\], but not 'input_ids'"):
        WithPretraining(Prompts(1), Prompts(1)).load(None)


def pairs(*texts):
    return [{"prompt": p, "response": r} for p, r in texts]


def test_prompts_come_with_the_given_sequence(write):
    path = write(*pairs(("1+2=", "3"), ("4", "56"), ("7+8=", "15")))
    data = PromptsWithResponses(SupervisedData(path)).load(make_tokenizer())
    assert data.keys == ("prompt_ids", "data_input_ids", "data_prompt_mask", "data_loss_mask")
    sample = data.sample([(0, 1), (1, 0)])
    assert sample.keys == set(data.keys)
    assert sample.ids == ("1@0", "0@1")
    assert [x.tolist() for x in sample.sequences("prompt_ids")] == [characters("4"), characters("1+2=")]
    assert [x.tolist() for x in sample.sequences("data_input_ids")] == [
        [*characters("456"), EOS],
        [*characters("1+2=3"), EOS],
    ]
    given, loss = sample.sequences("data_prompt_mask"), sample.sequences("data_loss_mask")
    assert [x.tolist() for x in given] == [[True, False, False, False], [True] * 4 + [False] * 2]
    assert [x.tolist() for x in loss] == [[False, True, True, True], [False] * 4 + [True] * 2]
    assert (len(data), data.longest_sequence, data.longest_text) == (3, 4, 7)
    assert len(data.sample([])) == 0


def test_the_prompt_of_a_conversation_ends_before_the_first_turn_of_the_assistant(write):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    path = write({"messages": [{"role": role, "content": text} for role, text in turns]})
    tokenizer = make_tokenizer(chat_template=TURNS)
    sample = PromptsWithResponses(SupervisedData(path)).load(tokenizer).sample([(0, 0)])
    assert tokenizer.decode(sample["prompt_ids"]) == "<|user|>a<|end|>\n<|assistant|>"
    each = PromptsWithResponses(SupervisedData(path, train_on_turns="each"))
    with pytest.raises(DataError, match=r"row 0 has 2 sequences.*Set responses\.train_on_turns=all or last"):
        each.load(tokenizer)
