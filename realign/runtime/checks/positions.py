"""Whether rows, and the responses to them, fit the positions of the models that read them: asked before training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from realign.api import Model
from realign.data import Dataset


def check_positions(
    dataset: Dataset,
    response: int,
    models: Mapping[str, Model],
    roles: Iterable[str],
    what: str,
    *,
    setting: str = "generation.max_new_tokens",
) -> None:
    """Compare the longest row, with a response of `response` tokens, with the positions of every model that reads it.

    Without this a long prompt would end the run when it is drawn, hours later.

    Args:
        dataset: the rows; nothing is compared with one that does not tell its longest sequence.
        response: tokens that a response to a row can have; 0 where there is none.
        models: by role.
        roles: those that read the rows.
        what: config key of the rows, for messages.
        setting: of the length of a response, for messages.

    Raises:
        ValueError: a row leaves no room; names the role, the numbers and what to set.
    """
    rows, texts = dataset.longest_sequence, dataset.longest_text
    for role in dict.fromkeys(roles):
        engine = models[role].engine
        limit = None if engine is None else engine.positions
        if limit is None:
            continue
        if rows + response > limit:
            room = limit - response
            long = f"a row of {what} has {rows} tokens" + (f" and its response up to {response}" if response else "")
            if room > 0:
                cure = f"limit the rows to {room} tokens" + (f", or lower {setting}" if response else "")
            else:
                cure = f"no prompt fits before {response} tokens; lower {setting}"
            raise ValueError(f"models.{role} has {limit} positions, but {long}: {cure}")
        if texts > limit:
            raise ValueError(
                f"models.{role} has {limit} positions, but a text of {what}.pretraining has {texts} tokens: limit them"
            )
