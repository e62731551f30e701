import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from realign.errors import ConfigError
from realign.rewards import sandbox as module
from realign.rewards.sandbox import (
    Bubblewrap,
    ProgramLimits,
    SandboxMode,
    choose_sandbox,
    find_sandbox,
    runs_to_its_end,
)
from tests.processes import until
from tests.rewards.escapes import OUTSIDE, REFUSED

LIMITS = ProgramLimits(timeout_s=20.0, memory_mb=256, processes=8, disk_mb=16)
NAMED = "import ctypes, os\nctypes.CDLL(None).prctl(15, b'{name}', 0, 0, 0)\n"
"""Gives a process and its later children a name that is visible outside."""


@pytest.fixture
def sandbox():
    chosen = find_sandbox()
    if isinstance(chosen, str):
        pytest.skip(f"no sandbox on this machine: {chosen}")
    return chosen


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """Make what the attempts try to reach, and return its values for them."""
    monkeypatch.setenv("ORDINARY", "value-of-the-run")
    (tmp_path / "file").write_text("text")
    abstract = f"\0realign-{os.getpid()}-{time.monotonic_ns()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as unnamed,
        subprocess.Popen(["sleep", "600"], start_new_session=True) as process,
    ):
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        unnamed.bind(abstract)
        unnamed.listen()
        yield {
            "FILE": repr(str(tmp_path / "file")),
            "FOLDER": repr(str(tmp_path)),
            "PORT": str(server.getsockname()[1]),
            "SOCKET": repr(str(tmp_path / "s")),
            "ABSTRACT": repr(abstract),
            "PID": str(process.pid),
            "VALUE": repr("value-of-the-run"),
        }
        assert process.poll() is None
        process.kill()


def attempt(source, outside, contained):
    """Return a program that runs to its end if the attempt fails (`contained`), or if it succeeds."""
    for name, value in outside.items():
        source = source.replace(name, value)
    return (
        f"try:\n    exec({source!r}, {{}})\nexcept (OSError, MemoryError):\n    escaped = False\n"
        f"else:\n    escaped = True\nassert escaped is {not contained}"
    )


def every(attempts):
    return [pytest.param(x, id=f"{kind}-{i}") for kind, sources in attempts.items() for i, x in enumerate(sources)]


@pytest.mark.skipif(sys.platform != "linux", reason="the attempts use interfaces of Linux")
@pytest.mark.parametrize("source", every(OUTSIDE))
def test_an_attempt_succeeds_without_a_sandbox(source, outside):
    assert runs_to_its_end(attempt(source, outside, contained=False), LIMITS, None)


@pytest.mark.parametrize("source", every(OUTSIDE) + every(REFUSED))
def test_an_attempt_fails_in_the_sandbox(source, outside, sandbox):
    assert runs_to_its_end(attempt(source, outside, contained=True), LIMITS, sandbox)


def test_an_ordinary_program_runs_in_the_sandbox(sandbox):
    program = (
        "import multiprocessing, os, pathlib, subprocess, sys, tempfile, threading, json, sqlite3, decimal\n"
        "pathlib.Path(tempfile.mkdtemp(), 'x').write_text('1')\n"
        "assert subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout == b'1\\n'\n"
        "thread = threading.Thread(target=int)\nthread.start()\nthread.join()\n"
        "multiprocessing.get_context('fork').Queue().put(1)\n"
        "print('output' * 100_000)\nassert pathlib.Path.cwd() == pathlib.Path('/tmp')\n"
    )
    assert runs_to_its_end(program, LIMITS, sandbox)
    assert not runs_to_its_end(program + "assert False", LIMITS, sandbox)


def named(name):
    """Return the pids of the processes with a name."""
    numbers = []
    for file in Path("/proc").glob("[0-9]*/comm"):
        try:
            if file.read_text().strip() == name:
                numbers.append(int(file.parent.name))
        except OSError:
            continue
    return numbers


SURVIVORS = {
    "double fork": (True, "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time\n"
                          "        time.sleep(600)\n    os._exit(0)\nos.wait()"),
    "ignored signals": (False, "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
                               "    except (OSError, ValueError): pass\nos.fork()\nwhile True: signal.pause()"),
    "fork bomb": (False, "while True:\n    try: os.fork()\n    except OSError: pass"),
    "one that burns": (False, "while True: pass"),
    "one that floods": (False, "while True:\n    for fd in range(3, 32):\n        try: os.write(fd, bytes(65536))\n"
                               "        except OSError: pass"),
    "kills all": (True, "import signal\nfor pid in (-1, 1, os.getppid()):\n    try: os.kill(pid, signal.SIGKILL)\n"
                        "    except OSError: pass"),
}  # fmt: skip


@pytest.mark.parametrize(("ends", "source"), SURVIVORS.values(), ids=SURVIVORS)
def test_no_process_of_a_program_survives_it(ends, source, sandbox, outside):
    name = f"survivor{time.monotonic_ns() % 10**6}"
    limits = LIMITS if ends else replace(LIMITS, timeout_s=1.5)
    assert runs_to_its_end(NAMED.format(name=name) + source, limits, sandbox) is ends
    until(lambda: not named(name))


