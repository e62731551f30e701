"""Test the command line under SIGKILL, SIGTERM and Ctrl-C, in a separate process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from realign.cli import commands as cli
from realign.records.checkpoint.folder import list_checkpoints
from realign.signals import SIGNALS, Interrupted, StopSignals, raise_on_signals
from tests.checkpoint_runs import untimed
from tests.config_parts import write_experiment
from tests.processes import Command
from tests.tiny import save_tiny
from tests.torchrun_ranks import ARGS, STEPS, assert_same_as_whole

SLOW = """\
import time
from dataclasses import dataclass
from pathlib import Path
from tests.config_parts import CountThrees

@dataclass
class Slow(CountThrees):
    blocked_by: str = ""  # from step 3 on, until this file is there
    steps: int = 0

    def inference(self, model, data, mb_spec):
        self.steps += 1
        time.sleep(0.02)
        while self.blocked_by and self.steps > 2 and not Path(self.blocked_by).exists():
            Path("waiting").touch()
            time.sleep(0.01)
        return super().inference(model, data, mb_spec)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_experiment(tmp_path / "conf")
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("slow", None)  # another test may have imported its own file of this name
    return tmp_path


class Start(Protocol):
    def __call__(self, *more: str, args: Sequence[str] = ARGS) -> Command: ...


@pytest.fixture
def command() -> Iterator[Start]:
    """Return what starts a command line, which the end of the test kills."""
    with ExitStack() as stack:
        yield lambda *more, args=ARGS: stack.enter_context(Command(Path.cwd(), *args, *more))


def wait_for(process: Command, path: Path, lines: int) -> None:
    """Wait until the file has this number of lines. Fail with the output of the process if it ends before."""
    deadline = time.monotonic() + 120
    while not path.exists() or len(path.read_bytes().splitlines()) < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_for_bit(here, command):
    process = command("output_dir=run", "resume=auto")  # resume=auto starts a new run if there is no checkpoint
    wait_for(process, Path("run/metrics.jsonl"), 6)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not Path("run/final").exists()
    assert cli.main([*ARGS, "output_dir=run", "resume=auto"]) == 0
    assert_same_as_whole("run")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_lets_the_step_end_and_the_run_goes_on_bit_for_bit(here, command, number, code):
    process = command("output_dir=run", "checkpoint.every_steps=null")
    wait_for(process, Path("run/metrics.jsonl"), 4)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    (checkpoint,) = list_checkpoints(Path("run/checkpoints"))
    assert err.splitlines()[-1] == f"stopped after step {checkpoint.step} of {STEPS}. Continue with resume=auto."
    assert "once more to end at once" in err
    assert untimed(Path("run/metrics.jsonl"))[-1]["step"] == checkpoint.step < STEPS
    assert not Path("run/final").exists()
    assert cli.main([*ARGS, "output_dir=run", "resume=auto"]) == 0
    assert_same_as_whole("run")


@pytest.mark.slow
def test_a_second_signal_ends_the_run_in_the_middle_of_a_step(here, command):
    process = command("output_dir=run", "interfaces.reward.blocked_by=never")
    wait_for(process, Path("waiting"), 0)
    process.send_signal(signal.SIGTERM)
    wait_for_word(process, "once more")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143
    assert err.endswith("interrupted; the steps after the last checkpoint are lost\n")
    assert untimed(Path("run/metrics.jsonl"))[-1]["step"] == 2


CONVERSATION = """\
import time
from pathlib import Path

class Blocks:
    async def reset(self, row):
        return "", {}

    async def step(self, response):
        lines = len(Path("run/metrics.jsonl").read_text().splitlines())
        if lines > 1 or Path("block").exists():  # in the second step, or at once
            Path("waiting").touch()
            time.sleep(3600)
        return "", float(len(response.text)), True, False, {}
"""
CONVERSE = (
    "experiment=grpo_environment",
    "models.actor.path=model",
    "data.path=rows.jsonl",
    "interfaces.agent.environment=conversation.py:Blocks",
    "interfaces.agent.max_failed_fraction=1",
    "interfaces.agent.max_episode_tokens=8",
    "interfaces.actor.generation={n: 4, max_new_tokens: 4}",
    "batch_prompts=2",
    "steps=3",
    "checkpoint.every_steps=1",
    "output_dir=run",
)


@pytest.fixture
def conversing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path / "model", "gpt2")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "conversation.py").write_text(CONVERSATION)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("conversing")
def test_a_signal_while_an_environment_blocks_lets_the_step_end_at_the_deadline(command):
    process = command("interfaces.agent.timeout_s=2", args=CONVERSE)
    wait_for(process, Path("waiting"), 0)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert err.splitlines()[-1] == "stopped after step 2 of 3. Continue with resume=auto."
    assert "blocked its event loop for more than 7 s" in out
    assert untimed(Path("run/metrics.jsonl"))[-1]["missing_rewards"] == 1.0


def wait_for_word(process: Command, word: str) -> None:
    """Wait until stderr has the word. Fail with the output of the process if it ends before."""
    deadline = time.monotonic() + 120
    while word not in process.output()[1]:
        assert process.poll() is None, process.output()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def raised(number: int) -> Interrupted | None:
    try:
        os.kill(os.getpid(), number)
        time.sleep(0)  # the handler runs between two instructions
    except Interrupted as error:
        return error
    return None


@pytest.fixture
def defaults() -> Iterator[None]:
    """Let each signal have its default, which the process of the tests may have inherited as ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_raised(number, capfd):
    before = {each: signal.getsignal(each) for each in SIGNALS}
    with StopSignals() as signals:
        assert signals.received is None
        assert raised(number) is None
        assert signals.received == number
        error = raised(signal.SIGTERM)
        assert isinstance(error, KeyboardInterrupt)
        assert error.exit_code == 143
    assert {each: signal.getsignal(each) for each in before} == before
    assert capfd.readouterr().err.count("stopping") == 1


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_process_ignored_from_the_start_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)  # as after `nohup`, or in the background of a script
    with raise_on_signals(), StopSignals() as signals:
        assert raised(number) is None
        assert signals.received is None


def test_another_thread_than_the_main_one_handles_no_signals():
    handlers: Sequence[object] = []

    def use() -> None:
        nonlocal handlers
        with StopSignals() as signals:
            handlers = [signals.received, signal.getsignal(signal.SIGINT)]

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert handlers == [None, signal.getsignal(signal.SIGINT)]
