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


@pytest.mark.parametrize(("machine", "calls"), [("x86_64", (41, 53)), ("aarch64", (198, 199))])
def test_the_filter_allows_sockets_of_unix_and_the_internet_only(machine, calls):
    for call in calls:
        allowed = [family for family in range(64) if decide(machine, call, family) == ALLOW]
        assert allowed == [1, 2, 10]  # AF_UNIX, AF_INET, AF_INET6; not AF_VSOCK (40), AF_NETLINK (16) or AF_ALG (38)
        assert decide(machine, call, 40) == FAIL | errno.EAFNOSUPPORT
        assert decide(machine, call, 2**32 + 40) == FAIL | errno.EAFNOSUPPORT  # the kernel reads an int


def test_the_filter_kills_calls_of_another_architecture_and_fails_those_of_x32():
    assert decide("x86_64", 0, audit=0x40000003) == KILL
    assert decide("x86_64", 0x40000000) == FAIL | errno.EPERM
