"""Read images, and split them into patches with the image processor of a model."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realign.api.image_keys import GRIDS, PIXELS
from realign.data.messages import short
from realign.errors import DataError


@dataclass(frozen=True, eq=False)
class ImageReader:
    """Reads images, and splits them into patches.

    Attributes:
        processor: Image processor of transformers.
        token: Text of the token that a chat template writes for an image.
        folder: Folder of relative paths; empty: the working directory.
    """

    processor: Any
    token: str
    folder: str

    def tokens(self, source: Any) -> int:
        """Return the number of tokens of an image, given as a path, a PIL image, its bytes, or an object with them.

        Raises:
            DataError: it cannot be read.
        """
        with self._opened(source) as image:
            width, height = image.size
        patches: int = self.processor.get_number_of_image_patches(height, width)
        return patches // self.processor.merge_size**2

    def pixels(self, source: Any) -> npt.NDArray[np.uint8]:
        """Return the pixels [height, width, 3] of an image; see `tokens`."""
        with self._opened(source) as image:
            return np.asarray(image.convert("RGB"))

    @contextmanager
    def _opened(self, source: Any) -> Iterator[Any]:
        from PIL import Image

        if isinstance(source, Image.Image):
            yield source
            return
        found = (source.get("bytes") or source.get("path")) if isinstance(source, Mapping) else source
        if not isinstance(found, str | bytes):
            raise DataError(f"the image is {short(source)}; expected a path, a PIL image or the bytes of a file.")
        file: Any = io.BytesIO(found) if isinstance(found, bytes) else Path(self.folder, found).expanduser()
        try:
            with Image.open(file) as image:
                yield image
        except OSError as error:
            raise DataError(f"cannot read the image {short(source)}: {error}") from error


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of a row, which are read and split into patches each time that the row is drawn.

    Attributes:
        reader: Reads the images.
        sources: The images, as in the row.
    """

    reader: ImageReader
    sources: tuple[Any, ...]

    def patches(self) -> dict[str, Tensor]:
        """Return the patches [P, d] of all images, and their grids [I, 3], by key.

        Raises:
            DataError: an image cannot be read.
        """
        processor = self.reader.processor
        if not self.sources:
            values = 3 * processor.temporal_patch_size * processor.patch_size**2
            return {PIXELS: torch.zeros(0, values), GRIDS: torch.zeros(0, 3, dtype=torch.int64)}
        images = [self.reader.pixels(source) for source in self.sources]
        found = processor(images, return_tensors="pt", input_data_format="channels_last")
        return {PIXELS: found[PIXELS].float(), GRIDS: found[GRIDS].long()}


__all__ = ["ImageReader", "RowImages"]
