"""Resource limits of the worker processes of the reward pool, and the environment variables they do not inherit.

The limits contain accidents; they are no sandbox. `docs/security.md` lists what they do not prevent.
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

from realign.errors import SettingsError
from realign.settings import Count, Positive, Range, Settings

_SECRET_NAME = re.compile(
    r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|APIKEY|^PGPASS"  # anywhere in a name
    r"|(^|_)(TOKENS?|KEYS?|AUTH|PAT|COOKIE|SIG|SIGNATURE)(_|$)|_PWD$"  # as a separate word
    r"|^(AWS|AZURE)_"
)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


OpenFiles = Annotated[int, Range(ge=32)]
"""Number of file descriptors. Python itself needs 32."""


@dataclass(frozen=True)
class Limits(Settings):
    """Limits of one worker. The processes that the reward function starts inherit them."""

    memory_mb: Count | None = None
    """Address space in MiB, in addition to the worker's usage after importing the function; None sets no limit."""
    cpu_s: Positive | None = None
    """CPU seconds that one call may use, over all its threads; None sets no limit."""
    open_files: OpenFiles | None = None
    """Number of file descriptors, including sockets and pipes; None keeps the system's limit."""
    keep_environment: Sequence[str] = ()
    """Names of environment variables to inherit although they look like secrets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.keep_environment, str):
            raise SettingsError(
                f"keep_environment={self.keep_environment!r}: must be a list of names of variables, not one text"
            )


def looks_secret(name: str) -> bool:
    """Return whether the name of a variable or parameter looks like that of a secret."""
    return _SECRET_NAME.search(name.upper()) is not None


def secret_variables(environment: Mapping[str, str], keep: Sequence[str] = ()) -> list[str]:
    """Return the names of the variables that look like secrets, except those in `keep`.

    A variable looks like a secret if its name has a word such as TOKEN, KEY, SECRET or PASSWORD, or starts with AWS_ or
    AZURE_. So does a variable whose value is a URL with a password, except proxies, which the workers may need.
    """
    return sorted(
        name
        for name, value in environment.items()
        if name not in keep
        and (looks_secret(name) or (_URL_WITH_PASSWORD.search(value) and not name.lower().endswith("_proxy")))
    )


def without_secrets(environment: Mapping[str, str], keep: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment without `secret_variables`."""
    dropped = set(secret_variables(environment, keep))
    return {name: value for name, value in environment.items() if name not in dropped}


def drop_secrets(keep: Sequence[str]) -> None:
    """Remove the variables that look like secrets from this process, and so from the processes it starts."""
    for name in secret_variables(os.environ, keep):
        del os.environ[name]


def limits_memory() -> bool:
    """Return whether this platform enforces a memory limit."""
    return sys.platform == "linux"


def limit_process(limits: Limits) -> None:
    """Apply all limits except CPU time, which `allow_cpu` sets before each call. Also disables core files."""
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
    """Lower the soft and the hard limit, so that the process cannot raise it again."""
    import resource

    hard = resource.getrlimit(kind)[1]
    lowered = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (lowered, lowered))


def allow_cpu(cpu_s: float | None) -> None:
    """Allow this process `cpu_s` more CPU seconds. The limit on its total CPU time is rounded up to whole seconds."""
    if cpu_s is None or sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
