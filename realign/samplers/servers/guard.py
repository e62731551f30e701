"""Cleans up when a run ends, however it ends.

    python guard.py COMMAND...           ends a server and all its processes
    python guard.py --remove FOLDER...   removes the weights for servers

The run holds the other end of standard input. At the end of the input, the whole process group of the server ends: by
SIGTERM, and after some seconds by SIGKILL. The exit code is that of the server, 128 + N if signal N ended it, as in a
shell. This file imports only the standard library, because it runs as a script.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

END_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""


def main(command: list[str]) -> int:
    """Run a command until it ends or standard input ends, then end its whole process group."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # this process waits for the server
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    status = server.wait()
    _signal_group(server, signal.SIGKILL)  # ends processes of the server that outlive it
    return status if status >= 0 else 128 - status


def remove(folders: list[str]) -> int:
    """Remove folders when standard input ends."""
    _wait_for_end_of_input()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _wait_for_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass


def _end_with_input(server: "subprocess.Popen[bytes]") -> None:
    _wait_for_end_of_input()
    _signal_group(server, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(server, signal.SIGKILL)


def _signal_group(server: "subprocess.Popen[bytes]", number: int) -> None:
    """Send a signal to the server's group, if a process of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(remove(sys.argv[2:]) if sys.argv[1] == "--remove" else main(sys.argv[1:]))
