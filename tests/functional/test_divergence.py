from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.functional.logprobs import LMHead, Support, vocabulary_divergence
from tests.functional.heads import KINDS, N, V, make_head
from tests.grids import pairwise

TARGET_H = 3
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def make(*args, **options):
    """Return the leaves and the head of `make_head`."""
    return make_head(*args, **options)[:2]


def target(kind="bias", **options):
    """Return hidden states and head of a target with another hidden size."""
    (hidden, *_), head = make(kind, seed=1, hidden_size=TARGET_H, **options)
    return hidden, head


def by_definition(logq, logp, beta):
    """Return the divergence of whole distributions by its textbook formula, with plain autograd."""
    q, p = logq.exp(), logp.exp()
    if beta in (0, 1):
        return (p * (logp - logq)).sum(-1) if beta == 0 else (q * (logq - logp)).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


def weighted(x):
    return (x * torch.linspace(-1, 1, len(x), dtype=x.dtype)).sum()


@pytest.mark.parametrize(
    ("beta", "expected"), [(0.0, 0.2231436), (0.25, 0.0395802), (0.5, 0.0506719), (1.0, 0.1927448)]
)
def test_values_computed_by_hand(beta, expected):
    """The policy is (0.8, 0.2) and the target (0.5, 0.5); with beta = 0.25 the mixture is (0.725, 0.275)."""
    head, policy = LMHead(torch.eye(2, dtype=torch.float64)), torch.tensor([[0.8, 0.2]], dtype=torch.float64).log()
    divergence = vocabulary_divergence(policy, head, torch.zeros_like(policy), head, beta=beta)
    assert divergence.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("chunk", "kind", "beta"), pairwise([1, 7, None], list(KINDS), BETAS))
def test_value_and_gradient_equal_the_definition_in_float64(beta, kind, chunk):
    leaves, head = make(kind)
    target_hidden, target_head = target()
    logq = (head.logits(leaves[0]) / 0.7).log_softmax(-1)
    logp = (target_head.logits(target_hidden) / 0.7).log_softmax(-1).detach()
    expected = by_definition(logq, logp, beta)
    divergence = vocabulary_divergence(
        leaves[0], head, target_hidden, target_head, beta=beta, temperature=0.7, chunk_size=chunk
    )
    torch.testing.assert_close(divergence, expected, rtol=1e-12, atol=1e-12)
    inputs = [*leaves, target_hidden, target_head.weight_VH, target_head.bias_V]
    grads = torch.autograd.grad(weighted(divergence), inputs, allow_unused=True)
    wanted = torch.autograd.grad(weighted(expected), leaves)
    torch.testing.assert_close(grads[: len(leaves)], wanted, rtol=1e-10, atol=1e-12)
    assert grads[len(leaves) :] == (None, None, None)


@settings(deadline=None)  # the machine may be busy
@given(st.integers(0, 2**31 - 1), st.sampled_from(BETAS), st.floats(0.0, 30.0))
def test_it_is_finite_never_negative_and_zero_for_equal_distributions(seed, beta, spread):
    """Logits of spread 30 put nearly all probability on one token, where exp underflows in fp32."""
    generator = torch.Generator().manual_seed(seed)
    head = LMHead(torch.eye(V))
    policy, other = (spread * torch.randn(4, V, generator=generator) for _ in range(2))
    policy.requires_grad_()
    divergence = vocabulary_divergence(policy, head, other, head, beta=beta)
    (gradient,) = torch.autograd.grad(divergence.sum(), policy)
    assert divergence.isfinite().all()
    assert gradient.isfinite().all()
    assert (divergence >= -1e-5).all()
    assert vocabulary_divergence(policy, head, policy, head, beta=beta).abs().max() < 1e-5


