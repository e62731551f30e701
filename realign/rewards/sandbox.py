"""Run Python programs in separate processes, and in a bubblewrap sandbox (Linux only).

`docs/security.md` states what the sandbox prevents. A program is Python source. It succeeds if it runs to its end.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from realign.errors import ConfigError
from realign.rewards.seccomp import is_supported, seccomp_filter
from realign.secrets import without_secrets
from realign.text import shorten

logger = logging.getLogger(__name__)

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
_SHARED_MEMORY_MB = 16
_OPEN_FILES = 256
# Root is exempt from limits on processes, so programs of root run as users of this range, which own nothing.
_FIRST_USER, _USERS = 0x60000000, 2**24
_LONGEST_CHANNEL = 65536  # capacity of a pipe
_PROBE_S = 20.0

_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),  # threads count as processes
}

# Runs inside the sandbox, before the program. Becomes the user (if it is root), then sets the limits.
_CONFINE = """\
import os, resource, sys
user, memory, cpu_s, processes, disk, files = map(int, sys.argv[1:7])
if user:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
for kind, limit in (
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_CPU, cpu_s),
    (resource.RLIMIT_FSIZE, disk),
    (resource.RLIMIT_NOFILE, files),
    (resource.RLIMIT_NPROC, processes),
    (resource.RLIMIT_AS, memory),
):
    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))
del sys.argv[1:], user, memory, cpu_s, processes, disk, files, kind, limit, hard, resource
"""
# Reads a random token and the program from stdin, and writes the token when the program has run to its end. The token
# is in no file, so a program that exits early cannot succeed. The output of the program is discarded.
_RUN = """\
import os, sys
done, _, source = sys.stdin.buffer.read().partition(b"\\n")
channel, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
os.dup2(null, 1)
os.dup2(null, 2)
os.write(channel, b"started\\n")
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
os.write(channel, done)
"""
# Succeeds if the sandbox has the properties that a wrong kernel configuration can silently remove.
_PROBE = """\
import os, socket
assert [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]] in ([], ["lo"])
for family, kind in ((16, socket.SOCK_RAW), (40, socket.SOCK_STREAM)):  # AF_NETLINK, AF_VSOCK
    try:
        socket.socket(family, kind)
    except OSError:
        continue
    raise AssertionError
status = open("/proc/self/status").read().split()
assert status[status.index("Seccomp:") + 1] == "2" and status[status.index("NoNewPrivs:") + 1] == "1"
assert int(status[status.index("CapEff:") + 1], 16) == 0
for folder in ("/", "/usr", "/dev"):
    try:
        open(os.path.join(folder, "written"), "w")
    except OSError:
        continue
    raise AssertionError
for _ in range(64):
    try:
        child = os.fork()
    except BlockingIOError:
        break
    if child == 0:
        os.read(os.pipe()[0], 1)
else:
    raise AssertionError
"""


class SandboxMode(StrEnum):
    """Whether programs run in a sandbox."""

    required = "required"
    """In a sandbox. If the machine does not support it, the run ends with a configuration error."""
    off = "off"
    """With the permissions of the user and the limits of the reward workers only."""


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of one program in the sandbox."""

    timeout_s: float = 10.0
    """Time limit in seconds, also without a sandbox. The CPU time of each process has the same limit."""
    memory_mb: int = 1024
    """Address space of each process in MiB."""
    processes: int = 16
    """Number of processes and threads."""
    disk_mb: int = 64
    """Size of the temporary file system in MiB, which is in memory."""


@dataclass(frozen=True)
class Bubblewrap:
    """A bubblewrap installation, and how this process uses it."""

    path: str
    """Path of `bwrap`."""
    as_root: bool
    """Whether root creates the sandbox and programs run as other users. False: a user namespace."""
    trees: tuple[str, ...]
    """Folders that programs can read, in addition to those of the system."""
    private: tuple[str, ...] = ()
    """Folders that programs do not see, even inside a folder that they can read."""

    def command(self, limits: ProgramLimits, seccomp: int, user: int) -> list[str]:
        """Return the command line that runs Python in the sandbox; the program follows on stdin.

        Args:
            limits: limits of the program.
            seccomp: file descriptor of the filter of system calls.
            user: id of the user who runs the program, if root creates the sandbox.
        """
        mib = 2**20
        options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        if self.as_root:
            options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            options += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
        # A new session has no terminal, into which a program could type commands for the user (TIOCSTI).
        options += ["--hostname", "sandbox", "--die-with-parent", "--new-session"]
        options += ["--proc", "/proc", "--dev", "/dev", *_temporary("/dev/shm", _SHARED_MEMORY_MB)]
        options += ["--remount-ro", "/dev", *_temporary("/tmp", limits.disk_mb), *self._mounts()]
        options += ["--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(seccomp), "--"]
        numbers = (
            user if self.as_root else 0,
            limits.memory_mb * mib,
            # Whole seconds, rounded up: the clock ends a program first.
            int(limits.timeout_s) + 1,
            limits.processes,
            limits.disk_mb * mib,
            _OPEN_FILES,
        )
        return [self.path, *options, sys.executable, "-I", "-c", _CONFINE + _RUN, *map(str, numbers)]

    def _mounts(self) -> list[str]:
        """Return the options that mount the readable folders and hide the private ones, outer folders first."""
        options: dict[str, list[str]] = {}
        for place in _SYSTEM:
            path = Path(place)
            if path.is_symlink() and path.is_dir():
                options[place] = ["--symlink", os.readlink(path), place]
            elif path.exists():
                options[place] = ["--ro-bind", place, place]
        shown = [Path(place) for place in (*_SYSTEM, *self.trees)]
        hidden = [place for place in self.private if any(tree in Path(place).parents for tree in shown)]
        options |= {place: ["--perms", "0755", "--size", "4096", "--tmpfs", place] for place in hidden}
        for place in self.trees:
            options.setdefault(place, ["--ro-bind", os.path.realpath(place), place])
            for parent in map(str, Path(place).parents[:-1]):  # bwrap would create folders that other users cannot open
                options.setdefault(parent, ["--perms", "0755", "--dir", parent])
        words = [word for place in sorted(options, key=lambda place: Path(place).parts) for word in options[place]]
        # At the end, since a readable folder may be inside a hidden one and is mounted there first.
        return words + [word for place in hidden for word in ("--remount-ro", place)]


def _temporary(place: str, size_mb: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size_mb * 2**20), "--tmpfs", place]


