"""How the next token is drawn: temperature, top-k and top-p, then one draw; pure but for the generator's state.

The log-prob that comes with a token is the one under the distribution that it was drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realign.api.model import GenerationConfig
from realign.functional.packed import at_least_fp32

CPU_ELEMENTS = 2**17
"""On a CPU rows are handled this many logits at a time, so that what is made of them stays in the cache."""


def sample(
    logits_NV: Tensor, config: GenerationConfig, generator: torch.Generator, *, blocked_NV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    The order is: temperature, blocked tokens out, top-k, top-p of what top-k left. Greedy takes the most likely token
    that is not blocked and ignores top-k and top-p; its log-prob is that of the softmax over the whole vocabulary.

    Args:
        logits_NV: [N, V], left as they are.
        config: the sampler's settings.
        generator: source of the noise, on the device of the logits; greedy does not use it.
        blocked_NV: [N, V] bool, tokens that cannot be drawn; None blocks none.

    Returns:
        Tokens [N] int64, and their log-probs [N] fp32 (fp64 for fp64 logits) in nats.
    """
    rows = max(1, CPU_ELEMENTS // logits_NV.shape[-1]) if logits_NV.device.type == "cpu" else len(logits_NV)
    if rows >= len(logits_NV):
        return _sample(logits_NV, config, generator, blocked_NV)
    starts = range(0, len(logits_NV), rows)
    blocked = [None if blocked_NV is None else blocked_NV[i : i + rows] for i in starts]
    parts = [_sample(logits_NV[i : i + rows], config, generator, b) for i, b in zip(starts, blocked, strict=True)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def most_likely(logits_NV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """The `top_k` largest logits, and of them the smallest set, largest first, that holds `top_p` of their mass.

    Returns:
        Logits [N, K], -inf where `top_p` cuts, and their token ids [N, K]; the input and None when both are off.
    """
    if top_k == 0 and top_p == 1:
        return logits_NV, None
    words = logits_NV.shape[-1]
    if 0 < top_k < words:
        kept_NK, ids_NK = logits_NV.topk(top_k, sorted=True)
    else:
        kept_NK, ids_NK = logits_NV.sort(-1, descending=True)
    if top_p < 1:
        probs_NK = kept_NK.softmax(-1)
        before_NK = probs_NK.cumsum(-1) - probs_NK
        before_NK[:, 0] = 0
        kept_NK = kept_NK.masked_fill(before_NK >= top_p, -torch.inf)
    return kept_NK, ids_NK


def _sample(
    logits_NV: Tensor, config: GenerationConfig, generator: torch.Generator, blocked_NV: Tensor | None
) -> tuple[Tensor, Tensor]:
    scaled_NV = at_least_fp32(logits_NV)
    if config.temperature != 1:
        scaled_NV = scaled_NV / config.temperature
    allowed_NV = scaled_NV if blocked_NV is None else scaled_NV.masked_fill(blocked_NV, -torch.inf)
    if config.greedy:
        tokens_N = allowed_NV.argmax(-1)
        return tokens_N, _pick(scaled_NV.log_softmax(-1), tokens_N)
    kept_NK, ids_NK = most_likely(allowed_NV, config.top_k, config.top_p)
    probs_NK = kept_NK.softmax(-1)
    draw = draw_by_sum if probs_NK.device.type == "cpu" else draw_by_race
    choice_N = draw(probs_NK, generator)
    return choice_N if ids_NK is None else _pick(ids_NK, choice_N), _pick(probs_NK, choice_N).log()


def draw_by_sum(probs_NV: Tensor, generator: torch.Generator) -> Tensor:
    """A draw [N] from each row: where the running sum of the probabilities passes a uniform number.

    Ten times faster than the race on a CPU, where random numbers are made one by one. Sums are in fp64: in fp32 they
    would miss tokens of a probability below 6e-8, of which a large vocabulary has many.
    """
    sums_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    uniform_N1 = torch.rand(len(probs_NV), 1, dtype=torch.float64, device=probs_NV.device, generator=generator)
    choice_N = torch.searchsorted(sums_NV, uniform_N1 * sums_NV[:, -1:], right=True)[:, 0]
    return choice_N.clamp_(max=probs_NV.shape[-1] - 1)  # past the end only where a row is not finite


def draw_by_race(probs_NV: Tensor, generator: torch.Generator) -> Tensor:
    """A draw [N] from each row by Gumbel-max, in the form argmax(p / E) with E from Exp(1).

    The choice of accelerators: running sums are not reproducible bit by bit there.
    """
    return (probs_NV / torch.empty_like(probs_NV).exponential_(generator=generator)).argmax(-1)


def _pick(x_NV: Tensor, index_N: Tensor) -> Tensor:
    return x_NV.gather(-1, index_N[:, None])[:, 0]
