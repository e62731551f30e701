"""Reward functions that try to exceed the limits of a worker. Workers load this file by its path."""

import os
import resource
import socket
import subprocess
import sys


def environment_has(prompt, response, row):
    return float(row["name"] in os.environ)


def child_has(prompt, response, row):
    program = f"import os; print(int({row['name']!r} in os.environ))"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)


def needs_the_key(prompt, response, row):
    return float(len(os.environ["JUDGE_API_KEY"]))


def burns(prompt, response, row):
    while row["burn"]:
        pass
    return 1.0


def opens(prompt, response, row):
    held = [socket.socket() for _ in range(row["n"])]
    return float(len(held))


def hard_limits_are_as_low_as_soft_ones(prompt, response, row):
    pairs = [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CORE)]
    return float(all(soft == hard != resource.RLIM_INFINITY for soft, hard in pairs))
