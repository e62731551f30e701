from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import SequenceSample
from realign.data import Dataset, batch_indices
from realign.errors import CheckpointError
from realign.runtime.rollout.prompts import PromptStream


@dataclass
class Rows(Dataset):
    keys = ("prompt_ids",)

    n: int

    def __len__(self) -> int:
        return self.n

    def sample(self, rows) -> SequenceSample:
        return SequenceSample(tuple(rows))


def test_batches_come_in_the_order_of_the_data_and_the_position_is_one_number():
    stream = PromptStream(Rows(5), 3, seed=1, shuffle=True)
    drawn = [stream.draw().ids for _ in range(4)]
    assert drawn == [tuple(batch_indices(5, 3, number, 1, True)) for number in range(4)]
    assert stream.drawn == 4
    resumed = PromptStream(Rows(5), 3, seed=1, shuffle=True, drawn=2)
    assert [resumed.draw().ids for _ in range(2)] == drawn[2:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_places_of_the_stream_are_those_of_its_batches(shuffle):
    stream = PromptStream(Rows(5), 3, seed=1, shuffle=shuffle)
    batches = [row for number in range(6) for row in stream.rows(number)]
    assert stream.at(range(18)).ids == tuple(batches)
    assert stream.at([17, 2, 9]).ids == (batches[17], batches[2], batches[9])
    assert len(stream.order._orders) == 2


def test_rows_that_were_used_are_passed_over():
    """Draw rows 0 to 3 in file order, in batches of 3: 012 | 3 01 | 23 0 | ..."""
    stream = PromptStream(Rows(4), 3, seed=0, shuffle=False)
    used: set[int] = set()
    assert stream.draw_new(used).ids == ((0, 0), (0, 1), (0, 2))
    assert stream.draw_new(used).ids == ((0, 3),)
    assert stream.draw_new(used) is None
    assert stream.drawn == 2
    assert stream.draw_new(set()).ids == ((1, 2), (1, 3), (2, 0))


def test_batches_of_used_rows_only_are_passed_over():
    stream = PromptStream(Rows(3), 1, seed=0, shuffle=False, drawn=2)
    used: set[int] = set()
    assert [stream.draw_new(used).ids for _ in range(3)] == [((0, 2),), ((1, 0),), ((1, 1),)]
    assert stream.draw_new(used) is None


def test_a_row_that_stands_in_one_batch_twice_is_drawn_once():
    assert PromptStream(Rows(2), 3, seed=0, shuffle=False).draw_new(set()).ids == ((0, 0), (0, 1))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_every_row_comes_once_before_there_are_none_left(n, batch, drawn, shuffle):
    stream = PromptStream(Rows(n), batch, seed=3, shuffle=shuffle, drawn=drawn)
    used: set[int] = set()
    rows = []
    while (sample := stream.draw_new(used)) is not None:
        rows += [row for _, row in sample.ids]
    assert sorted(rows) == list(range(n)) == sorted(used)


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_repeats_new_rows_are_the_batch(shuffle):
    plain, new = (PromptStream(Rows(8), 3, seed=0, shuffle=shuffle) for _ in range(2))
    used: set[int] = set()
    assert [plain.draw().ids for _ in range(2)] == [new.draw_new(used).ids for _ in range(2)]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_trap_g1_a_stream_goes_on_at_the_same_row_in_any_batch_size_that_begins_there(n, batch, drawn, other):
    first = PromptStream(Rows(n), batch, seed=3, shuffle=True, drawn=drawn)
    state = first.state_dict()
    assert (state["epoch"], state["index"]) == divmod(drawn * batch, n)
    second = PromptStream(Rows(n), other, seed=3, shuffle=True)
    if drawn * batch % other:
        with pytest.raises(CheckpointError, match="is not a multiple of it"):
            second.load_state_dict(state)
        return
    second.load_state_dict(state)
    rows = [[row for _ in range(9) for row in stream.draw().ids] for stream in (first, second)]
    length = min(map(len, rows))
    assert rows[0][:length] == rows[1][:length]


def test_prompts_that_are_taken_one_by_one_go_on_anywhere():
    state = PromptStream(Rows(9), 4, 0, True, drawn=3).state_dict()
    for batch, place, drawn in ((8, None, 2), (5, 11, 3), (4, 8, 2)):
        stream = PromptStream(Rows(9), batch, 0, True)
        stream.load_state_dict(state, place, cut=True)
        assert stream.drawn == drawn  # batches that are not drawn again
    with pytest.raises(CheckpointError, match=r"^batch_prompts=4: .* after 11 prompts \(3 batches of 4\)"):
        PromptStream(Rows(9), 4, 0, True).load_state_dict(state, 11)


def test_another_number_of_rows_has_another_order():
    with pytest.raises(CheckpointError, match="the dataset has 5 rows, but the checkpoint was written with 4"):
        PromptStream(Rows(5), 2, 0, True).load_state_dict(PromptStream(Rows(4), 2, 0, True).state_dict())
