from __future__ import annotations

import copy

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import ConfigError, SettingsError
from realign.models import Causal, QHeads, ValueHead
from realign.samplers.in_process.settings import InProcessSampling
from realign.samplers.servers.server_sampler import check_config
from tests.tiny import VOCAB, random_sample, save_tiny

ONE = MicroBatchSpec()
LENGTHS = ((9, 4, 6), (12,), (3, 5))
STEP = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)
RATE = 0.25
WORDS = VOCAB - 7
PROMPTS = SequenceSample.from_sequences("abc", {"prompt_ids": [[[5, 6]], [[7]], [[8, 9, 10]]]})


def load(folder, *, hidden="mlp", n=2, vocabulary=None, **fields):
    head = Causal(ValueHead(hidden=hidden, init="normal", q_heads=QHeads(n, RATE)), vocabulary=vocabulary)
    return (
        TransformersModel(str(folder), device="cpu", optimizer=STEP, head=head, **fields).load("actor", seed=0).engine
    )


def keep(out, mb):
    q = out.q_values(where_T=mb["loss_mask"])
    return mb.with_tokens(
        **{f"q{k}": x for k, x in enumerate(q.online_KT)}, target=q.target_T, cql=q.logprobs_KT.sum(0)
    )


def loss(out, mb):
    q, mask_T = out.q_values(where_T=mb["loss_mask"]), mb["loss_mask"]
    errors_T = (q.online_KT - 1).square().sum(0) + (out.values() - q.target_T).square()
    return torch.where(mask_T, errors_T, 0).sum() - q.logprobs_KT.sum(), {}


def step(engine, step_if=None, seed=0):
    data = random_sample(LENGTHS, seed=seed)
    data = data.with_tokens(input_ids=data["input_ids"].clamp(max=WORDS - 1))
    return engine.train_batch(data, ONE, loss, lambda d: d["loss_mask"].sum(), step_if)


def linear(layers, x):
    """Apply the layers of a head with products of matrices."""
    for i in range(0, len(layers) - 1, 2):
        x = (x @ layers[i].weight.T + layers[i].bias).clamp(min=0)
    return x @ layers[-1].weight.T + layers[-1].bias


def alone(engine):
    """Return a copy of the model that runs the code of its family, and its function from ids to hidden states."""
    module = copy.deepcopy(engine.module)
    module.set_attn_implementation("eager")
    return module, lambda ids: module.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0].detach()


def smallest(heads, hidden):
    return torch.stack([linear(head, hidden) for head in heads]).min(0).values


@pytest.mark.parametrize(("family", "hidden", "n"), [("llama", "mlp", 2), ("gpt2", "linear", 3), ("bloom", "mlp", 1)])
def test_action_values_of_packed_sequences_equal_an_independent_pass_over_each(tmp_path, family, hidden, n):
    engine = load(save_tiny(tmp_path / "m", family), hidden=hidden, n=n)
    step(engine)  # from here on the targets differ from the heads
    data = random_sample(LENGTHS)
    packed = engine.forward(data, MicroBatchSpec(max_tokens_per_microbatch=20), keep)
    (_, states_of), heads = alone(engine), engine.value_head.q_heads
    cu, mask_T = data.cu_seqlens().tolist(), data["loss_mask"]
    for s, ids in enumerate(data.sequences()):
        states = states_of(ids)
        here, index = slice(cu[s], cu[s + 1]), ids[1:, None]
        values = {f"q{k}": linear(head, states[:-1]).gather(1, index)[:, 0] for k, head in enumerate(heads.online)}
        values["target"] = (
            torch.stack([linear(h, states[:-1]).gather(1, index)[:, 0] for h in heads.target]).min(0).values
        )
        values["cql"] = sum(linear(h, states[:-1]).log_softmax(-1).gather(1, index)[:, 0] for h in heads.online)
        for name, expected in values.items():
            expected = torch.where(mask_T[here][1:], expected, 0)
            torch.testing.assert_close(packed[name][here][1:], expected.detach(), atol=2e-5, rtol=1e-4)
            assert packed[name][here][0] == 0
    assert packed["q0"].abs().max() > 1e-2


