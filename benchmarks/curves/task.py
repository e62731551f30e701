"""Task of the curves: generated passages, a small GPT-2 that imitates them, and two reward functions.

A passage has several sentences of the grammar in `realign.demo.sentiment`. As in openai/lm-human-preferences, a query
is an excerpt of a passage, and a response continues it. The reward functions count words:

- `sentiment`: positive minus negative words. A negation in the two words before a word flips its sign.
- `descriptiveness`: half the number of different adjectives and adverbs of degree.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from realign.demo.sentiment import (
    ADJECTIVES,
    FEELINGS,
    NOUNS,
    STRONGER,
    VERBS,
    WEAKER,
    Tone,
    continuation,
    openings,
    vocabulary,
)
from realign.demo.tiny import build_tokenizer, write_rows

SENTENCES = 5
"""Sentences of a passage."""
POSITIONS = 64
"""Context window of the model in tokens."""
NEGATIONS = frozenset({"not", "never"})


def _words(tone: Tone) -> frozenset[str]:
    """Return the words that carry a tone."""
    kinds: tuple[Mapping[Tone, Any], ...] = (ADJECTIVES, FEELINGS, NOUNS, VERBS)
    return frozenset(phrase.split()[-1] for kind in kinds for phrase in kind[tone])


SIGNS = dict.fromkeys(_words(Tone.good), 1) | dict.fromkeys(_words(Tone.bad), -1)
DESCRIPTIVE = frozenset(word for words in ADJECTIVES.values() for word in words) | {*STRONGER, *WEAKER}


def _tokens(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def sentiment(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """Return the number of positive minus negative words."""
    words = _tokens(response)
    total = 0
    for i, word in enumerate(words):
        flipped = not NEGATIONS.isdisjoint(words[max(0, i - 2) : i])
        total += SIGNS.get(word, 0) * (-1 if flipped else 1)
    return float(total)


def descriptiveness(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """Return half the number of different adjectives and adverbs of degree."""
    return len(DESCRIPTIVE.intersection(_tokens(response))) / 2


REWARDS = {"sentiment": sentiment, "descriptiveness": descriptiveness}


def passages(count: int, seed: int) -> Iterator[str]:
    """Yield passages of `SENTENCES` sentences."""
    rng, every = random.Random(seed), openings()
    for _ in range(count):
        yield " ".join(f"{opening} {continuation(rng, opening)}" for opening in rng.choices(every, k=SENTENCES))


def prepare(folder: Path, *, width: int, rows: int = 4096, steps: int = 500, seed: int = 0) -> None:
    """Write `texts.jsonl` with passages, and `model/`, a GPT-2 of two layers that was trained on other passages.

    Args:
        folder: output folder.
        width: hidden size of the model.
        rows: number of passages.
        steps: optimizer steps of the language model, on 32 windows of `POSITIONS` tokens each.
        seed: seed of weights and data.
    """
    from tokenizers import pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    folder.mkdir(parents=True, exist_ok=True)
    words = vocabulary()
    write_rows(folder / "texts.jsonl", ({"prompt": text} for text in passages(rows, seed)))
    config = GPT2Config(
        vocab_size=2 + len(words),
        n_positions=POSITIONS,
        n_embd=width,
        n_layer=2,
        n_head=4,
        initializer_range=0.06,
        bos_token_id=1,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config).eval()  # eval: without dropout
        ids = {word: 2 + i for i, word in enumerate(words)}
        stream = torch.tensor([ids[word] for text in passages(8 * steps, seed + 1) for word in text.split()])
        _imitate(model, stream, steps)
    model.save_pretrained(folder / "model")
    build_tokenizer(words, split=pre_tokenizers.WhitespaceSplit()).save_pretrained(folder / "model")


def _imitate(model: Any, stream_T: torch.Tensor, steps: int) -> None:
    """Train a language model on windows of a stream of tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(2, steps))
    for _ in range(steps):
        starts = torch.randint(len(stream_T) - POSITIONS, (32, 1))
        windows = stream_T[starts + torch.arange(POSITIONS)]
        optimizer.zero_grad()
        model(input_ids=windows, labels=windows).loss.backward()
        optimizer.step()
        schedule.step()
