"""A chat template from an untrusted source costs bounded time and memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from realign import chat_template
from realign.chat_template import Bounds, ChatTemplate
from realign.data import PromptData
from realign.data.writer import Template, Writer
from realign.environments.turns import TurnWriter
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
ECHO = "{{ messages[-1].content }}"
LATER = "{% if messages[-1].content == 'loop' %}" + LOOPS["nested ranges"] + "{% endif %}" + ECHO


@pytest.fixture
def one_second(monkeypatch):
    monkeypatch.setattr(chat_template, "BOUNDS", Bounds(row_s=1.0, mean_s=1.0))


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def template(text: str, **bounds) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(chat_template=text), Bounds(**bounds))


def render(template: ChatTemplate, content: str = "x") -> str:
    return template.render(said(content), {}, add_generation_prompt=True)


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_does_not_end_is_one_line(name, one_second):
    writer = Writer(make_tokenizer(chat_template=LOOPS[name]), Template.chat)
    with pytest.raises(DataError, match=r"^the chat template (did not finish within 1 seconds|needs too much)"):
        writer.prompt("x")


@pytest.mark.parametrize("name", LARGE)
def test_a_template_of_giant_text_is_one_line(name):
    writer = Writer(make_tokenizer(chat_template=LARGE[name]), Template.chat)
    with pytest.raises(DataError, match=r"^the chat template (needs too much memory|failed: )") as caught:
        writer.prompt("x")
    assert "\n" not in str(caught.value)


def test_a_template_that_does_not_end_for_a_later_row_names_the_row(tmp_path, one_second):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "loop"}\n{"prompt": "b"}\n')
    data = PromptData(str(rows), template=Template.chat)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: the chat template did not finish within 1 seconds\. "):
        data.load(make_tokenizer(chat_template=LATER))


def test_a_template_that_does_not_end_for_an_observation_fails_that_call_and_all_later_ones(one_second):
    writer = TurnWriter(make_tokenizer(chat_template=LATER), chat=True)
    for observation in ("loop", "a"):  # the second one fails at once, so that a batch waits only once
        with pytest.raises(ValueError, match=r"^the chat template did not finish within 1 seconds\. "):
            writer.between(observation, [])


def test_rows_that_are_slow_together_exceed_the_mean():
    slow = template("{% for a in range(300) %}{% for b in range(300) %}" + END * 2 + ECHO, row_s=1.0, mean_s=1e-9)

    def render_many() -> None:
        for _ in range(100_000):
            render(slow)

    with pytest.raises(DataError, match=r"^the chat template did not finish within 1e-09 seconds on average\. "):
        render_many()


def test_a_text_that_is_too_long_is_an_error():
    assert render(template(ECHO, characters=3), "abc") == "abc"
    with pytest.raises(DataError, match="wrote more than 3 characters"):
        render(template(ECHO, characters=3), "abcd")


def test_texts_and_errors_are_those_of_the_tokenizer_and_do_not_end_the_child():
    echo = template("{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + ECHO)
    with pytest.raises(DataError, match=r"^the chat template failed: TemplateError: no$"):
        render(echo, "no")
    for text in ("", "é\u2028\x00", "\ud800", "x" * 3_000_000):
        assert render(echo, text) == text


def test_an_error_with_a_giant_message_is_shortened():
    with pytest.raises(DataError, match=r"^the chat template failed: TemplateError: x+\.\.\.$") as caught:
        render(template("{{ raise_exception('x' * 1000000) }}"))
    assert len(str(caught.value)) < 3000


def test_messages_that_are_nested_too_deeply_are_an_error():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DataError, match=r"^the messages cannot be sent to the process .*: RecursionError: "):
        template(ECHO).render([{"role": "user", "content": deep}], {}, add_generation_prompt=True)


@pytest.fixture
def forks(monkeypatch) -> list[int]:
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


def test_all_rows_are_rendered_by_one_child_that_leaves_nothing_behind(forks):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    writer = Writer(make_tokenizer(chat_template=ECHO), Template.chat)
    assert [writer.prompt(text).text for text in ("a", "b", "c")] == ["a", "b", "c"]
    assert len(forks) == 1
    del writer
    endless = template(LOOPS["power"], row_s=0.2)
    with pytest.raises(DataError, match=r"within 0\.2 seconds"):
        render(endless)
    assert len(forks) == 2
    assert len(os.listdir("/proc/self/fd")) == before
    for child in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_a_child_that_is_killed_from_outside_is_an_error(forks):
    echo = template(ECHO)
    assert render(echo) == "x"
    os.kill(forks[0], signal.SIGKILL)
    with pytest.raises(DataError, match="the process that renders the chat template ended"):
        render(echo)


def test_an_interrupted_rendering_gives_its_text_to_no_later_one(forks, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    echo = template(ECHO)
    assert render(echo, "first") == "first"
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "_received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render(echo, "second")
    assert render(echo, "third") == "third"
    assert len(forks) == 2


KILLED = """
import os, sys
from realign.chat_template import Bounds, ChatTemplate
from tests.data.text_tokenizer import make_tokenizer
fork = os.fork
def recorded():
    child = fork()
    if child:
        print(child, flush=True)
    return child
os.fork = recorded
ChatTemplate(make_tokenizer(chat_template=sys.argv[1]), Bounds(row_s=2.0)).render(
    [{"role": "user", "content": "x"}], {}, add_generation_prompt=True
)
"""


def test_the_child_of_a_killed_process_ends_even_if_the_template_does_not():
    root = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, LOOPS["power"]], stdout=subprocess.PIPE, cwd=root, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        end = time.monotonic() + 60
        while Path(f"/proc/{child}/stat").exists() and _state(child) != "Z":
            assert time.monotonic() < end
            time.sleep(0.05)


def _state(child: int) -> str:
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
