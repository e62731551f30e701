"""Base classes of data nodes: `FileSource` reads rows, `DataSource` formats them, `ImageSource` adds their images."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from realign.cells import read_column
from realign.data.columns import Context, Row, beside_prompt, check_context, is_given
from realign.data.dataset import Collected, Dataset, DataSpec, LoadReport, PackedDataset, collect_tables
from realign.data.encoding import DroppedRow, Ending, LengthLimit, RowEncoder, RowText, TooLong
from realign.data.excerpt import Excerpt
from realign.data.images import ImageLoader, RowImages
from realign.data.order import Mixture
from realign.data.rendering import Segment
from realign.data.row_sources import RowSource, Split, Table, as_sources, titles
from realign.data.streaming import StreamedDataset, StreamSource
from realign.data.token_cache import CachedEncoder, key_of, tokenizer_identity
from realign.data.writer import Repeated, Template, Writer, Written
from realign.errors import ConfigError, DataError, SettingsError, TransientError
from realign.settings import Count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class FileSource(DataSpec):
    """Rows of one or several sources."""

    path: str | RowSource | list[str | RowSource]
    """A file, a folder, a pattern such as `data/*.jsonl`, or a hub name such as `org/name:split`. Files can be JSONL,
    JSON, CSV, TSV, parquet or arrow; folders contain such files, or come from `datasets`' `save_to_disk`. An existing
    local path wins over a hub name. A list combines several sources, and `{path: a.jsonl, weight: 0.7}` in it sets a
    weight, limit or columns."""
    limit: Count | None = None
    """Read only this many rows from the start of each source; null reads all."""
    split: str | Split | None = None
    """Split of a dataset, such as train, or one of several disjoint parts of each source's rows, such as
    `{part: 0, weights: [2, 4, 4]}`. null: the only split, and all rows."""
    subset: str | None = None
    """Subset (configuration) of a hub dataset; null uses the only one or the default."""
    revision: str | None = None
    """Branch, tag or commit of a hub dataset; null uses the main branch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sources()  # raises SettingsError if the sources do not fit together

    @property
    def sources(self) -> list[RowSource]:
        """The sources of the rows."""
        return self._sources()

    def _sources(self) -> list[RowSource]:
        split = self.split if isinstance(self.split, str) else None
        shared = {"limit": self.limit, "split": split, "subset": self.subset, "revision": self.revision}
        return as_sources(self.path, shared)

    @override
    def describe_source(self) -> str:
        described = []
        for source in self.sources:
            name = ":".join(filter(None, (source.path, source.split)))
            weight = "" if source.share is None else f" (weight {source.share:g})"
            described.append(f"{name}{weight}")
        return ", ".join(described)

    @override
    def check(self, where: str) -> None:
        """Read the first row of each source to check that it exists and has the columns.

        Args:
            where: Key of this node, for messages.

        Raises:
            DataError: a source or a column is missing; names the key, the value and the nearest file or column.
            TransientError: the hub is not reachable.
        """
        for index, source in enumerate(self.sources):
            key = f"{where}.path[{index}]" if isinstance(self.path, list) else f"{where}.path"
            try:
                first = source.read(1, streaming=self.streams)
            except (DataError, TransientError) as error:
                raise type(error)(f"{key}: {error}") from error
            try:
                columns = self.columns(self.visible(first.placed[0].row))
            except DataError as error:
                raise DataError(f"{where}: {first.where(0)}: {error}") from error
            for setting, column in columns.items():
                try:
                    first.column(column)
                except DataError as error:
                    raise DataError(f"{where}.{setting}: {error}") from error

    @abstractmethod
    def columns(self, row: Row) -> dict[str, str]:
        """Return the required columns of a row by the settings that name them. Recognizes those that are not set.

        Raises:
            DataError: several columns or none fit.
        """

    def visible(self, row: Row) -> Row:
        """Return the columns of a row that may be recognized; reward functions see all of them."""
        return row

    def tables(self) -> list[Table]:
        """Return the rows of each source, after applying the limit and the split.

        Raises:
            DataError: a source does not exist, is malformed or empty.
            TransientError: the hub is not reachable.
        """
        tables = [source.read() for source in self.sources]
        return [self.split.apply(table) for table in tables] if isinstance(self.split, Split) else tables


