"""Test concurrent CPU passes: results equal those of sequential passes, and the thread settings are restored."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.api import Lengths, MicroBatchSpec, stat_values
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.engines.shared_model import Share
from realign.engines.training import transformers_engine
from realign.engines.training.stepper import Stepper
from realign.models import Causal, TopLayers, ValueHead
from realign.models.network import passes as passes_module
from realign.models.network.passes import (
    MIN_ROWS,
    ParallelPasses,
    SharedPrompts,
    in_lanes,
    most_lanes,
    most_rows,
    side_by_side,
)
from realign.samplers.in_process import rollout_model
from tests.tiny import random_sample, save_tiny, tiny_engine

STEP = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)
DATA = ([60, 40], [90], [30, 20, 70], [50], [80, 10], [100])


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def likelihood(output, data):
    logprobs_T, entropy_T = output.logprobs_and_entropy(where_T=data["loss_mask"])
    return -(logprobs_T + 0.1 * entropy_T).sum(), {"threads": (torch.ones(()), torch.ones(()))}


def weight(data):
    return data["loss_mask"].sum()


def masked(nested=DATA, seed=0):
    data = random_sample(nested, seed=seed)
    return data.with_tokens(loss_mask=torch.rand(len(data["input_ids"]), generator=torch.Generator()) < 0.8)


def trained(data, spec=None, *, loss=likelihood, **engine):
    engine = tiny_engine(optimizer=STEP, **engine)
    stats = engine.train_batch(data, spec or MicroBatchSpec(), loss, weight)
    return stat_values(stats), torch.cat([p.detach().flatten() for p in engine.network.parameters()])


groups = st.lists(st.lists(st.integers(0, 300), max_size=4), max_size=12)


@given(groups, st.none() | st.integers(1, 3000), st.integers(1, 8), st.booleans())
def test_lanes_divide_the_budget(nested, limit, threads, whole_groups):
    lengths = Lengths.of(nested)
    spec = MicroBatchSpec(limit, whole_groups=whole_groups)
    lanes, cut = in_lanes(lengths, lengths.total, spec, threads)
    assert 1 <= lanes <= threads
    if lanes == 1:
        assert cut is spec
        return
    assert lengths.total >= lanes * MIN_ROWS
    assert lanes <= len(lengths.per_prompt if whole_groups else lengths.flat)  # each has a pass
    assert cut.n_microbatches % lanes == 0
    assert cut.whole_groups == whole_groups
    if limit is not None:
        assert lanes * cut.max_tokens_per_microbatch <= limit
        longest = lengths.per_prompt if whole_groups else lengths.flat
        assert cut.max_tokens_per_microbatch >= longest.max()


@given(groups, st.none() | st.integers(1, 3000), st.integers(1, 8), st.integers(1, 400))
def test_a_pass_is_no_longer_than_needed_and_has_room_for_every_sequence(nested, limit, threads, most):
    lengths = Lengths.of(nested)
    lanes, cut = in_lanes(lengths, lengths.total, MicroBatchSpec(limit), threads, most)
    longest = int(lengths.flat.max(initial=1))
    enough = max(longest, most)
    assert cut.max_tokens_per_microbatch <= enough
    assert limit is None or lanes * cut.max_tokens_per_microbatch <= limit
    assert cut.max_tokens_per_microbatch >= min(longest, limit or longest)
    assert lanes == in_lanes(lengths, lengths.total, MicroBatchSpec(limit), threads)[0]


def test_large_models_take_shorter_passes_and_fewer_at_once():
    tiny, smollm2, billions = 200_000, 134_515_008, 1_500_000_000
    assert [most_lanes(n) for n in (0, tiny, smollm2, billions)][1:] == [3353, 2, 1]
    assert [most_rows(n) for n in (0, tiny, smollm2, billions)][1:] == [858993, 1277, 256]


@pytest.mark.parametrize(("instructions", "rows"), [(True, 2554), (False, 1277)])
def test_passes_have_twice_the_rows_where_products_take_half_the_time(monkeypatch, instructions, rows):
    monkeypatch.setattr(passes_module, "multiplies_bf16", lambda: instructions)
    assert most_rows(134_515_008, rounded=True) == rows
    assert most_rows(134_515_008) == 1277
    assert most_rows(1_500_000_000, rounded=True) == 256


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_exception_reaches_the_caller_and_ends_the_rest(lanes):
    begun = []

    def work(x):
        begun.append(x)
        if x == 1:
            raise KeyError("advantages")
        return x

    results = side_by_side(work, range(50), lanes)
    assert next(results) == 0
    with pytest.raises(KeyError, match="advantages"):
        next(results)
    assert len(begun) <= 2 + lanes


@pytest.mark.parametrize("share", SharedPrompts)
@pytest.mark.parametrize("limit", [None, 400, 250])
def test_training_is_the_same(share, limit):
    data = masked()
    want, want_weights = trained(data, parallel_passes=ParallelPasses.off, shared_prompts=share)
    metrics, weights = trained(data, MicroBatchSpec(limit), shared_prompts=share)
    lanes = 3 if limit != 250 else 2
    assert metrics.pop("n_microbatches") >= lanes > want.pop("n_microbatches")
    assert metrics == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


def test_only_the_weights_that_are_trained_now_limit_the_lanes(monkeypatch):
    monkeypatch.setattr("realign.models.network.network.most_lanes", lambda trained: 1 if trained else 8)
    engine = tiny_engine(optimizer=STEP)
    assert engine.network.passes(masked(), MicroBatchSpec(), parallel=True).lanes == 1
    engine.module.requires_grad_(False)
    assert engine.network.passes(masked(), MicroBatchSpec(), parallel=True).lanes == 3


def test_no_gradient_waits_with_the_sum_for_the_next_one(monkeypatch):
    """A second one would be another copy of the weights. Autograd gives the first one to the sum without a copy."""
    made, held = [], []
    differentiate, in_order = Stepper.differentiate, transformers_engine.side_by_side

    def watched(*args):
        for result in in_order(*args):
            yield result
            held.append(len(result[2]))

    monkeypatch.setattr(Stepper, "differentiate", lambda self, loss: made.append(loss) or differentiate(self, loss))
    monkeypatch.setattr(transformers_engine, "side_by_side", watched)
    n = trained(masked())[0]["n_microbatches"]
    assert n == len(held) == len(made) + 1 >= 3
    assert not any(held)


def test_shorter_passes_train_the_same(monkeypatch):
    data = masked()
    want, want_weights = trained(data)
    monkeypatch.setattr("realign.models.network.passes._PASS_PRODUCTS", 1)
    monkeypatch.setattr("realign.models.network.passes._SHORTEST_PASS", 70)
    metrics, weights = trained(data)
    # 550 tokens, with the longest sequence of 100 in each pass
    assert metrics.pop("n_microbatches") >= 6 > want.pop("n_microbatches")
    assert metrics == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(weights, want_weights, atol=1e-6, rtol=1e-5)


def test_the_same_bits_whichever_pass_is_ready_first():
    data, again = masked(), []

    def late(which):
        def loss(output, part):
            if part.ids[0] == which:
                time.sleep(0.05)
            return likelihood(output, part)

        return loss

    for which in data.ids[:3]:
        again.append(trained(data, loss=late(which)))
    assert all(stats == again[0][0] and torch.equal(weights, again[0][1]) for stats, weights in again)


def test_branches_that_listen_to_the_trunk_take_one_pass_after_the_other(tmp_path):
    path = str(save_tiny(tmp_path / "model"))
    policy = TransformersModel(
        path, optimizer=STEP, trains=TopLayers(1), device="cpu", head=Causal(ValueHead(layers=1))
    )
    actor = policy.load("actor", seed=0)
    ref = SharedModel("actor", Share.reference).load("ref", seed=0, loaded={"actor": actor})
    passes = []

    def keep(out, part):
        passes.append(threading.get_ident())
        return part.with_tokens(logprobs=out.logprobs())

    for engine in (actor.engine, ref.engine):
        engine.forward(masked(), MicroBatchSpec(), keep)
    assert passes == [threading.get_ident()] * 2


def test_a_rollout_takes_one_core_for_small_products(monkeypatch):
    engine = tiny_engine()
    seen = []

    def trunk(ids_N, positions_N, context):
        seen.append((len(ids_N), torch.get_num_threads()))

    cores = rollout_model.Cores(engine.module)
    thrifty = cores.wrap(trunk)
    for rows in (1, 100_000, 5):
        thrifty(torch.zeros(rows), torch.zeros(rows), None)
    monkeypatch.setattr(rollout_model, "SMALL_PRODUCT", 0)
    thrifty(torch.zeros(1), torch.zeros(1), None)
    cores.give_back()
    assert torch.get_num_threads() == 3
    assert seen == [(1, 1), (100_000, 3), (5, 1), (1, 3)]
