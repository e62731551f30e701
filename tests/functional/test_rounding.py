"""bf16 on CPUs: rounded weights, fp32 activations, and few shapes of products."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from realign.functional import rounding as page
from realign.functional.logprobs import LMHead, no_autocast, token_logprobs
from realign.functional.rounding import RoundedWeights, round_rows, rounding


def rounded(x: Tensor) -> Tensor:
    return x.detach().to(torch.bfloat16).float()


def layers(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.Tanh(), nn.Linear(40, 16, bias=bias))


@pytest.fixture(params=[True, False], ids=["instructions", "no-instructions"])
def instructions(request, monkeypatch):
    """Run a test as on a CPU that multiplies bf16, and as on one that does not."""
    monkeypatch.setattr(page, "multiplies_bf16", lambda: request.param)
    return request.param


@pytest.mark.parametrize("bias", [True, False])
def test_the_forward_pass_is_that_of_rounded_weights_bit_for_bit(instructions, bias):
    network, x = layers(bias), torch.randn(11, 24)
    plain = copy.deepcopy(network)
    for part in (plain[0], plain[2]):
        part.weight.data = rounded(part.weight)
    with rounding(RoundedWeights()):
        assert torch.equal(network(x), plain(x))
        with no_autocast(x):
            assert not torch.equal(network(x), plain(x))


def test_gradients_reach_inputs_weights_and_biases(instructions):
    network, x = layers(True), torch.randn(3, 11, 24, requires_grad=True)
    plain, x2 = copy.deepcopy(network), x.detach().clone().requires_grad_()
    for part in (plain[0], plain[2]):
        part.weight.data = rounded(part.weight)
    with rounding(RoundedWeights()):
        network(x).square().sum().backward()  # the backward pass may also run outside of the context
    plain(x2).square().sum().backward()
    pairs = [(x, x2), *zip(network.parameters(), plain.parameters(), strict=True)]
    for got, want in pairs:
        difference = (got.grad - want.grad).norm() / want.grad.norm()
        assert difference < (0.01 if instructions else 1e-6)


@pytest.mark.parametrize("fused", [True, False])  # a fused optimizer doesn't count its steps in `_version`
def test_each_weight_is_rounded_once_per_optimizer_step(instructions, fused):
    network, weights = layers(True), RoundedWeights()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=fused)
    for step in range(1, 4):
        for rows in (5, 9, 700):  # micro-batches
            with rounding(weights):
                network(torch.randn(rows, 24)).sum().backward()
        assert weights.count == 2 * step
        optimizer.step()
        weights.forget()
    with rounding(weights):
        y = network(x := torch.ones(2, 24))
    assert torch.equal(y, F.linear(torch.tanh(F.linear(x, rounded(network[0].weight), network[0].bias)),
                                   rounded(network[2].weight), network[2].bias))  # fmt: skip


def test_products_have_few_shapes_and_added_rows_are_zeros():
    sizes = {len(round_rows(torch.ones(n, 1))) for n in range(1, 4097)}
    assert len(sizes) == 80  # 16 up to 16 rows, then 8 for each doubling
    assert all(n <= len(round_rows(torch.ones(n, 1))) <= max(n + 1, 1.13 * n) for n in range(1, 4097))
    padded = round_rows(torch.ones(1000, 3))
    assert padded.shape == (1024, 3)
    assert float(padded.float().sum()) == 3000


def test_a_head_rounds_its_weight_and_keeps_its_logits_in_fp32(instructions):
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets = torch.arange(70) % 50
    with rounding(RoundedWeights()):
        logits = LMHead(weight).logits(hidden)
        logprobs, entropy = token_logprobs(hidden, LMHead(weight), targets, with_entropy=True, chunk_size=32)
    assert torch.equal(logits, hidden @ rounded(weight).t())
    want = (hidden @ rounded(weight).requires_grad_().t()).log_softmax(-1)
    torch.testing.assert_close(logprobs, want.gather(1, targets[:, None])[:, 0])
    (logprobs.sum() + entropy.sum()).backward()
    hidden2, weight2 = hidden.detach().requires_grad_(), rounded(weight).requires_grad_()
    want = (hidden2 @ weight2.t()).log_softmax(-1)
    (want.gather(1, targets[:, None]).sum() - (want.exp() * want).sum()).backward()
    for got, expected in ((hidden.grad, hidden2.grad), (weight.grad, weight2.grad)):
        assert (got - expected).norm() / expected.norm() < (0.01 if instructions else 1e-5)


def test_forward_products_of_layers_and_head_can_be_made_by_others():
    def thrice(weight_MK):
        assert weight_MK.dtype == torch.float32
        return lambda x_NK: 3 * F.linear(x_NK, weight_MK.to(torch.bfloat16).float())

    weights, plain = RoundedWeights(), RoundedWeights()
    weights.multiply_by = thrice
    layer, x = nn.Linear(24, 40, bias=False), torch.randn(5, 24)
    head, hidden, tokens = LMHead(torch.randn(50, 24)), torch.randn(5, 24), torch.arange(5)
    with rounding(plain):
        want, logits = 3 * layer(x), 3 * head.logits(hidden)
    with rounding(weights):
        torch.testing.assert_close(layer(x), want)
        torch.testing.assert_close(head.logits(hidden), logits)
        logprobs, _ = token_logprobs(hidden, head, tokens)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens, tokens])


def test_a_weight_and_its_transposed_view_are_different_weights():
    weight, x = torch.randn(8, 8).bfloat16().float(), torch.randn(3, 8)
    with rounding(RoundedWeights()):
        assert torch.equal(F.linear(x, weight), x @ weight.t())
        torch.testing.assert_close(F.linear(x, weight.t()), x @ weight)
