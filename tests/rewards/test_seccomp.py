import errno
import struct

import pytest

from realign.rewards.seccomp import seccomp_filter

ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
CLONE_NEWUSER, CLONE_THREAD = 0x10000000, 0x00010000
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(machine, number, argument=0, audit=None):
    """Run the filter as the kernel does, and return its decision about a system call."""
    data = struct.pack("=IIQQ", number, AUDIT[machine] if audit is None else audit, 0, argument)
    steps = list(struct.iter_unpack("=HBBI", seccomp_filter(machine)))
    value = place = 0
    while True:
        code, yes, no, constant = steps[place]
        place += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            value = struct.unpack_from("=I", data, constant)[0]
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
            place += yes if holds else no


@pytest.mark.parametrize(
    ("machine", "allowed", "forbidden"),
    [
        ("x86_64", {"read": 0, "fork": 57, "execve": 59, "futex": 202}, {"ptrace": 101, "memfd": 319, "shmget": 29}),
        ("aarch64", {"read": 63, "execve": 221, "futex": 98}, {"ptrace": 117, "memfd": 279, "shmget": 194}),
    ],
)
def test_the_filter_fails_forbidden_calls_and_allows_ordinary_ones(machine, allowed, forbidden):
    assert {name: decide(machine, number) for name, number in allowed.items()} == dict.fromkeys(allowed, ALLOW)
    refused = FAIL | errno.EPERM
    assert {name: decide(machine, number) for name, number in forbidden.items()} == dict.fromkeys(forbidden, refused)


@pytest.mark.parametrize(("machine", "clone"), [("x86_64", 56), ("aarch64", 220)])
def test_the_filter_allows_threads_but_no_new_namespaces(machine, clone):
    assert decide(machine, clone, CLONE_THREAD) == ALLOW
    assert decide(machine, clone, CLONE_THREAD | CLONE_NEWUSER) == FAIL | errno.EPERM
    assert decide(machine, 435, CLONE_THREAD) == FAIL | errno.ENOSYS


def test_the_filter_kills_calls_of_another_architecture_and_fails_those_of_x32():
    assert decide("x86_64", 0, audit=0x40000003) == KILL
    assert decide("x86_64", 0x40000000) == FAIL | errno.EPERM
