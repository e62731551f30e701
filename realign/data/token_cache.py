"""Tokens of rows on disk, so that a large dataset is tokenized once for all runs with the same tokenizer and format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from realign.array_cache import ArrayCache, Arrays, code_version, key_of
from realign.data.columns import Row
from realign.data.encoding import CHUNK, DroppedRow, Encoded, EncodedRow, RowEncoder, TokenSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PLACES = {"name_or_path", "is_local", "local_files_only", "cache_dir"}
"""Settings of a tokenizer that say where it came from, as do those whose names end in `_file`."""


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a hash of all that a tokenizer and its chat template compute; None if it cannot be told."""
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:  # written in Python, and any attribute may matter
        return None
    given = tokenizer.init_kwargs.items()
    own = {name: value for name, value in given if name not in _PLACES and not name.endswith("_file")}
    settings = json.dumps([own, tokenizer.special_tokens_map], default=str, sort_keys=True)
    return key_of(type(tokenizer).__qualname__, core.to_str(), str(tokenizer.chat_template), settings)


@dataclass
class CachedEncoder:
    """A `RowEncoder` whose tokens stay on disk.

    Attributes:
        encoder: Converts the rows that are not in the cache.
        format: Identifies the tokenizer and all settings that decide about the tokens of a row.
    """

    encoder: RowEncoder
    format: str
    _cache: ArrayCache = field(default_factory=ArrayCache, init=False, repr=False)

    def encode(self, rows: Iterable[tuple[str, Row]]) -> Iterator[Encoded]:
        """Yield rows as token sequences, in order; see `RowEncoder.encode`."""
        # a template that writes the date gives other tokens tomorrow
        dated = "strftime_now" in str(self.encoder.tokenizer.chat_template)
        source = iter(rows)
        while chunk := list(islice(source, CHUNK)):
            plain, today = [row for _, row in chunk], _today(dated)
            key = self._key(plain, today)
            encoded = None if key is None else self._read(key, plain)
            if encoded is None:
                self.encoder.faults = {}
                encoded = list(self.encoder.encode(chunk))
                if key is not None and today == _today(dated):
                    faults = json.dumps(self.encoder.faults).encode()
                    self._cache.put(key, _packed(encoded) | {_FAULTS: np.frombuffer(faults, dtype=np.uint8)})
            yield from encoded

    def _key(self, rows: Sequence[Row], today: str) -> str | None:
        """Return the key of a chunk of rows; None if they contain other values than those of JSON."""
        with suppress(TypeError, ValueError, RecursionError):
            return key_of("tokens", code_version(), self.format, today, json.dumps(rows, ensure_ascii=False))
        return None

    def _read(self, key: str, rows: Sequence[Row]) -> list[Encoded] | None:
        arrays = self._cache.get(key)
        if arrays is None:
            return None
        with suppress(ValueError, LookupError, TypeError):
            faults = json.loads(arrays.pop(_FAULTS).tobytes())
            encoded = _unpacked(arrays, rows)
            for kind, message in faults.items():  # as the run did that wrote the entry
                self.encoder.warn(kind, message)
            return encoded
        return None


def _today(dated: bool) -> str:
    return date.today().isoformat() if dated else ""


_FAULTS = "faults"
_FORM: dict[str, tuple[Any, int]] = {
    "dropped": (np.uint8, 1),
    "truncated": (np.uint8, 1),
    "counts": (np.int64, 2),
    "labels": (np.float64, 1),
    "margins": (np.float64, 1),
    "lengths": (np.int64, 2),
    "ids": (np.int64, 1),
    "trained": (np.uint8, 1),
}
"""Data type and number of dimensions of the arrays of an entry."""


def _packed(encoded: Sequence[Encoded]) -> Arrays:
    rows = [e for e in encoded if isinstance(e, EncodedRow)]
    sequences = [s for row in rows for s in row.sequences]
    dropped = [e.reason if isinstance(e, DroppedRow) else None for e in encoded]
    return {
        "dropped": np.frombuffer(json.dumps(dropped).encode(), dtype=np.uint8),
        "truncated": np.array([row.truncated for row in rows], dtype=np.uint8),
        "counts": np.array([[len(r.sequences), len(r.labels), len(r.margins)] for r in rows], np.int64).reshape(-1, 3),
        "labels": np.array([x for row in rows for x in row.labels], dtype=np.float64),
        "margins": np.array([x for row in rows for x in row.margins], dtype=np.float64),
        "lengths": np.array([[len(s.ids), s.prompt, s.start] for s in sequences], dtype=np.int64).reshape(-1, 3),
        "ids": np.array([i for s in sequences for i in s.ids], dtype=np.int64),
        "trained": np.frombuffer(b"".join(s.trained for s in sequences), dtype=np.uint8),
    }


def _unpacked(arrays: Arrays, rows: Sequence[Row]) -> list[Encoded]:
    """Return the rows of an entry.

    Raises:
        ValueError, LookupError, TypeError: the entry is none of these rows.
    """
    if {name: (array.dtype, array.ndim) for name, array in arrays.items()} != _FORM:
        raise ValueError("the arrays have another form")
    dropped = json.loads(arrays["dropped"].tobytes())
    lengths = arrays["lengths"].tolist()
    ids, trained = arrays["ids"].tolist(), arrays["trained"].tobytes()
    values: dict[str, list[Any]] = {name: arrays[name].tolist() for name in ("labels", "margins")}
    at, tokens, sequences = {"labels": 0, "margins": 0}, 0, list[TokenSequence]()
    for n, prompt, start in lengths:
        if not 0 <= start <= n or not 0 <= prompt <= n or tokens + n > len(ids):
            raise ValueError("a sequence has no such part")
        sequences.append(TokenSequence(ids[tokens : tokens + n], trained[tokens : tokens + n], prompt, start))
        tokens += n
    if tokens != len(ids) or tokens != len(trained):
        raise ValueError("the sequences are not all tokens")
    encoded, first = list[Encoded](), 0
    kept = iter(zip(arrays["counts"].tolist(), arrays["truncated"].tolist(), strict=True))
    for row, reason in zip(rows, dropped, strict=True):
        if reason is not None:
            encoded.append(DroppedRow(str(reason)))
            continue
        counts, truncated = next(kept, ((0, 0, 0), 0))
        if not 0 < counts[0] <= len(sequences) - first:
            raise ValueError("a row has no such sequences")
        own: dict[str, tuple[float, ...]] = {}
        for name, n in zip(("labels", "margins"), counts[1:], strict=True):
            own[name] = tuple(values[name][at[name] : at[name] + n])
            at[name] += n
        encoded.append(
            EncodedRow(row, tuple(sequences[first : first + counts[0]]), own["labels"], own["margins"], bool(truncated))
        )
        first += counts[0]
    if first != len(sequences):
        raise ValueError("the rows are not all sequences")
    return encoded


__all__ = ["CachedEncoder", "tokenizer_identity"]
