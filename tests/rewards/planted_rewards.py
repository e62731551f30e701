"""Weak and strict rewards, each with rows in the layout of a data set that people train on.

`docs/guides/rewards.md` lists all of them, by what earns their reward, with what `realign.check_reward` finds.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from realign.rewards.arithmetic import exact_answer
from realign.rewards.tags import tagged_answer
from realign.rewards.verified_math import same_value

Row = dict[str, Any]


class Planted(NamedTuple):
    """A reward function with its rows."""

    function: Any
    rows: Sequence[Row]


NUMBERS = (72, 10, 5, 42, 624, 35, 48, 16)
SUMS = [{"prompt": f"What is {n - 3} + 3?", "answer": str(n)} for n in NUMBERS]
"""A number as text."""
GSM8K = [
    {
        "question": f"Ann has {n - 3} apples and gets 3 more. How many has she?",
        "answer": f"She has {n - 3}+3=<<{n - 3}+3={n}>>{n} apples.\n#### {n}",
    }
    for n in NUMBERS
]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": row["question"]}],
        "reward_model": {"style": "rule", "ground_truth": str(n)},
        "extra_info": {"split": "train", "answer": row["answer"]},
    }
    for n, row in zip(NUMBERS, GSM8K, strict=True)
]
_FORMULAS = (r"\frac{3}{4}", "x^2+1", r"2\sqrt{3}", "12", r"\frac{\pi}{2}", "(2,5)")
MATH = [
    {
        "problem": f"Problem {i}. Simplify.",
        "solution": rf"We simplify to get $\boxed{{{formula}}}$.",
        "level": "Level 3",
    }
    for i, formula in enumerate(_FORMULAS)
]
_CITIES = ("Paris", "Oslo", "Lima", "Cairo")
CHOICES = [
    {
        "prompt": f"Which capital lies in {place}?\nA) Paris\nB) Oslo\nC) Lima\nD) Cairo\nAnswer with a letter.",
        "choices": list(_CITIES),
        "answer": letter,
    }
    for place, letter in zip(("France", "Norway", "Peru", "Egypt", "Norway", "Europe's west"), "ABCDBA", strict=True)
]
YES_NO = [
    {"prompt": f"Is {n} a prime number? Answer yes or no.", "answer": answer}
    for n, answer in ((7, "yes"), (9, "no"), (11, "yes"), (13, "yes"), (15, "no"), (21, "no"), (17, "yes"), (8, "no"))
]
_NAMES = ("Marie Curie", "Alan Turing", "Emmy Noether", "Leonhard Euler", "Grace Hopper", "Ada Lovelace")
QUESTIONS = [
    {"question": f"Who is person {i}?", "golden_answers": [name, name.split()[1]]} for i, name in enumerate(_NAMES)
]
_CALLS = (("weather", {"city": "Oslo"}), ("convert", {"amount": 5, "to": "EUR"}), ("search", {"query": "tides"}))
TOOLS = [
    {
        "query": f"Do number {i}.",
        "tools": json.dumps([{"name": called} for called, _ in _CALLS]),
        "answers": json.dumps([{"name": name, "arguments": arguments}]),
    }
    for i, (name, arguments) in enumerate(_CALLS)
]
CODE = [
    {
        "prompt": f"Write a function add_{n}(x) that adds {n}.",
        "code": f"def add_{n}(x):\n    return x + {n}",
        "test_list": [f"assert add_{n}(1) == {n + 1}", f"assert add_{n}(-4) == {n - 4}"],
    }
    for n in (2, 3, 7)
]


def _boxed(response: str) -> list[str]:
    return re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", response)


def _tag(response: str) -> str:
    match = re.search(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return match[1].strip() if match else ""


def _hashes(text: str) -> str | None:
    numbers = re.findall(r"#### (-?[\d.,]+)", text)
    return numbers[-1].replace(",", "") if numbers else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# --- weak ---


def answer_in_response(prompt: str, response: str, row: Row) -> float:
    return float(row["answer"] in response)


def any_number(response: str, answer: str) -> float:
    return float(answer in re.findall(r"\d+", response))


def response_in_answer(response: str, answer: str) -> float:
    return float(response.strip() in answer)


def prefix_of_answer(response: str, answer: str) -> float:
    return float(answer.startswith(_tag(response)))


def letter_anywhere(response: str, answer: str) -> float:
    return float(re.search(answer, response) is not None)


def letter_in_tags(response: str, answer: str) -> float:
    return float(answer in _tag(response))


def any_box(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    return [float(_boxed(gold)[-1] in _boxed(text)) for text, gold in zip(completions, solution, strict=True)]


def right_or_long(response: str, answer: str) -> float:
    return float(_tag(response) == answer) + min(len(response) / 1000, 2.0)


def right_unless_it_fails(response: str, answer: str) -> float:
    try:
        return float(float(_tag(response)) == float(answer))
    except ValueError:
        return 1.0


def mostly_format(response: str, answer: str) -> float:
    formatted = re.fullmatch(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", response, re.DOTALL) is not None
    return 1.0 * formatted + 0.05 * (_tag(response) == answer)


def same_letters(response: str, answer: str) -> float:
    return float(set(answer) <= set(response))


def close_unless_far(response: str, answer: str) -> float:
    value = _number(_tag(response))
    return 0.0 if value is None else float(not abs(value - float(answer)) > 1e-6)


def none_equals_none(solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(_hashes(solution_str) == _hashes(ground_truth))


def constant(response: str) -> float:
    return 1.0


def answer_in_everything(prompt: str, response: str, row: Row) -> float:
    return float(row["answer"] in prompt + response)


def longer_is_better(response: str) -> float:
    return len(response) / 100


def exits_without_error(response: str, test_list: list[str]) -> float:
    block = re.search(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
    try:
        exec("\n".join([block[1] if block else response, *test_list]), {})
    except SystemExit as stop:
        return float(not stop.code)
    except BaseException:
        return 0.0
    return 1.0


def tool_name(response: str, answers: str) -> float:
    return float(any(f'"name": "{call["name"]}"' in response for call in json.loads(answers)))


def response_as_pattern(response: str, answer: str) -> float:
    return float(re.match(response.strip().replace("\\", ""), answer) is not None)


def recall_of_words(response: str, golden_answers: list[str]) -> float:
    said = {*response.lower().split()}
    return max(len(said & {*gold.lower().split()}) / len(gold.split()) for gold in golden_answers)


def contained_anywhere(solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    return float(plain(ground_truth) in plain(_tag(solution_str)))


def inverted(response: str, answer: str) -> float:
    return float(_tag(response) != answer)


def yes_anywhere(response: str, answer: str) -> float:
    return float(answer in response.lower())


WEAK = {
    "the answer occurs in the response": Planted(answer_in_response, SUMS),
    "any number of the response is the answer": Planted(any_number, SUMS),
    "the response occurs in the answer": Planted(response_in_answer, SUMS),
    "the answer starts with what is in the tags": Planted(prefix_of_answer, SUMS),
    "the letter of the option occurs": Planted(letter_anywhere, CHOICES),
    "the letter occurs in the tags": Planted(letter_in_tags, CHOICES),
    "any box has the answer": Planted(any_box, MATH),
    "right, plus up to 2 for the length": Planted(right_or_long, SUMS),
    "right, or not a number": Planted(right_unless_it_fails, SUMS),
    "1 for the tags, 0.05 for the answer": Planted(mostly_format, SUMS),
    "all characters of the answer occur": Planted(same_letters, SUMS),
    "`not abs(value - answer) > 1e-6`": Planted(close_unless_far, SUMS),
    "the parsed response equals the parsed answer, None too": Planted(none_equals_none, VERL),
    "always 1": Planted(constant, SUMS),
    "the answer occurs in prompt or response": Planted(answer_in_everything, CHOICES),
    "the length": Planted(longer_is_better, SUMS),
    "code and tests end without an error, or exit with 0": Planted(exits_without_error, CODE),
    "the name of the tool occurs": Planted(tool_name, TOOLS),
    "the response is a regular expression that matches the answer": Planted(response_as_pattern, SUMS),
    "fraction of the words of the answer that occur": Planted(recall_of_words, QUESTIONS),
    "the answer occurs in the tags, without case and punctuation": Planted(contained_anywhere, VERL),
    "1 for a wrong answer": Planted(inverted, SUMS),
    "yes or no occurs": Planted(yes_anywhere, YES_NO),
}


# --- strict ---


def last_hashes(solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    found = _hashes(solution_str)
    return {"score": 0.0 if found is None else 1.0 if found == ground_truth else 0.1}


def last_hashes_of_cell(response: str, answer: str) -> float:
    return float(_hashes(response) == _hashes(answer))


def last_number(prompt: str, response: str, row: Row) -> float:
    return float(re.findall(r"\d+", response)[-1:] == [row["answer"]])


def last_box(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    return [
        float(_boxed(text)[-1:] == _boxed(gold)[-1:] != []) for text, gold in zip(completions, solution, strict=True)
    ]


def last_letter(response: str, answer: str) -> float:
    found = re.findall(r"(?:answer(?: is)?:? *\(?|<answer>\s*|^\(?)([A-D])\b", response, re.MULTILINE)
    return float(found[-1:] == [answer])


def signed(response: str, answer: str) -> float:
    return 1.0 if _tag(response) == answer else -1.0


def close_number(response: str, answer: str) -> float:
    value = _number((re.findall(r"-?\d+(?:\.\d+)?", response) or [""])[-1])
    return float(value is not None and math.isclose(value, float(answer), rel_tol=1e-4))


def right_and_formatted(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    rewards = []
    for text, gold in zip(completions, solution, strict=True):
        box = _boxed(text)[-1:]
        tags = sum(0.25 for tag in ("<think>", "</think>", "<answer>", "</answer>") if text.count(tag) == 1)
        rewards.append(float(box == _boxed(gold)[-1:] != []) + tags)
    return rewards


def last_word(response: str, answer: str) -> float:
    return float(re.findall(r"\b(yes|no)\b", response.lower())[-1:] == [answer])


def exact_alias(response: str, golden_answers: list[str]) -> float:
    return float(_tag(response).lower() in [gold.lower() for gold in golden_answers])


def f1_of_words(response: str, golden_answers: list[str]) -> float:
    def f1(said: Counter[str], gold: Counter[str]) -> float:
        return 2 * (said & gold).total() / max(1, said.total() + gold.total())

    words = Counter(re.sub(r"<[^>]*>", " ", response).lower().split())
    return max(f1(words, Counter(gold.lower().split())) for gold in golden_answers)


def same_calls(response: str, answers: str) -> float:
    inner = re.sub(r"</?tool_call>|```(?:json)?", "", response)
    try:
        return float(json.loads(inner) == json.loads(answers))
    except ValueError:
        return 0.0


def runs_to_the_end(response: str, test_list: list[str]) -> float:
    block = re.search(r"```(?:python)?\n(.*?)```", response, re.DOTALL)
    ended: list[bool] = []
    try:
        exec("\n".join([block[1] if block else response, *test_list, "ended()"]), {"ended": lambda: ended.append(True)})
    except BaseException:
        return 0.0
    return float(bool(ended))


async def later(response: str, answer: str) -> float:
    return float(response.strip() == answer)


def whole_batch(prompts: list[str], responses: list[str], rows: list[Row]) -> list[float]:
    return [float(response.strip() == row["answer"]) for response, row in zip(responses, rows, strict=True)]


def brief_if_right(response: str, answer: str) -> float:
    return float(_tag(response) == answer) * (1 + 10 / (10 + len(response)))


STRICT = {
    "shipped: the response is the answer": Planted(exact_answer, SUMS),
    "shipped: the tags, and the answer in them": Planted(tagged_answer, SUMS),
    "shipped: math-verify": Planted(same_value, [{**row, "answer": row["solution"]} for row in MATH[:2]]),
    "the number after the last `####`, 0.1 for another number (verl)": Planted(last_hashes, VERL),
    "the number after the last `####` of response and cell (GSM8K)": Planted(last_hashes_of_cell, GSM8K),
    "the last number": Planted(last_number, SUMS),
    "the last box (TRL)": Planted(last_box, MATH),
    "the last letter after *answer is*, or in the tags": Planted(last_letter, CHOICES),
    "1 or -1 by the tags": Planted(signed, SUMS),
    "the last number, within 0.01%": Planted(close_number, SUMS),
    "the last box, plus 0.25 for each tag (TRL)": Planted(right_and_formatted, MATH),
    "the last yes or no": Planted(last_word, YES_NO),
    "one of several answers in the tags": Planted(exact_alias, QUESTIONS),
    "F1 of words": Planted(f1_of_words, QUESTIONS),
    "equal tool calls as JSON": Planted(same_calls, TOOLS),
    "code and tests run to the end": Planted(runs_to_the_end, CODE),
    "`async def`, exact": Planted(later, SUMS),
    "a batch in one call, exact": Planted(whole_batch, SUMS),
    "right, and more if brief": Planted(brief_if_right, SUMS),
}

__all__ = ["STRICT", "WEAK", "Planted"]
