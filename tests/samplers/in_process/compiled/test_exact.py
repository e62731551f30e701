"""With `exact=true`, rollouts, scoring and training give the same log-probs bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import ConfigError, SettingsError
from realign.functional import nll_loss
from realign.interfaces.grpo import GRPOActorInterface
from realign.models import Causal, ValueHead
from realign.models.network.passes import SharedPrompts
from realign.runtime import run
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.settings import InProcessSampling
from tests.samplers.in_process.compiled.native import adapted_model
from tests.tiny import engine_over, save_tiny, tiny_engine
from tests.toys import CountToken, Prompts, experiment

EXACT = InProcessSampling(exact=True)
CONFIG = GenerationConfig(n=3, max_new_tokens=9, temperature=0.7)
STEP = OptimizerSpec(lr=1e-2)


def engine(family="llama", sampling=EXACT, **settings):
    return tiny_engine(family, optimizer=STEP, sampling=sampling, **settings)


def prompts(ids=range(5), system=()):
    given = {i: [*system, *(2 + (i * 3 + k) % 11 for k in range(3 + 2 * i))] for i in ids}
    return SequenceSample.from_sequences(ids, {"prompt_ids": [[given[i]] for i in ids]})


def scored(engine, data, spec, temperature=CONFIG.temperature):
    def hook(output, mb):
        return mb.with_tokens(x=output.logprobs(temperature=temperature, where_T=mb["loss_mask"]))

    return engine.forward(data, spec, hook)["x"]


def loss(output, data):
    return nll_loss(output.logprobs(temperature=CONFIG.temperature), data["loss_mask"]).sum(), {}


def in_training(engine, data, spec):
    """Return the log-probs and the gradient of a training pass."""
    computed_T = torch.full_like(data["logprobs"], torch.nan)
    data = data.with_tokens(place=torch.arange(len(computed_T)))

    def traced(output, mb):
        logprobs_T = output.logprobs(temperature=CONFIG.temperature, where_T=mb["loss_mask"])
        computed_T[mb["place"]] = logprobs_T.detach()
        return loss(output, mb)

    engine.accumulate(data, spec, traced, torch.tensor(1.0))
    gradient = {n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None}
    engine.module.zero_grad()
    return computed_T, gradient


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in ("llama", "qwen2", "qwen3", "mistral", "phi3")),
        ("llama", torch.bfloat16),
    ],
)
def test_scoring_and_training_have_the_bits_of_the_rollout_however_it_is_batched(family, dtype):
    policy = engine(family, sampling=replace(EXACT, max_slots=4), dtype=dtype)
    system = [7, 9, 8, 4, 3]  # with which all prompts begin, so that passes have pieces at three levels
    out = policy.generate(prompts(system=system), CONFIG, seed=0)
    alone = [policy.generate(prompts([i], system), CONFIG, seed=0) for i in range(5)]
    assert torch.equal(torch.cat([x["logprobs"] for x in alone]), out["logprobs"])
    for budget in (None, 70, 25):
        spec = MicroBatchSpec(budget)
        assert torch.equal(scored(policy, out, spec), out["logprobs"])
        assert torch.equal(in_training(policy, out, spec)[0], out["logprobs"])
    plain = engine(family, sampling=InProcessSampling())
    differences = (scored(plain, out, MicroBatchSpec()) - out["logprobs"]).abs()
    assert 0 < differences.max() < 1e-5


def test_a_model_with_adapters_has_the_bits_of_the_rollout_and_the_gradient_of_torch():
    policy, plain = (engine_over(adapted_model(), optimizer=STEP, sampling=x) for x in (EXACT, InProcessSampling()))
    out = policy.generate(prompts(), CONFIG, seed=0)
    assert torch.equal(scored(policy, out, MicroBatchSpec()), out["logprobs"])
    (logprobs_T, exact), (_, torchs) = (in_training(x, out, MicroBatchSpec(70)) for x in (policy, plain))
    assert torch.equal(logprobs_T, out["logprobs"])
    for name in torchs:
        torch.testing.assert_close(exact[name], torchs[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"shared_prompts": SharedPrompts.off}], ids=["shared", "off"])
def test_the_gradient_is_that_of_torch(settings):
    made = [engine(sampling=x, **settings) for x in (EXACT, InProcessSampling())]
    out = made[0].generate(prompts(), CONFIG, seed=0)
    exact, plain = (in_training(x, out, MicroBatchSpec(70))[1] for x in made)
    for name in plain:
        torch.testing.assert_close(exact[name], plain[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, top_p=0.8, sampling_replay=True),
        replace(CONFIG, min_p=0.05, temperature=1.0, sampling_replay=True),
        replace(CONFIG, greedy=True),
    ],
)
def test_other_settings_of_sampling_keep_the_bits(config):
    policy = engine()
    out = policy.generate(prompts(), config, seed=0)
    assert torch.equal(scored(policy, out, MicroBatchSpec(60), config.temperature), out["logprobs"])


def test_the_first_ratio_of_a_run_is_exactly_1(tmp_path):
    save_tiny(tmp_path / "policy")
    actor = GRPOActorInterface(generation=GenerationConfig(n=4, max_new_tokens=6, top_p=0.9))
    model = TransformersModel(str(tmp_path / "policy"), optimizer=STEP, sampler=EXACT)
    made = experiment(
        tmp_path,
        steps=3,
        batch_prompts=4,
        interfaces={"actor": actor, "reward": CountToken()},
        models={"actor": model},
        data=Prompts(11),
        evaluation=None,
        checkpoint=None,
        strict_ratio=True,
    )
    assert run(made).series("first_logprob_diff_max") == [0.0, 0.0, 0.0]


def test_a_model_that_the_library_does_not_compute_is_refused():
    for family in ("gpt2", "gemma2"):
        with pytest.raises(
            ConfigError, match=r"sampler\.exact=true: decode steps cannot be compiled, .* Set exact=false\.$"
        ):
            engine(family)
    with pytest.raises(ConfigError, match=r"exact=true: incompatible with dropout"):
        engine(dropout=0.1)
    with pytest.raises(SettingsError, match=r"exact=true: incompatible with compiled_decode=off"):
        InProcessSampling(exact=True, compiled_decode=CompiledDecode.off)


def test_a_value_head_with_layers_is_refused(tmp_path):
    save_tiny(tmp_path / "policy")
    head = Causal(value_head=ValueHead(layers=1))
    model = TransformersModel(str(tmp_path / "policy"), head=head, optimizer=STEP, sampler=EXACT)
    with pytest.raises(ConfigError, match=r"models\.actor\.sampler\.exact=true: incompatible with a value head"):
        model.load("actor", seed=0)
