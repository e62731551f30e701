"""The settings of preference losses."""

from __future__ import annotations

from realign.interfaces.dpo import DPOInterface, DPOLoss

PRESETS = {
    "ipo": DPOInterface(kind=DPOLoss.ipo, length_normalized=True),
    "robust_dpo": DPOInterface(kind=DPOLoss.robust, label_smoothing=0.1),
    "dpo_norm": DPOInterface(length_normalized=True, beta=5.0),
    "simpo": DPOInterface(reference_free=True, length_normalized=True, beta=2.0, target_margin=1.0),
    "cpo": DPOInterface(reference_free=True, sft_coef=1.0),
    "orpo": DPOInterface(kind=DPOLoss.odds_ratio, reference_free=True, length_normalized=True, sft_coef=1.0),
}
"""The settings of `algorithm=NAME`."""
