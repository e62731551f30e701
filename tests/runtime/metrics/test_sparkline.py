from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis import given

from realign.runtime.metrics.sparkline import BLOCKS, sparkline


def test_the_lowest_value_has_the_lowest_block_and_the_highest_value_the_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == BLOCKS
    assert sparkline([5.0, 5.0], 8) == "▄▄"
    assert sparkline([], 8) == ""


def test_neighbors_share_a_character_which_shows_their_mean():
    assert sparkline([0, 2, 14, 14], 2) == "▁█"
    assert sparkline([0, 0, 1, 13, 14, 14], 3) == "▁▅█"


def test_values_that_are_not_finite_are_ignored():
    assert sparkline([0.0, math.nan, 7.0], 3) == "▁ █"
    assert sparkline([math.nan, math.inf], 2) == "  "


@given(st.lists(st.floats(), max_size=200), st.integers(1, 60))
def test_every_series_has_at_most_width_characters(values, width):
    assert len(sparkline(values, width)) == min(width, len(values))
