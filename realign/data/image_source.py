"""Rows with images: a column of images, and conversations with image parts (`{"type": "image"}`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from realign.data.columns import Row, read_column
from realign.data.image_files import ImageReader, RowImages
from realign.data.rendering import Segment
from realign.data.rows import Dropped, RowEncoder, RowText, TooLong
from realign.data.source import DataSource
from realign.data.templates import Template
from realign.data.writer import Written
from realign.errors import ConfigError, DataError, SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKEN = "<|image_pad|>"
"""Text of an image token, if the tokenizer defines no other."""


@dataclass
class ImageSource(DataSource):
    """A file of rows that may have images (config node)."""

    images_column: str | None = None
    """Column with the images of the conversation: a list of paths, PIL images, or objects with `bytes` or `path`, one
    for each image part of the messages, in order. null: rows have no images. Requires the extra `images`."""
    image_folder: str = ""
    """Folder of relative image paths; empty: the working directory."""
    image_processor: str | None = None
    """Folder or hub name of the image processor (preprocessor_config.json); null uses the folder of the tokenizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        others = {"image_folder": self.image_folder, "image_processor": self.image_processor}
        if self.images_column is None:
            if name := next((name for name, value in others.items() if value), None):
                raise SettingsError(f"{name}={others[name]!r}: it is ignored without images_column. Set images_column.")
            return
        for name, wrong, cure in (
            ("streaming", self.streaming, "false"),
            ("too_long", self.too_long is TooLong.truncate_left and "truncate_left", "drop"),
            ("template", self.template is Template.plain and "plain", "auto"),
        ):
            if wrong:
                raise SettingsError(f"{name}={wrong}: incompatible with images_column. Set {name}={cure}.")

    @property
    def has_images(self) -> bool:
        """See `DataSpec`."""
        return self.images_column is not None

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> RowEncoder:
        """See `DataSource`.

        Raises:
            ConfigError: the image processor cannot be loaded.
        """
        encoder = super().encoder(tokenizer)
        if (column := self.images_column) is None:
            return encoder
        reader, write = self._reader(tokenizer), encoder.write

        def with_images(row: Row) -> RowText | Dropped:
            text = write(row)
            return text if isinstance(text, Dropped) else with_image_tokens(row, column, text, reader)

        return replace(encoder, write=with_images)

    def _reader(self, tokenizer: PreTrainedTokenizerBase) -> ImageReader:
        try:
            import PIL  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"images_column={self.images_column}: images need Pillow. Install it with: pip install "
                "'realign-rl[images]'"
            ) from error
        from transformers import AutoImageProcessor

        path = self.image_processor or tokenizer.name_or_path
        try:
            processor = AutoImageProcessor.from_pretrained(path, trust_remote_code=False)
            if not hasattr(processor, "merge_size"):
                raise ValueError(f"{type(processor).__name__} does not merge patches")
        except Exception as error:  # whatever transformers raises for a folder without a supported processor
            raise ConfigError(
                f"image_processor={path!r}: cannot load an image processor of the Qwen-VL families ({error}). Set it "
                "to a folder with preprocessor_config.json."
            ) from error
        return ImageReader(processor, getattr(tokenizer, "image_token", None) or _TOKEN, self.image_folder)


def with_image_tokens(row: Row, column: str, text: RowText, reader: ImageReader) -> RowText:
    """Return the text of a row with as many image tokens for each image as it has merged patches.

    Raises:
        DataError: an image cannot be read, or the number of images is not the number of image parts.
    """
    found = read_column(row, column)
    sources = tuple(found) if isinstance(found, list | tuple) else () if found is None else (found,)
    counts = [reader.tokens(source) for source in sources]
    parts = [written.text.count(reader.token) for written in text.sequences]
    if max(parts, default=0) != len(sources):
        raise DataError(
            f"the row has {len(sources)} images in column {column!r}, but its text has {max(parts, default=0)} "
            f"image tokens ({reader.token}). Give each image an image part in the messages, and use a chat template "
            "that renders them."
        )
    sequences = [written._replace(segments=_repeated(written, counts, reader.token)) for written in text.sequences]
    return replace(text, sequences=sequences, images=RowImages(reader, sources))


def _repeated(written: Written, counts: Sequence[int], token: str) -> list[Segment]:
    remaining, segments = iter(counts), []
    for segment in written.segments:
        first, *others = segment.text.split(token)
        whole = first + "".join(token * next(remaining) + other for other in others)
        segments.append(segment._replace(text=whole))
    return segments


__all__ = ["ImageSource"]
