from __future__ import annotations

import math
import multiprocessing

import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample
from realign.errors import ConfigError, RewardError
from realign.interfaces.components.response_cut import ResponseCut
from realign.interfaces.rule_reward import RuleRewardInterface, decode, token_ids
from realign.rewards.terms import FunctionTerm
from tests.interfaces.rule_rewards import MODEL, batch


@pytest.fixture
def function(tmp_path) -> str:
    """Write a reward function: response length times the row's price. "e" gets no reward, and "h" raises an
    exception."""
    path = tmp_path / "priced.py"
    path.write_text(
        "def score(prompt, response, row):\n"
        "    if response == 'e':\n"
        "        return None\n"
        "    if response == 'h':\n"
        "        raise ValueError('h')\n"
        "    return len(response) * row['price'] + (prompt == 'b') / 2\n"
    )
    return f"{path}:score"


def rewards(interface: RuleRewardInterface, data: SequenceSample) -> list[float | None]:
    out = interface.inference(MODEL, data, MicroBatchSpec())
    assert out.keys == {"rewards"}
    assert out["rewards"].dtype == torch.float32
    return [None if math.isnan(r) else r for r in out["rewards"].tolist()]


def test_prompt_and_response_are_told_apart_without_special_tokens():
    data = batch([[3, 4, 0], []], [[5]])
    assert decode(MODEL, token_ids(data)) == (["a", "a", "b"], ["cd", "", "e"])


@pytest.mark.parametrize("workers", [0, 1])
def test_every_response_is_judged_with_the_row_of_its_prompt(function, workers):
    interface = RuleRewardInterface(function, workers=workers)
    try:
        assert rewards(interface, batch([[3, 4, 0], [], [5]], [[6], [7, 7]])) == [2, 0, None, 10.5, 20.5]
    finally:
        interface.close()


def test_trap_c12_a_failure_is_a_missing_reward_and_too_many_stop_the_run(function):
    interface = RuleRewardInterface(function, workers=0, max_failed_fraction=0.5)
    assert rewards(interface, batch([[8], [3]])) == [None, 1]
    with pytest.raises(RewardError, match=r"max_failed_fraction=0\.5"):
        rewards(interface, batch([[8], [8], [3]]))


def test_shuffled_rewards_are_the_same_numbers_for_other_responses_again_and_again(function):
    data = batch([[3] * n for n in range(1, 9)], [[3] * n for n in range(1, 9)])
    plain = rewards(RuleRewardInterface(function, workers=0), data)
    shuffled = rewards(RuleRewardInterface(function, workers=0, shuffle=True), data)
    assert shuffled != plain
    assert sorted(shuffled) == sorted(plain)
    assert any((a < 9) != (b < 9) for a, b in zip(plain, shuffled, strict=True))  # the permutation also crosses groups
    assert rewards(RuleRewardInterface(function, workers=0, shuffle=True), data) == shuffled


def test_closing_stops_the_workers_and_can_be_repeated(function):
    interface = RuleRewardInterface(function, workers=1)
    interface.close()
    assert rewards(interface, batch([[3]])) == [1]
    assert multiprocessing.active_children()
    interface.close()
    interface.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_has_as_many_processes_as_workers(function, workers):
    interface = RuleRewardInterface(function, workers=workers)
    try:
        assert rewards(interface, batch([[3]])) == [1]
        assert len(multiprocessing.active_children()) == workers
    finally:
        interface.close()


def test_a_call_that_exceeds_the_time_limit_has_no_reward(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\ndef score(prompt, response, row):\n    return time.sleep(5) or 1.0\n"
    )
    interface = RuleRewardInterface(f"{tmp_path / 'slow.py'}:score", timeout_s=0.2, max_failed_fraction=1.0)
    try:
        assert rewards(interface, batch([[3]])) == [None]
    finally:
        interface.close()


def test_a_cut_response_is_judged_up_to_its_mark_and_one_without_is_not_judged_at_all(function):
    data = batch([[3, 7, 4, 5], [3, 4]], [[7, 7], [8]])  # the responses are "cgde", "cd", "gg" and "h"; the mark is "g"
    assert rewards(RuleRewardInterface(function, workers=0, cut=ResponseCut([7])), data) == [2, 2, 10.5, None]
    strict = RuleRewardInterface(function, workers=0, cut=ResponseCut([7], penalty=-1.0), max_failed_fraction=0.0)
    assert rewards(strict, data) == [2, -1, 10.5, -1]
    assert rewards(strict, batch([[3], [4]])) == [-1, -1]


