"""Small heads of language models, with every option."""

from __future__ import annotations

import torch

from realign.functional.logprobs import LMHead

N, H, V = 9, 5, 11
KINDS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "all": {"bias": True, "scale": 1.7, "softcap": 2.0},
}


def make_head(kind="plain", seed=0, dtype=torch.float64, n=N, hidden_size=H, grad=True):
    """Return the leaves (hidden states, weight, and bias if there is one), the head and targets."""
    generator = torch.Generator().manual_seed(seed)
    options = dict(KINDS[kind])
    hidden = torch.randn(n, hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype) if options.pop("bias", False) else None
    leaves = [x.requires_grad_(grad) for x in (hidden, weight, bias) if x is not None]
    targets = torch.randint(V, (n,), generator=generator)
    return leaves, LMHead(weight, bias, **options), targets
