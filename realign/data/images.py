"""Images of rows: read them, and split them into patches with the image processor of a model."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from realign.api.sample import GRIDS, PIXELS
from realign.data.messages import short
from realign.errors import DataError

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read. Pillow has others, such as EPS, for which it starts a program."""
_MOST_PIXELS = 2**26
"""Pixels of an image, which is decoded whole before it is scaled down. An image of 169 million pixels takes 2.5 GB."""


@dataclass(frozen=True, eq=False)
class ImageLoader:
    """Loads images, and splits them into patches.

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
            DataError: it cannot be read, not even its last pixel.
        """
        with self._open(source) as image:
            width, height = image.size
            if image is not source:  # a picture of the caller would become smaller
                image.draft(None, (1, 1))  # faster for JPEG, and reads all of the file as well
            image.load()
            patches: int = self.processor.get_number_of_image_patches(height, width)
        return patches // self.processor.merge_size**2

    def pixels(self, source: Any) -> npt.NDArray[np.uint8]:
        """Return the pixels [height, width, 3] of an image.

        Raises:
            DataError: it cannot be read.
        """
        with self._open(source) as image:
            return np.asarray(image.convert("RGB"))

    @contextmanager
    def _open(self, source: Any) -> Iterator[Any]:
        from PIL import Image, UnidentifiedImageError

        if isinstance(source, Image.Image):
            file: Any = None
        else:
            file = (source.get("bytes") or source.get("path")) if isinstance(source, Mapping) else source
            if not isinstance(file, str | bytes):
                raise DataError(f"the image is {short(source)}; expected a path, a PIL image or the bytes of a file.")
        try:
            if isinstance(file, str):
                file = Path(self.folder, file).expanduser()
                if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait
                    raise OSError("it is not a regular file")
            elif file is not None:
                file = io.BytesIO(file)
            with nullcontext(source) if file is None else Image.open(file, formats=_FORMATS) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels are too many. Scale it down")
                yield image
        except Exception as error:  # Pillow and its decoders raise many kinds
            if isinstance(error, UnidentifiedImageError):
                reason = f"it is none of {', '.join(_FORMATS)}"
            else:  # without the path, which can be a whole image as text
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise DataError(f"cannot read the image {short(source)}: {reason}.") from error


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of a row, which are read and split into patches each time that the row is drawn.

    Attributes:
        loader: Loads the images.
        sources: The images, as in the row.
    """

    loader: ImageLoader
    sources: tuple[Any, ...]

    def patches(self) -> dict[str, Tensor]:
        """Return the patches [P, d] of all images, and their grids [I, 3], by key.

        Raises:
            DataError: an image cannot be read.
        """
        processor = self.loader.processor
        if not self.sources:
            values = 3 * processor.temporal_patch_size * processor.patch_size**2
            return {PIXELS: torch.zeros(0, values), GRIDS: torch.zeros(0, 3, dtype=torch.int64)}
        images = [self.loader.pixels(source) for source in self.sources]
        processed = processor(images, return_tensors="pt", input_data_format="channels_last")
        return {PIXELS: processed[PIXELS].float(), GRIDS: processed[GRIDS].long()}
