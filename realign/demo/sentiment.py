"""Task of `make rlhf`: generated short reviews, and preferences for the more positive one, labeled by a lexicon.

A review consists of an opening (the prompt) and a continuation of one to three clauses from a small grammar. Reviews of
every tone are equally frequent, so a model that imitates them is neutral on average. Negations, degree adverbs, "but"
and exclamation marks change the score of a word, so single words do not determine the tone.

A preference is a pair of continuations of one opening. VADER (`realign.rewards.sentiment`) labels the more positive
one. Human labelers tend to prefer longer responses (arXiv:2310.03716). So a fraction of the training labels prefers the
longer one; the reward model learns this bias, and the policy exploits it. Labels of held-out pairs are unbiased.

`prepare` writes a Hugging Face model folder and JSONL files, which every CLI command accepts. The same from the shell:

    python -m realign.demo.sentiment [folder] [seed]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from realign.demo.tiny import build_model, build_tokenizer, save, write_rows
from realign.rewards.sentiment import compound

GOLD = "realign.rewards.sentiment:compound"
"""Gold reward function, which labels the pairs and scores the policy, in the format of reward interfaces."""


class Tone(IntEnum):
    """Tone of a clause."""

    bad = -1
    none = 0
    good = 1


_LEADS = (
    "in general", "last week", "this time", "as usual", "on monday", "on sunday", "in the morning", "in the evening",
    "after the trip", "before noon", "in my opinion", "for my part", "that day", "in april", "once again", "overall",
)  # fmt: skip
PLACES: Mapping[str, Sequence[str]] = {
    "at the cafe": ("soup", "coffee", "cake", "menu", "waiter", "table", "tea"),
    "in the hotel": ("room", "bed", "breakfast", "staff", "pool", "view", "lift"),
    "in the film": ("story", "acting", "ending", "music", "script", "photography", "cast"),
    "of the book": ("plot", "language", "style", "beginning", "cover", "dialogue", "author"),
    "of the phone": ("screen", "battery", "camera", "keyboard", "sound", "case", "software"),
    "on the tour": ("guide", "bus", "garden", "walk", "lunch", "museum", "group"),
}
ADJECTIVES = {
    Tone.good: (
        "good", "great", "excellent", "wonderful", "lovely", "amazing", "brilliant", "perfect", "pleasant", "nice",
        "delightful", "superb", "fantastic", "enjoyable", "charming", "beautiful", "impressive", "fine", "awesome",
        "outstanding", "splendid", "terrific", "elegant", "fun", "fascinating", "clever", "satisfying", "comfortable",
    ),
    Tone.bad: (
        "bad", "terrible", "awful", "horrible", "poor", "disappointing", "boring", "dull", "ugly", "nasty", "dreadful",
        "disgusting", "miserable", "annoying", "weak", "unpleasant", "useless", "pathetic", "lousy", "gloomy", "lame",
        "ridiculous", "painful", "irritating", "worthless", "uncomfortable", "wrong", "stupid",
    ),
    Tone.none: (
        "small", "large", "long", "short", "new", "old", "usual", "plain", "green", "blue", "round", "modern", "local",
        "heavy", "thin", "quick", "dark", "simple", "average", "familiar",
    ),
}  # fmt: skip
FEELINGS = {
    Tone.good: ("happy", "pleased", "satisfied", "glad", "thrilled", "grateful", "cheerful", "relaxed"),
    Tone.bad: ("sad", "angry", "upset", "disappointed", "frustrated", "tired", "annoyed", "bored"),
    Tone.none: ("awake", "curiously still", "there for an hour", "at the door"),
}
NOUNS = {
    Tone.good: ("a joy", "a success", "a treat", "a masterpiece", "a pleasure", "a triumph"),
    Tone.bad: ("a disaster", "a mess", "a failure", "a waste", "a problem", "a shame"),
    Tone.none: ("news to nobody", "part of the price", "what we expected", "a copy of the last one", "on the list"),
}
VERBS = {
    Tone.good: ("loved", "liked", "enjoyed", "adored", "praised"),
    Tone.bad: ("hated", "disliked", "regretted", "dreaded", "despised"),
    Tone.none: ("saw", "tried", "noticed", "described", "remembered"),
}
STRONGER = ("very", "really", "extremely", "so", "absolutely", "incredibly", "quite")
WEAKER = ("slightly", "somewhat", "barely", "hardly", "almost")


@dataclass(frozen=True)
class SentimentTask:
    """Paths of the model and data files of the task."""

    model: Path
    demonstrations: Path
    """JSONL of `prompt`, `response`: the demonstrations for SFT."""
    pairs: Path
    """JSONL of `prompt`, `chosen`, `rejected`: the training pairs of the reward model."""
    held_out_pairs: Path
    """JSONL of `prompt`, `chosen`, `rejected`: pairs with held-out openings and unbiased labels."""
    prompts: Path
    """JSONL of `prompt`: the training openings of reinforcement learning."""
    held_out: Path
    """JSONL of `prompt`: held-out openings."""

    @classmethod
    def of(cls, folder: Path) -> SentimentTask:
        """Return the paths of the files that `prepare` writes to `folder`."""
        names = ("demonstrations", "pairs", "held_out_pairs", "prompts", "held_out")
        return cls(folder / "model", *(folder / f"{name}.jsonl" for name in names))


def prepare(
    folder: Path,
    *,
    seed: int,
    demonstrations: int = 20_000,
    pairs: int = 4000,
    hasty: float = 0.3,
    shuffle: bool = False,
    held_out_pairs: int = 500,
    held_out: int = 96,
) -> SentimentTask:
    """Write model, tokenizer and data of the task.

    Args:
        folder: Output folder for `model/`, `demonstrations.jsonl`, `pairs.jsonl`, `held_out_pairs.jsonl`,
            `prompts.jsonl` and `held_out.jsonl`.
        seed: Seed of the data and of the weights.
        demonstrations: Number of demonstrations for SFT.
        pairs: Number of training pairs for the reward model.
        hasty: Fraction of the training pairs whose label prefers the longer response, whatever its tone.
        shuffle: Whether to assign random labels to the training pairs, as a negative control.
        held_out_pairs: Number of unbiased pairs for the evaluation of the reward model.
        held_out: Number of openings for the evaluation of the policy.
    """
    task = SentimentTask.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    every = openings()
    rng.shuffle(every)
    asked, trained = every[:held_out], every[held_out:]
    write_rows(task.held_out, ({"prompt": opening} for opening in asked))
    write_rows(task.prompts, ({"prompt": opening} for opening in trained))
    write_rows(task.held_out_pairs, (preference(rng, asked) for _ in range(held_out_pairs)))
    write_rows(
        task.demonstrations,
        (
            {"prompt": opening, "response": continuation(rng, opening)}
            for opening in rng.choices(trained, k=demonstrations)
        ),
    )
    labelled = [preference(rng, trained, hasty) for _ in range(pairs)]
    write_rows(task.pairs, (_with_random_label(rng, pair) for pair in labelled) if shuffle else labelled)
    words = vocabulary()
    save(task.model, build_model("llama", 2 + len(words), seed=seed), _tokenizer(words))
    return task


def openings() -> list[str]:
    """Return every opening of a review. VADER scores all of them as neutral."""
    return [
        f"{lead} the {aspect} {place}" for lead in _LEADS for place, aspects in PLACES.items() for aspect in aspects
    ]


def preference(rng: random.Random, openings: Sequence[str], hasty: float = 0.0) -> dict[str, str]:
    """Return a pair of continuations of one opening with different VADER scores.

    With probability `hasty`, the label prefers the longer continuation.
    """
    while True:
        prompt = rng.choice(openings)
        two = [continuation(rng, prompt) for _ in range(2)]
        judged = [compound(prompt, response, {}) for response in two]
        if judged[0] != judged[1]:
            break
    lengths = [len(response.split()) for response in two]
    if rng.random() < hasty and lengths[0] != lengths[1]:
        judged = [float(length) for length in lengths]
    chosen, rejected = two if judged[0] > judged[1] else reversed(two)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _with_random_label(rng: random.Random, pair: Mapping[str, str]) -> dict[str, str]:
    """Return the pair with a random label."""
    chosen, rejected = rng.sample([pair["chosen"], pair["rejected"]], 2)
    return {"prompt": pair["prompt"], "chosen": chosen, "rejected": rejected}


def continuation(rng: random.Random, opening: str) -> str:
    """Return the continuation of an opening: one to three clauses, most of which have the same tone."""
    place = next(place for place in PLACES if opening.endswith(place))
    mood = rng.choice(list(Tone))
    words: list[str] = []
    before = None
    for number in range(rng.choice((1, 1, 2, 2, 3))):
        tone = mood if rng.random() < 0.7 else rng.choice(list(Tone))
        if number:
            turns = before is not None and before * tone < 0
            words.append("but" if turns and rng.random() < 0.8 else rng.choice(("and", ", and", "while")))
            words.append(_clause(rng, tone, rng.choice(PLACES[place])))
        else:
            words.append(_predicate(rng, tone))
        before = tone
    loud = mood is not Tone.none and rng.random() < 0.25
    words.append(rng.choice(("!", "! !", "! ! !")) if loud else ".")
    return " ".join(words)


def _clause(rng: random.Random, tone: Tone, aspect: str) -> str:
    """Return a clause with a separate subject."""
    kind = rng.random()
    if kind < 0.6:
        return f"the {aspect} {_predicate(rng, tone)}"
    who = rng.choice(("i", "we", "my sister"))
    if kind < 0.75 and tone is not Tone.none:
        return f"{who} would {'not ' if tone is Tone.bad else ''}recommend it"
    verb = rng.choice(VERBS[tone])
    return f"{who} {'really ' if rng.random() < 0.2 else ''}{verb} it"


def _predicate(rng: random.Random, tone: Tone) -> str:
    """Return a predicate: an adjective (plain, intensified, weakened or negated), a feeling, or a noun."""
    kind = rng.random()
    if kind < 0.15:
        return f"left {rng.choice(('me', 'us'))} {rng.choice(FEELINGS[tone])}"
    if kind < 0.3:
        return f"was {rng.choice(NOUNS[tone])}"
    denied = rng.random() < 0.3
    adjective = rng.choice(ADJECTIVES[Tone(-tone) if denied else tone])
    degree = rng.random()
    if degree < 0.25:
        adjective = f"{rng.choice(STRONGER)} {adjective}"
    elif degree < 0.4 and not denied:
        adjective = f"{rng.choice(WEAKER)} {adjective}"
    return f"was {rng.choice(('not', 'never')) + ' ' if denied else ''}{adjective}"


def vocabulary() -> list[str]:
    """Return every word that a review can contain, in a fixed order."""
    listed = [_LEADS, PLACES, *PLACES.values(), STRONGER, WEAKER]
    listed += [words for kind in (ADJECTIVES, FEELINGS, NOUNS, VERBS) for words in kind.values()]
    fixed = ("the i we my sister it would not never recommend left me us was and , but while . !",)
    return sorted({word for texts in (*listed, fixed) for text in texts for word in text.split()})


def _tokenizer(words: Sequence[str]) -> Any:
    from tokenizers import pre_tokenizers

    return build_tokenizer(words, split=pre_tokenizers.WhitespaceSplit())


if __name__ == "__main__":
    folder, seed = (sys.argv[1:] + ["runs/sentiment", "0"][len(sys.argv) - 1 :])[:2]
    for name, path in vars(prepare(Path(folder), seed=int(seed))).items():
        print(f"{name}: {path}")
