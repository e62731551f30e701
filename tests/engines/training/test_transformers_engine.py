from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

from realign.api import (
    GenerationConfig,
    Lengths,
    MicroBatchSpec,
    SequenceSample,
    masked_max,
    masked_mean,
    stat_values,
)
from realign.engines import OptimizerSpec, Schedule, TransformersModel
from realign.errors import RunError
from realign.functional.rounding import active_rounding
from realign.interfaces.components import Constant, SeqMeanTokenMean, SeqMeanTokenSum, TokenMean
from realign.models import Causal, ValueHead
from realign.models.network import passes
from realign.samplers.in_process.compiled import fusion
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.compiled.trunk import library_products
from realign.samplers.in_process.settings import InProcessSampling
from tests.grids import rotating
from tests.tiny import (
    FAMILIES,
    ONE,
    STEP,
    Likelihood,
    assert_same,
    random_sample,
    save_tiny,
    tiny_engine,
    train,
    weights,
)

LENGTHS = ((9, 4, 6), (12,), (3, 5), (8, 2, 2, 1))
SPECS = [ONE, *(MicroBatchSpec(n_microbatches=n) for n in (2, 3, 4, 9))]
SPECS += [MicroBatchSpec(max_tokens_per_microbatch=15)]


def moved(engine, before):
    return max(float((x - before[name]).abs().max()) for name, x in weights(engine).items())


