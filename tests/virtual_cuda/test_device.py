"""Test the virtual device: it computes what the CPU computes, and refuses what CUDA refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import varlen

from realign.api import Mean, SequenceSample, Sum
from realign.api.stats import on_host
from realign.models.network.kernels import PAGE, AttentionArgs, Pages, paged_attention
from tests.virtual_cuda.counts import counting


def on_device(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in tensors]


def test_a_training_step_equals_the_one_on_the_cpu():
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    device = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).cuda()
    device.load_state_dict(host.state_dict())
    x, y = torch.randn(5, 4), torch.randint(2, (5,))
    for module, inputs, labels in ((host, x, y), (device, x.cuda(), y.cuda())):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        F.cross_entropy(module(inputs), labels).backward()
        optimizer.step()
    for a, b in zip(host.parameters(), device.parameters(), strict=True):
        assert b.is_cuda
        torch.testing.assert_close(a, b.cpu())  # `linear` is another kernel on the CPU, with other rounding


@pytest.mark.parametrize("mixed", [lambda x, y: x + y, lambda x, y: y @ x, lambda x, y: torch.cat([x, y])])
def test_operators_with_tensors_on_both_devices_are_refused(mixed):
    with pytest.raises(RuntimeError, match="same device"):
        mixed(torch.ones(2, 2, device="cuda"), torch.ones(2, 2))


@pytest.mark.parametrize(
    ("wait", "reason"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: x.tolist(), "device to host"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x: x.cpu(), "device to host"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "boolean mask"),
        (lambda x: torch.tensor([1.0], device="cuda"), "torch.tensor of Python values"),
        (lambda x: torch.ones(2).cuda(), "host to device"),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2, 3]).cuda()), "repeat_interleave without output_size"),
        (lambda x: torch.cuda.synchronize(), "cuda.synchronize"),
    ],
)
def test_each_way_to_wait_for_the_device_is_a_synchronization(wait, reason):
    x = torch.arange(3.0, device="cuda")
    with counting() as counts:
        wait(x)
    assert reason in {why for why, _ in counts.synchronizations}


def test_launches_are_counted_also_in_the_backward_pass():
    x = torch.ones(4, device="cuda", requires_grad=True)
    with counting() as counts:
        y = (x * 2).relu()
    assert counts.launches.total() == 2
    assert not counts.synchronizations
    with counting() as counts:
        y.backward(torch.ones_like(y))
    assert counts.launches["threshold_backward"] == 1
    with counting() as counts:
        x.detach().view(2, 2).t()
        torch.empty(3, device="cuda")
    assert not counts.launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_and_its_gradient_equal_the_cpu(dtype, causal):
    torch.manual_seed(0)
    given = [torch.randn(1, 2, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    copies = on_device(*given)
    expected, actual = (F.scaled_dot_product_attention(*x, is_causal=causal) for x in (given, copies))
    assert torch.equal(expected, actual.cpu())
    expected.sum().backward()
    actual.sum().backward()
    assert all(torch.equal(a.grad, b.grad.cpu()) for a, b in zip(given, copies, strict=True))


def test_varlen_attention_equals_attention_of_each_sequence():
    torch.manual_seed(0)
    q, k, v = (torch.randn(7, 2, 8, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32, device="cuda")
    packed = varlen.varlen_attn(q, k, v, bounds, bounds, 4, 4, window_size=(-1, 0))
    for start, stop in ((0, 3), (3, 7)):
        one = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        alone = F.scaled_dot_product_attention(*one, is_causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(packed[start:stop], alone)
    packed.sum().backward()
    assert q.grad.is_cuda


@pytest.mark.parametrize("window", [None, 3])
def test_attention_to_pages_equals_the_reference_of_the_cpu(window):
    torch.manual_seed(0)
    q, pool = torch.randn(3, 4, 8, dtype=torch.bfloat16), torch.randn(5, PAGE, 4, 8, dtype=torch.bfloat16)
    table = torch.tensor([[3, 1], [0, 2], [4, 4]], dtype=torch.int32)
    lengths = torch.tensor([PAGE + 5, 2, PAGE], dtype=torch.int32)
    args = AttentionArgs(0.3, 0.0, window, None, None)
    pages = Pages(torch.arange(4, dtype=torch.int32), table, lengths, PAGE + 5)
    there = Pages(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in pages))
    got = paged_attention(q.cuda(), pool.cuda(), args, there)
    torch.testing.assert_close(got.cpu(), paged_attention(q, pool, args, pages))
    with pytest.raises(RuntimeError, match="do not fit"):
        paged_attention(q.cuda(), pool.cuda(), args, there._replace(longest=PAGE))


def test_metrics_of_any_dtype_reach_the_host_in_one_transfer_with_their_bits():
    stats = {
        "mean": Mean(torch.tensor(1 / 3, device="cuda"), torch.tensor(3, device="cuda")),
        "flag": Sum(torch.tensor(True, device="cuda")),
        "wide": Sum(torch.tensor(1 / 3, dtype=torch.float64, device="cuda")),
        "here": Sum(torch.tensor(2.0)),
    }
    with counting() as counts:
        host = on_host(stats)
    assert counts.synchronizations.total() == 1
    for name, stat in stats.items():
        for given, copied in zip(stat, host[name], strict=True):
            assert copied.device.type == "cpu"
            assert copied.dtype == given.dtype
            assert torch.equal(given.cpu(), copied)


def test_a_sample_reaches_the_device_without_waiting():
    sample = SequenceSample.from_sequences(["a"], {"input_ids": [[[1, 2], [3]]]})
    with counting() as counts:
        moved = sample.to("cuda")
        bounds = moved.cu_seqlens()
    assert not counts.synchronizations
    assert {kind for kind, _ in counts.copies} == {"host to device"}
    assert bounds.tolist() == [0, 2, 3]
