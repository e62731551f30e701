"""Sentiment reward from the VADER lexicon (needs the extra `sentiment`)."""

from __future__ import annotations

from functools import cache
from typing import Any

from realign.errors import ConfigError


def compound(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return VADER's compound score of prompt and response together, from -1 to 1 (Hutto and Gilbert, ICWSM 2014).

    Raises:
        ConfigError: vaderSentiment is not installed.
    """
    return float(_analyzer().polarity_scores(f"{prompt} {response}")["compound"])


@cache
def _analyzer() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise ConfigError(
            "realign.rewards.sentiment needs the package vaderSentiment: pip install 'realign-rl[sentiment]'"
        ) from error
    return SentimentIntensityAnalyzer()
