"""Check before training that rows and their responses fit the context window of the models that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from realign.api import Model
from realign.data import Dataset
from realign.errors import ConfigError


def check_positions(
    dataset: Dataset,
    response: int,
    models: Mapping[str, Model],
    roles: Iterable[str],
    what: str,
    *,
    setting: str,
) -> None:
    """Check that the longest row plus a response fits the positions of every model that reads it.

    Without this check, a prompt that is too long would stop the run when it is drawn, possibly hours later.

    Args:
        dataset: the rows; not checked if the dataset does not report its longest sequence.
        response: maximum number of tokens of a response to a row; 0 without responses.
        models: models by role.
        roles: roles that read the rows.
        what: config key of the rows, for messages.
        setting: config key that limits the response length, for messages.

    Raises:
        ConfigError: a row does not fit; the message contains the role, the lengths and the setting to change.
    """
    rows, texts = dataset.longest_sequence, dataset.longest_text
    for role in dict.fromkeys(roles):
        engine = models[role].engine
        limit = None if engine is None else engine.positions
        if limit is None:
            continue
        if rows + response > limit:
            long = f"a row of {what} has {rows} tokens" + (f" and its response up to {response}" if response else "")
            raise ConfigError(
                f"models.{role}: its context window has {limit} positions, but {long}. "
                f"{_cure(rows, response, limit, setting)}"
            )
        if texts > limit:
            raise ConfigError(
                f"models.{role}: its context window has {limit} positions, but a text of {what}.pretraining has "
                f"{texts} tokens. Limit the texts to {limit} tokens."
            )


def check_length(response: int, models: Mapping[str, Model], roles: Iterable[str], setting: str) -> None:
    """Check that responses fit the positions of every model that reads them, before the rows are known.

    Args:
        response: maximum number of tokens of a response, or of a whole sequence.
        models: models by role.
        roles: roles that read the responses.
        setting: config key that limits this number, for messages.

    Raises:
        ConfigError: they do not fit; the message contains the role and the key to change.
    """
    for role in dict.fromkeys(roles):
        engine = models[role].engine
        limit = None if engine is None else engine.positions
        if limit is not None and response > limit:
            raise ConfigError(
                f"models.{role}: its context window has {limit} positions, but {setting}={response}. Lower it, so that "
                "prompt and response fit."
            )


def _cure(rows: int, response: int, limit: int, setting: str) -> str:
    if not response:
        return f"Limit the rows to {limit} tokens."
    if response >= limit:
        fits = f"to at most {limit - rows}" if rows < limit else f"below {limit} and limit the rows"
        return f"Set {setting} {fits}."
    lower = f", or set {setting} to at most {limit - rows}" if rows < limit else ""
    return f"Limit the rows to {limit - response} tokens{lower}."
