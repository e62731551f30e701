"""The task of `make rlhf`: short reviews, and a lexicon that says which of two has the friendlier tone; made here.

A review is an opening (the prompt) and its continuation, of one to three clauses from a small grammar. Reviews of
every tone are equally frequent, so a model that imitates them is neutral on average. Negations, words of degree, "but"
and exclamation marks change what a word of praise counts, so the tone is not that of the single words.

Preferences are pairs of continuations of one opening; VADER (`realign.rewards.sentiment`) says which is friendlier.
People who label pairs tend to take the longer one (arXiv:2310.03716). So do some labels of training pairs here: what
the reward model learns of that, the policy will exploit. The labels of held-out pairs are VADER's own.

`prepare` writes an ordinary Hugging Face folder and JSONL files, on which every command of the CLI works; so does

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

from realign.demo.tiny import build_model, build_tokenizer, write_rows
from realign.rewards.sentiment import compound

GOLD = "realign.rewards.sentiment:compound"
"""Who labels the pairs and judges the policy, as reward interfaces name it."""


class Tone(IntEnum):
    """Of a clause."""

    bad = -1
    none = 0
    good = 1


LEADS = (
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
class Task:
    """Where the parts of the task are."""

    model: Path
    demonstrations: Path
    """JSONL of `prompt`, `response`: the reviews that SFT imitates."""
    pairs: Path
    """JSONL of `prompt`, `chosen`, `rejected`: the preferences that the reward model learns."""
    held_out_pairs: Path
    """The same, for openings that nothing trains on, and without mistakes."""
    prompts: Path
    """JSONL of `prompt`: the openings that reinforcement learning practises on."""
    held_out: Path
    """JSONL of `prompt`: openings that nothing trains on."""

    @classmethod
    def of(cls, folder: Path) -> Task:
        """The parts that `prepare` writes to `folder`."""
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
) -> Task:
    """Write model, tokenizer and data of the task.

    Args:
        folder: gets `model/`, `demonstrations.jsonl`, `pairs.jsonl`, `held_out_pairs.jsonl`, `prompts.jsonl` and
            `held_out.jsonl`.
        seed: of all that is drawn here, and of the weights.
        demonstrations: reviews for SFT.
        pairs: preferences for the reward model.
        hasty: fraction of these of which the longer one is preferred, whatever it says.
        shuffle: deal their labels out at random: the control under which nothing may be learned.
        held_out_pairs: preferences to judge the reward model by, without mistakes.
        held_out: openings to judge the policy by.
    """
    task = Task.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    every = openings()
    rng.shuffle(every)
    asked, kept = every[:held_out], every[held_out:]
    write_rows(task.held_out, ({"prompt": opening} for opening in asked))
    write_rows(task.prompts, ({"prompt": opening} for opening in kept))
    write_rows(task.held_out_pairs, (preference(rng, asked) for _ in range(held_out_pairs)))
    write_rows(
        task.demonstrations,
        (
            {"prompt": opening, "response": continuation(rng, opening)}
            for opening in rng.choices(kept, k=demonstrations)
        ),
    )
    labelled = [preference(rng, kept, hasty) for _ in range(pairs)]
    write_rows(task.pairs, (dealt_out(rng, pair) for pair in labelled) if shuffle else labelled)
    words = vocabulary()
    build_model("llama", 2 + len(words), seed=seed).save_pretrained(task.model)
    _tokenizer(words).save_pretrained(task.model)
    return task


def openings() -> list[str]:
    """Every opening of a review; VADER finds no tone in any."""
    return [f"{lead} the {aspect} {place}" for lead in LEADS for place, aspects in PLACES.items() for aspect in aspects]


def preference(rng: random.Random, openings: Sequence[str], hasty: float = 0.0) -> dict[str, str]:
    """A pair of continuations of one opening that VADER tells apart; preferred by length in this fraction of cases."""
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


def dealt_out(rng: random.Random, pair: Mapping[str, str]) -> dict[str, str]:
    """The pair with its label given by a coin."""
    chosen, rejected = rng.sample([pair["chosen"], pair["rejected"]], 2)
    return {"prompt": pair["prompt"], "chosen": chosen, "rejected": rejected}


def continuation(rng: random.Random, opening: str) -> str:
    """The rest of a review: one to three clauses; clauses of one review tend to be of one tone."""
    place = next(place for place in PLACES if opening.endswith(place))
    mood = rng.choice(list(Tone))
    words: list[str] = []
    before = None
    for number in range(rng.choice((1, 1, 2, 2, 3))):
        tone = mood if rng.random() < 0.7 else rng.choice(list(Tone))
        if number:
            turns = before is not None and before * tone < 0
            words.append("but" if turns and rng.random() < 0.8 else rng.choice(("and", ", and", "while")))
            words.append(clause(rng, tone, rng.choice(PLACES[place])))
        else:
            words.append(predicate(rng, tone))
        before = tone
    loud = mood is not Tone.none and rng.random() < 0.25
    words.append(rng.choice(("!", "! !", "! ! !")) if loud else ".")
    return " ".join(words)


def clause(rng: random.Random, tone: Tone, aspect: str) -> str:
    """A further clause with its own subject."""
    kind = rng.random()
    if kind < 0.6:
        return f"the {aspect} {predicate(rng, tone)}"
    who = rng.choice(("i", "we", "my sister"))
    if kind < 0.75 and tone is not Tone.none:
        return f"{who} would {'not ' if tone is Tone.bad else ''}recommend it"
    verb = rng.choice(VERBS[tone])
    return f"{who} {'really ' if rng.random() < 0.2 else ''}{verb} it"


def predicate(rng: random.Random, tone: Tone) -> str:
    """What is said of a subject: an adjective, plain, stronger, weaker or denied; a feeling; or a noun."""
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
    """Every word that a review can hold, in a fixed order."""
    listed = [LEADS, PLACES, *PLACES.values(), STRONGER, WEAKER]
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
