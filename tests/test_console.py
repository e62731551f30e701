"""Test that a console which is gone, full or of another encoding never ends what it reports."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from realign.cli import commands as cli
from realign.console import LastingStream, lasting_console
from realign.errors import ExitCode
from realign.runtime import run
from tests.config_parts import write_experiment
from tests.toys import experiment


class Failing(io.StringIO):
    """A stream that fails from its write number `after` on."""

    def __init__(self, number: int, after: int = 0) -> None:
        super().__init__()
        self.number, self.left = number, after

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


ARGS = ("--config-dir=conf", "experiment=bigram", "steps=2", "output_dir=run")
ERRORS = (errno.EPIPE, errno.EIO, errno.ENOSPC)


@pytest.mark.parametrize("number", ERRORS)
def test_a_stream_keeps_its_first_error_and_goes_on(number):
    inner = Failing(number, after=1)
    stream = LastingStream(inner)
    for text in ("a", "b", "c"):
        assert stream.write(text) == 1
    stream.writelines(["d", "e"])
    stream.flush()
    assert inner.getvalue() == "a"
    assert stream.lost is not None
    assert stream.lost.errno == number


@contextmanager
def streams(out: object, err: object) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def test_everything_that_prints_is_kept_from_errors_and_the_streams_come_back():
    out, err = Failing(errno.EPIPE), Failing(errno.EIO)
    own = Console(file=Failing(errno.ENOSPC), force_terminal=True)
    file = own.file
    with streams(out, err):
        with lasting_console(own) as console:
            print("a", flush=True)
            print("b", file=sys.stderr)
            Console().print("c")
            own.print("d")
            with Live(console=own):
                pass
            with lasting_console(own) as inner:
                assert inner is console
        assert (sys.stdout, sys.stderr, own.file) == (out, err, file)
    assert console.lost is not None


@pytest.mark.parametrize("number", ERRORS)
def test_a_run_ends_well_without_its_console(tmp_path, number):
    result = run(experiment(tmp_path), console=Console(file=Failing(number, after=5)))
    assert result.series("step") == [0, 1, 2, 3]


def closed_pipe() -> int:
    """Return the end to write to of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


@contextmanager
def descriptors(out: int, err: int) -> Iterator[None]:
    """Replace the descriptors 1 and 2 and their streams, as a shell does."""
    kept = os.dup(1), os.dup(2)
    os.dup2(out, 1)
    os.dup2(err, 2)
    try:
        with streams(*(io.TextIOWrapper(io.FileIO(n, "w", closefd=False), encoding="ascii") for n in (1, 2))):
            yield
    finally:
        for number, descriptor in enumerate(kept, 1):
            os.dup2(descriptor, number)
            os.close(descriptor)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_experiment(tmp_path / "conf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("full", "code"), [(False, ExitCode.error), (True, ExitCode.transient)])
@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job", *ARGS], ["graph", *ARGS]])
@pytest.mark.usefixtures("here")
def test_a_command_whose_output_is_its_result_fails_if_it_is_lost(words, full, code):
    """Quietly after a closed pipe, as in `realign --help | head`."""
    errors = os.open("errors", os.O_WRONLY | os.O_CREAT)
    with descriptors(os.open("/dev/full", os.O_WRONLY) if full else closed_pipe(), errors):
        code_given = cli.main(words)
    assert code_given == code
    assert Path("errors").read_text() == ("error: [Errno 28] No space left on device\n" if full else "")
