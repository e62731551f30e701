"""Turn rows into tokens within a length limit, and tokens back into text.

The conversion depends only on the row, not on where it was read, so rows in memory and streamed rows become the same
tokens.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import compress, islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from realign.api.sample import SequenceSample
from realign.data.columns import Row
from realign.data.images import RowImages
from realign.data.rendering import Segment
from realign.data.writer import Written
from realign.errors import ConfigError, DataError
from realign.text import part_over
from realign.tokenization import Divided, Tokens, with_start

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_TOKENS = 2**20
"""Length from which a sequence is refused if neither the data nor the run has a limit."""
CHUNK = 512
"""Number of rows that are tokenized together."""

_EQUAL_PAIR = "chosen equals rejected"


class TooLong(StrEnum):
    """What to do with a row over the length limit: drop it, truncate its prompt on the left, or raise an error."""

    drop = "drop"
    truncate_left = "truncate_left"
    error = "error"


class DroppedRow(NamedTuple):
    """A row that is left out of the dataset."""

    reason: str


@dataclass(frozen=True)
class RowText:
    """A row as text.

    Attributes:
        row: The row. An excerpt replaces the text of its prompt.
        sequences: The text of each sequence.
        labels: One label per sequence; empty without labels.
        margins: One preference margin per sequence; empty without margins.
        pairs: Whether consecutive sequences are pairs. Pairs with equal tokens are dropped.
        images: The images of the row; None without images.
    """

    row: Row
    sequences: Sequence[Written]
    labels: Sequence[float] = ()
    margins: Sequence[float] = ()
    pairs: bool = False
    images: RowImages | None = None


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of one sequence.

    Attributes:
        ids: Token ids.
        trained: For each token, 1 if the model writes it and trains on it, otherwise 0.
        prompt: Number of tokens before the first trained one.
        start: Number of start tokens, which truncation keeps.
    """

    ids: list[int]
    trained: bytes
    prompt: int
    start: int

    def shorten(self, n: int) -> TokenSequence:
        """Return the sequence without the first `n` prompt tokens after the start tokens."""
        if not n:
            return self
        # All flags before the first trained token are 0, so it does not matter which n of them are dropped.
        ids = self.ids[: self.start] + self.ids[self.start + n :]
        return replace(self, ids=ids, trained=self.trained[n:], prompt=self.prompt - n)


@dataclass(frozen=True)
class EncodedRow:
    """A row as token sequences.

    Attributes:
        row: The row.
        sequences: Its sequences.
        labels: One label per sequence; empty without labels.
        margins: One preference margin per sequence; empty without margins.
        truncated: Whether the prompt was truncated on the left.
        images: The images of the row; None without images.
    """

    row: Row
    sequences: Sequence[TokenSequence]
    labels: Sequence[float] = ()
    margins: Sequence[float] = ()
    truncated: bool = False
    images: RowImages | None = None


Encoded: TypeAlias = EncodedRow | DroppedRow


_ROOM: ContextVar[int | None] = ContextVar("room", default=None)


@contextmanager
def room_for(tokens: int | None) -> Iterator[None]:
    """Load data for a run that has room for sequences of this length; None: of any length."""
    before = _ROOM.set(tokens)
    try:
        yield
    finally:
        _ROOM.reset(before)


