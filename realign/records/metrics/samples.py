"""Text for the console and samples.jsonl: the first row of the data, and responses with their rewards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

from realign.api import SequenceSample
from realign.api.rewards import NAMED, named_rewards, total_rewards
from realign.api.sample import INDEX_KEYS, with_response_index
from realign.cells import answers_of, read_column
from realign.data.encoding import DecodedSequence
from realign.errors import DataError
from realign.functional import KLEstimator, kl_estimate, segment_sum
from realign.text import shorten, visible

LONGEST = 1000
"""Maximum number of characters of a run of tokens; its middle is omitted."""
PROMPT_END = 40
"""Number of characters of a prompt that a line shows: a chat template begins every prompt alike."""
SEQUENCES = 4
"""Maximum number of sequences of a row."""
_STYLE = "bold green"


def row_text(sequences: Sequence[DecodedSequence], *, color: bool) -> Text:
    """Return a row as text, with the trained tokens in color, or otherwise in brackets.

    Control characters in the text are escaped.
    """
    trains = any(segment.trained for sequence in sequences for segment in sequence.segments)
    marked = (
        (f"trained tokens in {_STYLE.split()[-1]}" if color else "trained tokens in [[brackets]]") if trains else ""
    )
    text = Text(f"First row of the data{': ' if marked else ''}")
    text.append(marked, style=_STYLE if color and marked else "")
    for sequence in sequences[:SEQUENCES]:
        text.append("\n" if sequence.label is None else f"\n  label {sequence.label:g}\n")
        body = Text()
        for segment in sequence.segments:
            shown = visible(shorten(segment.text, LONGEST))
            if segment.trained:
                body.append(shown if color else f"[[{shown}]]", style=_STYLE if color else "")
            else:
                body.append(shown)
        lines = body.split("\n", allow_blank=True)
        text.append_text(Text("\n").join([Text("  | ") + line if line else Text("  |") for line in lines]))
    if len(sequences) > SEQUENCES:
        text.append(f"\n  and {len(sequences) - SEQUENCES} more sequences")
    return text


def show_row(console: Console, sequences: Sequence[DecodedSequence], described: str = "") -> None:
    """Print a description of the data, and a row of it; nothing if they are empty. Warn if printing fails."""
    color = console.color_system is not None and not console.no_color
    try:
        if described:
            console.print(f"Data: {described}", markup=False, highlight=False, soft_wrap=True)
        if sequences:
            console.print(row_text(sequences, color=color), soft_wrap=True)
    except OSError as error:  # standard output may be a file on a full disk
        warnings.warn(f"The first row of the data could not be printed ({error}). The run continues.", stacklevel=2)


def show_lines(console: Console, lines: Sequence[str]) -> None:
    """Print lines about the data. Warn if printing fails."""
    try:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    except OSError as error:  # standard output may be a file on a full disk
        warnings.warn(f"Lines about the data could not be printed ({error}). The run continues.", stacklevel=2)


SHOWN = 3


def readable(batch: SequenceSample, prompts: int, decode: Callable[..., str]) -> list[dict[str, Any]]:
    """Return a record for each response to the first `prompts` prompts of a batch; empty if the batch has no rewards.

    Each record contains the prompt's `id`, `prompt`, `response` (all text after the prompt) and its number of `tokens`,
    and `reward` (None if it is missing). `response_index` and `episode` (of environments and agents) say which it is.
    If the batch has named rewards, it also contains `rewards`, by name. If the batch has reference log-probs, it also
    contains `kl`: the log-prob differences, summed over the response (nats). A multi-turn record also contains `turns`:
    policy turns and observations, alternating. `answer` is the right answer of the row, if it has a short one. With a
    curriculum, `pass_rate` is the rolling pass rate that the prompt had when it was chosen, None if it was new.
    """
    if not {"input_ids", "prompt_mask", "rewards"} <= batch.keys or prompts == 0:
        return []
    part = batch.take(range(min(prompts, len(batch))))
    rows = zip(
        part.group_index().tolist(),
        part.sequences("input_ids"),
        part.sequences("prompt_mask"),
        total_rewards(part).tolist(),
        sequence_places(part),
        strict=True,
    )
    records: list[dict[str, Any]] = []
    for owner, ids, given, reward, place in rows:
        prompt, *turns = _runs(ids, given)
        record = {
            "id": part.ids[owner],
            **place,
            "prompt": decode(prompt, skip_special_tokens=True),
            "response": decode(ids[len(prompt) :], skip_special_tokens=True),
            "reward": reward if math.isfinite(reward) else None,
            "tokens": len(ids) - len(prompt),
        }
        if len(turns) > 1:
            record["turns"] = [decode(turn, skip_special_tokens=True) for turn in turns]
        if answer := _answer(part, owner):
            record["answer"] = answer
        if "pass_rate" in part.metadata:
            record["pass_rate"] = part.metadata["pass_rate"][owner]
        records.append(record)
    for key, named_S in named_rewards(part).items():
        for record, value in zip(records, named_S.tolist(), strict=True):
            shown = value if math.isfinite(value) else None
            record.setdefault("rewards", {})[key.removeprefix(NAMED)] = shown
    if {"logprobs", "ref_logprobs", "loss_mask"} <= part.keys:
        kl_T = kl_estimate(part["logprobs"], part["ref_logprobs"], part["loss_mask"], KLEstimator.k1)
        for record, kl in zip(records, segment_sum(kl_T, part.cu_seqlens()).tolist(), strict=True):
            record["kl"] = kl
    return records


_ANSWERS = ("answer", "solution", "ground_truth", "reward_model.ground_truth")
"""Columns in which data sets have the right answer of a row."""


def _answer(batch: SequenceSample, owner: int) -> str:
    """Return the right answer of a prompt, from its row; empty if the row has no single short text."""
    for column in _ANSWERS if "row" in batch.metadata else ():
        with suppress(DataError, LookupError, TypeError):
            if answers := answers_of(read_column(batch.metadata["row"][owner], column)):
                return answers[0] if len(answers[0]) <= LONGEST else ""
    return ""


def sequence_places(batch: SequenceSample) -> list[dict[str, int]]:
    """Return `response_index` of each sequence, and `episode` if the batch has it, for records."""
    batch = with_response_index(batch)
    columns = {key: batch[key].tolist() for key in INDEX_KEYS if key in batch}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _runs(ids: Tensor, given: Tensor) -> list[Tensor]:
    """Split a sequence into alternating runs of `prompt_mask` tokens (prompt, observations) and sampled tokens.

    The first run contains prompt tokens and may be empty.
    """
    changes = (given[1:] != given[:-1]).nonzero()[:, 0] + 1
    runs = list(ids.tensor_split(changes.tolist()))
    return runs if bool(given[:1].all()) else [ids[:0], *runs]


def as_one_line(record: Mapping[str, Any]) -> str:
    """Return the end of the prompt and the response in one line. Observations of an environment are in brackets."""
    prompt = record["prompt"]
    shown = repr(prompt) if len(prompt) <= PROMPT_END else f"...{prompt[-PROMPT_END:]!r}"
    turns = record.get("turns", [record["response"]])
    turns_text = " ".join(f"[{text!r}]" if place % 2 else repr(text) for place, text in enumerate(turns))
    return f"{shown} -> {turns_text}"


def show(console: Console, step: int, records: Sequence[dict[str, Any]]) -> None:
    """Print the first response to each of the first `SHOWN` prompts. Warn if printing fails."""
    # reversed twice: of equal ids the first response stays, and the prompts keep their order
    first = {record["id"]: record for record in reversed(records)}
    for record in list(reversed(first.values()))[:SHOWN]:
        numbers = [f"{name} {record[name]:.4g}" for name in ("reward", "kl") if record.get(name) is not None]
        line = f"step {step}: {as_one_line(record)}  {', '.join(numbers) or 'no reward'}"
        try:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        except OSError as error:  # standard output may be a file on a full disk
            warnings.warn(f"Responses of step {step} could not be printed ({error}). Training continues.", stacklevel=2)
            return
