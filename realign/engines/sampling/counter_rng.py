"""Counter-based random numbers for sampling: one per token, a pure function of seed, prompt, response and position.

Token t of response j to prompt `id` is drawn with a uniform number that depends only on (seed, id, j, t). The result
is therefore independent of batching, slots, the number of decoding waves, and the rank that decodes.

The generator is SplitMix64 (Steele, Lea and Flood, 2014). The t-th number of a stream is a mix of `key + t * GAMMA`.
It is computed without the earlier numbers, by about a dozen tensor operators on any device. Philox, also
counter-based, needs about ten times as many. The key of a prompt is taken from a SHA-256 digest, and the keys of its
responses are mixed from it. Two streams of N tokens overlap with probability N / 2^63.

Shapes: B sequences, K positions.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from realign.api.seeds import derive_seed

GAMMA = 0x9E3779B97F4A7C15
"""The odd number nearest to 2^64 divided by the golden ratio."""
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def response_keys(seed: int, ids: Iterable[Hashable], n: int) -> Tensor:
    """Return the stream keys of `n` responses to each prompt, [B] int64 on the CPU, in prompt order.

    Args:
        seed: seed of the call.
        ids: prompt ids; ids with the same string form get the same keys.
        n: responses per prompt.
    """
    prompts_P = torch.tensor([derive_seed(seed, "response", str(i)) for i in ids], dtype=torch.int64)
    return _mixed(prompts_P[:, None] + torch.arange(1, n + 1) * _signed(GAMMA)).flatten()


def uniforms(keys_B: Tensor, first_B: Tensor, count: int) -> Tensor:
    """Return uniform numbers [K, B] float64 in [0, 1) for `count` (= K) tokens per sequence, from `first_B` on."""
    places_KB = first_B + torch.arange(1, count + 1, device=keys_B.device)[:, None]
    bits_KB = _mixed(places_KB.mul_(_signed(GAMMA)).add_(keys_B))
    return _shifted(bits_KB, 11).double().mul_(2.0**-53)


def _mixed(z: Tensor) -> Tensor:
    """Apply SplitMix64's output function to `z` in place."""
    for bits, factor in _FACTORS:
        z.bitwise_xor_(_shifted(z, bits)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right logically, as if `z` were unsigned."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)


def _signed(x: int) -> int:
    """Return the int64 with the same bits as `x`; int64 products wrap around like unsigned ones."""
    return x - (1 << 64) if x >= 1 << 63 else x