@dataclass(frozen=True)
class LengthLimit:
    """Length limit of the sequences of a row.

    Attributes:
        setting: Name of the config field, for messages.
        tokens: Maximum length of a sequence in tokens; None sets no limit.
        too_long: Handling of rows with longer sequences.
        room: Length from which a sequence without limit is refused, see `room_for`.
    """

    setting: str
    tokens: int | None
    too_long: TooLong
    room: int | None = field(default_factory=_ROOM.get)

    def bound(self, text: RowText, tokenizer: PreTrainedTokenizerBase) -> RowText | DroppedRow:
        """Return the row without text that is certainly above the limit, before all of it is tokenized.

        Raises:
            DataError: a sequence exceeds the limit, and `too_long` is error; or it exceeds the room of the run.
        """
        if self.tokens is None:
            room = self.room or _MOST_TOKENS
            for written in text.sequences:
                if part_over(tokenizer, "".join(segment.text for segment in written.segments), room) is not None:
                    raise DataError(
                        f"a sequence has far more than {room:,} tokens, for which the run has room. Remove the row, "
                        f"or set {self.setting}. In training, microbatch.max_tokens_per_microbatch is the room."
                    )
            return text
        sequences = []
        for written in text.sequences:
            cut, rest = [], written.segments
            if self.too_long is TooLong.truncate_left and rest and not rest[0].trained:
                end = part_over(tokenizer, rest[0].text, self.tokens, end=True)  # `fit` keeps a part of it
                cut, rest = [rest[0] if end is None else rest[0]._replace(text=end)], rest[1:]
            if part_over(tokenizer, "".join(segment.text for segment in rest), self.tokens) is not None:
                if self.too_long is TooLong.error:
                    raise DataError(self._over("far too many"))
                return DroppedRow(self._reason)
            sequences.append(written._replace(segments=[*cut, *rest]))
        return replace(text, sequences=sequences)

    @property
    def _reason(self) -> str:
        return f"longer than {self.setting}={self.tokens}"

    def _over(self, tokens: int | str) -> str:
        return (
            f"a sequence has {tokens} tokens, more than {self.setting}={self.tokens}. Raise {self.setting}, or set "
            "too_long=drop or truncate_left."
        )

    def fit(self, row: EncodedRow) -> Encoded:
        """Return the row with its prompts truncated to fit. Sequences with the same prompt keep the same part of it.

        Raises:
            DataError: a sequence exceeds the limit, and `too_long` is error.
        """
        longest = max(len(sequence.ids) for sequence in row.sequences)
        if self.tokens is None or longest <= self.tokens:
            return row
        if self.too_long is TooLong.error:
            raise DataError(self._over(longest))
        # The longest response decides for all responses to a prompt: they must be compared after the same prompt.
        excess: dict[tuple[int, ...], int] = defaultdict(int)
        for sequence in row.sequences:
            prompt = tuple(sequence.ids[: sequence.prompt])
            excess[prompt] = max(excess[prompt], len(sequence.ids) - self.tokens)
        cuts = [excess[tuple(sequence.ids[: sequence.prompt])] for sequence in row.sequences]
        # At least one prompt token must remain, or the response would follow nothing.
        too_short = any(s.prompt - s.start <= cut for s, cut in zip(row.sequences, cuts, strict=True) if cut)
        if self.too_long is TooLong.drop or too_short:
            return DroppedRow(self._reason)
        shortened = [s.shorten(cut) for s, cut in zip(row.sequences, cuts, strict=True)]
        return replace(row, sequences=shortened, truncated=True)


@dataclass
class RowEncoder:
    """Converts rows to token sequences.

    Attributes:
        tokenizer: Tokenizer of the rows.
        write: Returns a row as text, or why it is dropped.
        limit: Length limit of the sequences.
        end: Ending of responses; None if the rows are prompts.
        faults: The warnings that rows caused, by kind. Each kind is shown once.
    """

    tokenizer: PreTrainedTokenizerBase
    write: Callable[[Row], RowText | DroppedRow]
    limit: LengthLimit
    end: Ending | None = None
    faults: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    _shown: set[str] = field(default_factory=set, init=False, repr=False)

    @cached_property
    def _tokens(self) -> Tokens:
        return Tokens(self.tokenizer)

    @cached_property
    def _start(self) -> list[int]:
        return self._tokens.start()

    def __call__(self, row: Row) -> Encoded:
        """Return one row as token sequences.

        Raises:
            DataError: the row is invalid.
        """
        return next(self.encode([("row", row)]))

    def encode(self, rows: Iterable[tuple[str, Row]]) -> Iterator[Encoded]:
        """Yield rows as token sequences, in order. Reads only a few hundred rows ahead.

        Args:
            rows: The place (file and line) of each row, for messages, and the row.

        Raises:
            DataError: a row is invalid; names its place.
        """
        source = iter(rows)
        while chunk := list(islice(source, CHUNK)):
            written: list[RowText | DroppedRow] = []
            for place, row in chunk:
                with _naming(place):
                    written.append(self._write_row(row))
            # One call for all texts of the chunk uses the threads of the tokenizer.
            texts = [w.segments for text in written if isinstance(text, RowText) for w in text.sequences]
            divided = self._tokens.divide(texts)
            for (place, _), text in zip(chunk, written, strict=True):
                if isinstance(text, DroppedRow):
                    yield text
                    continue
                own = list(islice(divided, len(text.sequences)))
                with _naming(place):
                    encoded = self._encode_row(text, own)
                yield encoded

    def _write_row(self, row: Row) -> RowText | DroppedRow:
        text = self.write(row)
        return text if isinstance(text, DroppedRow) else self.limit.bound(text, self.tokenizer)

    def _encode_row(self, text: RowText, divided: Sequence[Divided]) -> Encoded:
        sequences = [self._sequence(written, ids) for written, ids in zip(text.sequences, divided, strict=True)]
        selected = [True] * len(sequences)
        if text.pairs:
            # Tokens are compared, since different texts can become the same tokens.
            selected = [a.ids != b.ids for a, b in zip(sequences[::2], sequences[1::2], strict=True) for _ in range(2)]
            if not any(selected):
                return DroppedRow(_EQUAL_PAIR)
        labels, margins = (tuple(compress(values, selected)) for values in (text.labels, text.margins))
        row = EncodedRow(text.row, tuple(compress(sequences, selected)), labels, margins, images=text.images)
        return self.limit.fit(row)

    def _sequence(self, written: Written, divided: Divided) -> TokenSequence:
        start = [] if written.chat else self._start
        ids: list[int] = []
        trained = bytearray()
        for index, (segment, part) in enumerate(zip(written.segments, divided.parts, strict=True)):
            if index == 0:
                part = with_start(part, start)
            if segment.trained and self.end is not None:
                if index == len(divided.parts) - 1:
                    part = self.end(part)
                else:
                    self._check_end(part, written.chat)
            ids += part
            trained += bytes([segment.trained]) * len(part)
        if self.end is None and not ids:
            raise DataError("the prompt has no tokens.")
        # Nothing predicts the first token, so it alone is nothing to train on.
        if self.end is not None and 1 not in trained[1:]:
            raise DataError("the response has no token to train on.")
        if divided.joined:
            self.warn(
                "joined",
                f"The tokenizer joins the end of a prompt, {divided.joined!r}, with its response in one token. When "
                "the model generates, it sees the tokens of the prompt alone. So they are kept, and the response is "
                "tokenized from there. If prompts end with a space, it is better at the beginning of the responses.",
            )
        prompt = trained.find(1)
        return TokenSequence(ids, bytes(trained), len(ids) if prompt < 0 else prompt, len(start))

    def _check_end(self, turn: Sequence[int], chat: bool) -> None:
        """Warn if a turn before the last one does not end with EOS, at which generation stops."""
        if self.end is None or not self.end.append_eos or list(turn[-1:]) == [self.tokenizer.eos_token_id]:
            return
        if chat:
            writer, cure = (
                "chat template",
                ("Set the EOS token of the tokenizer to the end-of-turn token, or set train_on_turns=each."),
            )
        else:
            writer, cure = "text of a dialogue", "Convert the dialogues to messages if it should."
        self.warn(
            "end",
            f"The {writer} ends an assistant turn with {self.tokenizer.decode(list(turn[-1:]))!r}, but the EOS token "
            f"of the tokenizer is {self.tokenizer.eos_token!r}. Only the last turn of a conversation gets EOS, so the "
            f"model may not stop after earlier turns. Training continues. {cure}",
        )

    def warn(self, kind: str, message: str) -> None:
        """Show a warning about rows, unless one of its kind was shown."""
        self.faults[kind] = message
        if kind not in self._shown:
            self._shown.add(kind)
            warnings.warn(message, stacklevel=2)


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Add the place of a row to its `DataError`s."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


