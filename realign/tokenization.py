"""Tokenize texts as wholes, and divide their tokens where the model takes over.

The tokens of a part of a text are not a part of its tokens: tokenizers like that of Llama 2 put a blank before each
text, and many join characters across any border. See docs/adr/0047-whole-then-divided.md for the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, islice, takewhile
from typing import Any, NamedTuple

from realign.errors import DataError

_BATCH = 2048
"""Number of texts per tokenizer call: enough to use its threads, few enough to store as lists of Python ints."""
_ANCHORS = ("\n", "a")
"""Texts that a text continues to find its tokens: one of them shares no token with it."""
_CONTEXT = 8
"""Number of preceding tokens that are decoded with a text."""
_NEAR = 16
"""Number of tokens before a border that a text behind it can change. Twice as many are tokenized again to see that."""


class Divided(NamedTuple):
    """The tokens of a text in parts."""

    parts: list[list[int]]
    """Token ids of each part."""
    joined: str = ""
    """End of a context that shares a token with the text that the model writes after it; empty without one."""


class _Border(NamedTuple):
    """The end of a part of a text. `near` is the text before it that is tokenized again, without what follows."""

    at: int
    """Its place in characters."""
    token: int
    """Index of the first token of the whole text that is not before it."""
    near: str
    first: int
    """Index of the first token of `near` in the whole text."""
    exact: bool
    """Whether `near` has the same tokens as it has behind what is before it. Else, its last ones are the same."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """Converts texts to token ids and back. Adds no special tokens."""

    tokenizer: Any

    def encode(self, texts: Iterable[str]) -> Iterator[list[int]]:
        """Yield the token ids of each text."""
        for batch in self._batches(texts):
            yield from batch["input_ids"]

    def divide(self, texts: Iterable[Sequence[tuple[str, bool]]]) -> Iterator[Divided]:
        """Yield the tokens of texts that are given in parts, each with whether the model writes it.

        They are the tokens of the whole text, if these begin with the tokens of each text after which the model writes,
        as they are in generation. Otherwise each part continues the tokens of the parts before it. A token that begins
        in a part that the model writes, and ends in the next part, belongs to the former.
        """
        source = iter(texts)
        while chunk := list(islice(source, _BATCH)):
            wholes = ["".join(text for text, _ in parts) for parts in chunk]
            (batch,) = self._batches(wholes)
            borders = [self._borders(batch, i, parts, wholes[i]) for i, parts in enumerate(chunk)]
            distinct = list(dict.fromkeys(border.near for own in borders for border in own))  # few, of chat messages
            near = dict(zip(distinct, self.encode(distinct), strict=True))
            for parts, whole, ids, own in zip(chunk, wholes, batch["input_ids"], borders, strict=True):
                ends = [0]
                for border, (_, written) in zip(own, parts[1:], strict=True):
                    end, shared = self._end(border, near[border.near], whole, ids)
                    if shared and written:
                        yield Divided(self._apart(parts), border.near[-40:])
                        break
                    ends.append(end + shared)
                else:
                    yield Divided([ids[a:b] for a, b in zip(ends, [*ends[1:], len(ids)], strict=True)])

    def _end(self, border: _Border, near: list[int], whole: str, ids: list[int]) -> tuple[int, bool]:
        """Return how many tokens of a text are those of the text before a border, and whether the next one crosses it.

        Args:
            border: the border.
            near: the tokens of `border.near`.
            whole: the text.
            ids: its tokens.
        """
        first = border.first
        if not border.exact:
            if near[-_NEAR:] == ids[border.token - _NEAR : border.token]:
                return border.token, False
            near, first = next(self.encode([whole[: border.at]])), 0
        equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(near, ids[first:], strict=False)))
        return first + equal, equal < len(near)

    def _apart(self, parts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        divided, last = list[list[int]](), None
        for text, _ in parts:
            divided.append(self.encode_following(text, last) if any(divided) else next(self.encode([text])))
            last = divided[-1][-1] if divided[-1] else last
        return divided

    def encode_following(self, text: str, last: int | None = None) -> list[int]:
        """Return the token ids of a text that follows other text.

        Args:
            text: the text.
            last: id of the token before it; None if it is unknown or no special one.
        """
        if not text:
            return []
        anchors = [self._added[last]] if last in self._added else []
        for anchor in (*anchors, *_ANCHORS):
            before, both = self.encode([anchor, anchor + text])
            if both[: len(before)] == before:
                return both[len(before) :]
        return next(self.encode([text]))

    def decode(self, ids: Sequence[int], before: Sequence[int], *, special: bool = True) -> str:
        """Return the text of token ids that follow others.

        Args:
            ids: the token ids.
            before: the token ids before them.
            special: whether to include special tokens.
        """
        if not self._separates:
            return self._decode_after(ids, before, special)
        texts, last = list[str](), list(before)
        for added, run in groupby(ids, key=self._added.__contains__):
            own = list(run)
            after_added = last and last[-1] in self._added
            texts.append(self._decode(own, special) if added or after_added else self._decode_after(own, last, special))
            last = own
        return "".join(texts)

    def _decode_after(self, ids: Sequence[int], before: Sequence[int], special: bool) -> str:
        for tokens in range(_CONTEXT, _CONTEXT + 4) if before else ():
            context = before[-tokens:]
            head = self._decode(context, special)
            if head.startswith("\ufffd") and len(before) > tokens:  # the context begins within a character
                continue
            text = self._decode([*context, *ids], special)
            if text.startswith(head):
                return text[len(head) :]
            break
        return self._decode(ids, special)

    def texts(self, ids: Iterable[int], *, special: bool = True) -> list[str]:
        """Return the text of each token, as it is within a text; see `decode`."""
        before = next(self.encode([_ANCHORS[-1]]))
        return [self.decode([i], before, special=special) for i in ids]

    def _decode(self, ids: Sequence[int], special: bool) -> str:
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def start(self) -> list[int]:
        """Return the special tokens that the tokenizer adds before a text (often one BOS, or none).

        Raises:
            DataError: the tokenizer encodes a text differently with and without special tokens.
        """
        # Tried out with a text, since `bos_token_id` does not say whether the tokenizer adds this token.
        bare = self.tokenizer("x", add_special_tokens=False)["input_ids"]
        full = self.tokenizer("x")["input_ids"]
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return list(full[:at])
        raise DataError(
            f"{type(self.tokenizer).__name__} encodes 'x' as {bare} without special tokens, but as {full} with them. "
            "Use a tokenizer that adds special tokens only before or after a text."
        )

    def _batches(self, texts: Iterable[str]) -> Iterator[Any]:
        source = iter(texts)
        while batch := list(islice(source, _BATCH)):
            yield self.tokenizer(
                batch,
                add_special_tokens=False,
                padding=False,
                truncation=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # suppresses its warning about long texts; `LengthLimit` handles them
            )

    @cached_property
    def _added(self) -> dict[int, str]:
        """The texts of the added tokens, by id. The unknown token is none, since it stands for other texts."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return {i: str(token.content) for i, token in self.tokenizer.added_tokens_decoder.items() if i != unknown}

    @cached_property
    def _separates(self) -> bool:
        """Whether a text after an added token begins with the blank that the tokenizer puts before a whole text."""
        last = next(iter(self._added), None)
        return last is not None and next(self.encode(["x"])) == self.encode_following(
            "x", last
        ) != self.encode_following("x")

    @cached_property
    def _firm(self) -> frozenset[int]:
        """Ids of the tokens that are found in a text before it is normalized, so that it divides at each of them."""
        added = self.tokenizer.added_tokens_decoder
        return frozenset(i for i in self._added if not added[i].normalized)

    def _borders(self, batch: Any, index: int, parts: Sequence[tuple[str, bool]], whole: str) -> list[_Border]:
        """Return the borders between the parts of a text.

        What follows a border changes the tokens close to it, so only these are compared: those since the last firm
        token, at which texts divide, or else the last ones.
        """
        ids, borders = batch["input_ids"][index], []
        for at in islice(accumulate(len(text) for text, _ in parts), len(parts) - 1):
            token, first, exact = len(ids), 0, True
            if getattr(self.tokenizer, "is_fast", False):
                found = (batch.char_to_token(index, x) for x in range(at, len(whole)))
                token = next((t for t in found if t is not None), len(ids))
                recent = range(token - 1, max(-1, token - 2 * _NEAR), -1)
                firm = next((i for i in recent if ids[i] in self._firm), None)
                first = max(0, token - 2 * _NEAR) if firm is None else firm
                exact = firm is not None or not first
            start = batch.token_to_chars(index, first).start if first else 0
            borders.append(_Border(at, token, whole[start:at], first, exact))
        return borders


def with_start(ids: list[int], start: Sequence[int]) -> list[int]:
    """Return token ids with the `start` tokens before them, unless they begin with these."""
    first = list(start)
    return ids if ids[: len(first)] == first else first + ids
