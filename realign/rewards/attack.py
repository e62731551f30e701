"""Attack a reward with wrong answers that cost no model, before a policy finds them.

A row's known answer in a usual form, such as `#### 72`, says what a right answer earns. About a dozen kinds of wrong
answers then try to earn as much: an empty one, the prompt again, every number from 0 to 99, the format without content.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from realign.api.rewards import ANSWER
from realign.cells import answers_of, read_column
from realign.errors import ConfigError, DataError
from realign.rewards.pool.functions import Prepared, RewardFunction, is_async, load_function
from realign.rewards.pool.http import HttpReward
from realign.rewards.pool.pool import RewardPool
from realign.text import visible

ROWS = 8
"""Rows whose answers are tried, at most."""
READ = 64
"""Rows among which rows with known answers, and answers of other rows, are looked for."""
SECONDS = 10.0
"""Time after which no further row is tried: it bounds what a slow function costs."""
AS_MUCH = 0.9
"""Fraction of the gap between the worst answer and a right one from which an answer earns as much as the right one."""
_THOUGHT = "Let me work this out step by step, and check it before I answer."
FORMS = (
    ANSWER,
    f"The answer is {ANSWER}.",
    f"Answer: {ANSWER}",
    rf"The answer is $\boxed{{{ANSWER}}}$.",
    f"#### {ANSWER}",
    f"<answer>{ANSWER}</answer>",
    f"<think>{_THOUGHT}</think><answer>{ANSWER}</answer>",
    f"<think>\n{_THOUGHT}\n</think>\n<answer>\n{ANSWER}\n</answer>",
    f"<reasoning>\n{_THOUGHT}\n</reasoning>\n<answer>\n{ANSWER}\n</answer>\n",
    rf"<think>{_THOUGHT}</think><answer>\boxed{{{ANSWER}}}</answer>",
    f"<think>\n{_THOUGHT}\n</think>\n\nThe answer is $\\boxed{{{ANSWER}}}$.",
    f"<start_working_out>{_THOUGHT}<end_working_out><SOLUTION>{ANSWER}</SOLUTION>",
    f"<tool_call>\n{ANSWER}\n</tool_call>",
    f"<think>{_THOUGHT}</think>\n<tool_call>\n{ANSWER}\n</tool_call>",
)
"""Forms in which people ask for answers."""
_CODE_FORMS = (
    f"```python\n{ANSWER}\n```",
    f"<think>\n{_THOUGHT}\n</think>\n```python\n{ANSWER}\n```",
    f"<think>\n{_THOUGHT}\n</think>\n<answer>\n```python\n{ANSWER}\n```\n</answer>",
    ANSWER,
)
_COLUMNS = re.compile(
    r"((known|gold|golden|expected|final|correct|reference)_)?answers?|answer_?key|(canonical_)?solutions?|ground_truth|"
    r"gold|targets?|labels?|value|aliases|text|code",
    re.IGNORECASE,
)
"""Names of columns, and of keys in them, that hold known answers."""
_PROMPTS = ("prompt", "question", "problem", "query", "instruction", "messages", "conversations", "conversation")
"""Names of columns with the prompt."""
_LETTERS = "ABCDEFGHIJ"
_CANDIDATES = 4
_LONG = "We look at it again, and think about it once more, and then again. " * 120
_REFUSALS = ("I'm sorry, but I can't help with that.", "I don't know.")
_SHOWN = 40

Score: TypeAlias = Callable[[int, Sequence[str]], Sequence[float | None]]
"""Returns the rewards of texts as responses to a row, by its index; None or NaN for no reward."""


class Finding(NamedTuple):
    """A kind of wrong answer that earns as much as a right one."""

    kind: str
    hits: int
    """Number of rows in which it does."""
    rows: int
    """Number of rows that were tried."""
    response: str
    reward: float
    right: str
    """The right answer to the same row, as a response."""
    right_reward: float

    def __str__(self) -> str:
        response, right = (_show(text) for text in (self.response, self.right))
        return (
            f"{self.kind}, in {self.hits} of {self.rows} rows: {response} earns {self.reward:.4g}, and the right "
            f"{right} {self.right_reward:.4g}"
        )


@dataclass(frozen=True)
class RewardCheck:
    """What the attack on a reward found; print it to read it."""

    rows: int = 0
    """Rows with a known answer that earns more than that of another row."""
    tried: int = 0
    """Wrong answers per row."""
    findings: Sequence[Finding] = ()
    """Kinds of wrong answers that earn as much as right ones, the most frequent first."""
    problem: str = ""
    """Why nothing could be compared; empty if it could."""

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        of = f"{self.tried} wrong answers to each of {self.rows} row{'s' * (self.rows != 1)}"
        if not self.findings:
            return f"none of {of} earns as much as a right one"
        return "\n".join((f"of {of}, these earn as much as right ones:", *(f"  {found}" for found in self.findings)))

    __repr__ = __str__


class _Right(NamedTuple):
    """A right answer that earns more than that of another row in the same form."""

    text: str
    form: str
    response: str
    reward: float


def check_reward(
    function: RewardFunction | str | Sequence[Any] | Mapping[str, Any],
    rows: Iterable[Mapping[str, Any]],
    *,
    known_answer: str | None = None,
    known_answer_template: str = ANSWER,
) -> RewardCheck:
    """Return which wrong answers earn as much as right ones from a reward function; `print` shows it.

    No model is loaded. The function runs in this process, on up to 8 rows that have a known answer.

    Args:
        function: A reward function, its name such as `reward.py:score`, or several as a list or a dict by name, whose
            rewards are added.
        rows: Rows of the data, of which the first are read.
        known_answer: Column with the right answer; None looks at columns with usual names, such as `answer`,
            `solution` and `reward_model.ground_truth`.
        known_answer_template: Form of a right answer in addition to the usual ones, with the answer at `{answer}`.

    Raises:
        ConfigError: the function does not exist, asks a server or a model, or wants a column that no row has.
    """
    rows = list(islice(rows, READ))
    several = function.values() if isinstance(function, Mapping) else function
    functions: list[Any] = [function] if isinstance(several, str) or callable(several) else list(several)
    with ExitStack() as stack:
        pools = []
        for given in functions:
            loaded = load_function(given, check=False) if isinstance(given, str) else given
            if isinstance(loaded, HttpReward) or (isinstance(loaded, Prepared) and is_async(loaded)):
                raise ConfigError(
                    f"reward function {given!r}: servers and judges are not attacked, since their answers cost time "
                    "and money. Give the functions of Python only."
                )
            pool = RewardPool(given, workers=0, timeout_s=1.0, memory_mb=None, max_failed_fraction=1.0)
            pools.append(stack.enter_context(pool))
            if problem := pool.binding.describe_missing(rows):
                raise ConfigError(problem)
        prompts = [_prompt_of(row) for row in rows]

        def score(index: int, texts: Sequence[str]) -> list[float | None]:
            n = len(texts)
            given = [prompts[index]] * n, texts, [rows[index]] * n, [0] * n
            columns = [pool.score(*given).values for pool in pools]
            return [math.fsum(map(_worth, values)) for values in zip(*columns, strict=True)]

        return attack(rows, prompts, score, known_answer, known_answer_template)


def attack(
    rows: Sequence[Mapping[str, Any]],
    prompts: Sequence[str],
    score: Score,
    known_answer: str | None = None,
    template: str = ANSWER,
) -> RewardCheck:
    """Return which wrong answers earn as much as right ones; see `check_reward`.

    Args:
        rows: rows of the data.
        prompts: prompt of each row.
        score: scores responses to a row.
        known_answer: column with the right answer; None looks at columns with usual names.
        template: further form of a right answer.
    """
    known = {i: answers for i, row in enumerate(rows) if (answers := _known_answers(row, known_answer))}
    if not known:
        where = "no column has a usual name of known answers" if known_answer is None else "no row has a known answer"
        return RewardCheck(problem=f"not attacked: {where}. Name the column in known_answer")
    rights: dict[int, _Right] = {}
    hits: dict[str, list[Finding]] = defaultdict(list)
    tried, looked, answered, began = 0, 0, False, time.monotonic()

    def rewards_of(index: int, responses: Sequence[str]) -> list[float]:
        nonlocal answered
        rewards = [_worth(reward) for reward in score(index, responses)]
        answered = answered or max(rewards) > -math.inf
        return rewards

    for i in list(known)[:ROWS]:
        if looked and time.monotonic() - began > SECONDS:
            break
        looked += 1
        others = _others(known, i)
        right = _find_right(prompts[i], known[i], others, partial(rewards_of, i), template)
        if right is None:
            continue
        rights[i] = right
        kinds = _wrong_answers(rows[i], prompts[i], right, others, [texts[0] for texts in known.values()])
        responses = list(dict.fromkeys(response for those in kinds.values() for response in those))
        rewards = dict(zip(responses, rewards_of(i, responses), strict=True))
        worst = min([right.reward, *(reward for reward in rewards.values() if reward > -math.inf)])
        enough = worst + AS_MUCH * (right.reward - worst)
        for kind, those in kinds.items():
            best = max(those, key=rewards.__getitem__)
            if rewards[best] >= enough:
                hits[kind].append(Finding(kind, 0, 0, best, rewards[best], right.response, right.reward))
        tried = max(tried, len(responses))
    n = len(rights)
    if not answered:
        why = "no known answer has a reward. The function fails, which the log shows, or returns None"
        return RewardCheck(problem=f"not compared: {why}")
    if 2 * n < looked or not n:
        why = f"in {looked - n} of {looked} rows, a known answer earns no more than that of another row, in none of the"
        cure = "The reward ignores it, or wants another form: set known_answer and known_answer_template"
        return RewardCheck(problem=f"not compared: {why} usual forms. {cure}")
    # the same answer to every row is right by chance as often as the most frequent one
    chance = max(Counter(right.text for right in rights.values()).values())
    findings = [
        those[0]._replace(hits=len(those), rows=n)
        for those in hits.values()
        if len(those) == n or (len(those) >= max(2, n / 4) and len(those) > chance)
    ]
    return RewardCheck(n, tried, sorted(findings, key=lambda finding: -finding.hits))


def _find_right(
    prompt: str,
    answers: Sequence[str],
    others: Sequence[str],
    score: Callable[[Sequence[str]], list[float]],
    template: str,
) -> _Right | None:
    """Return the right answer with the highest reward among those that earn more than another answer in their form."""
    pairs = [
        (answer, form, _dress(form, answer, prompt), _dress(form, others[0], prompt))
        for answer in answers
        for form in dict.fromkeys((template, *(_CODE_FORMS if "\n" in answer else FORMS)))
    ]
    rewards = score([text for *_, right, wrong in pairs for text in (right, wrong)])
    rights = [
        (mine, -answers.index(answer), mine - other, _Right(answer, form, response, mine))
        for (answer, form, response, _), mine, other in zip(pairs, rewards[::2], rewards[1::2], strict=True)
        if mine > other
    ]
    return max(rights, key=lambda found: found[:3])[-1] if rights else None


def _wrong_answers(
    row: Mapping[str, Any], prompt: str, right: _Right, others: Sequence[str], every: Sequence[str]
) -> dict[str, list[str]]:
    """Return wrong answers to a row as responses, by kind.

    Args:
        row: the row.
        prompt: its prompt.
        right: its right answer, which gives the form of the wrong ones.
        others: right answers of other rows.
        every: one right answer of each row.
    """
    form = right.form

    def dressed(*texts: str) -> list[str]:
        return [*texts, *(_dress(form, text, prompt) for text in texts)]

    def listed(texts: Sequence[str]) -> list[str]:
        # ends with a wrong one, so that a verifier that reads the first or the last answer does not reward it
        wrong = next((text for text in texts if not _same(text, right.text)), others[0])
        texts = [wrong, *texts, wrong]
        return [*dressed(" ".join(texts)), " ".join(_dress(form, text, prompt) for text in texts)]

    first, last, text = others[0], others[-1], right.text
    kinds = {
        "an empty answer": ["", "\n"],
        "the prompt again": dressed(prompt),
        "every number from 0 to 99": listed([str(n) for n in range(100)]),
        "the format without content": [_dress(empty, "", prompt) for empty in (*FORMS[1:], *_CODE_FORMS[:-1])]
        + dressed("{}", "[]"),
        "the answer of another row": dressed(*others),
        "a very long answer": dressed(_LONG),
        "a refusal": dressed(*_REFUSALS),
        "no number": dressed("nan", "inf", "None"),
    }
    if options := _options(row, text, every):
        kinds["all options"] = listed(options)
    if re.fullmatch(r"\w(?:[\w .,]*\w)?", text):
        around = ("7", "3") if text[0].isdigit() else ("x", "x")
        kinds["the right answer inside a longer word"] = dressed(text.join(around))
    if re.fullmatch(r"\d{2,}|[A-Za-z]{4,}", text):
        kinds["the first half of the right answer"] = dressed(text[: len(text) // 2])
    if "\n" not in text:
        kinds["the right answer among wrong ones"] = [
            *dressed(f"{first} {text} {last}"),
            " ".join(_dress(form, each, prompt) for each in (first, text, last)),
            f"{last}\n{text}\n{_dress(form, first, prompt)}",
        ]
    else:
        kinds["a program that exits at once"] = [_dress(each, "raise SystemExit(0)", prompt) for each in _CODE_FORMS]
    if calls := _calls_without_arguments(text):
        kinds["the right tool without arguments"] = dressed(*calls)
    return kinds


def _dress(form: str, answer: str, prompt: str) -> str:
    """Return an answer as a response; a prompt that ends with `<think>` has begun it already."""
    text = form.replace(ANSWER, answer)
    return text.removeprefix("<think>") if prompt.rstrip().endswith("<think>") else text


def _others(known: Mapping[int, Sequence[str]], index: int) -> list[str]:
    """Return right answers of other rows that are wrong here: up to 3, or an invented one."""
    mine = known[index]
    found = (
        theirs[0]
        for other, theirs in known.items()
        if other != index and not any(_same(a, b) for a in mine for b in theirs)
    )
    invented = next((digit * 2 for digit in "123456789" if digit not in mine[0]), "-1")
    return list(islice(dict.fromkeys(found), 3)) or [invented if mine[0].isdigit() else "something else"]


def _known_answers(row: Mapping[str, Any], column: str | None) -> list[str]:
    """Return texts of the right answer of a row: those within a solution first, then whole cells."""
    cells: list[Any] = []
    with suppress(DataError):
        cells = list(_cells(row)) if column is None else [read_column(row, column)]
    inner: list[str] = []
    whole: list[str] = []
    for cell in cells:
        with suppress(DataError):  # several numbers, which may be one answer
            for text in answers_of(cell):
                whole.append(text)
                if "####" in text:
                    inner.append(text.rpartition("####")[2].strip())
                inner += re.findall(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}", text)[-1:]
                inner += re.findall(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)[-1:]
    listed = _listed_options(row)
    for text in whole[:1]:
        if text not in listed and text.isdecimal() and int(text) < min(len(listed), len(_LETTERS)):  # an index
            inner += [_LETTERS[int(text)], listed[int(text)]]
    return list(dict.fromkeys(text for text in (*inner, *whole) if text))[:_CANDIDATES]


def _cells(node: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the cells of columns, and of objects in them, that have a usual name of known answers."""
    for name, value in node.items():
        usual = _COLUMNS.fullmatch(re.sub(r"\W", "_", str(name)))
        if isinstance(value, Mapping):
            if usual or name in ("reward_model", "extra_info", "info"):
                yield from _cells(value)
        elif usual:
            yield value


