"""Costs of the parts of a step, which the simulator adds up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Costs in seconds."""

    decode_step_s: float
    """Fixed cost of a decoding step: reading the weights and launching every operator once."""
    decode_row_s: float = 0.0
    """Additional cost per row."""
    decode_context_s: float = 0.0
    """Additional cost per token of context over all rows: reading its keys and values."""
    prefill_token_s: float = 0.0
    """Cost per token of prefill. Decoding waits meanwhile."""
    train_step_s: float = 0.0
    """Fixed cost of a training step."""
    train_token_s: float = 0.0
    """Additional cost per packed token, over all passes on the training devices."""
    sync_s: float = 0.0
    """Duration of a weight update, during which rollout engines do not decode."""
