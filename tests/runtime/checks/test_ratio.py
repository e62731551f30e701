from __future__ import annotations

import warnings

import pytest

from realign.api import RPC
from realign.engines import DType, TransformersModel
from realign.errors import RunError
from realign.runtime.checks.ratio import check_ratio, default_tolerance
from tests.config_parts import Bigram

TRAIN = RPC("actor_train", "actor", "train_step", inputs=("input_ids",))


def test_a_difference_within_the_tolerance_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_ratio(TRAIN, 1e-3, 1e-3, strict=True)


def test_a_larger_difference_warns_and_is_an_error_under_strict_ratio():
    message = r"^ratio_tolerance=0\.001: in actor_train, .* differ by up to 0\.5 .*interfaces\.actor\.recompute=true"
    with pytest.warns(UserWarning, match=rf"{message}.* Training continues\.$"):
        check_ratio(TRAIN, 0.5, 1e-3, strict=False)
    with pytest.raises(RunError, match=message):
        check_ratio(TRAIN, 0.5, 1e-3, strict=True)


def test_the_tolerance_of_the_ratio_check_follows_the_precision():
    assert default_tolerance(TransformersModel("a", dtype=DType.float32)) == 1e-3
    assert default_tolerance(TransformersModel("a", dtype=DType.bfloat16)) == 0.1
    assert default_tolerance(Bigram()) == 1e-3