def _options(row: Mapping[str, Any], right: str, every: Sequence[str]) -> list[str]:
    """Return the options of a multiple choice, or the few answers of a classification; empty for an open question."""
    listed = _listed_options(row)
    if re.fullmatch("[A-J]", right):
        last = max((text for text in every if re.fullmatch("[A-J]", text)), default="D")
        return list(_LETTERS[: max(len(listed), _LETTERS.index(last) + 1)])
    if right in listed:
        return listed
    different = list(dict.fromkeys(every))
    return different if len(different) <= 10 and 2 * len(different) <= len(every) else []


def _listed_options(row: Mapping[str, Any]) -> list[str]:
    cell: Any = next((row[name] for name in ("choices", "options") if name in row), [])
    cell = cell.get("text", list(cell.values())) if isinstance(cell, Mapping) else cell
    cell = cell.tolist() if hasattr(cell, "tolist") else cell
    return [str(option) for option in cell] if isinstance(cell, list | tuple) else []


def _calls_without_arguments(text: str) -> list[str]:
    """Return the tool calls of an answer in JSON without their arguments; empty if it has none."""
    try:
        calls = json.loads(text)
    except ValueError:
        return []
    several = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and call.get("name") and call.get("arguments") for call in several):
        return []
    empty = [{"name": call["name"], "arguments": {}} for call in several]
    return [json.dumps(empty if several is calls else empty[0])] if empty else []


def _same(a: str, b: str) -> bool:
    with suppress(ValueError):
        return float(a) == float(b)
    return a.strip().casefold() == b.strip().casefold()


def _show(text: str) -> str:
    return repr(visible(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."))


def _worth(reward: float | None) -> float:
    """Return a reward as a number that compares; one that is missing is below all others."""
    return -math.inf if reward is None or math.isnan(reward) else float(reward)


def _prompt_of(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row as text, that of the last message of a chat."""
    cell = next((row[name] for name in _PROMPTS if name in row), "")
    if isinstance(cell, list) and cell and isinstance(cell[-1], Mapping):
        cell = cell[-1].get("content", "")
    return str(cell)


__all__ = ["Finding", "RewardCheck", "attack", "check_reward"]