def test_one_step_equals_padded_reference_with_plain_torch():
    """The reference uses a plain transformers pass per sequence and the definition of Adam."""
    engine = tiny_engine(optimizer=STEP)
    reference = copy.deepcopy(engine.module)
    reference.set_attn_implementation("eager")
    data = random_sample(LENGTHS)
    total = 0.0
    for ids, mask in zip(data.sequences(), data.sequences("loss_mask"), strict=True):
        logp = reference(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        for t in range(1, len(ids)):
            if mask[t]:
                total = total - logp[t - 1, ids[t]] + 0.01 * (logp[t - 1].exp() * logp[t - 1]).sum()
    (total / data["loss_mask"].sum()).backward()
    stats = stat_values(train(engine, data))
    assert stats["loss"] == pytest.approx((total / data["loss_mask"].sum()).item(), rel=1e-5)
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for (name, p), (_, q) in zip(reference.named_parameters(), engine.module.named_parameters(), strict=True):
        want = p.detach() - 1e-2 * p.grad / (p.grad.abs() + 1.0)
        torch.testing.assert_close(q.detach(), want, atol=1e-6, rtol=1e-5, msg=name)


AGGREGATIONS = [TokenMean(), SeqMeanTokenMean(), SeqMeanTokenSum(), Constant(16.0)]


@pytest.mark.parametrize("mode", AGGREGATIONS, ids=lambda x: x.describe().partition(",")[0])
def test_trap_d1_d3_step_does_not_depend_on_the_cut(mode):
    data = random_sample(LENGTHS)
    loss = Likelihood(mode)
    results = []
    for spec in SPECS:
        engine = tiny_engine(optimizer=STEP)
        stats = stat_values(train(engine, data, spec, loss))
        results.append((weights(engine), stats, stats.pop("n_microbatches")))
    assert {n for _, _, n in results} >= {1.0, 2.0, 3.0, 4.0}
    for gradient, stats, _ in results[1:]:
        assert_same(gradient, results[0][0])
        assert stats == pytest.approx(results[0][1], rel=1e-4)  # all metrics are equal, too


def test_trap_d1_golden_token_mean():
    """Lengths 2, 4, 10 with per-token loss 1, 2, 3: the token mean is 2.5. Means per micro-batch would give 2.0 or
    2.33."""
    data = random_sample([[2], [4], [10]], prompt=0)
    per_token = torch.tensor([1.0] * 2 + [2.0] * 4 + [3.0] * 10)
    data = data.with_tokens(given=per_token)
    for spec in SPECS[:3]:
        engine = tiny_engine(optimizer=STEP)
        stats = engine.train_batch(
            data,
            spec,
            lambda out, mb: (mb["given"].sum() + 0 * out.logprobs().sum(), {}),
            lambda d: d["loss_mask"].sum(),
        )
        assert stat_values(stats)["loss"] == pytest.approx(2.5)


def test_trap_d5_group_size_does_not_scale_the_gradient():
    group = random_sample([[9, 9, 9, 9]])
    one = group.take_sequences([0])
    ids = one["input_ids"].repeat(4)
    norms = [
        stat_values(train(tiny_engine(optimizer=STEP), data))["grad_norm"]
        for data in (one, group.with_tokens(input_ids=ids))
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_trap_d7_batch_without_trainable_tokens_is_no_step():
    data = random_sample([[9, 4], [5]])
    data = data.with_tokens(loss_mask=torch.zeros(18, dtype=torch.bool))
    engine = tiny_engine(optimizer=OptimizerSpec(lr=0.1, weight_decay=0.5, schedule=Schedule("linear", total=10)))
    train(engine, random_sample([[7]]))  # now the moments of the optimizer are not zero
    before, lr = weights(engine), engine._stepper.lr
    stats = stat_values(train(engine, data))
    assert stats["skipped_steps"] == stats["zero_weight_steps"] == 1
    assert stats["nonfinite_steps"] == stats["zero_gradient_steps"] == 0
    assert "loss" not in stats
    assert moved(engine, before) == 0
    assert engine._stepper.lr == lr


def test_trap_a14_d7_empty_and_tiny_sequences_train():
    engine = tiny_engine(optimizer=STEP)
    data = random_sample([[0, 1], [0], [7, 0], [1]], prompt=0)
    for spec in (ONE, MicroBatchSpec(n_microbatches=4), MicroBatchSpec(max_tokens_per_microbatch=7)):
        stats = stat_values(train(engine, data, spec))
        assert stats["skipped_steps"] == 0
        assert stats["tokens"] == 9
    logprobs = engine.forward(data, MicroBatchSpec(n_microbatches=4), keep_logprobs)["logprobs"]
    assert logprobs.shape == (9,)
    assert logprobs.isfinite().all()


def test_trap_e13_zero_gradient_is_no_step():
    engine = tiny_engine(optimizer=OptimizerSpec(lr=0.1, weight_decay=0.5))
    data = random_sample([[7], [5]])
    train(engine, data)
    before = weights(engine)
    stats = engine.train_batch(data, ONE, lambda out, mb: (0 * out.logprobs().sum(), {}), lambda d: torch.tensor(3.0))
    metrics = stat_values(stats)
    assert (metrics["skipped_steps"], metrics["zero_gradient_steps"], metrics["grad_norm"]) == (1, 1, 0)
    assert moved(engine, before) == 0
    constant = engine.train_batch(data, ONE, lambda out, mb: (torch.tensor(2.0), {}), lambda d: torch.tensor(4.0))
    assert stat_values(constant)["loss"] == 0.5
    assert stat_values(constant)["zero_gradient_steps"] == 1
    assert moved(engine, before) == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nonfinite_steps_are_skipped_and_counted_and_end_the_run(poison):
    engine = tiny_engine(optimizer=replace(STEP, max_nonfinite_in_a_row=3))
    data = random_sample([[7], [5]])
    before = weights(engine)

    def bad(out, mb):
        return out.logprobs().sum() * (poison if len(mb["input_ids"]) == 5 else 1.0), {}

    def weight(d):
        return torch.tensor(1.0)

    two = MicroBatchSpec(n_microbatches=2)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"the loss of id 'p1'\)\. The step is skipped .* skips: \d; the run ends at 3\."
        ):
            stats = stat_values(engine.train_batch(data, two, bad, weight))
        assert stats["nonfinite_steps"] == stats["skipped_steps"] == 1
        assert "loss" not in stats
        assert moved(engine, before) == 0
    assert stat_values(train(engine, data))["skipped_steps"] == 0  # a successful step resets the count
    after = weights(engine)
    for _ in range(2):
        with pytest.warns(UserWarning, match="is skipped"):
            engine.train_batch(data, two, bad, weight)
    message = "actor: the loss or gradient of 3 consecutive optimizer steps was not finite .*, from the loss of id 'p1'"
    with pytest.raises(RunError, match=message):
        engine.train_batch(data, two, bad, weight)
    assert moved(engine, after) == 0


def test_a_vetoed_step_moves_no_weight_moment_schedule_or_average():
    spec = OptimizerSpec(lr=0.1, weight_decay=0.5, schedule=Schedule("linear", total=10), ema_decay=0.5)
    engine = tiny_engine(optimizer=spec)
    data, loss, seen = random_sample(LENGTHS), Likelihood(), []
    train(engine, random_sample(LENGTHS, seed=1))  # now the moments of the optimizer are not zero
    before = copy.deepcopy(engine.state_dict())
    plain = stat_values(train(copy.deepcopy(engine), data))

    def veto(stats):
        seen.append(stat_values(stats))
        return False

    for spec in (ONE, MicroBatchSpec(n_microbatches=3)):
        metrics = stat_values(engine.train_batch(data, spec, loss.loss, loss.weight, veto))
        assert (metrics["vetoed_steps"], metrics["skipped_steps"], metrics["optimizer_steps"]) == (1, 1, 0)
        for name in ("nll", "nll_max", "loss", "grad_norm", "lr", "tokens"):  # reported as without the veto
            assert metrics[name] == pytest.approx(plain[name], rel=1e-5), name
        asked = {k: plain[k] for k in ("nll", "nll_max", "pair", "tokens")}
        assert {k: seen[-1][k] for k in asked} == pytest.approx(asked, rel=1e-5)
    for part in ("module", "ema", "optimizer"):
        assert_equal(engine.state_dict()[part], before[part])
    assert all(p.grad is None for p in engine.module.parameters())
    after = stat_values(engine.train_batch(data, ONE, loss.loss, loss.weight, lambda stats: True))
    assert (after["vetoed_steps"], after["optimizer_steps"], after["lr"]) == (0, 1, plain["lr"])


def test_a_step_without_a_gradient_is_refused_or_counted():
    engine = tiny_engine(optimizer=STEP)
    with pytest.raises(ValueError, match=r"'actor': apply has no gradient"):
        engine.apply(torch.tensor(1.0))
    metrics = stat_values(engine.skip("zero_weight_steps"))
    assert (metrics["zero_weight_steps"], metrics["skipped_steps"], metrics["optimizer_steps"]) == (1, 1, 0)


def assert_equal(a, b):
    """Compare nested state bit by bit."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def test_an_interrupted_batch_leaves_no_gradient_behind():
    data = random_sample([[7], [5]])

    def fails(out, mb):
        if len(mb["input_ids"]) == 5:
            raise KeyError("advantages")
        return out.logprobs().sum(), {}

    engine, fresh = tiny_engine(optimizer=STEP), tiny_engine(optimizer=STEP)
    with pytest.raises(KeyError, match="advantages"):
        engine.train_batch(data, MicroBatchSpec(n_microbatches=2), fails, lambda d: torch.tensor(1.0))
    assert not any(m.training for m in engine.module.modules())
    train(engine, data)
    train(fresh, data)
    assert_same(weights(engine), weights(fresh), atol=0)


def test_trap_d14_a8_schedule_counts_rollout_batches():
    schedule = Schedule("linear", total=4, unit="train_step")
    engine = tiny_engine(optimizer=OptimizerSpec(lr=1.0, grad_clip=1e-9, schedule=schedule))
    data, rates = random_sample([[7]]), []
    for version in range(3):
        engine.start_step(version)
        rates += [stat_values(train(engine, data))["lr"] for _ in range(2)]
    assert rates == pytest.approx([1.0, 1.0, 0.75, 0.75, 0.5, 0.5])


def test_state_dict_continues_exactly():
    spec = OptimizerSpec(lr=1e-2, eps_hat=True, eps=1e-5, schedule=Schedule("cosine", warmup=2, total=8))
    data = [random_sample(LENGTHS, seed=s) for s in range(4)]
    whole = tiny_engine(optimizer=spec)
    for sample in data:
        train(whole, sample)
    first, second = tiny_engine(optimizer=spec), tiny_engine(optimizer=spec, model={"seed": 1})
    for sample in data[:2]:
        train(first, sample)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for sample in data[2:]:
        train(second, sample)
    assert_same(weights(whole), weights(second), atol=0)
    with pytest.raises(ValueError, match=r"models.actor: the saved state has an optimizer, but the engine does not"):
        tiny_engine().load_state_dict(first.state_dict())


def test_weights_alone_leave_the_optimizer_and_start_the_average_anew():
    spec = OptimizerSpec(lr=1e-2, ema_decay=0.5)
    first, second = (tiny_engine(optimizer=spec, model={"seed": seed}) for seed in (0, 1))
    train(first, random_sample(LENGTHS))
    second.load_state_dict(copy.deepcopy(first.state_dict()), weights_only=True)
    assert_same(weights(first), weights(second), atol=0)
    assert second._stepper.optimizer_steps == 0
    assert not second._stepper.optimizer.state
    for average, parameter in zip(second._average.average, second._average.parameters, strict=True):
        assert torch.equal(average, parameter)


def test_a_state_of_which_other_weights_train_is_refused():
    first, second = (tiny_engine(optimizer=STEP) for _ in range(2))
    for x in second.module.model.embed_tokens.parameters():
        x.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"the saved state has different trained weights: 'model\.embed_tokens\.weight'"
    ):
        second.load_state_dict(first.state_dict())
    assert second.fixed_weights()["module"].keys() == {"model.embed_tokens.weight"}
    with pytest.raises(
        ValueError, match=r"the saved state has different trained weights: 'model\.embed_tokens\.weight'"
    ):
        first.load_state_dict(second.state_dict())


def test_whether_rollouts_are_fused_is_found_out_with_the_weights_that_the_run_began_with(monkeypatch):
    """Otherwise a resumed run would compare with trained weights, and might decide differently."""
    prompt = SequenceSample.from_sequences(["a"], {"prompt_ids": [[[5, 6, 7]]]})
    first = tiny_engine(optimizer=OptimizerSpec(lr=1e-2))
    assert not first.state_dict()["fused"]
    first.generate(prompt, GenerationConfig(max_new_tokens=2), seed=0)
    assert first.state_dict()["fused"]
    train(first, random_sample(LENGTHS))
    second, probed = tiny_engine(optimizer=OptimizerSpec(lr=1e-2)), []
    initial = weights(second)
    compared = fusion._probe_args
    monkeypatch.setattr(fusion, "_probe_args", lambda *args: probed.append(weights(second)) or compared(*args))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_same(probed[0], initial, atol=0)
    assert second.state_dict()["fused"]
    second.generate(prompt, GenerationConfig(max_new_tokens=2), seed=0)
    assert len(probed) == 1


def keep_logprobs(out, mb):
    return mb.with_tokens(logprobs=out.logprobs())


class DifferenceToBefore:
    """Reports the largest difference between log-probs and `before`."""

    def loss(self, output, data):
        logprobs_T = output.logprobs()
        return -logprobs_T.sum(), {"diff": masked_max((logprobs_T - data["before"]).abs(), data["loss_mask"])}

    def weight(self, data):
        return data["loss_mask"].sum()


@pytest.mark.parametrize(("family", "checkpointing"), rotating(FAMILIES, [False, True]))
def test_trap_b1_b6_first_ratio_is_one(family, checkpointing):
    """The config sets dropout. The engine disables it, with and without gradient checkpointing."""
    rates = {"gpt2": ("attn_pdrop", "resid_pdrop", "embd_pdrop"), "opt": ("dropout", "attention_dropout")}
    rates |= {"gpt_neox": ("attention_dropout", "hidden_dropout"), "phi3": ("resid_pdrop", "embd_pdrop")}
    config = dict.fromkeys(rates.get(family, ("attention_dropout",)), 0.3)
    engine = tiny_engine(family, model=config, optimizer=OptimizerSpec(lr=0.0), gradient_checkpointing=checkpointing)
    data = random_sample(LENGTHS)
    for spec, other, limit in ((ONE, ONE, 0.0), (SPECS[5], SPECS[5], 0.0), (ONE, SPECS[5], 1e-5)):
        before = engine.forward(data, spec, keep_logprobs).rename({"logprobs": "before"})
        metrics = stat_values(train(engine, data.merge(before), other, DifferenceToBefore()))
        assert metrics["diff"] <= limit
    assert not any(m.training for m in engine.module.modules())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3_moe"])
def test_trap_b6_checkpointing_recomputes_and_changes_nothing(family):
    data, results, calls = random_sample(LENGTHS), [], []
    for checkpointing in (False, True):
        engine = tiny_engine(family, optimizer=STEP, gradient_checkpointing=checkpointing)
        layer = next(m for n, m in engine.module.named_modules() if n.endswith(("layers.0", "h.0")))
        first = next(m for m in layer.modules() if not list(m.children()))
        count = []
        first.register_forward_hook(lambda *_, count=count: count.append(1))
        train(engine, data)
        results.append(weights(engine))
        calls.append(len(count))
        engine.forward(data, ONE, keep_logprobs)
        assert len(count) == calls[-1] + 1  # scoring does not recompute layers
    assert calls == [1, 2]
    assert_same(*results)


def test_dropout_is_applied_when_asked_and_only_while_training():
    """Whatever the model's config says."""
    rates = {"attn_pdrop": 0.9, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    data = random_sample(LENGTHS)
    losses, scores = [], []
    for dropout, checkpointing in ((0.0, False), (0.3, False), (0.3, False), (0.3, True)):
        engine = tiny_engine(
            "gpt2", model=rates, optimizer=OptimizerSpec(lr=0.0), dropout=dropout, gradient_checkpointing=checkpointing
        )
        scores.append(engine.forward(data, ONE, keep_logprobs)["logprobs"])
        torch.rand(1)  # the noise must not depend on the global generator
        losses.append(stat_values(train(engine, data)))
        assert not any(m.training for m in engine.module.modules())
    assert all(torch.equal(x, scores[0]) for x in scores)
    assert abs(losses[0]["loss"] - losses[1]["loss"]) > 1e-3
    assert losses[1] == losses[2]  # the noise is a function of the seed
    assert losses[3] == pytest.approx(losses[1], rel=1e-5)  # recomputed layers use the same noise


@pytest.mark.parametrize("family", FAMILIES)
def test_seed_c23_each_family_drops_values_at_the_rate_that_was_set(family):
    """The larger the rate, the further the loss is from that of the whole model."""
    data = random_sample(LENGTHS)
    off = tiny_engine(family, optimizer=OptimizerSpec(lr=0.0))
    whole = stat_values(train(off, data))["loss"]
    rates = {rate: tiny_engine(family, optimizer=OptimizerSpec(lr=0.0), dropout=rate).module for rate in (0.1, 0.4)}
    for rate, module in rates.items():
        assert {layer.p for layer in module.modules() if isinstance(layer, torch.nn.Dropout)} <= {rate}
        of_layers = {
            value
            for layer in module.modules()
            for name, value in vars(layer).items()
            if isinstance(value, float) and "dropout" in name
        }
        assert of_layers <= {rate}
    dropping = tiny_engine(family, optimizer=OptimizerSpec(lr=0.0), dropout=0.4)
    assert abs(stat_values(train(dropping, data))["loss"] - whole) > 1e-4


def test_trap_b9_bfloat16_computes_over_fp32_weights():
    data = random_sample(LENGTHS)
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = tiny_engine(optimizer=OptimizerSpec(lr=1e-6, eps=1e-3), dtype=dtype)
        before = weights(engine)
        seen = []

        def loss(out, mb, seen=seen, dtype=dtype):
            seen.append(out.logprobs().dtype)
            weight_VH = out.head.weight_VH.detach().to(dtype).float()  # a CPU rounds weights only
            near = 1e-5 if dtype == torch.bfloat16 and library_products() else 0.0
            torch.testing.assert_close(out.logits, out.hidden_TH @ weight_VH.T, rtol=0, atol=near)
            return Likelihood().loss(out, mb)

        results[dtype] = stat_values(engine.train_batch(data, ONE, loss, Likelihood().weight))
        assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
        state = engine._stepper.optimizer.state_dict()["state"]
        assert {x.dtype for s in state.values() for x in s.values() if x.ndim} == {torch.float32}
        assert seen == [torch.float32]
        assert moved(engine, before) > 0  # fp32 weights keep steps far below the resolution of bfloat16
    assert results[torch.bfloat16]["loss"] == pytest.approx(results[torch.float32]["loss"], rel=2e-2)
    assert results[torch.bfloat16]["loss"] != results[torch.float32]["loss"]


@pytest.mark.parametrize("compiled", [CompiledDecode.auto, CompiledDecode.off])
def test_rounded_weights_follow_every_optimizer_step(compiled):
    data = random_sample(LENGTHS)
    settings = {"dtype": torch.bfloat16, "sampling": InProcessSampling(compiled_decode=compiled)}
    engine = tiny_engine(optimizer=OptimizerSpec(lr=1e-2), **settings)
    matrices = sum(isinstance(part, torch.nn.Linear) for part in engine.module.modules())
    rounded = engine.network.abilities.rounded
    prompts = SequenceSample.from_sequences([0], {"prompt_ids": [[torch.tensor([5, 9, 4])]]})
    for spec in (ONE, SPECS[-1]):
        before = rounded.count
        train(engine, data, spec)
        assert rounded.count == before + matrices  # once for all micro-batches
        assert not rounded._known  # only passes need the copies
        fresh = tiny_engine(optimizer=OptimizerSpec(lr=1e-2), **settings)
        fresh.load_weights(engine.weights())
        scored = [x.forward(data, ONE, lambda out, mb: mb.with_tokens(x=out.logprobs()))["x"] for x in (engine, fresh)]
        config = GenerationConfig(max_new_tokens=8)
        sampled = [x.generate(prompts, config, seed=0)["logprobs"] for x in (engine, fresh)]
        assert not rounded._known  # nor after a rollout
        assert torch.equal(*scored)
        assert torch.equal(*sampled)


def weighted(output, data, *, entropy=0.0, values=0.0):
    logprobs_T, entropy_T = output.logprobs_and_entropy(where_T=data["loss_mask"])
    loss_T = -data["advantages"] * logprobs_T - entropy * entropy_T
    loss_T = loss_T + values * output.values().square() if values else loss_T
    shown = {name: masked_mean(x_T, data["loss_mask"]) for name, x_T in (("nll", -logprobs_T), ("entropy", entropy_T))}
    return torch.where(data["loss_mask"], loss_T, 0).sum(), shown


def with_advantages(*prompts):
    data = random_sample(LENGTHS)
    lengths = data.lengths["input_ids"]
    factor_S = torch.tensor([p in prompts for p in lengths.prompt_of_sequence.tolist()])
    of_token_T = factor_S.repeat_interleave(torch.from_numpy(lengths.flat))
    drawn_T = torch.randn(len(of_token_T), generator=torch.Generator().manual_seed(0))
    return data.with_tokens(advantages=torch.where(of_token_T, drawn_T, 0))


class Calls:
    def __init__(self, engine):
        self.forward = self.backward = 0
        layer = engine.module.base_model.layers[0]
        layer.register_forward_hook(lambda *_: self._add("forward"))
        layer.register_full_backward_hook(lambda *_: self._add("backward"))

    def _add(self, name):
        setattr(self, name, getattr(self, name) + 1)


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize(
    ("trained", "terms", "calls"),
    [
        ((0, 2), {}, (2, 1)),
        ((), {}, (1, 0)),
        ((0, 1, 2, 3), {}, (1, 1)),
        ((0, 2), {"entropy": 0.1}, (3, 2)),  # their gradient is found, and they are computed again
        ((0, 2), {"values": 0.1}, (3, 2)),
    ],
)
def test_prompts_whose_loss_has_no_gradient_have_no_backward_pass(
    monkeypatch, tmp_path, trained, terms, calls, settings
):
    data, results = with_advantages(*trained), []
    folder = save_tiny(tmp_path / "m", "llama")
    head = Causal(ValueHead(layers=1, init="normal") if "values" in terms else None)
    monkeypatch.setattr(passes, "MIN_ROWS", 1)
    for key in (None, "advantages"):
        source = TransformersModel(
            str(folder), device="cpu", optimizer=STEP, head=head, parallel_passes="off", **settings
        )
        engine = source.load("actor", seed=0).engine
        counted = Calls(engine)
        spec = MicroBatchSpec(zero_key=key)
        stats = stat_values(engine.train_batch(data, spec, partial(weighted, **terms), lambda d: d["loss_mask"].sum()))
        results.append((weights(engine), stats, stats.pop("n_microbatches")))
    assert (counted.forward, counted.backward) == calls
    for name, x in results[0][0].items():  # products in bf16 round
        torch.testing.assert_close(results[1][0][name], x, atol=1e-5 if "dtype" in settings else 1e-6, rtol=1e-5)
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-4)
    assert stats["zero_gradient_steps"] == (not trained)


def test_lanes_compute_both_kinds_of_prompts(monkeypatch):
    monkeypatch.setattr(passes, "MIN_ROWS", 4)
    threads, data = torch.get_num_threads(), with_advantages(0, 2)
    results = []
    try:
        for number, key in ((1, None), (2, "advantages")):
            torch.set_num_threads(number)
            engine = tiny_engine(optimizer=STEP)
            stats = stat_values(
                engine.train_batch(data, MicroBatchSpec(zero_key=key), weighted, lambda d: d["loss_mask"].sum())
            )
            results.append((weights(engine), stats, stats.pop("n_microbatches")))
    finally:
        torch.set_num_threads(threads)
    assert results[1][2] == 4
    assert_same(results[1][0], results[0][0])
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-4)


