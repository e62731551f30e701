"""Lock an output folder: a second run in the same folder would truncate the records of the first."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from realign.errors import TransientError


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder until the context ends or the process exits, for any reason.

    Where folder locks are not supported (Windows, some network file systems), this does nothing.

    Raises:
        TransientError: Another run has locked the folder.
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
            raise TransientError(
                f"output_dir={folder}: another run is active in this folder. Wait until it ends, or use another folder."
            ) from error
    try:
        yield
    finally:
        os.close(number)
