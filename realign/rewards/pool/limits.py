"""What a worker process of the reward pool may use, and which variables of the environment it does not inherit.

This contains accidents; it is no sandbox. `docs/security.md` says what it does not hold back.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from realign.settings import Count, Positive, Range, Settings

_SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|^PGPASS"  # anywhere in a name
    r"|(^|_)(TOKENS?|KEYS?|AUTH|PAT|COOKIE)(_|$)|_PWD$"  # as a word of its own
    r"|^(AWS|AZURE)_"
)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


OpenFiles = Annotated[int, Range(ge=32)]
"""A number of file descriptors; Python itself needs 32."""


@dataclass(frozen=True)
class Limits(Settings):
    """Limits of one worker; each is inherited by the processes that the reward function starts."""

    memory_mb: Count | None = None
    """MiB of address space beyond what the worker holds once the function is imported; None sets no limit."""
    cpu_s: Positive | None = None
    """CPU seconds, of all threads together, that one call may use; None sets no limit."""
    open_files: OpenFiles | None = None
    """File descriptors, sockets and pipes included; None leaves the system's limit."""
    keep_environment: Sequence[str] = ()
    """Variables that look like secrets and are inherited all the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.keep_environment, str):
            raise ValueError(
                f"keep_environment must be a list of names of variables, found the text {self.keep_environment!r}"
            )


def secret_variables(environment: Mapping[str, str], keep: Sequence[str] = ()) -> list[str]:
    """Names of the variables that look like secrets, but for those in `keep`.

    A name looks like one if it has a word such as TOKEN, KEY, SECRET or PASSWORD, or starts with AWS_ or AZURE_; a
    value, if it is a URL with a password (proxies excepted: the workers may have to go through one).
    """
    return sorted(
        name
        for name, value in environment.items()
        if name not in keep
        and (
            _SECRET_NAME.search(name.upper())
            or (_URL_WITH_PASSWORD.search(value) and not name.lower().endswith("_proxy"))
        )
    )


def without_secrets(environment: Mapping[str, str], keep: Sequence[str] = ()) -> dict[str, str]:
    """The environment without `secret_variables`."""
    dropped = set(secret_variables(environment, keep))
    return {name: value for name, value in environment.items() if name not in dropped}


def drop_secrets(keep: Sequence[str]) -> None:
    """Remove the variables that look like secrets from this process and so from those that it starts."""
    for name in secret_variables(os.environ, keep):
        del os.environ[name]


def limits_memory() -> bool:
    """Whether a memory limit is enforced on this platform."""
    return sys.platform == "linux"


def limit_process(limits: Limits) -> None:
    """Apply all but the limit on CPU time, which `allow_cpu` gives anew for each call; no core file is written."""
    if sys.platform == "win32":
        return
    import resource

    _lower(resource.RLIMIT_CORE, 0)
    if limits.open_files is not None:
        _lower(resource.RLIMIT_NOFILE, limits.open_files)
    if limits.memory_mb is not None and limits_memory():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + limits.memory_mb * 2**20)


def _lower(kind: int, limit: int) -> None:
    """Lower a limit for good: what is above it cannot be asked for again."""
    import resource

    hard = resource.getrlimit(kind)[1]
    lowered = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (lowered, lowered))


def allow_cpu(cpu_s: float | None) -> None:
    """Allow this process so many CPU seconds from now on, rounded up to the next whole second that it has used."""
    if cpu_s is None or sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
