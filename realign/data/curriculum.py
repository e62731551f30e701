"""Curricula: which rows come next, by the rewards that the policy got for them so far.

A curriculum gives each row a weight. The rows come in their usual order (`realign.data.order`), and a row is passed
over with probability `1 - weight / largest weight`. So rows of equal weight come in their usual order, as all rows do
before the first rewards, and no row comes twice in an epoch. Chances are a pure function of the seed and the place, and
the state is a few numbers per row, so a resumed run chooses the same rows.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from realign.api.lengths import IntArray
from realign.api.seeds import derive_seed
from realign.data.dataset import Dataset
from realign.data.order import FRUITLESS, RowOrder
from realign.errors import CheckpointError, ConfigError, RunError
from realign.settings import Count, Finite, Fraction, Settings

_FloatArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class PromptHistory:
    """What a run knows about its N rows when it chooses the next ones.

    Attributes:
        pass_rate: Fraction of responses that passed in the last `window` visits of each row [N]; NaN if it has none.
        visits: Number of times that each row was sampled and scored [N].
        prompts: Number of prompts chosen so far.
        column: Returns the values of a column of the data, such as `history.column("level")` [N].
    """

    pass_rate: _FloatArray
    visits: IntArray
    prompts: int
    column: Callable[[str], Sequence[Any]]


@dataclass
class Curriculum(Settings, ABC):
    """Base class of curricula. A subclass implements `weights`, and may add settings."""

    needs_rewards: ClassVar[bool] = True
    """Whether the graph has to compute rewards."""

    window: Count = 2
    """Number of visits in the rolling pass rate of a row. A visit is the group of responses of one step to it."""
    pass_reward: Finite = 1.0
    """A response passes if its reward is at least this."""

    @abstractmethod
    def weights(self, history: PromptHistory) -> _FloatArray:
        """Return the weight [N] of each row, of which only ratios matter; a row of weight 0 does not come."""

    def describe(self) -> str:
        """Return a line for the launch table."""
        return f"{type(self).__name__} of rewards of at least {self.pass_reward:g} in the last {self.window} visits"


class Prefer(StrEnum):
    """Prompts that come most often."""

    learnable = "learnable"
    """Prompts that are passed sometimes: weight 4p(1 - p) at pass rate p, the variance of the reward, which is 0 if a
    group has no advantage (arXiv:2502.12272)."""
    hard = "hard"
    """Prompts that are rarely passed: weight 1 - p (Kimi k1.5, arXiv:2501.12599)."""


@dataclass
class PassRate(Curriculum):
    """Prompts by their rolling pass rate. A prompt without rewards has the largest weight, 1."""

    prefer: Prefer = Prefer.learnable
    """Which prompts come most often: learnable (weight 4p(1 - p) at pass rate p) | hard (weight 1 - p)."""
    min_weight: Fraction = 0.1
    """Smallest weight, so that every prompt is measured again from time to time."""
    no_resampling_pass_rate: Fraction | None = None
    """Prompts with at least this pass rate don't come again (open-instruct has a setting of this name); null: all
    prompts do."""

    @override
    def weights(self, history: PromptHistory) -> _FloatArray:
        seen = ~np.isnan(history.pass_rate)
        p = history.pass_rate[seen]
        weights = np.ones(len(seen))
        weights[seen] = np.maximum(4 * p * (1 - p) if self.prefer is Prefer.learnable else 1 - p, self.min_weight)
        if self.no_resampling_pass_rate is not None:
            weights[seen] *= p < self.no_resampling_pass_rate
        return weights

    @override
    def describe(self) -> str:
        out = self.no_resampling_pass_rate
        never = "" if out is None else f", none again that has a pass rate of {out:g} or more"
        return (
            f"mostly {self.prefer} prompts, by their pass rate (reward >= {self.pass_reward:g}) in the last "
            f"{self.window} visits; smallest weight {self.min_weight:g}{never}"
        )


class _Choice(NamedTuple):
    """A row that was chosen for a place of the stream."""

    usual: int
    """Its place in the usual order."""
    epoch: int
    row: int


_BLOCK = 1024
"""Number of places of the usual order whose chances are drawn together."""


class CurriculumOrder(RowOrder):
    """The rows that a curriculum chooses. Each place is chosen when it is first asked for, from the rewards until then.

    A choice is remembered until its rewards are recorded. Callable from several threads.
    """

    def __init__(self, curriculum: Curriculum, dataset: Dataset, seed: int, shuffle: bool) -> None:
        self.curriculum, self.usual = curriculum, dataset.order(seed, shuffle)
        self._dataset, self._seed, self._rows = dataset, derive_seed(seed, "curriculum"), len(dataset)
        self._outcomes = np.full((self._rows, curriculum.window), np.nan)  # of the last visits, latest first
        self._visits = np.zeros(self._rows, dtype=np.int64)
        self._next = 0  # first place that is not chosen
        self._cursor = 0  # first place of the usual order after the last choice
        self._waiting: dict[int, _Choice] = {}  # choices without rewards, by place
        self._columns: dict[str, Sequence[Any]] = {}
        self._chances: tuple[int, _FloatArray] = (-1, np.zeros(0))
        self._lock = threading.RLock()
        self._chosen: list[_Choice] = []  # since the last `metrics`
        self._rates: list[float] = []  # of `_chosen`, when they were chosen
        self._passed_over = 0

    @property
    @override
    def rows_per_epoch(self) -> int:
        return self._rows

    @override
    def rows(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Return the (epoch, row) at each place, which must be a new one or wait for its rewards.

        Raises:
            RunError: the weights are not usable, or no row has a weight above 0.
        """
        with self._lock:
            if (new := max(places, default=-1) + 1 - self._next) > 0:
                self._choose(new)
            return [(choice.epoch, choice.row) for choice in (self._waiting[place] for place in places)]

    def pass_rates(self, places: Sequence[int]) -> list[float | None]:
        """Return the pass rates of the rows at places without rewards; None for rows that were never scored."""
        with self._lock:
            rates = self._pass_rate(np.array([self._waiting[place].row for place in places], dtype=np.int64))
        return [None if np.isnan(rate) else rate for rate in rates.tolist()]

    def record(self, place: int, rewards_G: _FloatArray) -> None:
        """Add the rewards [G] of the row at a place, NaN if missing, and forget the place. No rewards are no visit."""
        with self._lock:
            choice = self._waiting.pop(place)
            rewards_G = rewards_G[np.isfinite(rewards_G)]
            if len(rewards_G):
                outcomes = self._outcomes[choice.row]
                outcomes[1:] = outcomes[:-1].copy()
                outcomes[0] = (rewards_G >= self.curriculum.pass_reward).mean()
                self._visits[choice.row] += 1

    @override
    def is_exhausted(self, used: AbstractSet[Any]) -> bool:
        with self._lock:
            return set(np.flatnonzero(self._weights()).tolist()) <= used

    @override
    def metrics(self) -> dict[str, float]:
        """Return metrics of the rows chosen since the last call."""
        with self._lock:
            chosen, rates = self._chosen, np.array(self._rates)
            passed_over, self._chosen, self._rates, self._passed_over = self._passed_over, [], [], 0
            values = {"seen_fraction": float((self._visits > 0).mean())}
            seen_N = self._pass_rate()[self._visits > 0]
            if len(seen_N):
                values |= {
                    "solved_fraction": float((seen_N == 1).mean()),
                    "unsolved_fraction": float((seen_N == 0).mean()),
                }
            if chosen:
                known = rates[~np.isnan(rates)]
                values |= {"new_fraction": 1 - len(known) / len(rates), "passed_over_prompts": float(passed_over)}
                values |= {"pass_rate": float(known.mean())} if len(known) else {}
                self.usual.rows([choice.usual for choice in chosen])  # its metrics are those of these rows
            return self.usual.metrics() | {f"curriculum/{name}": value for name, value in values.items()}

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "next": self._next,
                "cursor": self._cursor,
                "waiting": [[place, choice.usual] for place, choice in self._waiting.items()],
                "outcomes": torch.from_numpy(self._outcomes.copy()),
                "visits": torch.from_numpy(self._visits.copy()),
            }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, also with another `window`.

        Raises:
            CheckpointError: the state is of another number of rows.
        """
        outcomes, visits = state["outcomes"].numpy(), state["visits"].numpy()
        if outcomes.ndim != 2 or visits.ndim != 1 or not len(outcomes) == len(visits) == self._rows:
            raise CheckpointError(
                f"data.curriculum: the dataset has {self._rows} rows, but the checkpoint has pass rates of "
                f"{len(visits)}. Restore the earlier dataset, or set resume_skip=[data]."
            )
        with self._lock:
            self._next, self._cursor = state["next"], state["cursor"]
            window = min(self._outcomes.shape[1], outcomes.shape[1])
            self._outcomes[:, :window] = outcomes[:, :window]
            self._visits[:] = visits
            usual = [place for _, place in state["waiting"]]
            choices = zip(usual, self.usual.rows(usual), strict=True)
            places = (place for place, _ in state["waiting"])
            self._waiting = {
                place: _Choice(at, epoch, row) for place, (at, (epoch, row)) in zip(places, choices, strict=True)
            }

    def start_at(self, place: int) -> None:
        """Continue at a place, after a run without a curriculum."""
        self._next = self._cursor = place

    def _pass_rate(self, rows: IntArray | slice = slice(None)) -> _FloatArray:
        outcomes = self._outcomes[rows]
        scored = ~np.isnan(outcomes)
        with np.errstate(invalid="ignore"):  # 0 / 0 without a visit: NaN
            rates: _FloatArray = np.where(scored, outcomes, 0).sum(1) / scored.sum(1)
        return rates

    def _weights(self) -> _FloatArray:
        """Return the weights [N] of the rows, of which the largest is 1 unless all are 0."""
        history = PromptHistory(self._pass_rate(), self._visits.copy(), self._next, self._column)
        weights = np.asarray(self.curriculum.weights(history), dtype=np.float64)
        if weights.shape != (self._rows,) or not (np.isfinite(weights) & (weights >= 0)).all():
            raise RunError(
                f"curriculum: {type(self.curriculum).__name__}.weights returned an array of shape {weights.shape} with "
                f"values from {weights.min(initial=np.inf):g} to {weights.max(initial=-np.inf):g}. Return one finite "
                f"number of at least 0 for each of the {self._rows} rows."
            )
        return weights / largest if (largest := weights.max()) else weights

    def _column(self, name: str) -> Sequence[Any]:
        if not self._columns:
            rows = self._dataset.source_rows()
            self._columns = {
                key: [row.get(key) for row in rows] for key in dict.fromkeys(k for row in rows for k in row)
            }
        if name not in self._columns:
            known = ", ".join(sorted(map(str, self._columns))) or "none"
            raise ConfigError(f"curriculum: the data has no column {name!r} (columns: {known}).")
        return self._columns[name]

    def _choose(self, count: int) -> None:
        """Choose the rows of the next `count` places."""
        weights = self._weights()
        if not weights.any():
            raise RunError(
                f"curriculum: none of the {self._rows} rows has a weight above 0, so no prompt is left to train on. "
                "Raise no_resampling_pass_rate or min_weight, add rows, or set curriculum=null."
            )
        left = most = FRUITLESS * max(self._rows, 100)
        choices: list[_Choice] = []
        while len(choices) < count:
            usual = range(self._cursor, self._cursor + 2 * (count - len(choices)))
            for place, (epoch, row) in zip(usual, self.usual.rows(usual), strict=True):
                self._cursor += 1
                if self._chance(place) < weights[row]:
                    choices.append(_Choice(place, epoch, row))
                    left = most
                    if len(choices) == count:
                        break
                else:
                    self._passed_over += 1
                    left -= 1
            if left < 0:
                raise RunError(
                    f"curriculum: {most} prompts in a row were passed over. {int((weights > 0).sum())} of the "
                    f"{self._rows} rows have a weight above 0, and their sources hardly ever come. Raise the smallest "
                    "weight, or data.path weights of these sources."
                )
        self._rates += self._pass_rate(np.array([choice.row for choice in choices], dtype=np.int64)).tolist()
        self._chosen += choices
        self._waiting |= dict(enumerate(choices, self._next))
        self._next += count

    def _chance(self, place: int) -> float:
        """Return a random number from 0 to 1 for a place of the usual order: a pure function of the seed."""
        block, inside = divmod(place, _BLOCK)
        if self._chances[0] != block:
            bits = derive_seed(self._seed, "chance", block)
            chances = np.random.RandomState([bits & 0xFFFFFFFF, bits >> 32]).random_sample(_BLOCK)
            self._chances = (block, chances)
        return float(self._chances[1][inside])
