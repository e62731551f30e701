"""Check that reward functions score the known right answers of a few rows higher than wrong answers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from realign.api import Model, SequenceSample
from realign.api.rewards import ANSWER, Verifier
from realign.api.sample import with_own_metadata
from realign.cells import answers_of, read_column
from realign.data import Dataset
from realign.errors import ConfigError, DataError, RewardError
from realign.ranks import current
from realign.runtime.checks.parts import locating
from realign.runtime.experiment import Experiment
from realign.runtime.rollout.prompts import PromptStream
from realign.text import shorten, visible

READ = 64
"""Number of rows among which the check looks for answers that differ."""
SCORED = 8
"""Number of rows whose answers are scored."""
LONGEST = 200
"""Number of characters of an answer that a message shows."""


class Known(NamedTuple):
    """A row with its right answer and a wrong one, as responses."""

    row: int
    right: str
    wrong: str


def check_verifiers(
    experiment: Experiment, models: Mapping[str, Model], held_out: Mapping[str, Dataset], prompts: PromptStream
) -> list[str]:
    """Check that reward functions find their columns in the training data, or in that of their evaluation.

    Those with `known_answer` also score known answers.

    Args:
        experiment: the experiment, whose interfaces are open.
        models: model of each role.
        held_out: rows of each evaluation, by config key.
        prompts: the training prompts.

    Returns:
        A line for each checked interface.

    Raises:
        RealignError: a column does not exist, or see `check_known_answers`.
    """
    lines = []

    def check(where: str, verifier: Verifier, model: Model, data: SequenceSample) -> None:
        with locating(where):
            current().lead(partial(verifier.check_rows, data.metadata.get("row", ())))
        if verifier.known_answer is not None:
            lines.append(check_known_answers(where, verifier, model, data))

    for role in dict.fromkeys(rpc.model for rpc in experiment.graph.rpcs):
        interface = experiment.interfaces[role]
        if isinstance(interface, Verifier):
            size = prompts.dataset.size  # None: a stream, of which only the first batch is read
            data = prompts.preview(range(prompts.batch_prompts if size is None else min(size, READ)))
            check(f"interfaces.{role}", interface, models[role], data)
    for where, evaluation in experiment.all_evaluations.items():
        for key, judge in evaluation.judges.items():
            if isinstance(judge, Verifier):
                dataset = held_out[where]
                data = with_own_metadata(dataset.sample([(0, row) for row in range(min(len(dataset), READ))]))
                check(f"{where}.{key}", judge, models[evaluation.role], data)
    return lines


def check_known_answers(where: str, verifier: Verifier, model: Model, data: SequenceSample) -> str:
    """Compare the rewards of right and wrong answers, and return a line with both means.

    The right answer of a row is the text in its column `known_answer`. The wrong answer is the right answer of the next
    row with another answer. Warns about a row whose right answer does not score higher than its wrong one, and if all
    rows have the same answer.

    Args:
        where: config key of the interface.
        verifier: interface with `known_answer`.
        model: model whose tokenizer decodes prompts.
        data: the first rows of the data, with `prompt_ids` and `row`.

    Raises:
        ConfigError: the column does not exist or contains no answers.
        RewardError: right answers do not score higher than wrong answers on average, or the functions fail.
    """
    setting = f"{where}.known_answer={verifier.known_answer}"
    known = _read_known_answers(setting, verifier, data)
    if not known:
        warnings.warn(
            f"{setting}: the first {len(data)} rows have the same answer, so there is no wrong answer to compare with. "
            "The run continues without this check.",
            stacklevel=2,
        )
        return f"{where}: not checked, because all rows have the same answer"
    texts = [(answers.right, answers.wrong) for answers in known]
    rows = data.take([answers.row for answers in known])

    def score() -> Tensor:
        with locating(where):
            return verifier.score_texts(model, rows, texts)

    rewards_K2 = current().lead(score).reshape(-1, 2)
    right, wrong = rewards_K2.nanmean(0).tolist()
    # `~(a > b)` and `not a > b` instead of `<=`: a missing reward is NaN, and must count against the function
    suspects = (~(rewards_K2[:, 0] > rewards_K2[:, 1])).nonzero()[:, 0].tolist()
    example = _example(data, known[suspects[0]], rewards_K2[suspects[0]]) if suspects else ""
    if not right > wrong:
        template = verifier.known_answer_template
        hidden = [token for token in getattr(model.tokenizer, "all_special_tokens", ()) if token in template]
        if hidden:
            example += (
                f" Functions do not see special tokens of the tokenizer, such as {hidden[0]!r}, unless you set "
                "special_tokens=true for them (docs/guides/rewards.md#several-functions)."
            )
        raise RewardError(
            f"{setting}: right answers have a mean reward of {_number(right)} and wrong answers {_number(wrong)} "
            f"({len(known)} rows). {example} Correct the reward function, or the response with "
            f"{where}.known_answer_template={template!r}. Set {where}.known_answer=null to skip "
            "this check."
        )
    if suspects:
        warnings.warn(
            f"{setting}: right answers do not score higher than wrong answers in {len(suspects)} of {len(known)} rows. "
            f"{example} The run continues.",
            stacklevel=2,
        )
    return f"{where}: mean reward {right:.4g} of right answers, {wrong:.4g} of wrong answers ({len(known)} rows)"


def _read_known_answers(setting: str, verifier: Verifier, data: SequenceSample) -> list[Known]:
    """Return the first rows with a right and a wrong answer; none if all answers are equal."""
    if "prompt_ids" not in data or "row" not in data.metadata:
        raise ConfigError(f"{setting}: the data has no prompts with rows. Set it to null, or use a dataset of prompts.")
    answers = _answers(setting, str(verifier.known_answer), data.metadata["row"])
    comparable: list[Known] = []
    for place, (index, right) in enumerate(answers):
        others = (text for _, text in [*answers[place + 1 :], *answers[:place]] if text.strip() != right.strip())
        if len(comparable) < SCORED and (wrong := next(others, None)) is not None:
            responses = (verifier.known_answer_template.replace(ANSWER, text) for text in (right, wrong))
            comparable.append(Known(index, *responses))
    return comparable


def _answers(setting: str, column: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return the index and the answer of each row that has an answer."""
    columns = ", ".join(sorted({name for row in rows for name in row}))
    answers, there = [], False
    for index, row in enumerate(rows):
        try:
            cell = read_column(row, column)
        except DataError:
            continue
        there = True
        try:
            if texts := answers_of(cell):
                answers.append((index, cell if isinstance(cell, str) else texts[0]))
        except DataError as error:
            raise ConfigError(f"{setting}: row {index}: {error}") from error
    if not there:
        raise ConfigError(f"{setting}: the data has no such column. Choose one of: {columns}.")
    if not answers:
        raise ConfigError(f"{setting}: the first {len(rows)} rows have no answer. Choose one of: {columns}.")
    return answers


def _example(data: SequenceSample, known: Known, rewards_2: Tensor) -> str:
    right, wrong = (visible(shorten(text, LONGEST)) for text in (known.right, known.wrong))
    scores = [_number(reward) for reward in rewards_2.tolist()]
    return (
        f"Row {data.ids[known.row]!r}: the right answer {right!r} has reward {scores[0]}, and the wrong answer "
        f"{wrong!r} has reward {scores[1]}."
    )


def _number(reward: float) -> str:
    """Return a reward as text; NaN means no reward."""
    return f"{reward:.4g}" if reward == reward else "none"


__all__ = ["check_known_answers", "check_verifiers"]
