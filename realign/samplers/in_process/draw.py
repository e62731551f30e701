"""Draw the next token: temperature, top-k, top-p, min-p, and a draw by the token's own random number (pure functions).

The log-prob of a token is its log-prob under the distribution from which it was drawn.

Token t of response j to prompt `id` is drawn with a uniform number that depends only on (seed, id, j, t). The result
is therefore independent of batching, slots, the number of decoding waves, and the rank that decodes.

The generator is SplitMix64 (Steele, Lea and Flood, 2014). The t-th number of a stream is a mix of `key + t * GAMMA`.
It is computed without the earlier numbers, by about a dozen tensor operators on any device. Philox, also
counter-based, needs about ten times as many. The key of a prompt is taken from a SHA-256 digest, and the keys of its
responses are mixed from it. Two streams of N tokens overlap with probability N / 2^63.

Shapes: B sequences, K positions or candidate tokens, N rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from realign.api.generation import GenerationConfig
from realign.api.seeds import derive_seed
from realign.functional.logprobs import ExactHead
from realign.functional.packed import at_least_fp32

GAMMA = 0x9E3779B97F4A7C15
"""The odd number nearest to 2^64 divided by the golden ratio."""

# shifts and multipliers of SplitMix64; the last shift, by 31, has none
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
CPU_ELEMENTS = 2**17
"""Number of logits processed at a time on a CPU, so that intermediate results stay in the cache."""

BLOCK = 256
"""Tokens per block. Probabilities are summed per block before the cumulative sum."""

FEW_WORDS = 2**12
"""Vocabulary size up to which, on a CPU, one cumulative sum over all tokens is as fast as a blocked one."""


def sample(
    logits_NV: Tensor,
    config: GenerationConfig,
    uniform_N: Tensor,
    *,
    blocked_NV: Tensor | None = None,
    exact: ExactHead | None = None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Draw one token per row.

    The order is temperature, masking of blocked tokens, top-k, top-p over the tokens that top-k kept, then min-p.
    Greedy takes the most likely token that is not blocked, and ignores these. Its log-prob is taken from the softmax
    over the whole vocabulary.

    Args:
        logits_NV: [N, V], not modified.
        config: sampling settings.
        uniform_N: [N] fp64 in [0, 1), one number per draw; ignored by greedy.
        blocked_NV: [N, V] bool, tokens that cannot be drawn; None blocks none.
        exact: computes log-probs as training does, with `LMHead.exact`.

    Returns:
        Tokens [N] int64, and their log-probs [N] fp32 (fp64 for fp64 logits) in nats. With `config.sampling_replay`
        also the tokens that each row was drawn from, int32 on the host; else an empty list.
    """
    rows = max(1, CPU_ELEMENTS // logits_NV.shape[-1]) if logits_NV.device.type == "cpu" else len(logits_NV)
    if rows >= len(logits_NV):
        return _sample(logits_NV, config, uniform_N, blocked_NV, exact)
    starts = range(0, len(logits_NV), rows)
    blocked = [None if blocked_NV is None else blocked_NV[i : i + rows] for i in starts]
    uniforms = uniform_N.split(rows)
    parts = [
        _sample(logits_NV[i : i + rows], config, u, b, exact) for i, u, b in zip(starts, uniforms, blocked, strict=True)
    ]
    return join_draws(parts)


def join_draws(parts: Sequence[tuple[Tensor, Tensor, list[Tensor]]]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Join results of `sample`."""
    if len(parts) == 1:
        return parts[0]
    tokens, logprobs, kept = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs), list(chain.from_iterable(kept))


def _sample(
    logits_NV: Tensor,
    config: GenerationConfig,
    uniform_N: Tensor,
    blocked_NV: Tensor | None,
    exact: ExactHead | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    scaled_NV = at_least_fp32(logits_NV)
    if exact is not None:
        scaled_NV = scaled_NV * (1 / config.temperature)  # as training rounds it
    elif config.temperature != 1:
        scaled_NV = scaled_NV / config.temperature
    allowed_NV = scaled_NV if blocked_NV is None else scaled_NV.masked_fill(blocked_NV, -torch.inf)
    if config.greedy:
        tokens_N = allowed_NV.argmax(-1)
        if exact is not None:
            return tokens_N, exact.logprobs(scaled_NV, tokens_N)[0], []
        return tokens_N, _pick(scaled_NV.log_softmax(-1), tokens_N), []
    logits_NK, ids_NK = most_likely(allowed_NV, config.top_k, config.top_p, config.min_p)
    probs_NK = logits_NK.softmax(-1)
    choice_N = draw(probs_NK, uniform_N)
    kept = []
    if config.sampling_replay:
        kept_NK = probs_NK > 0
        ids = kept_NK.nonzero()[:, 1] if ids_NK is None else ids_NK[kept_NK]
        kept = list(ids.int().cpu().split(kept_NK.sum(-1).tolist()))
    tokens_N = choice_N if ids_NK is None else _pick(ids_NK, choice_N)
    if exact is None:
        return tokens_N, _pick(probs_NK, choice_N).log(), kept
    if ids_NK is not None:  # in the order of the vocabulary
        logits_NK = torch.full_like(scaled_NV, -torch.inf).scatter_(1, ids_NK, logits_NK)
    return tokens_N, exact.logprobs(logits_NK, tokens_N)[0], kept


def draw(probs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """Draw one index [N] per row by inverting the cumulative sum of its probabilities at a uniform number.

    Sums are in fp64. In fp32, tokens with probability below 6e-8 would be lost, and a large vocabulary has many of
    them. A large vocabulary is summed in blocks, with a cumulative sum over the blocks and one inside the selected
    block. This is several times faster than a cumulative sum over all tokens.
    """
    uniform_N1 = uniform_N[:, None]
    words = probs_NV.shape[-1]
    # on an accelerator, `_running_sum` multiplies by a square matrix of this size
    if words <= (FEW_WORDS if probs_NV.device.type == "cpu" else BLOCK):
        sums_NV = _running_sum(probs_NV)
        # times the last sum, since probabilities add up to 1 only up to rounding
        return _first_above(sums_NV, uniform_N1 * sums_NV[:, -1:])[:, 0]
    full = words // BLOCK
    blocks_NB = probs_NV[:, : full * BLOCK].unflatten(-1, (full, BLOCK)).sum(-1, dtype=torch.float64)
    rest_N1 = probs_NV[:, full * BLOCK :].sum(-1, keepdim=True, dtype=torch.float64)
    sums_NB = _running_sum(torch.cat([blocks_NB, rest_N1], -1))
    target_N1 = uniform_N1 * sums_NB[:, -1:]
    block_N1 = _first_above(sums_NB, target_N1)
    before_N1 = F.pad(sums_NB, (1, 0)).gather(-1, block_N1)
    tokens_NK = block_N1 * BLOCK + torch.arange(BLOCK, device=probs_NV.device)
    tokens_NK.clamp_(max=words - 1)  # the last block is shorter: repeat its last token
    sums_NK = _running_sum(probs_NV.gather(-1, tokens_NK)).add_(before_N1)
    # Two sums of a block may differ by rounding: keep the target below the end of this sum.
    inner_N1 = _first_above(sums_NK, target_N1.minimum(sums_NK[:, -1:] * (1 - 2**-52)))
    return tokens_NK.gather(-1, inner_N1)[:, 0]


def most_likely(logits_NV: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor | None]:
    """Return the `top_k` largest logits, cut to the smallest set whose probability mass reaches `top_p`.

    Of these, it keeps tokens with at least `min_p` times the probability of the most likely one.

    Returns:
        Logits [N, K], in descending order, -inf where `top_p` or `min_p` cuts, and their token ids [N, K]. If `top_k`
        and `top_p` are off, logits in the order of the vocabulary, and None.
    """
    if top_k == 0 and top_p == 1:
        return _above(logits_NV, min_p), None
    words = logits_NV.shape[-1]
    if 0 < top_k < words:
        logits_NK, ids_NK = logits_NV.topk(top_k, sorted=True)
    else:
        logits_NK, ids_NK = logits_NV.sort(-1, descending=True)
    if top_p < 1:
        probs_NK = logits_NK.softmax(-1)
        before_NK = probs_NK.cumsum(-1) - probs_NK
        before_NK[:, 0] = 0  # a difference that rounds to more than a tiny top_p must not cut the most likely token
        logits_NK = logits_NK.masked_fill(before_NK >= top_p, -torch.inf)
    return _above(logits_NK, min_p), ids_NK


def _above(logits_NK: Tensor, min_p: float) -> Tensor:
    if min_p == 0:
        return logits_NK
    return logits_NK.masked_fill(logits_NK < logits_NK.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)


def _running_sum(x_NK: Tensor) -> Tensor:
    """Return the cumulative sum of each row, [N, K] fp64.

    The cumulative sum of an accelerator is not bitwise reproducible between calls. A product with ones is.
    """
    if x_NK.device.type == "cpu":
        return x_NK.cumsum(-1, dtype=torch.float64)
    return product_of_ones(x_NK)


def product_of_ones(x_NK: Tensor) -> Tensor:
    """Return the cumulative sum of each row, [N, K] fp64, computed as a product with a triangular matrix of ones."""
    size = x_NK.shape[-1]
    ones_KK = torch.ones(size, size, dtype=torch.float64, device=x_NK.device)
    return x_NK.double() @ ones_KK.triu_()


def _first_above(sums_NK: Tensor, target_N1: Tensor) -> Tensor:
    """Return the first index [N, 1] at which the cumulative sum exceeds the target."""
    # A token with probability 0 ends at the sum of the token before it. With `right=True` not even a 0 draws it.
    place_N1 = torch.searchsorted(sums_NK, target_N1, right=True)
    return place_N1.clamp_(max=sums_NK.shape[-1] - 1)  # past the end only if a row is not finite


def _pick(x_NV: Tensor, index_N: Tensor) -> Tensor:
    return x_NV.gather(-1, index_N[:, None])[:, 0]


def response_keys(seed: int, ids: Iterable[Hashable], n: int) -> Tensor:
    """Return the stream keys of `n` responses to each prompt, [B] int64 on the CPU, in prompt order.

    Args:
        seed: seed of the call.
        ids: prompt ids; ids with the same string form get the same keys.
        n: responses per prompt.
    """
    prompts_P = torch.tensor([derive_seed(seed, "response", str(i)) for i in ids], dtype=torch.int64)
    return _mix(prompts_P[:, None] + torch.arange(1, n + 1) * _to_int64(GAMMA)).flatten()


def uniforms(keys_B: Tensor, first_B: Tensor, count: int) -> Tensor:
    """Return uniform numbers [K, B] float64 in [0, 1) for `count` (= K) tokens per sequence, from `first_B` on."""
    places_KB = first_B + torch.arange(1, count + 1, device=keys_B.device)[:, None]
    bits_KB = _mix(places_KB.mul_(_to_int64(GAMMA)).add_(keys_B))
    # the upper 53 bits, as many as the mantissa of fp64 has: nothing is rounded, so the result stays below 1
    return _shift_right(bits_KB, 11).double().mul_(2.0**-53)


def _mix(z: Tensor) -> Tensor:
    """Apply SplitMix64's output function to `z` in place."""
    for bits, factor in _FACTORS:
        z.bitwise_xor_(_shift_right(z, bits)).mul_(_to_int64(factor))
    return z.bitwise_xor_(_shift_right(z, 31))


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift right logically, as if `z` were unsigned."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)


def _to_int64(x: int) -> int:
    """Return the int64 with the same bits as `x`; int64 products wrap around like unsigned ones."""
    return x - (1 << 64) if x >= 1 << 63 else x