@pytest.mark.parametrize("spec", [ONE, SPECS[-1]])
def test_forward_gives_results_in_the_order_of_the_batch(spec):
    engine = tiny_engine(optimizer=STEP)
    data = random_sample(LENGTHS)

    def hook(out, mb):
        mb = mb.with_tokens(logprobs=out.logprobs(), copied=mb["input_ids"].clone())
        return mb.with_sequences(first=mb["input_ids"][mb.cu_seqlens()[:-1].long()])

    got = engine.forward(data, spec, hook)
    assert got.ids == data.ids
    assert got.keys == {"logprobs", "copied", "first"}
    assert torch.equal(got["copied"], data["input_ids"])
    assert got.lengths["copied"] == data.lengths["input_ids"]
    assert torch.equal(got["first"], data["input_ids"][data.cu_seqlens()[:-1].long()])
    want = engine.forward(data, ONE, keep_logprobs)["logprobs"]
    torch.testing.assert_close(got["logprobs"], want, atol=1e-5, rtol=1e-5)
    assert not got["logprobs"].requires_grad
    data.merge(got)


def test_forward_of_nothing_and_a_hook_that_adds_nothing():
    engine = tiny_engine()
    nothing = SequenceSample(()).with_data({"input_ids": torch.zeros(0).long()}, lengths=Lengths.of([]))
    assert engine.forward(nothing, ONE, keep_logprobs).ids == ()
    with pytest.raises(ValueError, match=r"post_hook returned only keys of the micro-batch"):
        engine.forward(random_sample([[3]]), ONE, lambda out, mb: mb)


