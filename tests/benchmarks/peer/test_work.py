from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from benchmarks.peer.work import CHARACTERS, SCENARIOS, Scenario, reward, write_prompts

TINY = Scenario("by hand", 1, 2, 8, 4, vocabulary=10, hidden=4, layers=2, heads=2, kv_heads=1, mlp=6)


def test_flops_by_hand():
    # Weights per layer: q and o have 4 * 4 each, k and v have 4 * 2 each, and the MLP has three matrices of 4 * 6.
    # Tokens: 3 for the prompt (computed once), and 1 + 2 for the responses.
    # Query-key pairs: 6 in the prompt, 3 + 1 and 6 + 3 in the responses.
    forward = 2 * (2 * (16 + 16 + 8 + 8 + 72)) * 6 + 4 * 4 * 2 * 19
    head = 2 * 4 * 10 * 3
    assert (forward, head) == (3488, 240)
    assert TINY.flops([3], [1, 2]) == {"rollout": 3728, "training": 11184}
    ppo = replace(TINY, algorithm="ppo", epochs=2)
    assert ppo.flops([3], [1, 2]) == {"rollout": 3728, "training": 3 * 3488 + 240 + 2 * 3 * (2 * 3488 + 240)}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4))
def test_flops_count_every_pair_of_tokens_and_a_shared_prompt_once(groups):
    weights, words = 2 * 120, 10
    pairs = tokens = sampled = 0
    for prompt, *responses in groups:
        pairs += sum(1 for i in range(prompt) for _ in range(i + 1))
        tokens += prompt
        for n in responses:
            pairs += sum(1 for i in range(prompt, prompt + n) for _ in range(i + 1))
            tokens, sampled = tokens + n, sampled + n
    expected = 2 * weights * tokens + 2 * 2 * 4 * 2 * pairs + 2 * 4 * words * sampled
    found = TINY.flops([g[0] for g in groups], [n for g in groups for n in g[1:]])
    assert found["rollout"] == expected


def test_flops_count_the_matrices_of_the_model():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(TINY.config())
    matrices = sum(p.numel() for name, p in model.model.layers.named_parameters() if p.ndim == 2)
    without_pairs = TINY.flops([1], [0, 0])["rollout"] - 4 * 4 * 2 * 1
    assert without_pairs == 2 * matrices


def test_lengths_and_prompts_are_pure_functions_of_the_scenario():
    for scenario in SCENARIOS.values():
        lengths = scenario.lengths(3)
        assert lengths == scenario.lengths(3) != scenario.lengths(4)
        assert len(lengths) == scenario.prompts * scenario.group
        assert all(2 <= n <= scenario.max_new for n in lengths)
        texts = scenario.prompt_texts(2)
        assert texts == scenario.prompt_texts(2)
        assert texts[: scenario.prompts] == scenario.prompt_texts(1)
        assert all(scenario.prompt_low <= len(text) <= scenario.prompt_high for text in texts)


def test_every_token_of_a_prompt_is_one_character(tmp_path):
    scenario = SCENARIOS["tiny"]
    tokenizer = scenario.tokenizer()
    assert len(tokenizer) == scenario.vocabulary
    rows = [
        json.loads(line) for line in write_prompts(scenario, 2, tmp_path / "prompts.jsonl").read_text().splitlines()
    ]
    assert [row["prompt"] for row in rows] == scenario.prompt_texts(2)
    found = []
    for row in rows:
        ids = tokenizer(row["prompt"])["input_ids"]
        found.append(ids)
        assert len(ids) == len(row["prompt"])
        assert min(ids) > 2
        assert tokenizer.decode(ids) == row["prompt"]
    assert found == scenario.prompt_ids(1) + scenario.prompt_ids(2)


def test_reward_is_the_share_of_even_characters():
    even = [c for c in CHARACTERS[:10] if ord(c) % 2 == 0]
    odd = [c for c in CHARACTERS[:10] if ord(c) % 2]
    assert reward(even[0] + odd[0] + odd[1] + odd[2]) == pytest.approx(0.25)
    assert reward("") == 0
