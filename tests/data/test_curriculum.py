"""A curriculum chooses what a plain-Python reference chooses, and goes on so after a resume at any step."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import SequenceSample
from realign.api.seeds import derive_seed
from realign.config.construct import import_target
from realign.config.index import class_at
from realign.config.words import words_of
from realign.data import (
    Curriculum,
    PassRate,
    Prefer,
)
from realign.data.curriculum import CurriculumOrder
from realign.data.order import EpochOrder
from realign.runtime.rollout.prompts import PromptStream
from tests import toys

unhurried = settings(deadline=None)
KIND = class_at("realign.data.curriculum.Curriculum")
SHIPPED = [import_target(cls.path, "curriculum") for (cls,) in words_of(KIND).values()]
"""Every curriculum that a word chooses."""
STEPS, N, BATCH = 14, 11, 4


@dataclass
class Rows(toys.Rows):
    def sample(self, rows) -> SequenceSample:
        data = SequenceSample(tuple(f"{row}@{epoch}" for epoch, row in rows))
        return data.with_metadata(row=[{"level": row % 3} for _, row in rows])


@dataclass
class Fixed(Curriculum):
    """Weights that never change."""

    needs_rewards = False
    numbers: list[float] = field(default_factory=list)

    def weights(self, history):
        return np.array(self.numbers)


def rows_of(batch: SequenceSample) -> list[tuple[int, int]]:
    return [(int(epoch), int(row)) for row, epoch in (str(i).split("@") for i in batch.ids)]


def group(row: int, visit: int, n: int = 4) -> list[float]:
    """Rewards of a row, from 0 to 1, that depend on nothing else than how often it was sampled."""
    noise = random.Random(100 * row + visit)
    return [round(noise.random() + row / N * 0.6, 3) for _ in range(n)]


def scored(batch: SequenceSample, visits: dict[int, int]) -> SequenceSample:
    groups = []
    for _, row in rows_of(batch):
        groups.append(group(row, visits.get(row, 0)))
        visits[row] = visits.get(row, 0) + 1
    tokens = [[[1] for _ in rewards] for rewards in groups]
    rewards = [[[reward] for reward in rewards] for rewards in groups]
    return SequenceSample.from_sequences(batch.ids, {"input_ids": tokens, "rewards": rewards})


def stream(curriculum: Curriculum, n: int = N, batch: int = BATCH, seed: int = 0, *, shuffle: bool = True):
    return PromptStream(Rows(n), batch, seed, shuffle, curriculum=curriculum)


def trained(prompts: PromptStream, steps: int, visits: dict[int, int] | None = None) -> list[list[tuple[int, int]]]:
    visits = {} if visits is None else visits
    batches = []
    for _ in range(steps):
        batch = prompts.draw()
        prompts.record(scored(batch, visits))
        batches.append(rows_of(batch))
    return batches


def reference(curriculum: PassRate, n: int, batch: int, seed: int, steps: int, *, shuffle: bool):
    """The definition, row by row: walk along the usual order, and keep a row with chance weight / largest weight."""
    usual = EpochOrder(n, seed, shuffle)
    past: dict[int, list[float]] = {row: [] for row in range(n)}
    visits: dict[int, int] = {}
    place = 0
    for _ in range(steps):
        weights = []
        for row in range(n):
            last = past[row][-curriculum.window :]
            p = sum(last) / len(last) if last else math.nan
            weight = 4 * p * (1 - p) if curriculum.prefer is Prefer.learnable else 1 - p
            weight = max(weight, curriculum.min_weight) if last else 1.0
            limit = curriculum.no_resampling_pass_rate
            weights.append(0.0 if last and limit is not None and p >= limit else weight)
        rows = []
        while len(rows) < batch:
            block, inside = divmod(place, 1024)
            bits = derive_seed(derive_seed(seed, "curriculum"), "chance", block)
            chance = np.random.RandomState([bits % 2**32, bits >> 32]).random_sample(1024)[inside]
            ((epoch, row),) = usual.rows([place])
            if chance * max(weights) < weights[row]:
                rows.append((epoch, row))
            place += 1
        for _, row in rows:
            rewards = group(row, visits.get(row, 0))
            visits[row] = visits.get(row, 0) + 1
            past[row].append(sum(reward >= curriculum.pass_reward for reward in rewards) / len(rewards))
        yield rows


@unhurried
@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(0, 2**63 - 1),
    st.booleans(),
    st.builds(
        PassRate,
        window=st.integers(1, 3),
        pass_reward=st.sampled_from([0.3, 0.8, 1.2]),
        prefer=st.sampled_from(Prefer),
        min_weight=st.sampled_from([0.05, 0.5, 1.0]),
    ),
)
def test_the_rows_are_those_of_the_definition(n, batch, seed, shuffle, curriculum):
    expected = list(reference(curriculum, n, batch, seed, 8, shuffle=shuffle))
    assert trained(stream(curriculum, n, batch, seed, shuffle=shuffle), 8) == expected


@pytest.mark.parametrize("limit", [0.25, 0.5])
def test_a_solved_row_does_not_come_again(limit):
    curriculum = PassRate(no_resampling_pass_rate=limit, window=1, pass_reward=1.1)
    batches = trained(stream(curriculum), STEPS)
    assert batches == list(reference(curriculum, N, BATCH, 0, STEPS, shuffle=True))
    solved: set[int] = set()
    visits: dict[int, int] = {}
    for batch in batches:
        rows = [row for _, row in batch]
        assert solved.isdisjoint(rows)
        for row in rows:
            rewards = group(row, visits.get(row, 0))
            visits[row] = visits.get(row, 0) + 1
            if sum(reward >= 1.1 for reward in rewards) / len(rewards) >= limit:
                solved.add(row)
    assert solved


def other(name: str, value: Any) -> Any:
    """Another valid value of a setting, for any curriculum: the next enum member, a larger window, a middle rate."""
    if isinstance(value, Enum):
        members = list(type(value))
        return members[(members.index(value) + 1) % len(members)]
    return value + 1 if isinstance(value, int) else 0.5 if value != 0.5 else 0.9


KEYS = [(cls, f.name) for cls in SHIPPED for f in dataclasses.fields(cls)]


@pytest.mark.parametrize(("cls", "name"), KEYS, ids=[f"{cls.__name__}.{name}" for cls, name in KEYS])
def test_every_setting_changes_the_rows(cls, name):
    usual = cls(pass_reward=0.8)
    changed = replace(usual, **{name: other(name, getattr(usual, name))})
    assert trained(stream(usual), STEPS) != trained(stream(changed), STEPS)


@pytest.mark.parametrize("cls", SHIPPED)
@pytest.mark.parametrize("step", range(STEPS))
def test_a_run_resumed_at_any_step_chooses_the_same_rows(cls, step):
    """The state passes through the forms of a checkpoint: JSON and tensors."""
    visits: dict[int, int] = {}
    first = stream(cls(pass_reward=0.8))
    before = trained(first, step, visits)
    state = saved(first)
    second = stream(cls(pass_reward=0.8))
    second.load_state_dict(state)
    after = trained(second, STEPS - step, visits)
    assert before + after == trained(stream(cls(pass_reward=0.8)), STEPS)


def saved(prompts: PromptStream) -> dict[str, Any]:
    state = prompts.state_dict()
    own = state.pop("curriculum")
    tensors = {key: own.pop(key).clone() for key in ("outcomes", "visits")}
    return json.loads(json.dumps(state)) | {"curriculum": json.loads(json.dumps(own)) | tensors}


def test_prompts_drawn_one_by_one_wait_for_their_rewards_also_in_a_checkpoint():
    """As in asynchronous rollout: later places are chosen before the rewards of earlier ones."""
    prompts = stream(PassRate(pass_reward=0.8))
    begun = {place: prompts.at([place]) for place in range(9)}
    order, visits = prompts.order, {}
    for place in (3, 0, 7):
        prompts.record(scored(begun[place], visits))
    resumed = stream(PassRate(pass_reward=0.8))
    resumed.load_state_dict(saved(prompts), 9, cut=True)
    assert sorted(place for place, _ in resumed.state_dict()["curriculum"]["waiting"]) == [1, 2, 4, 5, 6, 8]
    for place in (1, 8):  # sampled again
        assert resumed.at([place]).ids == begun[place].ids
    for place in (1, 2, 4):
        for each in (prompts, resumed):
            each.at([place])
            each.record(scored(begun[place], {}))
    assert resumed.at(range(9, 30)).ids == prompts.at(range(9, 30)).ids
    assert isinstance(order, CurriculumOrder)
    with pytest.raises(KeyError):
        order.rows([3])


def test_used_rows_are_passed_over_and_forgotten():
    """Dynamic sampling draws until no row with a weight is left."""
    prompts = stream(Fixed(numbers=[1.0, 0.2, 0.0, 1.0, 0.5]), n=5, batch=2)
    used: set[int] = set()
    drawn = []
    while (batch := prompts.draw_new(used)) is not None:
        drawn += [row for _, row in rows_of(batch)]
        prompts.record(batch)
    assert sorted(drawn) == [0, 1, 3, 4]
    assert prompts.state_dict()["curriculum"]["waiting"] == []


def test_metrics_describe_the_rows_and_their_pass_rates():
    """Rows 0 and 1 always pass, and row 2 never does."""
    prompts = stream(PassRate(window=1, min_weight=0.5), n=4, batch=3, shuffle=False)

    def record(batch: SequenceSample) -> None:
        rewards = [[[float(row < 2)]] for _, row in rows_of(batch)]
        prompts.record(SequenceSample.from_sequences(batch.ids, {"input_ids": [[[1]]] * 3, "rewards": rewards}))

    record(prompts.draw())
    assert prompts.order.metrics() == {
        "curriculum/seen_fraction": 0.75,
        "curriculum/solved_fraction": 2 / 3,
        "curriculum/unsolved_fraction": 1 / 3,
        "curriculum/new_fraction": 1.0,
        "curriculum/passed_over_prompts": 0.0,
    }
    batch = prompts.draw()
    rates = [{0: 1.0, 1: 1.0, 2: 0.0, 3: None}[row] for _, row in rows_of(batch)]
    assert batch.metadata["pass_rate"] == tuple(rates)
    record(batch)
    values, known = prompts.order.metrics(), [rate for rate in rates if rate is not None]
    assert values["curriculum/pass_rate"] == sum(known) / len(known)
    assert values["curriculum/new_fraction"] == 1 - len(known) / 3
    last = next(place for place in range(99) if divmod(place, 4) == rows_of(batch)[-1])
    assert values["curriculum/passed_over_prompts"] == last + 1 - 6