def find_sandbox() -> Bubblewrap | str:
    """Return a sandbox that works for this process, or the reason why there is none. The result is cached."""
    return _find_sandbox(os.getcwd())


@functools.lru_cache(maxsize=4)
def _find_sandbox(folder: str) -> Bubblewrap | str:
    if sys.platform != "linux":
        return f"bubblewrap does not support {sys.platform}"
    if not is_supported():
        return f"there is no filter of system calls for {platform.machine()}"
    path = shutil.which("bwrap")
    if path is None:
        return "bwrap is not installed (Debian and Ubuntu: package bubblewrap)"
    prefixes = (sys.prefix, sys.base_prefix)
    trees = tuple(sorted({place for prefix in prefixes for place in (prefix, os.path.realpath(prefix))}))
    private = tuple(sorted({folder, os.path.realpath(Path.home()), str(Path.home())} - set(trees)))
    reason = ""
    for as_root in (True, False) if os.geteuid() == 0 else (False,):
        sandbox = Bubblewrap(path, as_root, trees, private)
        try:
            if runs_to_its_end(_PROBE, ProgramLimits(timeout_s=_PROBE_S, processes=8), sandbox):
                return sandbox
            reason = reason or "a test program in bwrap was not contained"
        except RuntimeError as error:
            reason = reason or str(error)
    return reason


def choose_sandbox(mode: SandboxMode) -> Bubblewrap | None:
    """Return the sandbox to use, None for no sandbox. Logs the choice once per process.

    Raises:
        ConfigError: the mode is `required`, and the machine does not support the sandbox.
    """
    if mode is SandboxMode.off:
        _log_once(logging.WARNING, "sandbox=off: " + _UNSAFE)
        return None
    sandbox = find_sandbox()
    if isinstance(sandbox, str):
        raise ConfigError(
            f"sandbox=required: programs of unit tests cannot run in a sandbox on this machine: {sandbox}. {_CURE}"
        )
    _log_once(logging.INFO, "programs of unit tests run in a bubblewrap sandbox")
    return sandbox


_CURE = (
    "On Linux, install bubblewrap and allow user namespaces. To run the programs unprotected, with your rights, set "
    "sandbox=off: interfaces.reward.function=null "
    "'interfaces.reward.functions.tests={_target_: realign.rewards.unit_tests.UnitTests, sandbox: off}'"
)
_UNSAFE = (
    "Programs of unit tests run without a sandbox, with the limits of the reward workers. Nothing prevents them from "
    "using the network, reading and writing your files, signaling your processes, or filling memory and disk with "
    "many processes."
)


@functools.lru_cache(maxsize=16)
def _log_once(level: int, message: str) -> None:
    logger.log(level, "%s", message)


def runs_to_its_end(program: str, limits: ProgramLimits, sandbox: Bubblewrap | None) -> bool:
    """Run a Python program, and return whether it ran to its end within the limits.

    Args:
        program: Python source.
        limits: limits of the program; without a sandbox only `timeout_s`.
        sandbox: the sandbox; None runs the program with the permissions of the user.

    Raises:
        RuntimeError: the process did not start the program.
    """
    with tempfile.TemporaryDirectory() as folder:
        if sandbox is None:
            command = [sys.executable, "-I", "-c", _RUN]
            return _succeeds(command, program, limits.timeout_s, folder, without_secrets(os.environ))
        read, write = os.pipe()
        try:
            # The filter fits into the pipe, so this does not wait for a reader.
            os.write(write, seccomp_filter(platform.machine()))
            os.close(write)
            # The kernel limits processes per user, so each program gets a user of its own.
            command = sandbox.command(limits, read, _FIRST_USER + secrets.randbelow(_USERS))
            return _succeeds(command, program, limits.timeout_s, folder, _ENVIRONMENT, (read,))
        finally:
            os.close(read)


def _succeeds(
    command: Sequence[str],
    program: str,
    timeout_s: float,
    folder: str,
    environment: dict[str, str],
    descriptors: Sequence[int] = (),
) -> bool:
    """Return whether the program on stdin wrote the token. Its channel is a pipe, so that it cannot fill memory."""
    done = secrets.token_hex(16).encode()
    read, write = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=write,
                # If bwrap fails, its message is all there is to read; `_RUN` redirects that of the program.
                stderr=write,
                pass_fds=descriptors,
            )
        finally:
            os.close(write)
        with process:
            try:
                process.communicate(done + b"\n" + program.encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                return False
            finally:
                process.kill()
        output = _content(read)
    finally:
        os.close(read)
    if not output.startswith(b"started\n"):
        raise RuntimeError(f"the program did not start: {shorten(output.decode(errors='replace').strip(), 300)!r}")
    return process.returncode == 0 and output == b"started\n" + done


def _content(read: int) -> bytes:
    """Return what a pipe contains, without waiting for processes that can still write to it."""
    if sys.platform != "win32":
        os.set_blocking(read, False)
    with suppress(BlockingIOError):
        return os.read(read, _LONGEST_CHANNEL)
    return b""
