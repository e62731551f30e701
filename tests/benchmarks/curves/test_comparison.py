from __future__ import annotations

import numpy as np
import pytest

from benchmarks.curves.comparison import MOST_SPLITS, compare, splits, table, within


def test_means_agree_within_two_standard_errors():
    a = np.array([[0.0, 0.0, 5.0], [2.0, 2.0, 5.0]])  # standard error 1 in the first two steps, and 0 in the last
    b = np.array([[2.0, 4.0, 5.0], [4.0, 6.0, 5.0]])
    assert within(a, b) == pytest.approx(2 / 3)  # differences of 2 and 4, with a standard error of sqrt(2); equal


def test_rounding_errors_are_no_difference():
    a, b = np.array([[0.0, 1.0], [0.0, 3.0]]), np.array([[1e-8, 1.0], [1.1e-8, 3.0]])
    assert within(a, b) == 1


def test_curves_of_one_distribution_agree_and_shifted_curves_do_not():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 5, 200))
    same, shifted = compare(a, b), compare(a, b + 3)
    assert same.fraction > 0.8
    assert same.p > 0.05
    assert shifted.fraction < 0.2
    assert shifted.p == pytest.approx(2 / 252)  # only the split itself and its mirror image
    assert shifted.largest > same.largest


def test_all_splits_are_used_if_there_are_few():
    assert list(splits(3, 2)) == [(0, 1), (0, 2), (1, 2)]
    many = list(splits(20, 10))
    assert len(many) == MOST_SPLITS
    assert all(len(set(chosen)) == 10 and max(chosen) < 20 for chosen in many)


def test_a_cell_is_the_mean_over_seeds_and_its_standard_error():
    runs = [[{"x": 1.0}, {"x": 3.0}], [{"x": 4.0}, {"x": 4.0}]]
    assert table({"a": runs}, ["x"]) == [["x", "3 ± 1"]]