def mixture_of(sources: Sequence[RowSource], sizes: Sequence[int]) -> Mixture | None:
    """Return the mixture of several sources with these numbers of rows; None for one source.

    Raises:
        DataError: no row of a source is left.
    """
    if len(sources) == 1:
        return None
    for source, size in zip(sources, sizes, strict=True):
        if not size:
            raise DataError(f"no row is left of {source.path}. Remove this source, or relax the filters.")
    weights = tuple(source.share for source in sources if source.share is not None)  # all or none have one
    return Mixture(titles(sources), tuple(sizes), weights or None)


@dataclass
class DataSource(FileSource):
    """A file of rows, and the format of a prompt.

    A prompt is a string, or a list of chat messages with role and content (also in the ShareGPT format, with from and
    value). `question.text` selects an item of a column.
    """

    keeps_rows: ClassVar[bool] = False
    """Whether samples contain the rows themselves."""

    prompt_column: str | None = None
    """Column with the prompt: a string or a list of chat messages. null recognizes it."""
    tools_column: str | None = None
    """Column with the tools of a conversation: a list of JSON schemas, or its JSON text. null uses the column `tools`
    or `functions` if a row has it; "" ignores it."""
    ignored_columns: list[str] = field(default_factory=list)
    """Columns to read as if the rows had them not, such as `[system, input]`. Only reward functions still see them."""
    template: Template = Template.auto
    """Prompt format: auto (chat messages use the tokenizer's chat template; strings are plain text, and an error if the
    tokenizer has a chat template) | plain | chat (a string becomes a user message)."""
    prefix: str = ""
    """Put this before each prompt that is a string."""
    suffix: str = ""
    """Put this after each prompt that is a string."""
    system: str = ""
    """System message to begin each chat with; empty adds none."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`."""
    too_long: TooLong = TooLong.drop
    """What to do with a row over the length limit: drop | truncate_left | error."""
    streaming: bool = False
    """Read, tokenize and shuffle rows during training, with bounded memory, for data larger than memory."""
    shuffle_buffer: Count = 10_000
    """With streaming=true, shuffle this many rows together. They are kept in memory."""
    cache: bool = False
    """Keep the tokens on disk: the next run with the same rows, tokenizer and format reads them instead of tokenizing.
    REALIGN_CACHE_GB limits the size."""
    excerpt: Excerpt | None = None
    """Use only a part of the prompt column, such as `{max_tokens: 64, end: "."}`. The part replaces the text in the
    row, also for the reward function. null uses the whole text."""

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "with template=plain. Set template=chat"
        plain = {"system": unused, "template_options": unused} if self.template is Template.plain else {}
        for name, value in (("streaming=true", self.streaming), ("excerpt", self.excerpt), ("images", self.has_images)):
            if value:
                return {**plain, "cache": f"with {name}. Set cache=false"}
        return plain

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming and isinstance(self.split, Split):
            raise SettingsError("streaming=true: split into parts needs all rows in memory. Set streaming=false.")
        limit = self.length_limit()
        if self.streaming and limit.tokens is None:
            raise SettingsError(
                f"streaming=true: requires {limit.setting}, since the lengths of the rows are unknown before training. "
                f"Set {limit.setting}."
            )

    @abstractmethod
    def text_of(self, row: Row, writer: Writer) -> RowText | DroppedRow:
        """Return a row as text, or why it is dropped.

        Raises:
            DataError: the row is invalid.
        """

    @abstractmethod
    def length_limit(self) -> LengthLimit:
        """Return the length limit of the sequences of a row."""

    def ending(self, tokenizer: PreTrainedTokenizerBase) -> Ending | None:
        """Return the ending of responses; None if the rows are prompts."""
        return None

    def writer(self, tokenizer: PreTrainedTokenizerBase) -> Writer:
        """Return what formats the rows as text."""
        return Writer(
            tokenizer,
            self.template,
            self.prefix,
            self.suffix,
            self.system,
            self.template_options,
            images=self.has_images,
        )

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> RowEncoder:
        """Return the conversion of rows to tokens, which does not depend on how rows are read.

        Raises:
            ConfigError: the tokenizer does not support a setting.
        """
        writer = self.writer(tokenizer)

        def write(row: Row) -> RowText | DroppedRow:
            if self.excerpt is not None:
                column = self.columns(self.visible(row)).get("prompt_column")
                if column is None:
                    raise DataError(
                        "excerpt needs a prompt column with strings. Set excerpt=null, or set prompt_column."
                    )
                cut = self.excerpt.replace(row, column, tokenizer)
                if isinstance(cut, DroppedRow):
                    return cut
                row = cut
            visible = deepcopy(self.visible(row))  # `text_of` may be a user's
            text = self.text_of(visible, writer)
            if isinstance(text, DroppedRow):
                return text
            check_context(
                visible, self._columns_with_meaning(visible), "\n".join(written.text for written in text.sequences)
            )
            return replace(text, row=row)

        return RowEncoder(tokenizer, write, self.length_limit(), self.ending(tokenizer))

    @property
    @override
    def streams(self) -> bool:
        return self.streaming

    @override
    def describe_source(self) -> str:
        return super().describe_source() + (
            f"; streamed, shuffled {self.shuffle_buffer:,} rows at a time" if self.streaming else ""
        )

    @override
    def load(self, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        """Read the rows and tokenize them; with `streaming`, prepare to read them.

        Raises:
            DataError: a row is invalid (names its file and line), or no row is left.
            ConfigError: the tokenizer does not support a setting.
            TransientError: the hub is not reachable.
        """
        encoder = self.encoder(tokenizer)
        if self.streaming:
            names = titles(self.sources)
            streams = [
                StreamSource(name, source.files(streaming=True), source.share)
                for name, source in zip(names, self.sources, strict=True)
            ]
            return StreamedDataset(streams, encoder, self.pack, self.shuffle_buffer, keep_rows=self.keeps_rows)
        cached = self.cache and "cache" not in self.ineffective()
        rows = self._with_cache(encoder, tokenizer) if cached else encoder
        collected, report, sizes = collect_tables(self.tables(), rows, keep_rows=self.keeps_rows)
        return self.pack(replace(collected, mixture=mixture_of(self.sources, sizes)), report)

    def _with_cache(self, encoder: RowEncoder, tokenizer: PreTrainedTokenizerBase) -> RowEncoder | CachedEncoder:
        """Return an encoder that keeps tokens on disk, if all that decides about them can be told."""
        identity = tokenizer_identity(tokenizer)
        if identity is None or not type(self).__module__.startswith("realign."):  # a user may change her class
            return encoder
        settings = {f.name: repr(getattr(self, f.name)) for f in fields(self) if f.name not in _OF_ROWS}
        return CachedEncoder(encoder, key_of(identity, type(self).__name__, json.dumps(settings)))

    @abstractmethod
    def pack(self, collected: Collected, report: LoadReport) -> PackedDataset:
        """Return encoded rows as a dataset."""

    @override
    def visible(self, row: Row) -> Row:
        return {name: row[name] for name in row if name not in self.ignored_columns} if self.ignored_columns else row

    def context(self, row: Row) -> Context:
        """Return what belongs to the prompt of a row besides the column of the prompt.

        Raises:
            DataError: two columns of the row have the same meaning.
        """
        return Context.of(
            row, self.columns(row).get("tools_column", self.tools_column), self._columns_with_meaning(row)
        )

    def values(self, row: Row) -> dict[str, Any]:
        """Return the values of the columns of a row by the settings that name them; see `columns`.

        Raises:
            DataError: the row lacks a column, or several fit.
        """
        columns = self.columns(row)
        values = {setting: read_column(row, column) for setting, column in columns.items()}
        prompt, more = values.get("prompt_column"), row.get("input")
        # as Alpaca, LLaMA-Factory and ms-swift write it
        both = isinstance(prompt, str) and isinstance(more, str) and is_given(more)
        if both and columns.get("prompt_column") == "instruction":
            values["prompt_column"] = f"{prompt}\n{more}"
        return values

    @override
    def describe_columns(self) -> str:
        row = self.visible(self.sources[0].read(1, streaming=self.streams).placed[0].row)
        read = [f"{setting.removesuffix('_column')}: {column}" for setting, column in self.columns(row).items()]
        used = self._columns_with_meaning(row)
        beside = beside_prompt(row, used)
        others = [name for name in row if name not in used and name not in beside]
        named = (("; with it: ", beside), ("; other columns: ", others))
        return ", ".join(read) + "".join(f"{title}{', '.join(names)}" for title, names in named if names)

    def _columns_with_meaning(self, row: Row) -> set[str]:
        """Return the columns of a row that have a meaning by themselves, so that its prompt needs not contain them."""
        return {name.split(".")[0] for name in self.columns(row).values()}


@dataclass
class ResponseSource(DataSource):
    """A file of rows with responses to learn from."""

    max_tokens: Count | None = None
    """Longest allowed sequence of prompt and response in tokens; null sets no limit. Only the text before the first
    trained token is truncated, and a row is dropped if none of it would remain. The responses of a row share the same
    truncated prompt."""
    append_eos: bool = True
    """Append the tokenizer's EOS token to responses that don't end with it, so that the model learns to stop."""
    repeated_prompt: Repeated = Repeated.error
    """What to do with a response that is a string and begins with the prompt: error | remove (the prompt from the
    response) | keep (learn to write the prompt again)."""

    @override
    def writer(self, tokenizer: PreTrainedTokenizerBase) -> Writer:
        return replace(super().writer(tokenizer), repeated=self.repeated_prompt)

    @override
    def length_limit(self) -> LengthLimit:
        return LengthLimit("max_tokens", self.max_tokens, self.too_long)

    @override
    def ending(self, tokenizer: PreTrainedTokenizerBase) -> Ending:
        return Ending(tokenizer, self.append_eos)


_OF_ROWS = {f.name for f in fields(FileSource)} | {"cache", "streaming", "shuffle_buffer"}
"""Settings that decide which rows are read, and not what their tokens are."""
_IMAGE_TOKEN = "<|image_pad|>"
"""Text of an image token, if the tokenizer defines no other."""


@dataclass
class ImageSource(DataSource):
    """A file of rows that may have images."""

    images_column: str | None = None
    """Column with the images of the conversation: a list of paths, PIL images, or objects with `bytes` or `path`, one
    for each image part of the messages, in order. null: rows have no images. Requires the extra `images`."""
    image_folder: str = ""
    """Folder of relative image paths; empty: the working directory."""
    image_processor: str | None = None
    """Folder or hub name of the image processor (preprocessor_config.json); null uses the folder of the tokenizer."""

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "without images_column. Set images_column"
        images = {} if self.images_column is not None else {"image_folder": unused, "image_processor": unused}
        return {**super().ineffective(), **images}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images_column is None:
            return
        for name, wrong, valid in (
            ("streaming", self.streaming, "false"),
            # truncating could cut image tokens, whose patches would stay
            ("too_long", self.too_long is TooLong.truncate_left and "truncate_left", "drop"),
            ("template", self.template is Template.plain and "plain", "auto"),
        ):
            if wrong:
                raise SettingsError(f"{name}={wrong}: incompatible with images_column. Set {name}={valid}.")

    @property
    @override
    def has_images(self) -> bool:
        return self.images_column is not None

    @override
    def _columns_with_meaning(self, row: Row) -> set[str]:
        return super()._columns_with_meaning(row) | (
            {self.images_column.split(".")[0]} if self.images_column else set()
        )

    @override
    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> RowEncoder:
        """Return the conversion of rows to tokens and images.

        Raises:
            ConfigError: the image processor cannot be loaded.
        """
        encoder = super().encoder(tokenizer)
        if (column := self.images_column) is None:
            return encoder
        loader, write = self._loader(tokenizer), encoder.write

        def with_images(row: Row) -> RowText | DroppedRow:
            text = write(row)
            return text if isinstance(text, DroppedRow) else _with_image_tokens(row, column, text, loader)

        return replace(encoder, write=with_images)

    def _loader(self, tokenizer: PreTrainedTokenizerBase) -> ImageLoader:
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
        return ImageLoader(processor, getattr(tokenizer, "image_token", None) or _IMAGE_TOKEN, self.image_folder)


def _with_image_tokens(row: Row, column: str, text: RowText, loader: ImageLoader) -> RowText:
    """Return the text of a row with as many image tokens for each image as it has merged patches.

    Raises:
        DataError: an image cannot be read, or the number of images is not the number of image parts.
    """
    images = read_column(row, column)
    sources = tuple(images) if isinstance(images, list | tuple) else () if images is None else (images,)
    counts = [loader.tokens(source) for source in sources]
    # With train_on_turns=each, the sequences of earlier turns contain only the first images of the row.
    parts = [written.text.count(loader.token) for written in text.sequences]
    if max(parts, default=0) != len(sources):
        raise DataError(
            f"the row has {len(sources)} images in column {column!r}, but its text has {max(parts, default=0)} "
            f"image tokens ({loader.token}). Give each image an image part in the messages, and use a chat template "
            "that renders them."
        )
    sequences = [written._replace(segments=_repeat_token(written, counts, loader.token)) for written in text.sequences]
    return replace(text, sequences=sequences, images=RowImages(loader, sources))


def _repeat_token(written: Written, counts: Sequence[int], token: str) -> list[Segment]:
    remaining, segments = iter(counts), []
    for segment in written.segments:
        first, *others = segment.text.split(token)
        expanded = first + "".join(token * next(remaining) + other for other in others)
        segments.append(segment._replace(text=expanded))
    return segments
