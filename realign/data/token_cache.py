"""Tokens of rows on disk, so that a large dataset is tokenized once for all runs with the same tokenizer and format.

An entry has the tokens of `CHUNK` rows as JSON, and is named by a hash of all that they follow from. It appears by a
rename, so a run that is killed loses one entry at most. A damaged one is missing, and computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realign.cache_folder import Cache
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
    _cache: Cache = field(default_factory=partial(Cache, "tokens"), init=False, repr=False)

    def encode(self, rows: Iterable[tuple[str, Row]]) -> Iterator[Encoded]:
        """Yield rows as token sequences, in order; see `RowEncoder.encode`."""
        # a template that writes the date gives other tokens tomorrow
        dated = "strftime_now" in str(self.encoder.tokenizer.chat_template)
        source = iter(rows)
        while chunk := list(islice(source, CHUNK)):
            today = _today(dated)
            key = self._key([row for _, row in chunk], today)
            entry = None if key is None else self._read(key)
            if entry is not None:
                for kind, message in entry["faults"].items():  # as the run did that wrote the entry
                    self.encoder.warn(kind, message)
                yield from (_unpack(row, packed) for (_, row), packed in zip(chunk, entry["rows"], strict=True))
                continue
            self.encoder.faults = {}
            encoded = list(self.encoder.encode(chunk))
            if key is not None and today == _today(dated):
                content = json.dumps({"faults": self.encoder.faults, "rows": list(map(_pack, encoded))}).encode()
                self._cache.write(key, _digest(key, content) + content)
            yield from encoded

    def _key(self, rows: list[Row], today: str) -> str | None:
        """Return the key of a chunk of rows; None if they contain other values than those of JSON."""
        with suppress(TypeError, ValueError, RecursionError):
            return key_of("tokens", _code_version(), self.format, today, json.dumps(rows, ensure_ascii=False))
        return None

    def _read(self, key: str) -> Any:
        digest, content = (found := self._cache.read(key) or b"")[:32], found[32:]
        return json.loads(content) if digest == _digest(key, content) else None


def _today(dated: bool) -> str:
    return date.today().isoformat() if dated else ""


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _pack(encoded: Encoded) -> Any:
    if isinstance(encoded, DroppedRow):
        return encoded.reason
    sequences = [(s.ids, s.trained.hex(), s.prompt, s.start) for s in encoded.sequences]
    return sequences, encoded.labels, encoded.margins, encoded.truncated


def _unpack(row: Row, packed: Any) -> Encoded:
    if isinstance(packed, str):
        return DroppedRow(packed)
    sequences, labels, margins, truncated = packed
    tokens = [TokenSequence(ids, bytes.fromhex(trained), *rest) for ids, trained, *rest in sequences]
    return EncodedRow(row, tokens, labels, margins, truncated)


@cache
def _code_version() -> str:
    """Return a hash of the source of this package and of the versions of the packages that tokenize for it."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    for package in ("transformers", "tokenizers", "sentencepiece", "jinja2"):
        with suppress(PackageNotFoundError):
            digest.update(f"{package} {version(package)}\n".encode())
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    """Return the key of what follows from these texts."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogatepass")
        digest.update(f"{len(content)} ".encode() + content)
    return digest.hexdigest()
