"""Check log-probs of sampler and trainer before the first update."""

from __future__ import annotations

import warnings

from realign.api import RPC, ModelSpec
from realign.errors import RunError


def default_tolerance(spec: ModelSpec) -> float:
    """Return the tolerance for the log-prob difference, in nats: higher if the model computes in bf16."""
    compute = spec.facts().compute
    return 0.1 if compute is not None and compute.precision == "bfloat16" else 1e-3


def check_ratio(rpc: RPC, difference: float, tolerance: float, *, strict: bool) -> None:
    """Check the log-prob difference of a training RPC before its first update, when both sides have the same policy.

    Args:
        rpc: the training RPC.
        difference: largest absolute difference in nats between sampler and trainer.
        tolerance: largest valid difference (`ratio_tolerance`).
        strict: raise an error instead of a warning.

    Raises:
        RunError: the difference is larger, and `strict` is set.
    """
    if difference <= tolerance:
        return
    message = (
        f"ratio_tolerance={tolerance:g}: in {rpc.name}, log-probs of sampler and trainer differ by up to "
        f"{difference:.3g} nats before the first update, so the probability ratio is not 1. Check the sampler's "
        "weights, the temperature on both sides, dropout, and bf16 (up to 0.1 is normal). "
        f"interfaces.{rpc.model}.recompute=true removes the difference from the ratio. "
        "docs/studies/mismatch.md has the correction for each kind of difference."
    )
    if strict:
        raise RunError(message)
    warnings.warn(f"{message} Training continues.", stacklevel=2)