@pytest.fixture
def dense_function(tmp_path) -> str:
    """Write a reward function with one reward per token: its position, times the row's price for "c".

    It returns too few rewards for "h", and None for "e".
    """
    path = tmp_path / "dense.py"
    path.write_text(
        "def score(prompt, response, row, tokens):\n"
        "    if response == 'e':\n"
        "        return None\n"
        "    places = [i * (row['price'] if token == 'c' else 1) for i, token in enumerate(tokens, 1)]\n"
        "    return places[1:] if 'h' in tokens else places\n"
    )
    return f"{path}:score"


@pytest.mark.parametrize("workers", [0, 1])
def test_dense_rewards_stand_at_their_tokens_and_rewards_say_who_has_a_verdict(dense_function, workers):
    interface = RuleRewardInterface(dense_function, workers=workers, dense=True)
    data = batch([[3, 4, 0], []], [[5], [4, 3], [8, 8]])
    out = interface.inference(MODEL, data, MicroBatchSpec())
    interface.close()
    assert out.keys == {"rewards", "dense_rewards"}
    assert out["rewards"].isfinite().tolist() == [True, True, False, True, False]
    assert out["rewards"].nan_to_num().tolist() == [0.0] * 5
    #                                        a  c  d  ?  a  b  e  b  d  c   b  h  h
    assert out["dense_rewards"].tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 1, 20, 0, 0, 0]
    assert out["dense_rewards"].dtype == out["rewards"].dtype == torch.float32


def test_a_worker_inherits_the_secrets_to_keep_and_no_others(tmp_path, monkeypatch):
    path = tmp_path / "inherited.py"
    path.write_text(
        "import os\n\ndef score(prompt, response, row):\n"
        "    return ('KEPT_TOKEN' in os.environ) + 2 * ('OTHER_TOKEN' in os.environ)\n"
    )
    for name in ("KEPT_TOKEN", "OTHER_TOKEN"):
        monkeypatch.setenv(name, "x")
    for keep, want in (([], 0), (["KEPT_TOKEN"], 1)):
        interface = RuleRewardInterface(f"{path}:score", workers=1, keep_environment=keep)
        assert rewards(interface, batch([[3]])) == [want]
        interface.close()


OTHERS = """
def accuracy(completions, completion_ids, price, **columns):
    return [len(text) + 100 * sum(ids) + 10 * p for text, ids, p in zip(completions, completion_ids, price)]

def areal(prompt, completions, prompt_ids, completion_ids, price):
    return completions.count("?") + 10 * len(completion_ids) + 100 * prompt_ids[0]

def marks(response):
    return response.count("?") + 10 * response.endswith("h") + 100 * len(response)

def wanting(completion, solution):
    return 1.0
"""


@pytest.fixture
def others(tmp_path) -> str:
    path = tmp_path / "others.py"
    path.write_text(OTHERS)
    return str(path)


def test_functions_of_other_tools_get_columns_and_token_ids_and_the_table_says_how_they_are_called(others):
    data = batch([[3, 0], [4]], [[5]])
    interface = RuleRewardInterface(functions={"a": f"{others}:accuracy", "b": f"{others}:areal"}, workers=0)
    scored = interface.inference(MODEL, data, MicroBatchSpec())
    assert scored["rewards/a"].tolist() == [1 + 300 + 10, 1 + 400 + 10, 1 + 500 + 100]
    assert scored["rewards/b"].tolist() == [1 + 20 + 100, 10 + 100, 10 + 200]
    assert interface.describe(1)["reward calls"] == (
        "accuracy(completions, completion_ids, price: column, **columns: columns), as TRL calls it, once per prompt; "
        "areal(prompt, completions, prompt_ids, completion_ids, price: column), as AReaL calls it"
    )


def test_special_tokens_reach_a_function_that_asks_for_them_without_the_end_of_the_response(others):
    class Ending(type(MODEL.tokenizer)):
        eos_token = "h"

    model = Model("reward", None, Ending(), seed=3)
    data = batch([[3, 0, 3, 8], [3, 8, 0]])
    for special, expected in ((False, [10 + 300, 10 + 200]), (True, [1 + 300, 1 + 300])):
        term = FunctionTerm(f"{others}:marks", special_tokens=special)
        interface = RuleRewardInterface(functions={"a": term}, workers=0)
        assert interface.inference(model, data, MicroBatchSpec())["rewards"].tolist() == expected


def test_a_column_that_no_row_has_is_an_error_before_the_first_step(others):
    interface = RuleRewardInterface(f"{others}:wanting", workers=0)
    with pytest.raises(ConfigError, match=r"asks for 'solution', which is no column\. Columns: answer, price"):
        interface.check_rows([{"price": 1}, {"answer": "4"}])
    interface.check_rows([{"price": 1}, {"solution": "4"}])
    interface.check_rows([])