def test_targets_are_polyak_averages_after_each_optimizer_step(tmp_path):
    engine = load(save_tiny(tmp_path / "m"))
    heads = engine.value_head.q_heads
    assert all(torch.equal(a, b) for a, b in zip(heads.online.parameters(), heads.target.parameters(), strict=True))
    want = [p.detach().clone() for p in heads.target.parameters()]
    for seed in range(3):
        step(engine, seed=seed)
        want = [(1 - RATE) * w + RATE * p.detach() for w, p in zip(want, heads.online.parameters(), strict=True)]
    for target, expected, online in zip(heads.target.parameters(), want, heads.online.parameters(), strict=True):
        torch.testing.assert_close(target, expected)
        assert not torch.equal(target, online)
        assert target.grad is None
    before = copy.deepcopy(heads.target.state_dict())
    step(engine, step_if=lambda stats: False)
    assert all(torch.equal(x, before[name]) for name, x in heads.target.state_dict().items())


def test_heads_and_targets_are_saved_and_restored(tmp_path):
    engine = load(save_tiny(tmp_path / "m"))
    step(engine)
    engine.save(tmp_path / "saved")
    saved = load(tmp_path / "saved")
    other = load(tmp_path / "m")
    other.load_state_dict(copy.deepcopy(engine.state_dict()))
    for model in (saved, other):
        weights = model.weights()
        assert all(torch.equal(x, weights[name]) for name, x in engine.weights().items())
    step(engine, seed=1)
    step(other, seed=1)
    assert all(torch.equal(x, other.weights()[name]) for name, x in engine.weights().items())
    with pytest.raises(ConfigError, match=r"value_head\.q_heads\.n=3: .* was saved with q_heads\.n=2"):
        load(tmp_path / "saved", n=3)


@pytest.mark.parametrize(("family", "exact"), [("llama", False), ("llama", True), ("bloom", False)])
@pytest.mark.parametrize(("scale", "temperature"), [(0.0, 1.0), (2.0, 1.0), (2.0, 0.5)])
def test_sampled_logprobs_are_those_of_the_perturbed_policy(tmp_path, family, exact, scale, temperature):
    engine = load(save_tiny(tmp_path / "m", family), vocabulary=WORDS, sampler=InProcessSampling(exact=exact))
    step(engine)
    config = GenerationConfig(n=3, max_new_tokens=6, temperature=temperature, advantage_scale=scale)
    out = engine.generate(PROMPTS, config, seed=3)
    (module, states_of), heads = alone(engine), engine.value_head.q_heads
    for ids, logprobs, mask in zip(*(out.sequences(k) for k in ("input_ids", "logprobs", "loss_mask")), strict=True):
        states = states_of(ids)[:-1]
        logits = states @ module.get_output_embeddings().weight[:WORDS].T
        advantages = smallest(heads.target, states) - engine.value_head.head(states)
        perturbed = (logits.log_softmax(-1) + scale * advantages) / temperature
        expected = perturbed.log_softmax(-1).gather(1, ids[1:, None])[:, 0].detach()
        torch.testing.assert_close(logprobs[1:][mask[1:]], expected[mask[1:]], atol=1e-4, rtol=1e-4)


def test_errors_name_the_setting(tmp_path):
    folder, config = save_tiny(tmp_path / "m"), GenerationConfig(advantage_scale=0.5)
    plain = TransformersModel(str(folder), head=Causal(ValueHead())).load("actor", seed=0).engine
    with pytest.raises(
        ConfigError, match=r"advantage_scale=0\.5: models\.actor has no Q heads\. Set models\.actor\.head"
    ):
        plain.generate(PROMPTS, config, seed=0)
    with pytest.raises(ValueError, match=r"q_values requires Q heads \(head\.value_head\.q_heads\)"):
        plain.forward(random_sample(LENGTHS), ONE, keep)
    with pytest.raises(ConfigError, match=r"advantage_scale=0\.5: servers have no Q heads"):
        check_config(config)
    with pytest.raises(SettingsError, match="layers=1: q_heads read the trunk's last hidden states"):
        ValueHead(layers=1, q_heads=QHeads())
    assert config.distortions() == ["advantage_scale=0.5"]
    assert plain.capabilities().outputs == {"logprobs", "values", "scores"}
    assert (
        load(folder).capabilities().outputs
        == Causal(ValueHead(q_heads=QHeads())).outputs
        == {*plain.capabilities().outputs, "q_values"}
    )
