from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from realign.runtime.rollout.staleness import Staleness


class World:
    """Prompts with random durations. It checks the staleness rules independently at each event."""

    def __init__(self, batch, bound, steps, seed, *, rejected=0.0):
        self.staleness = Staleness(batch, bound, steps)
        self.batch, self.bound = batch, bound
        self.rng = random.Random(seed)
        self.rejected = rejected
        self.running: list[int] = []
        self.begun_at: dict[int, int] = {}
        self.trained: list[int] = []
        self.dropped: list[int] = []
        self.lags: list[int] = []
        self.version = 0

    def begin_all(self):
        s = self.staleness
        while s.may_begin():
            untrained = len(set(self.begun_at) - set(self.trained) - set(self.dropped))
            assert (self.version * self.batch + untrained) // self.batch <= self.bound + self.version
            place = s.begin()
            self.begun_at[place] = self.version
            self.running.append(place)

    def finish_one(self):
        # Usually a late one, so that earlier ones become stale.
        place = self.running.pop(int(len(self.running) * self.rng.random() ** 0.5))
        if self.rng.random() < self.rejected:
            self.staleness.drop(place)
            self.dropped.append(place)
        else:
            self.staleness.finish(place)

    def step(self):
        self.begin_all()
        while (batch := self.staleness.choose()) is None:
            assert self.running, "nothing is running, and the step waits"
            self.finish_one()
            self.begin_all()
        assert len(batch) == self.batch
        self.lags += [self.version - self.begun_at[place] for place in batch]
        for _ in range(self.rng.randrange(3)):  # some prompts end or are dropped during the training step
            if self.running:
                self.finish_one()
                self.begin_all()
        self.staleness.train(batch)
        self.trained += batch
        self.version += 1

    def resumed(self, batch, bound):
        """Restart the run as after a kill between two steps."""
        state = self.staleness.state_dict()
        self.staleness = Staleness(batch, bound, self.staleness.steps)
        self.staleness.load_state_dict(state)
        for place in state["untrained"]:
            self.begun_at.pop(place, None)
        self.running, self.batch, self.bound = [], batch, bound


worlds = {
    "batch": st.integers(1, 5),
    "bound": st.integers(0, 4),
    "seed": st.integers(0, 10**6),
    "rejected": st.sampled_from([0.0, 0.3, 0.8]),
}


@given(**worlds)
def test_nothing_is_older_than_the_bound_and_each_prompt_is_trained_on_once(batch, bound, seed, rejected):
    world = World(batch, bound, 12, seed, rejected=rejected)
    for _ in range(12):
        world.step()
    assert max(world.lags) <= bound
    assert Counter(world.trained).most_common(1)[0][1] == 1
    assert len(world.trained) == 12 * batch
    assert not world.staleness.started
    assert sorted(world.trained + world.dropped + world.running) == list(range(world.staleness.next_place))
    if bound == 0 and not rejected:
        assert world.trained == list(range(12 * batch))


@given(**worlds, killed=st.lists(st.integers(0, 9), max_size=3), later=st.booleans())
def test_trap_f8_the_bound_holds_after_a_resume_and_no_prompt_is_lost(batch, bound, seed, rejected, killed, later):
    world = World(batch, bound, 10, seed, rejected=rejected)
    for step in range(10):
        world.step()
        for _ in range(killed.count(step)):
            world.begin_all() if later else None
            world.resumed(batch, bound)
    assert max(world.lags) <= bound
    assert sorted(world.trained + world.dropped) == list(range(world.staleness.next_place))
    assert len(world.trained) == 10 * batch


@given(seed=st.integers(0, 10**6), batches=st.tuples(st.integers(1, 4), st.integers(1, 4)), bound=st.integers(0, 3))
def test_a_resume_with_other_settings_trains_on_all_that_had_begun(seed, batches, bound):
    world = World(batches[0], 3, 20, seed)
    for _ in range(4):
        world.step()
    world.begin_all()
    world.resumed(batches[1], bound)
    world.lags.clear()
    for _ in range(8):
        world.step()
    assert max(world.lags) <= bound
    s = world.staleness
    assert sorted([*world.trained, *s.started, *s.again]) == list(range(s.next_place))


def test_the_oldest_ready_prompts_are_taken_first():
    s = Staleness(2, 2, 100)
    places = [s.begin() for _ in range(6)]
    assert not s.may_begin()
    assert s.choose() is None
    for place in (5, 3, 4):
        s.finish(places[place])
    assert s.choose() == [3, 4]
    s.finish(0)
    assert s.choose() == [0, 3]


def test_a_step_waits_for_what_would_become_too_old():
    s = Staleness(1, 1, 100)
    assert [s.begin(), s.begin()] == [0, 1]
    s.finish(1)
    assert s.choose() == [1]  # at version 1, place 0 can still be trained
    s.train([1])
    assert s.begin() == 2
    s.finish(2)
    assert s.choose() is None  # at version 2, it would be too stale
    s.finish(0)
    assert s.choose() == [0]


def test_no_prompt_begins_that_no_step_would_take():
    s = Staleness(2, 5, 2)
    begun = 0
    while s.may_begin():
        s.begin()
        begun += 1
    assert begun == 4


def test_what_is_dropped_makes_room():
    s = Staleness(2, 0, 9)
    assert [s.begin(), s.begin(), s.may_begin()] == [0, 1, False]
    s.drop(0)
    assert s.may_begin()
    assert s.begin() == 2
