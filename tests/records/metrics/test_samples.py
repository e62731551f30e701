"""Test the first row of the data and responses as text."""

from __future__ import annotations

import errno
import io

import pytest
import torch
from rich.console import Console

from realign.api import SequenceSample
from realign.data.encoding import DecodedSequence
from realign.data.rendering import Segment
from realign.records.metrics.samples import readable, row_text, show, show_row

ROW = [DecodedSequence([Segment("<user>a\n"), Segment("b</s>", trained=True), Segment("\nc")])]


def shown(sequences, **console):
    out = io.StringIO()
    show_row(Console(file=out, width=40, **console), sequences)
    return out.getvalue()


def test_trained_tokens_are_in_brackets_without_color():
    assert shown(ROW) == ("First row of the data: trained tokens in [[brackets]]\n  | <user>a\n  | [[b</s>]]\n  | c\n")
    assert shown(ROW, force_terminal=True, no_color=True, color_system="standard") == shown(ROW)


def test_trained_tokens_are_green_on_a_terminal():
    text = row_text(ROW, color=True)
    green = [text.plain[span.start : span.end] for span in text.spans if span.style == "bold green"]
    assert green == ["trained tokens in green", "b</s>"]
    assert "[[" not in text.plain
    assert "\x1b[1;32mb</s>\x1b[0m" in shown(ROW, force_terminal=True, color_system="standard")


def test_control_characters_of_a_row_are_escaped_and_markup_is_text():
    hostile = [DecodedSequence([Segment("\x1b[2J[red]x[/red]\u202e"), Segment("\x07", trained=True)])]
    assert shown(hostile).splitlines()[1] == "  | \\x1b[2J[red]x[/red]\\u202e[[\\x07]]"


def test_a_row_that_cannot_be_printed_is_a_warning():
    class FullLog(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.warns(UserWarning, match="The first row of the data could not be printed .*The run continues"):
        show_row(Console(file=FullLog()), ROW)


def decode(ids, skip_special_tokens=True):
    return " ".join(str(int(i)) for i in ids)


def batch(**more):
    ids = [[[1, 2, 3], [1, 4]], [[1, 5, 6, 7]], [[1, 8]]]
    given = [[[True] + [False] * (len(s) - 1) for s in group] for group in ids]
    data = SequenceSample.from_sequences(["a", "b", "c"], {"input_ids": ids, "prompt_mask": given})
    data = data.with_sequences(rewards=torch.tensor([1.0, float("nan"), 0.5, 2.0]))
    return data.with_tokens(loss_mask=~data["prompt_mask"], **more)


def test_records_have_text_reward_and_the_kl_of_the_whole_response():
    logprobs = torch.tensor([0.0, -1, -2, 0, -1, 0, -3, -2, -1, 0, -1])
    ref = torch.tensor([9.0, -2, -1.5, 0, -4, 0, -3, -3, -1, 0, -1])
    records = readable(batch(logprobs=logprobs, ref_logprobs=ref), 2, decode)
    assert [(r["id"], r["prompt"], r["response"], r["reward"]) for r in records] == [
        ("a", "1", "2 3", 1.0),
        ("a", "1", "4", None),
        ("b", "1", "5 6 7", 0.5),
    ]
    assert [r["kl"] for r in records] == pytest.approx([1 - 0.5, 3.0, 1.0])


def test_without_a_reference_there_is_no_kl_and_without_rewards_no_record():
    assert [sorted(r) for r in readable(batch(), 9, decode)] == [
        ["id", "prompt", "response", "response_index", "reward", "tokens"]
    ] * 4
    assert readable(batch(), 0, decode) == []
    assert readable(batch().select(["input_ids", "prompt_mask"]), 3, decode) == []


def test_the_first_response_of_each_prompt_is_shown():
    console = Console(file=io.StringIO(), width=200)
    records = readable(batch(), 3, decode)
    records[0]["kl"] = 12.34567
    show(console, 7, [{**r, "reward": None} if r["id"] == "c" else r for r in records])
    assert console.file.getvalue().splitlines() == [
        "step 7: '1' -> '2 3'  reward 1, kl 12.35",
        "step 7: '1' -> '5 6 7'  reward 0.5",
        "step 7: '1' -> '8'  no reward",
    ]


def test_a_conversation_is_shown_turn_by_turn():
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2, 3, 4, 5, 6, 7], [1, 2]]]})
    given = [True, True, False, True, True, False, False, True, True]
    data = data.with_tokens(prompt_mask=torch.tensor(given)).with_sequences(rewards=torch.tensor([1.0, 0.0]))
    talked, silent = readable(data, 1, decode)
    assert (talked["prompt"], talked["response"], talked["turns"]) == ("1 2", "3 4 5 6 7", ["3", "4 5", "6 7"])
    assert (silent["prompt"], silent["response"]) == ("1 2", "")
    assert "turns" not in silent
    console = Console(file=io.StringIO(), width=200)
    show(console, 2, [talked])
    assert console.file.getvalue() == "step 2: '1 2' -> '3' ['4 5'] '6 7'  reward 1\n"
