"""One run at a time in a folder: a second one would cut the records of the first."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder until the end of the context or of the process, however it ends.

    Where the system or the file system knows no locks on folders (Windows, some network disks), nothing is held.

    Raises:
        ValueError: another run holds it.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(number)
            raise ValueError(
                f"output_dir {str(folder)!r} is in use by a run that goes on; wait for its end, or choose another one"
            ) from error
    try:
        yield
    finally:
        os.close(number)
