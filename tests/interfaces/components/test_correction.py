from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.api import SequenceSample, stat_values
from realign.functional import ImportanceLevel
from realign.interfaces.components import ImportanceCorrection, RatioRange, staleness_stats
from realign.testing import random_batch


@given(st.integers(0, 100), st.sampled_from(list(ImportanceLevel)), st.floats(0.5, 1.0), st.floats(1.0, 2.0))
def test_a_weight_is_truncated_to_its_range_and_a_rejection_masks_what_is_outside(seed, level, floor, cap):
    data = random_batch(seed)
    limits = RatioRange(level, floor, cap)
    ratio_T = ImportanceCorrection(RatioRange(level)).correct(data).weight_T
    mask_T = data["loss_mask"]
    truncated = ImportanceCorrection(limits).correct(data)
    assert torch.equal(truncated.weight_T[mask_T], ratio_T[mask_T].clamp(floor, cap))
    assert torch.equal(truncated.mask_T, mask_T)
    rejected = ImportanceCorrection(RatioRange(level), limits).correct(data)
    assert torch.equal(rejected.mask_T, mask_T & (ratio_T >= floor) & (ratio_T <= cap))
    assert torch.equal(rejected.divisor_T, rejected.mask_T)
    assert torch.equal(ImportanceCorrection(RatioRange(level), limits, True).correct(data).divisor_T, mask_T)


def test_staleness_is_that_of_the_oldest_and_of_the_newest_token_of_a_response():
    lags = [(5, 3, 3), (2,), (), (0, 0)]
    data = SequenceSample.from_sequences(["q"], {"input_ids": [[[1, *range(len(x))] for x in lags]]})
    data = data.with_tokens(versions=torch.tensor([x for lag in lags for x in (-1, *(7 - a for a in lag))]))
    metrics = stat_values(staleness_stats(data, 7))
    assert metrics == pytest.approx({"staleness_head": 7 / 3, "staleness_tail": 5 / 3, "staleness_max": 5.0})


def test_metrics_of_a_correction_by_hand():
    """Ratios of the trained tokens are 0.5, 2 and 4. The weight is at most 3, and a ratio below 0.8 is rejected."""
    data = SequenceSample.from_sequences(["q"], {"input_ids": [[[1, 2, 3, 4]]]})
    ratios_T = torch.tensor([9.0, 0.5, 2.0, 4.0], dtype=torch.float64)
    for shift in (0.0, 4.0):  # a larger old log-prob gives the same ratios
        data = data.with_tokens(
            loss_mask=torch.tensor([False, True, True, True]),
            logprobs=torch.full((4,), -6.0 + shift, dtype=torch.float64),
            prox_logprobs=ratios_T.log() - 6.0 + shift,
        )
        correction = ImportanceCorrection(RatioRange(cap=3.0), RatioRange(floor=0.8))
        assert stat_values(correction.stats(data)) == pytest.approx(
            {
                "behavior_kl": float((ratios_T - 1 - ratios_T.log())[1:].mean()),
                "behavior_logprob_diff_max": math.log(4),
                "behavior_weight_mean": 2.5,
                "behavior_weight_max": 3.0,
                "behavior_clamped_fraction": 0.0,
                "behavior_truncated_fraction": 1 / 2,
                "behavior_rejected_fraction": 1 / 3,
            },
            rel=1e-6,
        )
    flipped = data.with_tokens(prox_logprobs=data["logprobs"], logprobs=data["prox_logprobs"])
    assert stat_values(correction.stats(flipped))["behavior_logprob_diff_max"] == pytest.approx(math.log(4))


def test_a_correction_needs_recomputed_log_probs():
    assert ImportanceCorrection().needs() == {"prox_logprobs": "correction"}
