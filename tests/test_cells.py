"""Cells of rows: columns by their paths, and the answers that a cell accepts."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from realign.cells import answers_of
from realign.errors import DataError
from tests.answer_cells import FOUR, NOTHING


@pytest.mark.parametrize("cell", NOTHING, ids=repr)
def test_nothing_is_no_answer(cell):
    assert answers_of(cell) == []


@pytest.mark.parametrize("cell", FOUR, ids=repr)
def test_four_is_4_however_it_came(cell):
    assert "4" in answers_of(cell)


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        (4.0, ["4", "4.0"]),
        (-0.5, ["-0.5"]),
        (np.float32(0.1), ["0.1"]),
        (torch.tensor(0.5), ["0.5"]),
        (Decimal("0.10"), ["0.10"]),
        (Fraction(1, 2), ["1/2"]),
        (True, ["True", "true"]),
        (np.bool_(False), ["False", "false"]),
        (math.inf, ["inf"]),
        (2**70, [str(2**70)]),
        (1 + 2j, ["(1+2j)"]),
        (["a", ["b", "a"]], ["a", "b"]),
    ],
)
def test_texts_of_an_answer(cell, texts):
    assert answers_of(cell) == texts


@pytest.mark.parametrize("cell", [{"text": ["a"]}, [{"text": "a"}], [1, 2], [1.0, None, 2.0], np.array([1, 2])])
def test_what_may_be_one_answer_or_several_is_an_error(cell):
    with pytest.raises(DataError, match=r"^the answer"):
        answers_of(cell)
