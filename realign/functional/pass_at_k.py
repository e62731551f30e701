"""pass@k: the probability that at least one of k sampled responses is correct."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pass_at_k(n_G: Tensor, correct_G: Tensor, k: int) -> Tensor:
    """Return [G] float64: the unbiased estimate of pass@k of each prompt, NaN for prompts with fewer than k responses.

    The estimate is 1 - C(n - c, k) / C(n, k) for c correct ones among n responses (Chen et al. 2021, arXiv:2107.03374,
    equation 1): the fraction of the subsets of k responses that contain a correct one.

    Args:
        n_G: [G] number of responses to each prompt.
        correct_G: [G] number of correct responses to each prompt.
        k: size of the subsets, at least 1.

    Raises:
        ValueError: k is not positive, or a prompt has more correct responses than responses.
    """
    if k < 1:
        raise ValueError(f"k={k}: must be at least 1")
    pairs = list(zip(n_G.tolist(), correct_G.tolist(), strict=True))
    if odd := [(n, c) for n, c in pairs if not 0 <= c <= n]:
        raise ValueError(f"{odd[0][1]} of {odd[0][0]} responses are correct: the number must be between 0 and n")
    return torch.tensor(
        # Exact integers: the binomials of large n overflow floats, though their ratio does not.
        [1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan for n, c in pairs],
        dtype=torch.float64,
    )