def test_a_program_dies_with_the_process_that_runs_it(sandbox, tmp_path):
    name = f"orphan{time.monotonic_ns() % 10**6}"
    source = NAMED.format(name=name) + "import time\ntime.sleep(600)"
    limits = replace(LIMITS, timeout_s=600.0)
    script = f"from realign.rewards.sandbox import *\nruns_to_its_end({source!r}, {limits!r}, {sandbox!r})"
    with subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2]) as process:
        until(lambda: named(name))
        process.send_signal(signal.SIGKILL)
    until(lambda: not named(name))


def test_programs_of_the_sandbox_see_no_variable_of_the_run_and_few_processes(sandbox, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    program = (
        "import os, glob\nassert set(os.environ) <= {names}\n"
        "found = []\nfor file in glob.glob('/proc/[0-9]*/environ'):\n    try: found.append(open(file).read())\n"
        "    except OSError: pass\nassert 'hf_secret' not in ''.join(found)\n"
        "assert len(glob.glob('/proc/[0-9]*')) <= 3\n"
    ).format(names=json.dumps([*module._ENVIRONMENT, "PWD", "LC_CTYPE"]).replace("[", "{").replace("]", "}"))
    assert runs_to_its_end(program, LIMITS, sandbox)


def test_folders_of_the_run_inside_the_interpreter_are_hidden(sandbox, tmp_path):
    tree, private = tmp_path / "tree", tmp_path / "tree" / "run"
    (private / "inner").mkdir(parents=True)
    for folder in (tree, private, private / "inner"):
        (folder / "file").write_text("text")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        assert folder.exists()
    shown = replace(sandbox, trees=(*sandbox.trees, str(tree), str(private / "inner")), private=(str(private),))
    program = (
        f"import os\nassert os.listdir({str(private)!r}) == ['inner']\n"
        f"assert open({str(private / 'inner' / 'file')!r}).read() == open({str(tree / 'file')!r}).read() == 'text'\n"
        f"try: open({str(private / 'made')!r}, 'w')\nexcept OSError: pass\nelse: raise AssertionError\n"
    )
    assert runs_to_its_end(program, LIMITS, shown)


def test_a_sandbox_that_does_not_start_is_a_failure_and_no_reward(tmp_path):
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: no permissions' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(RuntimeError, match="did not start: 'bwrap: no permissions'"):
        runs_to_its_end("", LIMITS, Bubblewrap(str(broken), as_root=False, trees=()))


def options(sandbox, **limits):
    return sandbox.command(replace(LIMITS, **limits), seccomp=9, user=77)


@pytest.mark.parametrize("as_root", [True, False])
def test_the_command_line_separates_everything_and_mounts_only_what_python_needs(as_root, tmp_path):
    words = options(Bubblewrap("/bin/bwrap", as_root, trees=(str(tmp_path),)))
    assert words[0] == "/bin/bwrap"
    separated = {"--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent"}
    assert separated | {"--new-session"} <= set(words)
    assert words[words.index("--seccomp") + 1] == "9"
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert ("--unshare-user" in words) is not as_root
    assert not {"--bind", "--dev-bind", "--share-net", "--unshare-all"} & set(words)
    mounted = {words[i + 2] for i, word in enumerate(words) if word == "--ro-bind"}
    assert str(tmp_path) in mounted
    assert mounted <= {*module._SYSTEM, str(tmp_path)}
    assert words.index("--tmpfs") < words.index(str(tmp_path)) < words.index("--chdir")


@pytest.fixture
def no_bubblewrap(monkeypatch):
    monkeypatch.setattr(module, "find_sandbox", lambda: "bwrap is not installed")
    module._log_once.cache_clear()
    yield
    module._log_once.cache_clear()


def test_required_is_a_configuration_error_that_names_the_reason(no_bubblewrap):
    with pytest.raises(ConfigError, match=r"sandbox=required: .* on this machine: bwrap is not installed") as error:
        choose_sandbox(SandboxMode.required)
    assert "\n" not in str(error.value)
    assert "sandbox: off}'" in str(error.value)


def test_without_a_sandbox_one_warning_names_what_is_not_prevented(no_bubblewrap, caplog):
    with caplog.at_level(logging.INFO):
        assert [choose_sandbox(SandboxMode.off) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "sandbox=off" in record.message
    for what in ("network", "reading and writing your files", "signaling", "memory and disk"):
        assert what in record.message


def searched(monkeypatch, path="/bin/bwrap", platform="linux", machine="x86_64"):
    monkeypatch.setattr(module.sys, "platform", platform)
    monkeypatch.setattr(module, "is_supported", lambda: machine == "x86_64")
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(module.shutil, "which", lambda name: path)
    module._find_sandbox.cache_clear()
    try:
        return find_sandbox()
    finally:
        module._find_sandbox.cache_clear()


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"platform": "darwin"}, "bubblewrap does not support darwin"),
        ({"machine": "mips"}, "no filter of system calls for mips"),
        ({"path": None}, "bwrap is not installed"),
    ],
)
def test_a_machine_without_what_the_sandbox_needs_has_a_reason(machine, reason, monkeypatch):
    assert reason in searched(monkeypatch, **machine)
