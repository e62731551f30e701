"""Filter of system calls for sandboxed programs: a seccomp program in classic BPF, as `bwrap --seccomp` reads it.

Memory of memfds and System V shared memory counts in no limit of a process, so their creation fails. So do calls that
inspect other processes, create namespaces or mounts, or use parts of the kernel that programs of rewards do not need.
Sockets exist only for Unix and the internet, which the network namespace separates. It does not separate AF_VSOCK, by
which a virtual machine talks to its host.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from types import MappingProxyType

# Architecture -> (audit number, {system call: number}), from the kernel's headers.
_CALLS: Mapping[str, tuple[int, Mapping[str, int]]] = MappingProxyType(
    {
        "x86_64": (
            0xC000003E,
            {
                **{"shmget": 29, "socket": 41, "socketpair": 53, "clone": 56, "msgget": 68, "ptrace": 101},
                **{"mount": 165, "mq_open": 240},
                **{"add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298},
                **{"open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311},
                **{"memfd_create": 319, "bpf": 321, "userfaultfd": 323},
            },
        ),
        "aarch64": (
            0xC00000B7,
            {
                **{"mount": 40, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186, "shmget": 194},
                **{"socket": 198, "socketpair": 199},
                **{"add_key": 217, "request_key": 218, "keyctl": 219, "clone": 220, "perf_event_open": 241},
                **{"open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271},
                **{"memfd_create": 279, "bpf": 280, "userfaultfd": 282},
            },
        ),
    }
)
_EVERYWHERE = {"io_uring_setup": 425, "clone3": 435, "memfd_secret": 447}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_X32 = 0x40000000  # numbers of the x32 ABI start here; no other number is as large
_NEW_NAMESPACES = 0x7E020000  # flags CLONE_NEW* of clone
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6


def is_supported() -> bool:
    """Return whether there is a filter for the architecture of this machine."""
    return platform.machine() in _CALLS


def seccomp_filter(machine: str) -> bytes:
    """Return the filter for an architecture (`platform.machine()`)."""
    architecture, calls = _CALLS[machine]
    forbidden = {**calls, **_EVERYWHERE}
    clone, clone3 = forbidden.pop("clone"), forbidden.pop("clone3")
    sockets = [forbidden.pop("socket"), forbidden.pop("socketpair")]
    steps = [
        # The same number is another call on another architecture, such as that of 32-bit programs.
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        # the flags of clone3 are in memory, which no filter reads; after ENOSYS, C libraries use clone
        (_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for number in sorted(forbidden.values()):
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    # The second and third field say how many steps to skip if a test holds and if not. A block that loads an argument
    # always returns, since the argument has replaced the number of the call that further tests would need.
    for number in sockets:
        steps += [(_EQUAL, 0, len(_FAMILIES) + 3, number), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        steps += [(_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
        steps += [(_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    steps += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
