"""Sentiment reward from the VADER lexicon (needs the extra `sentiment`)."""

from __future__ import annotations

from functools import cache
from typing import Any


def compound(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return VADER's compound score of prompt and response together, from -1 to 1 (Hutto and Gilbert, ICWSM 2014).

    Raises:
        ImportError: vaderSentiment is not installed.
    """
    return float(_analyzer().polarity_scores(f"{prompt} {response}")["compound"])


@cache
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ImportError("realign.rewards.sentiment needs vaderSentiment: pip install 'realign[sentiment]'") from error
    return SentimentIntensityAnalyzer()
