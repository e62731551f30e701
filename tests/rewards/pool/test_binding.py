"""Reward functions get their arguments by name, as the tool passes them whose names they have."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.errors import ConfigError
from realign.rewards import RewardPool
from realign.rewards.pool.binding import CONVENTIONS, Scored, bind

ROOT = Path(__file__).parents[3]
VERL = {
    "data_source": "gsm8k",
    "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
    "answer": "four",
    "score": 9.0,
    "label": "vier",
}
PROMPT = "system\nAdd.\nuser\n2+2=\nassistant\n"


def called(function, rows=(VERL,), responses=("4",), prompt=PROMPT, ids=((1, 2), (3,))):
    """Return what a function gets in its first call."""
    seen = {}
    binding = bind(recording(function, seen), "f")
    scored = [Scored(prompt, response, row, *ids) for response, row in itertools.product(responses, rows)]
    arguments, keywords = binding.arguments(scored)
    recording(function, seen)(*arguments, **keywords)
    return seen


def recording(function, seen):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        seen.update(function(*args, **kwargs))

    return wrapper


def answers(function, rows, responses, groups=None, **how):
    settings = {"workers": 0, "timeout_s": 20.0, "memory_mb": None, "max_failed_fraction": 1.0}
    with RewardPool(function, **(settings | how)) as pool:
        return pool.score([PROMPT] * len(responses), responses, rows, groups)


MESSAGES = VERL["prompt"]
ANSWERED = [{"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("function", "received"),
    [
        (lambda response, prompt, row: {"p": prompt, "r": response, "a": row["answer"]}, (PROMPT, "4", "four")),
        (lambda response: {"r": response}, ("4",)),
        (lambda response, answer: {"r": response, "a": answer}, ("4", "four")),
        (lambda responses, answer: {"r": responses, "a": answer}, (["4"], "four")),
        (lambda responses, rows, answer: {"r": responses, "n": len(rows), "a": answer}, (["4"], 1, ["four"])),
        (
            lambda data_source, solution_str, ground_truth, extra_info=None: {
                "d": data_source, "s": solution_str, "g": ground_truth, "e": extra_info,
            },
            ("gsm8k", "4", "4", {"index": 7}),
        ),
        # verl passes no columns, so the row's `score` is not this one
        (lambda solution_str, ground_truth, score=1.0: {"s": solution_str, "x": score}, ("4", 1.0)),
        (lambda solution_str, **more: {"m": sorted(more)}, (["data_source", "extra_info", "ground_truth"],)),
        (lambda solution_strs, ground_truths: {"s": solution_strs, "g": ground_truths}, (["4"], ["4"])),
        (lambda prompt, completion, answer: {"p": prompt, "c": completion, "a": answer}, (MESSAGES, ANSWERED, "four")),
        (lambda completion, answer, state=None: {"c": completion, "a": answer, "s": state}, (ANSWERED, "four", None)),
        (
            lambda prompts, completions, answer, trainer_state=None, **columns: {
                "p": prompts, "c": completions, "a": answer, "t": trainer_state, "k": sorted(columns),
            },
            (
                [MESSAGES], [ANSWERED], ["four"], None,
                ["completion_ids", "data_source", "extra_info", "label", "reward_model", "score"],
            ),
        ),
        (lambda completion_ids, **_: {"i": completion_ids}, ([[3]],)),
        (lambda queries, labels: {"q": queries, "l": labels}, ([PROMPT + "4"], ["vier"])),
        (
            lambda prompt, completions, prompt_ids, completion_ids, answer, **more: {
                "p": prompt, "c": completions, "i": prompt_ids, "j": completion_ids, "a": answer, "m": more["score"],
            },
            (PROMPT, "4", [1, 2], [3], "four", 9.0),
        ),
    ],
)  # fmt: skip
def test_the_names_say_whose_function_it_is_and_what_it_gets(function, received):
    assert tuple(called(function).values()) == received


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda p, r, row: 0, "none of these names is the response"),
        (lambda prompt, respons, row: 0, r"is the response\. Did you mean 'response'"),
        (lambda *args: 0, r"\*args would get nothing"),
        (lambda prompt, response, *rest: 0, r"\*args would get nothing"),
        (lambda **columns: 0, "none of these names is the response"),
        (lambda prompt, answer, row: 0, "none of these names is the response"),
        (lambda prompt, completion, row: 0, "completion of verifiers; row of realign"),
        (lambda prompt, response, rows: 0, "response of realign; rows of realign"),
        (lambda prompt, response, completion: 0, "completion of verifiers"),
        (lambda response, solution_str: 0, "response of realign; solution_str of verl"),
        (lambda prompts, completions, prompt_ids, completion_ids, solutions, **_: 0, "prompt_ids of AReaL"),
        (lambda prompts, completions, rows: 0, "rows of realign"),
        (lambda completion, answer, parser: 0, "realign has no 'parser'"),
        (lambda completions, trainer_state, **_: 0, "realign has no 'trainer_state'"),
        (lambda prompt, response, row, tokens: 0, "Set dense=true"),
        ({}.get, "none of these names is the response"),
        (itertools.chain, "takes|written in C"),
    ],
)
def test_names_of_nobody_or_of_several_are_refused_and_the_message_says_what_would_work(function, message):
    with pytest.raises(ConfigError, match=message) as caught:
        bind(function, "f")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda c: f"{c.tool}-{c.scope}-{len(c.arguments)}")
@given(data=st.data())
def test_any_order_of_a_tools_names_with_any_columns_gets_what_the_names_say(convention, data):
    own = data.draw(st.lists(st.sampled_from(sorted(convention.arguments)), unique=True))
    own += [name for needed in convention.needs if not needed & {*own} for name in [min(needed)]]
    columns = data.draw(st.lists(st.sampled_from(["alpha", "beta"]), unique=True))
    names = data.draw(st.permutations([*dict.fromkeys(own), *columns]))
    row = {**VERL, "info": {}, "alpha": 1, "beta": 2, **dict.fromkeys(convention.arguments, "a column of this name")}
    row |= {"reward_model": VERL["reward_model"], "prompt": MESSAGES, "extra_info": {}, "info": {}}
    namespace = {}
    exec(f"def f({', '.join(names)}): return dict({', '.join(f'{n}={n}' for n in names)})", namespace)
    binding = bind(namespace["f"], "f")
    scored = [Scored(PROMPT, response, row, (1,), (2, 3)) for response in ("4", "5")][: 1 + binding.returns_list]
    arguments, keywords = binding.arguments(scored)
    seen = namespace["f"](*arguments, **keywords)
    one = {"alpha": 1, "beta": 2} | dict.fromkeys(own)
    for name in columns:
        assert seen[name] == ([one[name]] * len(scored) if convention.lists is None else one[name])
    for name in own:
        every = [convention.arguments[name](each) for each in scored]
        several = convention.lists is None or name in convention.lists
        assert seen[name] == (every if several else every[0])
        assert "a column of this name" not in str(seen[name]) or name in (
            "data_source",
            "data_sources",
            "labels",
            "row",
            "rows",
        )


def test_a_column_that_is_missing_is_named_with_those_that_exist():
    binding = bind(lambda completion, solution, question: 0.0, "f")
    assert binding.describe_missing([{"answer": "4", "solutions": "x"}]) == (
        "reward function 'f' asks for 'solution', which is no column. Columns: answer, solutions. verifiers passes "
        "(prompt, completion, info). Did you mean 'solutions'?"
    )
    assert binding.describe_missing([{"solution": 1, "question": 2}]) == ""
    scores = answers(lambda response, answer: float(response == answer), [{"answer": "4"}, {}], ["4", "4"])
    assert scores.values == [1.0, None]
    assert "asks for 'answer', which is no column. Columns: none" in scores.failures[0].message


def test_the_prompt_of_a_conversation_is_its_messages_up_to_the_answer():
    def given(row, prompt):
        return called(lambda prompt, completion: {"p": prompt, "c": completion}, rows=(row,), prompt=prompt)

    asked = [{"role": "user", "content": "2+2="}]
    solved = [*asked, {"role": "assistant", "content": "4"}]
    assert given({"messages": solved}, "user 2+2= assistant") == {"p": asked, "c": ANSWERED}
    # the start of an answer, which the model continued, belongs to it as in TRL
    continued = [{"role": "assistant", "content": "44"}]
    assert given({"messages": solved}, "user 2+2= assistant 4") == {"p": asked, "c": continued}
    # not the conversation that was asked
    assert given({"prompt": "3+3=", "messages": asked}, "3+3=") == {"p": "3+3=", "c": "4"}
    assert given({"question": "3+3=", "messages": asked}, "3+3=") == {"p": "3+3=", "c": "4"}
    assert given({"prompt": [3, 4]}, "3+3=") == {"p": "3+3=", "c": "4"}


class Grader:
    def __init__(self, right):
        self.right = right

    def __call__(self, response, row):
        return float(response in self.right)

    def method(self, solution_str):
        return {"score": float(solution_str in self.right), "format": 1.0}


async def awaited(completion, answer):
    return float(completion == answer)


def weighted(weight, response, answer):
    return weight * (response == answer)


def passing_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def naming(function):
    @functools.wraps(function)
    def wrapper(prompt, response, row):
        return function(response, row["answer"])

    return wrapper


class Decorated:
    @passing_on
    def method(self, response, answer):
        return float(response == answer)


@pytest.mark.parametrize(
    "function",
    [
        Grader("45"),
        Grader("45").method,
        awaited,
        functools.partial(weighted, 1.0),
        functools.partial(weighted, weight=1.0),
        passing_on(lambda response, answer: float(response == answer)),
        naming(lambda text, gold: float(text == gold)),
        Decorated().method,
        functools.cache(lambda response, answer: float(response == answer)),
        lambda response, /, answer: float(response == answer),
        lambda response, *, answer: float(response == answer),
        lambda responses, answer: [float(r == answer) for r in responses],
        lambda completions, answer, **kwargs: [float(c == a) for c, a in zip(completions, answer, strict=True)],
        lambda completions, answer, **kwargs: [
            1.0 if c == a else None for c, a in zip(completions, answer, strict=True)
        ],
        lambda solution_str, answer: {"score": solution_str == answer, "acc": True},
        lambda solution_strs, answer: [{"score": float(s == a)} for s, a in zip(solution_strs, answer, strict=True)],
        lambda queries, labels: torch.tensor([float(q.endswith(a)) for q, a in zip(queries, labels, strict=True)]),
        lambda queries, prompts, labels: {"rewards": torch.tensor([float(queries[0] == prompts[0] + labels[0])])},
        lambda prompt, completions, prompt_ids, completion_ids, answer, **_: float(completions == answer),
    ],
)
def test_every_kind_of_function_and_of_result_is_scored(function):
    rows = [{"answer": "4", "label": "4"}, {"answer": "5", "label": "5"}]
    scores = answers(function, [rows[0], rows[0], rows[1]], ["4", "x", "5"], [0, 0, 1])
    assert scores.failures == []
    assert [value or 0.0 for value in scores.values] == [1.0, 0.0, 1.0]


def test_a_worker_gets_the_same_arguments():
    scores = answers(f"{__file__}:verl_like", [VERL, VERL], ["4", "5"], workers=1)
    assert scores.values == [1.0, 0.5]


def verl_like(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str == ground_truth and data_source == "gsm8k" and extra_info == {"index": 7}
    return {"score": 1.0 if right else 0.5}


def test_the_description_says_what_is_passed_and_how_often():
    texts = {
        "verl_like(data_source, solution_str, ground_truth, extra_info), as verl calls it": verl_like,
        "awaited(completion, answer: column), as verifiers calls it": awaited,
        "f(responses, **more: columns), once per prompt": lambda responses, **more: 0,
        "f(prompts, completions), as TRL calls it, once per prompt": lambda prompts, completions: 0,
    }
    for text, function in texts.items():
        assert (
            bind(function, f"file.py:{getattr(function, '__name__', '').replace('<lambda>', 'f')}").describe() == text
        )


def test_the_page_has_the_arguments_of_every_tool():
    page = (ROOT / "docs/guides/rewards.md").read_text()
    for convention in CONVENTIONS:
        assert f"`{convention.signature}`" in page
        assert all(f"`{name}`" in page for name in convention.lacking if convention.tool in ("TRL", "verifiers"))
