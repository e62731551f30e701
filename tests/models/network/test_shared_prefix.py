"""Test shared prefixes: the layout of a pass, and engines that compute a prompt once or once per response."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import Lengths, MicroBatchSpec
from realign.api.stats import stat_values
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.errors import ConfigError
from realign.models import Causal, Lora, TopLayers, ValueHead
from realign.models.network.abilities import can_share
from realign.models.network.attention import PackedContext
from realign.models.network.decoder import ModuleTrunk, PackedDecoder
from realign.models.network.kernels import Backend
from realign.models.network.passes import (
    Layout,
    Passes,
    SharedPrompts,
    common_prefixes,
)
from tests import flash_stand_in
from tests.families import family_model
from tests.flash_stand_in import install_flash, pretend_cuda
from tests.tiny import FAMILIES, OTHERS, engine_over, random_sample, save_tiny, tiny_engine, tiny_model

RAGGED = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), max_size=4)), max_size=5
)  # numbers of shared tokens, and of the tokens after them
STEP = OptimizerSpec(lr=1e-2, betas=(0.0, 0.0), eps=1.0, grad_clip=None)
ONE = MicroBatchSpec()
GROUPS = ((7, (6, 0, 9)), (1, (4, 5)), (5, (8,)), (12, (1, 2, 3, 2)), (2, (2, 40)))
"""Numbers of tokens of each prompt and of its responses. The groups cover ragged groups, an empty response, a short
prompt, a single response, and finally a group that is too small to share its prompt."""
TOKENS = sum(prompt + n for prompt, own in GROUPS for n in own)
SHARED = 2 * 7 + 1 + 3 * 12


@given(RAGGED, st.integers(0, 3))
@settings(deadline=None)  # the machine may be busy
def test_a_layout_token_by_token(groups, root):
    groups = [(root + prefix, own) for prefix, own in groups]
    root = root if any(own for _, own in groups) else 0
    lengths = Lengths.of([[prefix + n for n in own] for prefix, own in groups])
    layout = Layout.of(lengths, np.array([prefix for prefix, _ in groups], dtype=np.int64), root)
    rows, row_of, token, shared = [], [], 0, {}
    for group, (prefix, own) in enumerate(groups):
        for n in own:
            for place in range(prefix + n):
                is_shared = place < root or (place < prefix and len(own) > 1)
                key = (group if place >= root else None, place) if is_shared else token
                if key not in shared:
                    shared[key] = len(rows)
                    rows.append((token, place))
                row_of.append(shared[key])
                token += 1
    if layout.token_R is None:
        assert row_of == list(range(token))
        assert layout.pieces.tolist() == lengths.flat.tolist()
        assert layout.saved == 0
        return
    assert layout.token_R.tolist() == [t for t, _ in rows]
    assert layout.row_T.tolist() == row_of
    assert layout.saved == token - len(rows)
    assert layout.position_R.tolist() == [place for _, place in rows]


@given(st.lists(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=4), max_size=4))
@settings(deadline=None)
def test_common_prefixes(groups):
    flat = np.array([x for group in groups for sequence in group for x in sequence], dtype=np.int64)
    prefixes = common_prefixes(flat, Lengths.of([[len(sequence) for sequence in group] for group in groups]))
    for n, group in zip(prefixes.tolist(), groups, strict=True):
        columns = list(zip(*group, strict=False))
        same = [len(set(column)) == 1 for column in columns]
        assert n == (0 if len(group) < 2 else same.index(False) if False in same else len(same))


@pytest.mark.parametrize(("limit", "saved"), [(None, 18), (25, 18), (24, 12), (20, 12), (14, 6), (12, 0)])
def test_rows_of_a_cut_group(limit, saved):
    ids = torch.randint(3, 90, (30,), generator=torch.Generator().manual_seed(0))
    data = random_sample([[12, 9, 10, 12]])
    tokens = [torch.cat([ids[:6], torch.full((1,), i), ids[10 : 3 + n]]) for i, n in enumerate((12, 9, 10, 12))]
    data = data.with_tokens(input_ids=[tokens])
    passes = Passes.of(data, MicroBatchSpec(limit), share=True)
    rows = [int(layout.pieces.sum()) for _, layout in passes]
    assert limit is None or max(rows) <= limit
    assert sum(rows) == 43 - passes.saved
    assert passes.saved == saved


def sample(groups=GROUPS, seed=0):
    data = random_sample([[prompt + n for n in own] for prompt, own in groups], seed=seed)
    sequences = iter(data.sequences())
    ids, given = [], []
    for prompt, own in groups:
        of_group = [next(sequences).clone() for _ in own]
        for i, sequence in enumerate(of_group):
            sequence[:prompt] = of_group[0][:prompt]
            if len(sequence) > prompt:
                sequence[prompt] = 3 + i  # responses differ from their first token on
        ids.append(of_group)
        given.append([torch.arange(prompt + n) < prompt for n in own])
    data = data.with_tokens(input_ids=ids, prompt_mask=given)
    weight = torch.randn(len(data["input_ids"]), generator=torch.Generator().manual_seed(seed))
    return data.with_tokens(loss_mask=~data["prompt_mask"], weight=weight)


def pair(family="qwen2", **engine):
    """Return engines with the same weights, with and without shared prompts."""
    return [tiny_engine(family, shared_prompts=how, **engine) for how in SharedPrompts]


def gradient(engine):
    return torch.cat([p.grad.flatten() for p in engine.network.parameters() if p.grad is not None]).double()


def assert_same_gradient(shared, plain, tolerance=1e-6):
    a, b = gradient(shared), gradient(plain)
    assert a.shape == b.shape
    assert b.norm() > 0
    assert float((a - b).norm() / b.norm()) < tolerance


def outputs(engine, data, *, training=True):
    passes = engine.network.passes(data, ONE, training=training)
    ((part, layout),) = passes
    return engine.network.run(part, part, layout, training=training), passes.saved


def both(read, data, shared, plain):
    """Return the numbers [N] that `read` computes from an output, and the gradient of their weighted sum."""
    logprobs = []
    for engine in (shared, plain):
        out, saved = outputs(engine, data)
        assert saved == (SHARED if engine is shared else 0)
        x = read(out)
        (x * torch.linspace(-1, 1, x.numel()).view_as(x)).sum().backward()
        logprobs.append(x.detach())
    torch.testing.assert_close(logprobs[0], logprobs[1], atol=1e-5, rtol=1e-5)
    assert_same_gradient(shared, plain)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_logprobs_entropy_and_gradient(family):
    data = sample()
    both(lambda out: torch.stack(out.logprobs_and_entropy(temperature=0.7)), data, *pair(family, optimizer=STEP))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "mixtral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_hidden_states_logits_and_checkpointing(family, checkpointing):
    engines = pair(family, optimizer=STEP, gradient_checkpointing=checkpointing)
    data = sample()
    hidden = [outputs(engine, data)[0].hidden_TH for engine in engines]
    assert hidden[0].shape == (TOKENS, 64)
    torch.testing.assert_close(*hidden, atol=1e-5, rtol=1e-5)
    with engines[0]._training(), engines[1]._training():
        both(lambda out: out.logits, data, *engines)


def load(folder, how, **fields):
    return TransformersModel(str(folder), device="cpu", shared_prompts=how, **fields).load("actor", seed=0)


@pytest.mark.parametrize("layers", [0, 2])
def test_value_heads_and_their_branches(tmp_path, layers):
    folder = save_tiny(tmp_path / "m", "qwen2")
    spec = ValueHead(layers=layers, hidden="mlp", init="normal")
    engines = [load(folder, how, optimizer=STEP, head=Causal(spec)).engine for how in SharedPrompts]

    def read(out):
        return torch.cat([out.values(), out.scores(), out.logprobs()])

    both(read, sample(), *engines)


@pytest.mark.parametrize(("family", "trains"), [("gemma2", TopLayers(1)), ("gpt2", Lora(rank=2))])
def test_references(tmp_path, family, trains):
    folder = save_tiny(tmp_path / "m", family)
    data, scored = sample(), []

    def keep(out, mb):
        return mb.with_tokens(logprobs=out.logprobs())

    for how in SharedPrompts:
        model = load(folder, how, optimizer=STEP, trains=trains)
        view = SharedModel("actor", branch="reference").load("ref", seed=0, loaded={"actor": model})
        stats = train(model.engine, data)[0]
        assert stats["shared_tokens"] == (SHARED if how is SharedPrompts.auto else 0)
        scored.append([engine.forward(data, ONE, keep)["logprobs"] for engine in (view.engine, model.engine)])
    assert not torch.allclose(scored[0][0], scored[0][1], atol=1e-4)
    torch.testing.assert_close(scored[0], scored[1], atol=2e-5, rtol=1e-5)


def likelihood(out, mb):
    logprobs_T, entropy_T = out.logprobs_and_entropy(where_T=mb["loss_mask"])
    return (mb["weight"] * logprobs_T - 0.1 * entropy_T)[mb["loss_mask"]].sum(), {}


def train(engine, data, spec=ONE):
    stats = engine.train_batch(data, spec, likelihood, lambda d: d["loss_mask"].sum())
    weights = torch.cat([p.detach().flatten() for p in engine.network.parameters()])
    return stat_values(stats), weights


@pytest.mark.parametrize("limit", [None, 70, 44, 42])
def test_the_cut_is_invisible(limit):
    data, rows = sample(), []
    shared, plain = pair(optimizer=STEP)
    shared.module.base_model.register_forward_pre_hook(
        lambda module, args, keywords: rows.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    stats, weights = train(shared, data, MicroBatchSpec(limit))
    want, plain_weights = train(plain, data)
    torch.testing.assert_close(weights, plain_weights, atol=1e-6, rtol=1e-5)
    assert stats["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert stats["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert stats["tokens"] == want["tokens"] == TOKENS
    assert sum(rows) == TOKENS - stats["shared_tokens"]
    assert limit is None or max(rows) <= limit
    assert (stats["n_microbatches"] > 1) == (limit is not None)
    assert stats["shared_tokens"] == SHARED

    def keep(out, mb):
        return mb.with_tokens(logprobs=out.logprobs())

    scored = [e.forward(data, spec, keep)["logprobs"] for e, spec in ((shared, MicroBatchSpec(limit)), (plain, ONE))]
    torch.testing.assert_close(*scored, atol=2e-5, rtol=1e-5)


def test_trap_b1_training_sees_the_scored_logprobs_exactly():
    data, engine = sample(), tiny_engine(optimizer=STEP)
    scored = engine.forward(data, ONE, lambda out, mb: mb.with_tokens(logprobs=out.logprobs()))["logprobs"]
    out, saved = outputs(engine, data)
    assert saved
    assert torch.equal(out.logprobs().detach(), scored)


def test_dropout_shares_nothing_in_training():
    engine = tiny_engine("gpt2", optimizer=STEP, dropout=0.1)
    assert train(engine, sample())[0]["shared_tokens"] == 0
    assert outputs(engine, sample(), training=False)[1] == SHARED


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_prompts_are_shared_through_a_kernel_of_an_accelerator(monkeypatch, name, family):
    plain = tiny_engine(family, optimizer=STEP, dtype=torch.bfloat16, shared_prompts=SharedPrompts.off)
    want, want_weights = train(plain, sample())
    calls = install_flash(monkeypatch, name)
    pretend_cuda(monkeypatch)
    shared = tiny_engine(family, optimizer=STEP, dtype=torch.bfloat16)
    calls.clear()
    stats, weights = train(shared, sample())
    assert stats["shared_tokens"] == SHARED
    assert calls
    assert all(call["max_seqlen_k"] >= call["max_seqlen_q"] for call in calls)
    assert all(len(call["k"]) > len(call["q"]) for call in calls)
    assert stats["loss"] == pytest.approx(want["loss"], rel=2e-2)
    assert stats["grad_norm"] == pytest.approx(want["grad_norm"], rel=5e-2)
    torch.testing.assert_close(weights, want_weights, atol=5e-3, rtol=0)


def test_a_kernel_that_aligns_queries_with_the_first_keys_shares_nothing(monkeypatch, caplog):
    def first_keys(q, k, v, cu_q, cu_k, scale, window, softcap):
        parts = [k[a:b] for a, b in zip(cu_k.tolist(), cu_k.tolist()[1:], strict=False)]
        values = [v[a:b] for a, b in zip(cu_k.tolist(), cu_k.tolist()[1:], strict=False)]
        counts = cu_q.diff().tolist()
        cut = [torch.cat([x[:n] for x, n in zip(given, counts, strict=True)]) for given in (parts, values)]
        return varlen(q, *cut, cu_q, cu_q, scale, window, softcap)

    varlen = flash_stand_in.varlen
    monkeypatch.setattr(flash_stand_in, "varlen", first_keys)
    install_flash(monkeypatch, "flash_attn")
    pretend_cuda(monkeypatch)
    network = tiny_engine("llama", dtype=torch.bfloat16).network
    assert not can_share("actor", network.module, Backend.auto, network.autocast)
    assert "cannot share prompts in bfloat16: hidden states differ by" in caplog.text


def test_the_probe_refuses_shared_keys_that_are_lost(monkeypatch):
    monkeypatch.setattr(PackedContext, "_join", lambda self, x_of_each, dim: list(x_of_each))
    with pytest.raises(ConfigError, match=r"'llama' cannot share prompts: .* Set shared_prompts=off"):
        tiny_engine("llama")
    assert tiny_engine("llama", shared_prompts=SharedPrompts.off)


SYSTEM = 9
"""Number of first tokens that all prompts have in common."""


def chats():
    """Return `sample` with the same first tokens in all prompts, as after a system message."""
    data = sample(tuple((SYSTEM + prompt, own) for prompt, own in GROUPS))
    first = data.sequences()[0][:SYSTEM]
    texts = [torch.cat([first, text[SYSTEM:]]) for text in data.sequences()]
    return data.with_tokens(input_ids=torch.cat(texts))


ONCE = SYSTEM * (len([n for _, own in GROUPS for n in own]) - 1) + 2 * 7 + 1 + 3 * 12 + 2
"""Tokens of `chats` that are not computed. With the system message, the last group shares its prompt too."""


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_system_message_is_computed_once(family):
    data, (shared, plain) = chats(), pair(family, optimizer=STEP)
    stats, weights = train(shared, data)
    want, plain_weights = train(plain, data)
    assert stats.pop("shared_tokens") == ONCE
    assert want.pop("shared_tokens") == 0
    assert stats.pop("n_microbatches") <= want.pop("n_microbatches")  # more rows may need another lane
    assert stats == pytest.approx(want, rel=1e-4)
    torch.testing.assert_close(weights, plain_weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [MicroBatchSpec(n_microbatches=2), MicroBatchSpec(60)])
def test_each_micro_batch_has_its_own_copy_of_the_system_message(spec):
    data, (shared, plain) = chats(), pair(optimizer=STEP)
    stats, weights = train(shared, data, spec)
    assert stats["shared_tokens"] == ONCE - SYSTEM * (stats["n_microbatches"] - 1)
    torch.testing.assert_close(weights, train(plain, data)[1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("more", "saved"), [(30, 60), (300, 0), (800, 0)])
def test_long_texts_do_not_share_a_short_start(more, saved):
    data = random_sample([[20 + more]] * 4)
    first = data.sequences()[0][:20]
    data = data.with_tokens(input_ids=torch.cat([torch.cat([first, text[20:]]) for text in data.sequences()]))
    assert Passes.of(data, ONE, share=True).saved == saved


@torch.no_grad()
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS, "qwen3_next", "falcon_h1", "mamba"])
def test_a_prefill_computes_the_first_tokens_that_all_prompts_share_once(family):
    model = tiny_model(family) if family in {**FAMILIES, **OTHERS} else engine_over(family_model(family)).module
    rows, trunk = [], ModuleTrunk(model)

    def counting(ids_N, positions_N, context):
        rows.append(len(ids_N))
        return trunk(ids_N, positions_N, context)

    texts = [text[: SYSTEM + n] for text, n in zip(chats().sequences(), (4, 7, 0), strict=False)]
    hidden_SH, states = PackedDecoder(counting, shares=True).prefill(texts)
    assert rows == [SYSTEM + 4 + 7]
    for text, hidden_H, state in zip(texts, hidden_SH, states, strict=True):
        (want_H,), (want,) = PackedDecoder(counting).prefill([text])
        torch.testing.assert_close(hidden_H, want_H, atol=1e-5, rtol=1e-5)
        assert state.kv.keys() == want.kv.keys()
        for layer, kv in want.kv.items():
            torch.testing.assert_close(state.kv[layer], kv, atol=1e-5, rtol=1e-5)
        for layer, kept in want.states.items():
            torch.testing.assert_close(dict(state.states[layer]), dict(kept), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_prefilled_tokens_that_share_a_row_have_the_same_experts():
    engine = tiny_engine("qwen3_moe")
    texts = [text[: SYSTEM + 3] for text in chats().sequences()[:2]]
    both, alone = (
        PackedDecoder(ModuleTrunk(engine.module), engine.network.abilities.replay.routers, shares=shares)
        for shares in (True, False)
    )
    both.prefill(texts)
    alone.prefill(texts)
    assert len(both.chosen_NW) == 2 * (SYSTEM + 3)
    assert torch.equal(both.chosen_NW, alone.chosen_NW)