@dataclass(frozen=True, eq=False)
class Ending:
    """Callable that ends a response with one EOS, and removes the whitespace that a chat template writes after it.

    Raises:
        ConfigError: `append_eos` is set, and the tokenizer has no EOS token.
    """

    tokenizer: PreTrainedTokenizerBase
    append_eos: bool = True
    """Whether to end responses with EOS; false leaves them unchanged."""

    def __post_init__(self) -> None:
        if self.append_eos and self.tokenizer.eos_token_id is None:
            raise ConfigError("append_eos=true: the tokenizer has no EOS token. Set append_eos=false.")

    def __call__(self, response: list[int]) -> list[int]:
        """Return the response with its ending."""
        if not self.append_eos:
            return response
        eos = self.tokenizer.eos_token_id
        if eos in response:
            end = len(response) - response[::-1].index(eos)
            if not self.tokenizer.decode(response[end:]).strip():
                return response[:end]
        return [*response, eos]


@dataclass(frozen=True)
class DecodedSequence:
    """The text of a sequence.

    Attributes:
        segments: Runs of tokens that are trained, or not, as text with special tokens.
        label: Label or reward of the sequence; None without labels.
    """

    segments: list[Segment]
    label: float | None = None


def decode_row(sample: SequenceSample, tokenizer: PreTrainedTokenizerBase) -> list[DecodedSequence]:
    """Return the sequences of the first row of a sample as text; empty if the sample has no tokens.

    Args:
        sample: Rows with `input_ids` and `loss_mask`, or with `prompt_ids`.
        tokenizer: Tokenizer of the sample.
    """
    tokens = Tokens(tokenizer)
    row = sample.take(range(min(1, len(sample))))
    if "prompt_ids" in row:
        return [DecodedSequence([Segment(tokens.decode(ids.tolist(), ()))]) for ids in row.sequences("prompt_ids")]
    if not {"input_ids", "loss_mask"} <= row.keys:
        return []
    labels = next((row[key].tolist() for key in ("labels", "rewards") if key in row), [])
    decoded = []
    for index, (ids, loss) in enumerate(zip(row.sequences("input_ids"), row.sequences("loss_mask"), strict=True)):
        changes = ((loss[1:] != loss[:-1]).nonzero()[:, 0] + 1).tolist()
        given, runs = ids.tolist(), zip([0, *changes], [*changes, len(ids)], strict=True)
        segments = [Segment(tokens.decode(given[a:b], given[:a]), bool(loss[a])) for a, b in runs if a < b]
        decoded.append(DecodedSequence(segments, labels[index] if labels else None))
    return decoded
