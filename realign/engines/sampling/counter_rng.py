"""The random numbers of sampling: one for each token, a pure function of seed, prompt, response and place.

Token t of response j to prompt `id` is drawn with a uniform number that depends on (seed, id, j, t) and nothing else.
So it does not matter which sequences are decoded together, in which slots, in how many waves, or by which rank.

The generator is SplitMix64 (Steele, Lea and Flood, 2014): the t-th number of a stream is a mix of `key + t * GAMMA`, so
that any of them is had without the ones before, by a dozen operators on whole tensors on any device. Philox, of the
same kind, takes ten times as many. The key of a prompt is a part of a sha256, and keys of its responses are mixed from
it: two streams of N tokens overlap with probability N / 2^63.

Shapes: B sequences, K places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from realign.api.model import derive_seed

GAMMA = 0x9E3779B97F4A7C15
"""The odd number nearest to 2^64 divided by the golden ratio."""
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def response_keys(seed: int, ids: Iterable[Hashable], n: int) -> Tensor:
    """[B] int64 on the CPU: the keys of `n` responses to each prompt, prompt after prompt.

    Args:
        seed: of the call.
        ids: of the prompts; those with the same text are the same prompt.
        n: responses per prompt.
    """
    prompts_P = torch.tensor([derive_seed(seed, "response", str(i)) for i in ids], dtype=torch.int64)
    return _mixed(prompts_P[:, None] + torch.arange(1, n + 1) * _signed(GAMMA)).flatten()


def uniforms(keys_B: Tensor, first_B: Tensor, count: int) -> Tensor:
    """[K, B] float64 in [0, 1): for the tokens from `first_B` on, `count` (= K) of each sequence."""
    places_KB = first_B + torch.arange(1, count + 1, device=keys_B.device)[:, None]
    bits_KB = _mixed(places_KB.mul_(_signed(GAMMA)).add_(keys_B))
    return _shifted(bits_KB, 11).double().mul_(2.0**-53)


def _mixed(z: Tensor) -> Tensor:
    """SplitMix64's output function, in the memory of `z`."""
    for bits, factor in _FACTORS:
        z.bitwise_xor_(_shifted(z, bits)).mul_(_signed(factor))
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifted right as if there was no sign."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)


def _signed(x: int) -> int:
    """The int64 of the same bits; int64 products wrap around as unsigned ones do."""
    return x - (1 << 64) if x >= 1 << 63 else x
