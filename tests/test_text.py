from __future__ import annotations

import logging
import sys
import traceback
import unicodedata

import pytest

from realign.text import for_terminal, headline, log_file, part_over, visible


def raised(error: BaseException) -> str:
    try:
        raise error
    except BaseException as caught:
        return "".join(traceback.format_exception(caught)).rstrip()


def test_every_control_format_and_separator_character_is_escaped():
    every = map(chr, range(sys.maxunicode + 1))
    invisible = {c for c in every if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert len(invisible) > 2000
    for c in invisible - {"\n", "\t"}:
        shown = visible(f"a{c}b")
        assert shown.isprintable(), repr(c)
        assert shown.isascii(), repr(c)
        assert visible(shown) == shown
    assert visible("two\nlines\tand é 漢 🙂") == "two\nlines\tand é 漢 🙂"


def test_a_text_for_the_terminal_has_no_user_of_a_url():
    told = "https://me:pw@host/a@b, s3://key@bucket, git@host, https://host/@me"
    assert for_terminal(told) == "https://***@host/a@b, s3://***@bucket, git@host, https://host/@me"


def test_the_headline_of_a_traceback_is_its_last_exception_without_notes():
    error = ValueError("two\nlines")
    error.__cause__ = KeyError("first")
    error.add_note("a note")
    assert headline(raised(error)) == "ValueError: two"


def test_the_log_file_is_that_of_the_nearest_logger_that_writes_one(tmp_path):
    outer, inner = (logging.getLogger(name) for name in ("tests_log_file", "tests_log_file.inner"))
    handler = logging.FileHandler(tmp_path / "realign.log", delay=True)
    assert log_file(inner) == "the log"
    outer.addHandler(handler)
    try:
        assert log_file(inner) == str(tmp_path / "realign.log")
        inner.propagate = False
        assert log_file(inner) == "the log"
    finally:
        outer.removeHandler(handler)
        inner.propagate = True


class Words:
    """A tokenizer with one token per word, which skips whitespace."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, text, **options):
        self.lengths.append(len(text))
        return {"input_ids": text.split()}


@pytest.mark.parametrize("end", [False, True])
def test_a_text_with_too_many_tokens_is_found_by_a_part_of_it(end):
    tokenizer, text = Words(), "".join(f"{i} " for i in range(2_000_000))
    part = part_over(tokenizer, text, 1000, end=end)
    assert part is not None
    assert text.endswith(part) if end else text.startswith(part)
    assert len(part.split()) > 1000
    assert sum(tokenizer.lengths) < 50_000
