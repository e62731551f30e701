from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from realign.functional.logprobs import LMHead, Support, chunk_tokens, token_logprobs
from tests.functional.heads import KINDS, N, V
from tests.functional.heads import make_head as make

CHUNKS = [1, 7, None]


def reference(hidden, head, targets, temperature):
    """Compute log-probs and entropies with plain autograd on all logits."""
    logits = hidden @ head.weight_VH.T
    if head.bias_V is not None:
        logits = logits + head.bias_V
    logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), logp


def weighted(*outputs):
    """Return a scalar in which each token has a different weight."""
    total = 0.0
    for i, x in enumerate(outputs):
        total = total + (x * torch.linspace(-1, 2 + i, len(x), dtype=x.dtype)).sum()
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_trap_b8_any_chunk_gives_the_values_and_gradients_of_plain_autograd(kind, temperature, chunk):
    leaves, head, targets = make(kind)
    for with_entropy in (False, True):
        expected = reference(leaves[0], head, targets, temperature)[: 1 + with_entropy]
        got = token_logprobs(
            leaves[0], head, targets, temperature=temperature, chunk_size=chunk, with_entropy=with_entropy
        )
        assert (got[1] is None) is not with_entropy
        torch.testing.assert_close(got[: 1 + with_entropy], expected, rtol=1e-12, atol=1e-12)
        expected_grads = torch.autograd.grad(weighted(*expected), leaves)
        grads = torch.autograd.grad(weighted(*got[: 1 + with_entropy]), leaves)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-10, atol=1e-12)


def support_and_targets(targets):
    """Return sets of 1 to 5 tokens that contain the targets, none for two rows, as a list and as `Support`."""
    generator = torch.Generator().manual_seed(3)
    sets = [{*torch.randperm(V, generator=generator)[: n % 5].tolist(), int(t)} for n, t in enumerate(targets)]
    sets[2] = sets[5] = set()
    ids = [torch.tensor(sorted(x, reverse=True), dtype=torch.int64) for x in sets]
    return [sorted(x or range(V)) for x in sets], Support(torch.tensor([len(x) for x in ids]), torch.cat(ids))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_distributions_over_a_part_of_the_vocabulary_are_softmaxes_of_these_logits(kind, chunk):
    leaves, head, targets = make(kind)
    sets, support = support_and_targets(targets)
    logp_NV = reference(leaves[0], head, targets, 0.6)[2]
    rows = [logp_NV[n, ids].log_softmax(-1) for n, ids in enumerate(sets)]
    logprobs = [row[ids.index(int(t))] for row, ids, t in zip(rows, sets, targets, strict=True)]
    expected = torch.stack(logprobs), torch.stack([-(row.exp() * row).sum() for row in rows])
    for with_entropy in (False, True):
        got = token_logprobs(
            leaves[0],
            head,
            targets,
            temperature=0.6,
            chunk_size=chunk,
            with_entropy=with_entropy,
            support=support,
        )
        wanted, got = expected[: 1 + with_entropy], got[: 1 + with_entropy]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
        gradients = (torch.autograd.grad(weighted(*x), leaves, retain_graph=True) for x in (got, wanted))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_trap_b8_nothing_of_the_size_of_the_logits_is_kept(with_entropy, kind):
    leaves, head, targets = make(kind, n=40)
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        token_logprobs(leaves[0], head, targets, chunk_size=8, with_entropy=with_entropy)
    assert saved
    assert all(x.numel() < 40 * V for x in saved)
    assert all(x.untyped_storage().size() < 40 * V * 8 for x in saved)


def test_trap_b2_temperature_applies_to_logprobs_and_entropy():
    head, hidden, token = LMHead(torch.eye(2)), torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    for temperature, expected in [(1.0, -0.126928), (0.6, -0.035052)]:
        logprobs, entropy = token_logprobs(hidden, head, token, temperature=temperature, with_entropy=True)
        assert logprobs.item() == pytest.approx(expected, abs=1e-6)
        p = math.exp(expected)
        assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trap_b3_inputs_are_not_modified(dtype):
    leaves, head, targets = make("all", dtype=dtype)
    before = [x.detach().clone() for x in (*leaves, targets)]
    logprobs, entropy = token_logprobs(leaves[0], head, targets, temperature=0.5, with_entropy=True)
    (logprobs.sum() + entropy.sum()).backward()
    for x, old in zip((*leaves, targets), before, strict=True):
        assert torch.equal(x.detach(), old)


@pytest.mark.parametrize("temperature", [0.0, 9e-3, -1.0, math.nan])
def test_trap_b3_a_temperature_near_zero_is_refused(temperature):
    leaves, head, targets = make()
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(leaves[0], head, targets, temperature=temperature)


def test_trap_b9_bf16_hidden_states_give_fp32_results():
    leaves, head, targets = make("bias", dtype=torch.bfloat16)
    logprobs, entropy = token_logprobs(leaves[0], head, targets, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    weighted(logprobs, entropy).backward()
    assert all(x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all() for x in leaves)
    exact = reference(
        *(x.detach().double() for x in (leaves[0],)), LMHead(*(x.double() for x in leaves[1:])), targets, 1.0
    )
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=0, atol=0.05)


def test_bad_input_is_named():
    leaves, head, targets = make()
    with pytest.raises(ValueError, match=rf"targets_N must be ids in \[0, {V}\), found 0 to {V}"):
        token_logprobs(leaves[0], head, torch.arange(N) + torch.tensor([0] * (N - 1) + [V - N + 1]))
    with pytest.raises(ValueError, match="targets_N has shape"):
        token_logprobs(leaves[0], head, targets[:-1])
    with pytest.raises(ValueError, match="do not fit a head"):
        token_logprobs(leaves[0][:, :-1], head, targets)
    with pytest.raises(ValueError, match="chunk_size"):
        token_logprobs(leaves[0], head, targets, chunk_size=0)


@pytest.mark.parametrize(
    ("device", "gib", "words", "tokens"),
    [
        ("cpu", 0, 152_000, 64),
        ("cpu", 0, 1000, 2048),
        ("cuda", 16, 152_000, 441),
        ("cuda", 40, 152_000, 883),
        ("cuda", 141, 152_000, 1766),
        ("cuda", 141, 32_000, 8192),
    ],
)
def test_chunks_of_logits_grow_with_the_memory_of_a_gpu(monkeypatch, device, gib, words, tokens):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=gib * 2**30))
    assert chunk_tokens(words, torch.device(device)) == tokens


@pytest.mark.parametrize("chunk", [2, None])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_word_with_a_logit_of_minus_infinity_counts_as_absent(chunk, temperature):
    (hidden, weight, bias), _, targets = make("bias")
    absent, rest = 3, torch.arange(V) != 3
    targets = torch.where(targets == absent, 4, targets)
    short = targets - (targets > absent).long()
    with torch.no_grad():
        bias[absent] = -math.inf
    asked = {"temperature": temperature, "with_entropy": True, "chunk_size": chunk}
    scored = token_logprobs(hidden, LMHead(weight, bias), targets, **asked)
    wanted = token_logprobs(hidden, LMHead(weight[rest], bias[rest]), short, **asked)
    for a, b in zip(scored, wanted, strict=True):
        torch.testing.assert_close(a, b)
    got, want = (torch.autograd.grad(weighted(*x), [hidden, weight, bias]) for x in (scored, wanted))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_nan_logit_is_not_hidden():
    (hidden, weight, bias), _, targets = make("bias")
    with torch.no_grad():
        bias[3] = math.nan
    assert all(x.isnan().all() for x in token_logprobs(hidden, LMHead(weight, bias), targets, with_entropy=True))
