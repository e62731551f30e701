from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.api.router_experts import ROUTER_EXPERTS, experts_per_token, without_experts
from realign.engines import OptimizerSpec
from realign.engines.training.transformers_engine import TransformersEngine
from realign.errors import ConfigError
from realign.functional import nll_loss
from realign.models.network.attention import ATTENTION, use_attention
from realign.models.network.passes import SharedPrompts
from realign.models.network.routers import RouterReplay
from realign.samplers.in_process.settings import InProcessSampling
from tests.families import family_model
from tests.tiny import VOCAB, assert_same, gradients, tiny_engine, tiny_model, tiny_tokenizer

ONE = MicroBatchSpec()
STEP = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)  # a large eps keeps the step proportional to the gradient
REPLAY = GenerationConfig(n=3, max_new_tokens=10, router_replay=True)
METRICS = ("router_changes", "router_changed_tokens")


def moe_engine(family="qwen3_moe", **settings):
    model = {"tie_word_embeddings": False} | settings.pop("model", {})
    return tiny_engine(family, optimizer=STEP, sampling=InProcessSampling(max_slots=5), model=model, **settings)


def prompts(lengths=(7, 1, 12, 4)):
    g = torch.Generator().manual_seed(0)
    ids = [[torch.randint(3, VOCAB, (n,), generator=g)] for n in lengths]
    return SequenceSample.from_sequences([f"p{i}" for i in range(len(ids))], {"prompt_ids": ids})


def rollout(engine, config=REPLAY, data=None):
    return engine.generate(prompts() if data is None else data, config, seed=0)


def logprobs(engine, data, spec=ONE):
    return engine.forward(data, spec, lambda output, mb: mb.with_tokens(rescored=output.logprobs()))["rescored"]


def not_replayed(data):
    return data.select(data.keys - {ROUTER_EXPERTS})


def loss(output, data):
    return nll_loss(output.logprobs(), data["loss_mask"]).sum(), {}


@torch.no_grad()
def perturb(engine, std=0.3):
    """Change the routers, so that they choose other experts for many tokens."""
    generator = torch.Generator().manual_seed(1)
    for router in engine.network.abilities.replay.routers.modules:
        router.weight += std * torch.randn(router.weight.shape, generator=generator)


class ForcedExperts(torch.nn.Module):
    """The expert layer of qwen3_moe, written out for one sequence, with given experts [tokens, K] (-1: its own)."""

    def __init__(self, layer, chosen_TK, log):
        super().__init__()
        self.layer, self.chosen_TK, self.log = [layer], chosen_TK.long(), log

    def forward(self, hidden):
        layer, rows = self.layer[0], []
        experts = layer.experts
        for x, chosen in zip(hidden[0], self.chosen_TK, strict=True):
            probs = (layer.gate.weight @ x).softmax(-1)
            own = probs.topk(len(chosen)).indices
            if chosen[0] >= 0:
                self.log.append(set(own.tolist()) != set(chosen.tolist()))
            used = own if chosen[0] < 0 else chosen
            weights = probs[used] / (probs[used].sum() if layer.gate.norm_topk_prob else 1)
            row = torch.zeros_like(x)
            for weight, expert in zip(weights, used.tolist(), strict=True):
                gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
                row = row + weight * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            rows.append(row)
        return torch.stack(rows)[None]


def by_hand(engine, data):
    """Return log-probs, the gradient, and the fractions of changed choices, from transformers and `ForcedExperts`."""
    model, logprobs, changed = engine.module, [], []
    use_attention(model, "eager")
    layers = model.model.layers
    experts = experts_per_token(data).split(data.lengths["input_ids"].flat.tolist())
    for ids, chosen in zip(data.sequences(), experts, strict=True):
        logs = [[] for _ in layers]
        blocks = [layer.mlp for layer in layers]
        for layer, part, log in zip(layers, chosen.chunk(len(layers), 1), logs, strict=True):
            layer.mlp = ForcedExperts(layer.mlp, part, log)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        for layer, block in zip(layers, blocks, strict=True):
            layer.mlp = block
        scored = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        logprobs.append(torch.cat([scored.new_zeros(1), scored]))
        changed += list(zip(*logs, strict=True))
    use_attention(model, ATTENTION)
    logprobs_T = torch.cat(logprobs)
    model.zero_grad()
    (nll_loss(logprobs_T, data["loss_mask"]).sum() / 30).backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    flags = torch.tensor(changed).float()
    return logprobs_T.detach(), gradient, (float(flags.mean()), float(flags.amax(-1).mean()))


def test_a_rollout_records_the_experts_that_the_model_chooses_for_every_token_but_the_last():
    engine = moe_engine()
    out = rollout(engine)
    own = rollout(engine, GenerationConfig(n=3, max_new_tokens=10))
    assert all(torch.equal(out[key], own[key]) for key in own.data)
    assert ROUTER_EXPERTS not in own
    for ids, experts in zip(out.sequences(), out.sequences(ROUTER_EXPERTS), strict=True):
        use_attention(engine.module, "eager")
        logits = engine.module(input_ids=ids[None], output_router_logits=True).router_logits
        use_attention(engine.module, ATTENTION)
        want = torch.cat([layer.topk(2, -1).indices for layer in logits], 1)
        assert experts.dtype == torch.int16
        torch.testing.assert_close(experts[:-1].long(), want[:-1])
        assert (experts[-1] == -1).all()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_families_with_other_routers_replay_the_choices_of_their_rollouts(family):
    engine = TransformersEngine("actor", family_model(family), tiny_tokenizer(), seed=0, optimizer=STEP)
    out = rollout(engine)
    perturb(engine)
    changed = logprobs(engine, out)
    _, stats = gradients(engine, out, ONE, loss)
    assert stats["router_changes"] > 0.05
    hooks = forced(engine, out)
    whole = logprobs(engine, not_replayed(out))
    hooks.close()
    torch.testing.assert_close(changed, whole, atol=1e-5, rtol=1e-4)