@pytest.mark.parametrize("beta", BETAS)
def test_trap_c6_a_step_on_the_divergence_decreases_it(beta):
    leaves, head = make("bias")
    fixed = target()
    before = vocabulary_divergence(leaves[0], head, *fixed, beta=beta).sum()
    grads = torch.autograd.grad(before, leaves)
    hidden, weight, bias = (x - 0.01 * g for x, g in zip(leaves, grads, strict=True))
    assert vocabulary_divergence(hidden, LMHead(weight, bias), *fixed, beta=beta).sum() < before


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_trap_b2_temperature_applies_to_both_distributions(temperature):
    head, hidden = LMHead(torch.eye(2)), torch.tensor([[2.0, 0.0]])
    divergence = vocabulary_divergence(hidden, head, torch.tensor([[0.0, 1.0]]), head, temperature=temperature)
    logq, logp = ((torch.tensor(x) / temperature).log_softmax(0) for x in ([2.0, 0.0], [0.0, 1.0]))
    assert divergence.item() == pytest.approx(float((logq.exp() * (logq - logp)).sum()), abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_trap_b8_nothing_of_the_size_of_the_logits_is_allocated(beta):
    """Inspect all allocations of both passes: the largest one is a few chunks, smaller than [N, V]."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 8, generator=generator, requires_grad=True)
    head = LMHead(torch.randn(4096, 8, generator=generator, requires_grad=True))
    other, saved = torch.randn(512, 8, generator=generator), []

    def pack(x):
        saved.append(x)
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        vocabulary_divergence(hidden, head, other, head, beta=beta, chunk_size=16).sum().backward()
    largest = max(abs(event.cpu_memory_usage) for event in profile.events())
    assert 0 < largest < 512 * 4096 * 4 / 4
    assert saved
    assert all(x.numel() < 512 * 4096 / 4 for x in saved)


def test_trap_b9_bf16_hidden_states_give_fp32_results():
    leaves, head = make("bias", dtype=torch.bfloat16)
    target_hidden, target_head = target(dtype=torch.bfloat16)
    divergence = vocabulary_divergence(leaves[0], head, target_hidden, target_head, beta=0.5)
    assert divergence.dtype == torch.float32
    divergence.sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in leaves)


def test_bad_input_is_named():
    leaves, head = make()
    fixed = target()
    with pytest.raises(ValueError, match=r"policy has 9 tokens over 11 words, target 9 over 12"):
        vocabulary_divergence(leaves[0], head, fixed[0], LMHead(torch.zeros(V + 1, TARGET_H)))
    with pytest.raises(ValueError, match="target 8 over 11"):
        vocabulary_divergence(leaves[0], head, fixed[0][:-1], fixed[1])
    with pytest.raises(ValueError, match="do not fit a head"):
        vocabulary_divergence(leaves[0], head, leaves[0], fixed[1])
    for beta in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"beta must be in \[0, 1\]"):
            vocabulary_divergence(leaves[0], head, *fixed, beta=beta)
    for temperature in (0.0, 9e-3, math.nan):
        with pytest.raises(ValueError, match="temperature"):
            vocabulary_divergence(leaves[0], head, *fixed, temperature=temperature)
    with pytest.raises(ValueError, match="chunk_size"):
        vocabulary_divergence(leaves[0], head, *fixed, chunk_size=0)


@pytest.mark.parametrize("beta", BETAS)
def test_a_word_with_a_logit_of_minus_infinity_in_both_models_counts_as_absent(beta):
    leaves, head = make("bias")
    other, other_head = target()
    absent, rest = 3, torch.arange(V) != 3
    with torch.no_grad():
        head.bias_V[absent] = other_head.bias_V[absent] = -math.inf
    heads = (LMHead(x.weight_VH[rest], x.bias_V[rest]) for x in (head, other_head))
    divergence = vocabulary_divergence(leaves[0], head, other, other_head, beta=beta)
    short, short_target = heads
    wanted = vocabulary_divergence(leaves[0], short, other, short_target, beta=beta)
    torch.testing.assert_close(divergence, wanted)
    for a, b in zip(*(torch.autograd.grad(weighted(x), leaves) for x in (divergence, wanted)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("beta", BETAS)
def test_a_divergence_over_a_part_of_the_vocabulary_is_that_of_both_models_on_it(beta):
    leaves, head = make("all")
    other, other_head = target()
    sets = [sorted({n % V, (3 * n + 1) % V, (5 * n + 2) % V}) for n in range(N)]
    support = Support(torch.tensor([len(x) for x in sets]), torch.tensor([i for x in sets for i in x]))
    divergence = vocabulary_divergence(leaves[0], head, other, other_head, beta=beta, chunk_size=4, support=support)
    wanted = []
    for n, ids in enumerate(sets):  # a head with these tokens only
        heads = (
            replace(x, weight_VH=x.weight_VH[ids], bias_V=None if x.bias_V is None else x.bias_V[ids])
            for x in (head, other_head)
        )
        own, its = heads
        wanted.append(vocabulary_divergence(leaves[0][n : n + 1], own, other[n : n + 1], its, beta=beta))
    wanted = torch.cat(wanted)
    torch.testing.assert_close(divergence, wanted)
    for a, b in zip(*(torch.autograd.grad(weighted(x), leaves) for x in (divergence, wanted)), strict=True):
        torch.testing.assert_close(a, b)
