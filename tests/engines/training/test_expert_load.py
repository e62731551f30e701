from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from realign.api import Lengths, MicroBatchSpec, stat_values
from realign.engines import LoadBalancing, OptimizerSpec, TransformersModel
from realign.engines.training.transformers_engine import TransformersEngine
from realign.errors import ConfigError, SettingsError
from realign.functional import nll_loss
from realign.models import Lora
from realign.models.network.attention import ATTENTION, use_attention
from realign.models.network.passes import Layout, SharedPrompts
from realign.models.network.routers import BIAS, Routers
from tests.families import family_model
from tests.tiny import assert_same, gradients, random_sample, save_tiny, tiny_engine, tiny_tokenizer

LENGTHS = ((9, 4, 6), (12,), (3, 5), (8, 2, 2, 1))
ONE = MicroBatchSpec()
SPECS = [MicroBatchSpec(n_microbatches=n) for n in (2, 4, 9)] + [MicroBatchSpec(max_tokens_per_microbatch=15)]
STEP = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)  # a large eps keeps the step proportional to the gradient
NAMES = ("load_balancing_loss", "expert_load_max", "expert_load_min", "idle_experts")


def engine_with(coef=0.5, family="qwen3_moe", **settings):
    return tiny_engine(family, optimizer=STEP, load_balancing=LoadBalancing(coef), **settings)


def loss(output, data):
    mask_T = data["loss_mask"]
    return nll_loss(output.logprobs(), mask_T).sum(), {}


def nothing(output, data):
    """A loss whose gradient is 0, so that only the experts are balanced."""
    return 0 * output.logprobs().sum(), {}


def sample(seed=0):
    """Return prompts whose responses share a prefix of 2 tokens."""
    data = random_sample(LENGTHS, seed=seed)
    ids_T = data["input_ids"].clone()
    for start in data.lengths["input_ids"].starts[:-1].tolist():
        ids_T[start : start + 2] = torch.tensor([5, 6])[: len(ids_T) - start]
    return data.with_tokens(input_ids=ids_T)


@contextmanager
def eager(module):
    """Use transformers' own attention."""
    use_attention(module, "eager")
    yield
    use_attention(module, ATTENTION)


def router_logits(engine, data):
    """Return the router logits [T, E] of each layer, from a plain transformers pass for each sequence."""
    texts = data["input_ids"].split(data.lengths["input_ids"].flat.tolist())
    with eager(engine.module):
        outputs = [engine.module.model(input_ids=x[None], output_router_logits=True).router_logits for x in texts]
    return [torch.cat([logits[layer] for logits in outputs]) for layer in range(len(outputs[0]))]


