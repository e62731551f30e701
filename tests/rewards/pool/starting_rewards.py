"""Reward functions that start processes and end their worker; workers load this file by its path.

Every process writes its own pid to the file of the row, and ends after two minutes at the latest.
"""

import os
import signal
import time
from pathlib import Path


def start_and_end(prompt, response, row):
    note(row["file"], os.getpid())
    expected = len(row["ways"]) + 1 + ("chain" in row["ways"])
    for way in row["ways"]:
        start(way, row["file"])
    while row["ways"] and len(Path(row["file"]).read_text().split()) < expected:
        time.sleep(0.01)
    match row["end"]:
        case "os._exit":
            os._exit(3)
        case "os._exit(0)":
            os._exit(0)
        case "SIGKILL of its group":
            os.killpg(0, signal.SIGKILL)
        case "deaf and hangs":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(120)
        case None:
            return 1.0
        case name:
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(120)


def note(file, pid):
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, f"{pid}\n".encode())
    os.close(descriptor)


def start(way, file):
    if os.fork():
        return
    try:
        if way == "session":
            os.setsid()
        elif way == "double fork":
            os.setsid()
            if os.fork():
                os._exit(0)
            os.setsid()
        elif way == "grandchild":
            if os.fork():
                os._exit(0)
            os.setpgid(0, 0)
        elif way == "deaf":
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
        elif way == "chain" and os.fork() == 0:
            os.setsid()
        note(file, os.getpid())
        if way == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(120)
    finally:
        os._exit(0)
