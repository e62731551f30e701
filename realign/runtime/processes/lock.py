"""Lock an output folder: a second run in the same folder would truncate the records of the first."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder until the context ends or the process exits, for any reason.

    Where folder locks are not supported (Windows, some network file systems), this does nothing.

    Raises:
        ValueError: Another run has locked the folder.
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
