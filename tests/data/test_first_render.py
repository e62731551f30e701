"""A chat template from an untrusted source costs bounded time and memory."""

from __future__ import annotations

import os

import pytest

from realign.data.first_render import check_first_render
from realign.data.templates import Template
from realign.data.writer import Writer
from realign.errors import DataError
from tests.data.text_tokenizer import make_tokenizer

FOR = "{% for a in range(100000) %}"
TEXT = "{% for a in 'a' * 90000 %}"
END = "{% endfor %}"
DOUBLE = "{% set ns.s = ns.s + ns.s %}"
LOOPS = {
    "nested ranges": FOR * 3 + END * 3,
    "nested texts": TEXT * 4 + END * 4,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "power": "{{ 9 ** (9 ** 9) % 7 }}",
}
LARGE = {
    "repeated text": "{{ 'x' * 10000000000 }}",
    "repeated message": "{{ messages[0].content * 10000000000 }}",
    "doubled text": "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(40) %}" + DOUBLE + END + "{{ ns.s }}",
    "long list": "{{ (range(100000) | list * 100000) | length }}",
    "padding": "{{ 'x' | center(10000000000) }}",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_does_not_end_is_one_line(name, monkeypatch):
    monkeypatch.setattr(check_first_render, "__defaults__", (1.0, 1 << 30))
    writer = Writer(make_tokenizer(chat_template=LOOPS[name]), Template.chat)
    with pytest.raises(
        DataError, match=r"^the chat template (did not finish the first row within 1 sec|needs too much)"
    ):
        writer.prompt("x")


@pytest.mark.parametrize("name", LARGE)
def test_a_template_of_giant_text_is_one_line(name):
    writer = Writer(make_tokenizer(chat_template=LARGE[name]), Template.chat)
    with pytest.raises(DataError, match=r"^the chat template (needs too much memory|failed: )") as caught:
        writer.prompt("x")
    assert "\n" not in str(caught.value)


def recorded_forks(monkeypatch) -> list[int]:
    """Record the process id of every child that is forked from now on."""
    children = []
    fork = os.fork

    def recorded() -> int:
        child = fork()
        if child:
            children.append(child)
        return child

    monkeypatch.setattr(os, "fork", recorded)
    return children


def test_only_the_first_row_is_rendered_twice_and_errors_are_those_of_the_row(monkeypatch):
    forks = recorded_forks(monkeypatch)
    writer = Writer(make_tokenizer(chat_template="{{ messages[0].content }}"), Template.chat)
    assert [writer.prompt(text).text for text in ("a", "b", "c")] == ["a", "b", "c"]
    assert len(forks) == 1
    failing = Writer(make_tokenizer(chat_template="{{ raise_exception('no') }}"), Template.chat)
    with pytest.raises(DataError, match="the chat template failed: TemplateError: no"):
        failing.prompt("a")


def test_the_child_that_renders_leaves_nothing_behind(monkeypatch):
    forks = recorded_forks(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    check_first_render(lambda: "x")
    with pytest.raises(DataError, match=r"within 0\.2 seconds"):
        check_first_render(lambda: [None for _ in iter(int, 1)] and "", deadline_s=0.2)
    with pytest.raises(DataError, match="too much memory"):
        check_first_render(lambda: "x" * 10**12)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(forks) == 3
    for child in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
