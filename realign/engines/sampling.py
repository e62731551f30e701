"""How the next token is drawn: temperature, top-k and top-p, Gumbel-max; pure but for the generator's state.

The log-prob that comes with a token is the one under the distribution that it was drawn from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from realign.api.model import GenerationConfig
from realign.functional.packed import at_least_fp32


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
    scaled_NV = at_least_fp32(logits_NV)
    if config.temperature != 1:
        scaled_NV = scaled_NV / config.temperature
    allowed_NV = scaled_NV if blocked_NV is None else scaled_NV.masked_fill(blocked_NV, -torch.inf)
    if config.greedy:
        tokens_N = allowed_NV.argmax(-1)
        return tokens_N, _logprobs(scaled_NV, tokens_N)
    kept_NK, ids_NK = most_likely(allowed_NV, config.top_k, config.top_p)
    choice_N = _gumbel_max(kept_NK, generator)
    tokens_N = choice_N if ids_NK is None else ids_NK.gather(-1, choice_N[:, None])[:, 0]
    return tokens_N, _logprobs(kept_NK, choice_N)


def most_likely(logits_NV: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor | None]:
    """The `top_k` largest logits, and of them the smallest set, largest first, that holds `top_p` of their mass.

    Returns:
        Logits [N, K], -inf where `top_p` cuts, and their token ids [N, K]; the input and None when both are off.
    """
    if top_k == 0 and top_p == 1:
        return logits_NV, None
    words = logits_NV.shape[-1]
    kept_NK, ids_NK = logits_NV.topk(min(top_k, words) if top_k else words, sorted=True)
    if top_p < 1:
        probs_NK = kept_NK.softmax(-1)
        before_NK = probs_NK.cumsum(-1) - probs_NK
        before_NK[:, 0] = 0
        kept_NK = kept_NK.masked_fill(before_NK >= top_p, -torch.inf)
    return kept_NK, ids_NK


def _gumbel_max(logits_NV: Tensor, generator: torch.Generator) -> Tensor:
    """A draw [N] from softmax(logits): argmax(logits - log E) with E from Exp(1); one pass, no probabilities."""
    noise_NV = torch.empty_like(logits_NV).exponential_(generator=generator).log_()
    return torch.sub(logits_NV, noise_NV, out=noise_NV).argmax(-1)


def _logprobs(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    return logits_NV.gather(-1, tokens_N[:, None])[:, 0] - logits_NV.logsumexp(-1)
