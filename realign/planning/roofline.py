"""Costs that follow from the sizes of a network and the rates of a device (roofline model)."""

from __future__ import annotations

from dataclasses import dataclass

from realign.planning.costs import Costs
from realign.planning.devices import Accelerator, Assumed
from realign.planning.plans import Work


@dataclass(frozen=True)
class Network:
    """Sizes of a dense model. Defaults: bf16, 7 billion weights and the shape of Qwen2.5-7B (from its config.json)."""

    weights: float = 7.6e9
    layers: int = 28
    kv_heads: int = 4
    head_size: int = 128
    hidden: int = 3584
    number_bytes: int = 2
    """Bytes of a number in matrix products and in the KV cache."""

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of the KV cache per token of context."""
        return 2 * self.number_bytes * self.layers * self.kv_heads * self.head_size


def decoding(network: Network, device: Accelerator, assumed: Assumed, devices: int = 1) -> Costs:
    """Return the costs of an engine that decodes on `devices` devices with tensor parallelism."""
    read = device.bandwidth * assumed.bandwidth_used * devices
    compute = device.flops * assumed.flops_used * devices
    together_s = assumed.tensor_parallel_layer_s * network.layers if devices > 1 else 0.0
    return Costs(
        decode_step_s=assumed.decode_call_s + together_s + network.number_bytes * network.weights / read,
        decode_row_s=2 * network.weights / compute,
        decode_context_s=network.bytes_per_token / read,
        prefill_token_s=2 * network.weights / compute,
    )


def rows_that_fit(free: float, network: Network, assumed: Assumed, work: Work) -> int:
    """Return the number of rows of an engine whose KV cache fits `free` bytes at twice the mean length."""
    length = work.prompt_tokens + 2 * min(work.lengths.mean, work.lengths.most / 2)
    return max(1, min(assumed.slots, int(free / (network.bytes_per_token * length))))


__all__ = ["Network", "decoding", "rows_that_fit"]