def by_definition(engine, data):
    """Return the mean over layers of transformers' loss on the router logits of each layer."""
    config = engine.module.config
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    layers = router_logits(engine, data)
    return torch.stack(
        [load_balancing_loss_func((logits,), experts, config.num_experts_per_tok) for logits in layers]
    ).mean()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_loss_and_gradient_equal_those_of_transformers_on_one_micro_batch(family):
    engine, data = engine_with(0.5, family), sample()
    gradient, stats = gradients(engine, data, ONE, nothing)
    want = by_definition(engine, data)
    assert stats["load_balancing_loss"] == pytest.approx(want.item(), rel=1e-5)
    engine.module.zero_grad()
    (0.5 * want).backward()
    expected = {n: p.grad for n, p in engine.module.named_parameters() if p.grad is not None}
    assert float(max(x.abs().max() for x in expected.values())) > 1e-3
    for name, x in gradient.items():  # the last experts and the head do not change the router logits
        torch.testing.assert_close(x, expected.get(name, torch.zeros_like(x)), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("which", [loss, nothing])
def test_the_gradient_does_not_depend_on_micro_batches(which, checkpointing):
    data = sample()
    whole, metrics = gradients(engine_with(), data, ONE, which)
    for spec in SPECS:
        gradient, stats = gradients(engine_with(gradient_checkpointing=checkpointing), data, spec, which)
        assert stats["n_microbatches"] > 1
        assert_same(gradient, whole)
        assert {n: stats[n] for n in NAMES} == pytest.approx({n: metrics[n] for n in NAMES}, rel=1e-5)


def test_the_gradient_does_not_depend_on_the_order_or_on_shared_prompts():
    data = sample()
    whole, metrics = gradients(engine_with(shared_prompts=SharedPrompts.off), data, ONE, loss)
    for spec in (ONE, SPECS[0]):
        gradient, stats = gradients(engine_with(), data.take([2, 0, 3, 1]), spec, loss)
        assert stats["shared_tokens"] > 0
        assert_same(gradient, whole)
        assert {n: stats[n] for n in NAMES} == pytest.approx({n: metrics[n] for n in NAMES}, rel=1e-5)


def test_the_metrics_are_loads_relative_to_the_mean():
    engine, data = engine_with(), sample()
    _, stats = gradients(engine, data, SPECS[0], loss)
    chosen = [x.topk(2).indices.flatten() for x in router_logits(engine, data)]
    counts = torch.stack([torch.bincount(x, minlength=4) for x in chosen]).float()
    load = counts / counts.mean(-1, keepdim=True)
    assert stats["expert_load_max"] == pytest.approx(float(load.max()))
    assert stats["expert_load_min"] == pytest.approx(float(load.min()))
    assert stats["idle_experts"] == pytest.approx(float((counts == 0).float().mean()))


def test_adapters_are_trained_through_frozen_routers(tmp_path):
    folder = save_tiny(tmp_path / "moe", "qwen3_moe")
    spec = TransformersModel(
        str(folder),
        optimizer=STEP,
        trains=Lora(rank=2, target_modules=["q_proj", "v_proj"]),
        load_balancing=LoadBalancing(0.5),
        device="cpu",
    )
    data, of_each = sample(), []
    for each in (ONE, SPECS[0]):
        engine = spec.load("actor", seed=0).engine
        of_each.append(gradients(engine, data, each, nothing)[0])
    assert any(float(x.abs().max()) > 1e-5 for x in of_each[0].values())
    assert_same(*of_each)


@pytest.mark.parametrize("family", ["qwen2_moe", "olmoe", "granitemoe", "minimax", "flex_olmo"])
def test_families_with_softmax_routers_have_balanced_experts(family):
    routers = Routers(family_model(family))
    assert (routers.experts, routers.chosen, routers.softmax, routers.biases) == (4, 2, True, [])
    assert len(routers.modules) == 4


@pytest.mark.parametrize(("family", "biased"), [("deepseek_v3", True), ("glm4_moe", True), ("phimoe", False)])
def test_other_routers_have_no_auxiliary_loss(family, biased):
    routers = Routers(family_model(family))
    assert not routers.softmax
    assert len(routers.biases) == (len(routers.modules) if biased else 0)
    with pytest.raises(
        ConfigError, match=r"load_balancing\.coef=0\.1: .*softmax\. Set models\.actor\.load_balancing\.coef=0"
    ):
        biased_engine(LoadBalancing(0.1), family)


@pytest.mark.parametrize(("family", "message"), [("llama", "has no routers"), ("lfm2_moe", "do not return logits")])
def test_models_without_such_routers_raise_an_error(family, message):
    with pytest.raises(ConfigError, match=message):
        Routers(family_model(family))


def biased_engine(settings, family="deepseek_v3", optimizer=STEP):
    module = family_model(family, attention=ATTENTION)
    return TransformersEngine("actor", module, tiny_tokenizer(), seed=0, optimizer=optimizer, load_balancing=settings)


def biases(engine):
    return torch.stack([x.clone() for name, x in engine.module.named_buffers() if name.endswith(BIAS)])


def chosen_counts(engine, data):
    """Return how often each expert of each layer is chosen, [L, E], in a plain pass for each sequence."""
    choices = {}

    def hook(router, given, output):
        choices.setdefault(id(router), []).append(output[2].flatten())

    hooks = [x.register_forward_hook(hook) for x in Routers(engine.module).modules]
    with eager(engine.module), torch.no_grad():
        for x in data["input_ids"].split(data.lengths["input_ids"].flat.tolist()):
            engine.module.model(input_ids=x[None])
    for x in hooks:
        x.remove()
    return torch.stack([torch.bincount(torch.cat(parts), minlength=4) for parts in choices.values()])


@pytest.mark.parametrize("spec", [ONE, SPECS[0]])
def test_a_step_moves_the_bias_of_each_expert_towards_the_mean_load(spec):
    engine, data = biased_engine(LoadBalancing(0.0, bias_rate=0.01)), sample()
    counts = chosen_counts(engine, data).float()
    before = biases(engine)
    stats = stat_values(engine.train_batch(data, spec, loss, lambda _: torch.tensor(30.0)))
    expected = before + 0.01 * (counts.mean(-1, keepdim=True) - counts).sign()
    torch.testing.assert_close(biases(engine), expected)
    assert float((expected - before).abs().max()) == pytest.approx(0.01)
    assert stats["expert_load_max"] == pytest.approx(float((counts / counts.mean(-1, keepdim=True)).max()))
    assert "load_balancing_loss" not in stats


def test_biases_are_part_of_the_weights_and_of_the_state():
    engine, other = (biased_engine(LoadBalancing(0.0, bias_rate=0.01)) for _ in range(2))
    engine.train_batch(sample(), ONE, loss, lambda _: torch.tensor(30.0))
    assert not torch.equal(biases(engine), biases(other))
    other.load_weights(engine.weights())
    assert torch.equal(biases(engine), biases(other))
    resumed = biased_engine(LoadBalancing(0.0, bias_rate=0.01))
    resumed.load_state_dict(engine.state_dict())
    assert torch.equal(biases(engine), biases(resumed))


def test_a_bias_rate_needs_biases_and_all_weights():
    with pytest.raises(ConfigError, match=r"load_balancing\.bias_rate=0\.1: .*no routing biases"):
        tiny_engine("qwen3_moe", optimizer=STEP, load_balancing=LoadBalancing(bias_rate=0.1))
    with pytest.raises(SettingsError, match=r"load_balancing\.bias_rate=0\.1: .*trains=lora"):
        TransformersModel("folder", optimizer=STEP, trains=Lora(), load_balancing=LoadBalancing(0.0, bias_rate=0.1))


def test_a_model_without_routers_names_the_setting():
    with pytest.raises(ConfigError, match=r"models\.actor\.load_balancing: .*has no routers.*Remove load_balancing"):
        engine_with(family="llama")


def test_rows_of_a_shared_prefix_count_once_for_each_sequence():
    layout = Layout.of(Lengths.of([[4, 5]]), torch.tensor([3]).numpy())
    assert layout.tokens_per_row(torch.device("cpu")).tolist() == [2, 2, 2, 1, 1, 1]