def forced(engine, data):
    """Return an open stack of hooks on `torch.topk` of the routers; it makes them choose the recorded experts."""
    from contextlib import ExitStack

    from torch.overrides import TorchFunctionMode

    routers = engine.network.abilities.replay.routers
    experts = experts_per_token(data).long().unflatten(-1, (len(routers.modules), -1))

    class Choose(TorchFunctionMode):
        """Replaces the last `topk` of a router."""

        def __init__(self, recorded):
            super().__init__()
            self.recorded = recorded

        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            same = getattr(func, "__name__", "") == "topk" and out[0].shape == self.recorded.shape
            if not same or args[0].shape[-1] != routers.experts:
                return out
            known = self.recorded[:, :1] >= 0
            chosen = torch.where(known, self.recorded, out[1])
            return torch.return_types.topk((args[0].gather(-1, chosen), chosen))

    stack, modes = ExitStack(), {}

    def enter(number, router, inputs):
        modes[number] = Choose(experts[:, number])
        modes[number].__enter__()

    def leave(number, router, inputs, output):
        modes[number].__exit__(None, None, None)

    for number, router in enumerate(routers.modules):
        stack.callback(router.register_forward_pre_hook(lambda *x, i=number: enter(i, *x)).remove)
        stack.callback(router.register_forward_hook(lambda *x, i=number: leave(i, *x)).remove)
    engine.network.abilities = replace(engine.network.abilities, shares=False)
    return stack


@pytest.mark.parametrize(
    ("settings", "norm_topk_prob"),
    [({}, False), ({"gradient_checkpointing": True}, True), ({"shared_prompts": SharedPrompts.off}, False)],
)
def test_changed_routers_replay_the_choices_with_weights_and_gradients_of_their_new_logits(settings, norm_topk_prob):
    model = {"norm_topk_prob": norm_topk_prob}
    engine = moe_engine(model=model, **settings)
    out = rollout(engine, GenerationConfig(n=2, max_new_tokens=6, router_replay=True), prompts((7, 1, 5)))
    perturb(engine)
    reference = moe_engine(model=model)
    reference.load_weights(engine.weights())
    want, gradient, changes = by_hand(reference, out)
    assert min(changes) > 0.1
    torch.testing.assert_close(logprobs(engine, out), want, atol=1e-5, rtol=1e-4)
    assert float((logprobs(engine, not_replayed(out)) - want).abs().max()) > 1e-2
    for spec in (ONE, MicroBatchSpec(n_microbatches=3)):
        replayed, stats = gradients(engine, out, spec, loss)
        assert_same(replayed, gradient)
        assert [stats[name] for name in METRICS] == pytest.approx(changes)
        assert (stats["shared_tokens"] > 0) == ("shared_prompts" not in settings)
    routers = [x for name, x in gradient.items() if name.endswith("gate.weight")]
    assert min(float(x.abs().max()) for x in routers) > 1e-4


def test_prompts_are_shared_only_where_the_choices_of_all_responses_are_equal():
    engine = moe_engine()
    out = rollout(engine)
    experts = out[ROUTER_EXPERTS].clone()
    other = out.lengths["input_ids"].starts[1] + 3  # the fourth prompt token of the second response
    experts[other, :2] = torch.tensor([3, 2]) if set(experts[other, :2].tolist()) != {2, 3} else torch.tensor([0, 1])
    changed = out.with_tokens(**{ROUTER_EXPERTS: experts})
    shared, stats = gradients(engine, changed, ONE, loss)
    alone, unshared = gradients(moe_engine(shared_prompts=SharedPrompts.off), changed, ONE, loss)
    assert_same(shared, alone)
    assert 0 < stats["shared_tokens"] < gradients(moe_engine(), out, ONE, loss)[1]["shared_tokens"]
    assert [stats[name] for name in METRICS] == pytest.approx([unshared[name] for name in METRICS])


@pytest.mark.parametrize("family", ["qwen2", "bloom"])
def test_models_without_routers_and_unpacked_models_reject_replay(family):
    engine = tiny_engine(family)
    assert not engine.capabilities().router_replay
    assert engine.capabilities().router_replay_obstacle
    with pytest.raises(ConfigError, match="cannot be replayed"):
        rollout(engine)
    out = rollout(engine, GenerationConfig(max_new_tokens=4))
    with pytest.raises(ConfigError, match="cannot be replayed"):
        logprobs(engine, without_experts(out))


def test_routers_whose_weights_follow_no_known_rule_are_rejected():
    module = tiny_model("qwen3_moe")
    for layer in module.model.layers:
        layer.mlp.gate.register_forward_hook(lambda router, given, out: (out[0], out[1] ** 2, out[2]))
    with pytest.raises(ConfigError, match="weights follow no known rule"):
        RouterReplay(module)
