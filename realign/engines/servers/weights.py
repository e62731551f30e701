"""Model folders that servers load: one folder per version, of which only the latest is kept."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from realign.api.sampler import WeightSource
from realign.errors import ConfigError, TransientError

_SHARED_MEMORY = Path("/dev/shm")
_AVERAGED = "_ema"


class WeightFolders:
    """Writes the weights of a role for servers."""

    def __init__(self, parent: str | None) -> None:
        """Create the folder.

        Args:
            parent: folder in which it is created; None: shared memory if the system has it, or the temporary folder.

        Raises:
            ConfigError: the folder cannot be created.
        """
        if parent is None and _SHARED_MEMORY.is_dir():
            parent = str(_SHARED_MEMORY)
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self.root = Path(tempfile.mkdtemp(prefix="realign-weights-", dir=parent))
        except OSError as error:
            raise ConfigError(f"weights_dir={parent!r}: cannot be written: {error}") from error

    def write(self, source: WeightSource, number: int) -> Path:
        """Write the weights of an update, and return their folder.

        Raises:
            TransientError: there is not enough space.
        """
        folder = self.root / f"update_{number}"
        try:
            shutil.rmtree(folder, ignore_errors=True)
            source.save(folder)
            shutil.rmtree(folder.with_name(f"{folder.name}{_AVERAGED}"), ignore_errors=True)
        except OSError as error:
            raise TransientError(
                f"{folder}: the weights for the servers were not written: {error}. Set weights_dir to a folder with "
                "more space."
            ) from error
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove all other versions."""
        for other in self.root.glob("update_*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)