def test_frozen_models_do_not_train():
    engine = tiny_engine()
    assert not engine.capabilities().trainable
    assert not any(p.requires_grad for p in engine.module.parameters())
    with pytest.raises(ValueError, match=r"models.actor: a model without an optimizer cannot train. Set optimizer.lr."):
        train(engine, random_sample([[5]]))
    engine.start_step(3)


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones((), dtype=torch.bfloat16)])
def test_a_loss_that_is_no_fp32_sum_is_refused(loss):
    with pytest.raises(ValueError, match=r"loss_fn returned .* It must return a 0-d float32 sum."):
        tiny_engine(optimizer=STEP).train_batch(
            random_sample([[5]]), ONE, lambda out, mb: (loss, {}), lambda d: torch.tensor(1.0)
        )


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_refused(weight):
    with pytest.raises(ValueError, match=r"loss_weight_fn returned .* It must return a finite number of at least 0."):
        tiny_engine(optimizer=STEP).train_batch(
            random_sample([[5]]), ONE, Likelihood().loss, lambda d: torch.tensor(weight)
        )


def test_generate_passes_on_the_engines_tokens_and_precision(monkeypatch):
    seen = {}

    def fake(model, data, config, sampling, *, seed, eos_token_ids, tokenizer):
        seen.update(images=model.images, routers=model.routers, sampling=sampling, seed=seed, eos=eos_token_ids)
        seen.update(grad=torch.is_grad_enabled(), training=model.module.training)
        seen.update(rounds=active_rounding() is not None, head=model.head.weight_VH)
        return data

    monkeypatch.setattr("realign.samplers.in_process.generate.generate", fake)
    sampling = InProcessSampling(max_slots=5, cache_fraction=0.25, sync_every=3)
    engine = tiny_engine(optimizer=STEP, dtype=torch.bfloat16, sampling=sampling)
    engine.module.generation_config.eos_token_id = [7, 5]
    engine.module.generation_config.repetition_penalty = 1.3
    data = SequenceSample(("a",))
    assert engine.generate(data, GenerationConfig(), seed=3) is data
    assert seen == {
        "seed": 3,
        "images": None,
        "routers": None,
        "sampling": sampling,
        "eos": (2, 5, 7),
        "grad": False,
        "training": False,
        "rounds": True,
        "head": engine.head.weight_VH,
    }
    with pytest.raises(ValueError, match="a model with a scalar head cannot generate"):
        tiny_engine("llama", model={"head": "score"}).generate(data, None, seed=0)
