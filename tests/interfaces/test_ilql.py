from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from realign.api import MicroBatchSpec, Model, stat_values
from realign.config import build_experiment, compose
from realign.engines import OptimizerSpec, TransformersModel
from realign.interfaces.ilql import ILQLInterface
from realign.models import Causal, QHeads, ValueHead
from realign.runtime import run
from tests.tiny import random_sample, save_tiny

VARIANTS = [
    ILQLInterface(),
    ILQLInterface(gamma=0.6, tau=0.9, cql_coef=0.4, awac_coef=0.3, awac_beta=1.5),
    ILQLInterface(awac_beta=30.0, awac_max_weight=1.2),
]
KEYS = ("input_ids", "loss_mask", "rewards")


def by_trlx(interface, network, data):
    """Compute the mean loss over tokens from right-padded rows, with the steps of trlX's implementation.

    Rows of states and actions are gathered by index. The last action of a row is terminal.
    """
    module, heads = network.module, network.value_head
    rows = [r for r, reward in enumerate(data["rewards"].tolist()) if math.isfinite(reward)]
    ids = torch.nn.utils.rnn.pad_sequence([data.sequences()[r] for r in rows], batch_first=True)
    masks = [data.sequences("loss_mask")[r] for r in rows]
    states_BNH = module.base_model(input_ids=ids, use_cache=False).last_hidden_state
    actions = [mask.nonzero()[:, 0] for mask in masks]  # index of each action token; its state is one before
    width = max(map(len, actions))
    real = torch.stack([torch.arange(width) < len(a) for a in actions])
    index = torch.stack([F.pad(a, (0, width - len(a)), value=1) for a in actions])
    chosen = ids.gather(1, index)
    hidden = states_BNH.gather(1, (index - 1)[..., None].expand(-1, -1, states_BNH.shape[-1]))
    values = heads.head(hidden)[..., 0]
    qs = [head(hidden) for head in heads.q_heads.online]
    targets = [head(hidden).gather(-1, chosen[..., None])[..., 0] for head in heads.q_heads.target]
    target = torch.minimum(*targets).detach()
    last = torch.tensor([[len(a) - 1] for a in actions])
    terminal = torch.arange(width)[None] == last
    following = torch.where(terminal, 0, values.roll(-1, 1)).detach()
    rewards = torch.where(terminal, data["rewards"][rows][:, None], 0)
    goal = rewards + interface.gamma * following
    total = 0.0
    for q in qs:
        total = total + ((q.gather(-1, chosen[..., None])[..., 0] - goal).square() * real).sum()
    expectile = (target >= values) * interface.tau + (target < values) * (1 - interface.tau)
    total = total + (expectile * (target - values).square() * real).sum()
    for q in qs:
        total = total + interface.cql_coef * (F.cross_entropy(q.mT, chosen, reduction="none") * real).sum()
    weights = (interface.awac_beta * (target - values)).exp().clamp(max=interface.awac_max_weight).detach()
    logits = module.get_output_embeddings()(hidden)
    cloned = F.cross_entropy(logits.mT, chosen, reduction="none") * weights
    return (total + interface.awac_coef * (cloned * real).sum()) / real.sum()


def offline_data():
    """Return responses with tokens that do not train, one response without a reward and one prompt of two responses."""
    data = random_sample(((9, 4, 6), (12,), (3, 5)), prompt=2)
    keep_T = torch.rand(len(data["loss_mask"]), generator=torch.Generator().manual_seed(1)) < 0.8
    data = data.with_tokens(loss_mask=data["loss_mask"] & keep_T)
    return data.with_sequences(rewards=torch.tensor([1.0, -0.5, math.nan, 3.0, 0.0, 2.0])).select(KEYS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    head = Causal(ValueHead(hidden="mlp", init="normal", q_heads=QHeads(target_rate=0.3)))
    path = save_tiny(tmp_path_factory.mktemp("m") / "model")
    optimizer = OptimizerSpec(lr=1e-2, eps=1.0, grad_clip=None)
    return TransformersModel(str(path), device="cpu", head=head, optimizer=optimizer).load("actor", seed=0).engine


@pytest.mark.parametrize("interface", VARIANTS, ids=str)
@pytest.mark.parametrize("spec", [MicroBatchSpec(), MicroBatchSpec(max_tokens_per_microbatch=14)], ids=str)
def test_loss_and_gradients_equal_a_padded_implementation(engine, interface, spec):
    data = offline_data()
    interface.train_step(Model("actor", engine), data, spec)  # from here on the targets differ from the heads
    padded = copy.deepcopy(engine.network)
    padded.module.set_attn_implementation("eager")
    padded.zero_grad()
    expected = by_trlx(interface, padded, data)
    expected.backward()
    accumulated = engine.accumulate(data, spec, interface.loss, interface.loss_weight(data).float())
    gradients = {name: p.grad for name, p in engine.network.named_parameters()}
    stats = stat_values(accumulated | engine.apply(interface.loss_weight(data).float(), vetoed=True))
    assert stats["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for name, p in padded.named_parameters():
        if "q_heads.target" in name:
            assert p.grad is None
            continue
        torch.testing.assert_close(gradients[name], p.grad, atol=2e-5 * float(p.grad.abs().max()), rtol=1e-4)
        assert p.grad.any(), name


def digits(folder: Path, seed: int) -> list[str]:
    """Write responses of three digits and rewards, and return the settings of a run on them.

    The reward is the number of digits that equal the prompt's. The data usually contains the next digit, so that
    cloning it finds few of them.
    """
    rng, rows = random.Random(seed), []
    for _ in range(512):
        digit = rng.randrange(5)
        kinds = (digit, (digit + 1) % 5, rng.randrange(5))
        response = rng.choices(kinds, weights=[2, 6, 2], k=3)
        rows.append({"prompt": f"{digit}=", "completion": "".join(map(str, response)), "reward": response.count(digit)})
    prompts = [{"prompt": f"{digit}=", "digit": str(digit)} for digit in range(5)]
    for name, written in (("train", rows), ("prompts", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    score = "def score(prompt, response, row):\n    return float(response[:3].count(row['digit']))\n"
    (folder / "score.py").write_text(score)
    head = "models.actor.head.value_head.q_heads.target_rate=0.1"
    settings = [f"models.actor.path={save_tiny(folder / 'model')}", f"data.path={folder / 'train.jsonl'}", head]
    settings += [f"output_dir={folder / 'run'}", f"seed={seed}", "batch_prompts=64", "models.actor.optimizer.lr=3e-3"]
    for name, scale in (("cloned", 0), ("ilql", 16)):
        sampled = f"{{n: 32, max_new_tokens: 4, greedy: false, advantage_scale: {scale}}}"
        target = "_target_: realign.interfaces.rule_reward.RuleRewardInterface"
        reward = f"{{{target}, function: '{folder / 'score.py'}:score'}}"
        data = f"{{_target_: realign.data.PromptData, path: {folder / 'prompts.jsonl'}}}"
        settings.append(
            f"evaluations.{name}={{data: {data}, every_steps: 100, batch_prompts: 5, generation: {sampled}, "
            f"reward: {reward}}}"
        )
    return settings


def test_the_shipped_experiment_runs_on_a_tiny_model(tmp_path):
    settings = [*digits(tmp_path, 0), "steps=3"]
    history = run(build_experiment(compose(["experiment=ilql", *settings]))).history
    assert history[-1]["q_loss"] > 0
    assert {"eval/cloned/reward", "eval/ilql/reward"} <= history[-1].keys()
    assert (tmp_path / "run" / "final" / "actor" / "value_head.safetensors").is_file()
