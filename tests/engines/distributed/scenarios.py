"""Scenarios for the ranks of a sharded engine and for a single process. Each returns numbers to compare."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.memory import MemoryCount
from realign.api import GenerationConfig, MicroBatchSpec, Model, ModelInterface, SequenceSample, stat_values
from realign.api.router_experts import ROUTER_EXPERTS, with_experts
from realign.api.sample import shard
from realign.engines import LoadBalancing, OptimizerSpec, Schedule, Sharding, TransformersModel
from realign.engines.distributed import sharded_state
from realign.engines.distributed.sharded_state import ShardedSaver
from realign.errors import RealignError
from realign.interfaces.components import JSD, EarlyStop, Gspo, SeqMeanTokenMean
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.dpo import DPOInterface
from realign.interfaces.gkd import GKDInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ilql import ILQLInterface
from realign.interfaces.kto import KTOInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.reward_model import RewardModelInterface
from realign.interfaces.sft import SFTInterface
from realign.models import Causal, Lora, QHeads, Score, TopLayers, Value, ValueHead
from realign.models.network import merge
from realign.models.network.heads import HeadInit
from realign.models.parts import whole
from realign.ranks import current
from realign.records.checkpoint.folder import CheckpointWriter, list_checkpoints
from realign.records.checkpoint.serialize import hash_of
from realign.runtime.ray.wire_format import map_tree
from realign.samplers import InProcessSampling
from realign.samplers.in_process.compiled.fusion import Fusion
from realign.testing import random_batch, random_preferences
from tests.families import family_model
from tests.tiny import random_sample, save_tiny, tiny_tokenizer

STEP = OptimizerSpec(lr=1e-3, eps=1e-6, weight_decay=0.1, grad_clip=0.5, schedule=Schedule("linear", total=40))
BUDGET = MicroBatchSpec(max_tokens_per_microbatch=40)
PAIRS = MicroBatchSpec(max_tokens_per_microbatch=130)
LENGTHS = ((9, 4, 6), (30,), (3, 5), (8, 2, 2, 1), (17, 2))
FAMILIES = {name: {} for name in ("llama", "gpt2", "qwen2", "qwen3", "qwen3_moe")}
FAMILIES |= {"critic": {"family": "llama", "head": "value"}}


def write_models(folder: Path) -> None:
    """Write the models of the scenarios: an untied one, a tied one and a critic."""
    for name, settings in FAMILIES.items():
        save_tiny(folder / name, **{"family": name, "vocab_size": 97, **settings})
    family_model("deepseek_v3", attention="eager").save_pretrained(folder / "deepseek_v3")
    tiny_tokenizer().save_pretrained(folder / "deepseek_v3")


def load(folder: Path, name: str = "llama", **settings: Any) -> Model:
    settings.setdefault("optimizer", STEP)
    return TransformersModel(str(folder / name), device="cpu", **settings).load("actor", seed=0)


def batch(step: int, *, preferences: bool = False) -> SequenceSample:
    """Return uneven prompts of random tokens with every key. Each step has a different batch."""
    make = random_preferences if preferences else random_batch
    data = make(step, n_prompts=7, max_tokens=30, vocabulary=90)
    floats = {k: x.float() for k, x in data.data.items() if x.dtype == torch.float64}
    return SequenceSample(data.ids, {**data.data, **floats}, data.lengths, data.metadata)


def train(
    model: Model, interface: ModelInterface, batches: list[SequenceSample], spec: MicroBatchSpec = BUDGET
) -> dict[str, Any]:
    """Train on the batches. Return the metrics of each step, and the weights after the last."""
    metrics = []
    for data in batches:
        metrics.append(stat_values(interface.train_step(model, data, spec)))
        model.publish_weights()
    return {"metrics": metrics, "weights": weights_now(model)}


def whole_tree(tree: Any) -> Any:
    """Gather the tensors of a tree to the CPU. This is a collective."""
    return map_tree(tree, lambda x: whole(x.detach()).cpu())


def weights_now(model: Model) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.engine.weights().items()}


def rollouts(n: int) -> list[SequenceSample]:
    """Return batches without the keys that training computes."""
    drop = {"advantages", "returns", "values", "dense_rewards", "baseline_rewards", "ptx_input_ids"}
    return [data.select(data.keys - drop) for data in map(batch, range(n))]


def sft(folder: Path, family: str = "gpt2", n: int = 4, **settings: Any) -> dict[str, Any]:
    return train(load(folder, family, **settings), SFTInterface(n_minibatches=2), [batch(step) for step in range(n)])


def grpo(folder: Path, family: str = "llama", n: int = 4, **settings: Any) -> dict[str, Any]:
    return train(load(folder, family, **settings), GRPOActorInterface(n_minibatches=2), rollouts(n))


def early_stop(folder: Path) -> dict[str, Any]:
    """Train two epochs of three mini-batches per batch, on-policy at first, until the KL divergence exceeds a bound."""
    model, metrics = load(folder), []
    policy = GRPOActorInterface(epochs=2, n_minibatches=3, early_stop=EarlyStop(kl=0.3))
    for data in rollouts(3):
        logprobs_T = policy.inference(model, data, BUDGET)["logprobs"]
        data = data.with_tokens(logprobs=logprobs_T, prox_logprobs=logprobs_T)
        metrics.append(stat_values(policy.train_step(model, data, BUDGET)))
        model.publish_weights()
    return {"metrics": metrics, "weights": weights_now(model)}


def gspo(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train on a loss of whole sequences."""
    policy = GRPOActorInterface(n_minibatches=2, objective=Gspo(), aggregation=SeqMeanTokenMean())
    return train(load(folder, **settings), policy, rollouts(1) * 2)


def ppo(folder: Path, family: str = "llama", n: int = 4, **settings: Any) -> dict[str, Any]:
    """Train a separate policy and critic. Advantages are whitened over the whole batch."""
    actor, critic = load(folder, family, **settings), load(folder, "critic", head=Value(), **settings)
    policy, judge = PPOActorInterface(n_minibatches=2), PPOCriticInterface(n_minibatches=2)
    results: dict[str, Any] = {"metrics": [], "advantages": []}
    for data in rollouts(n):
        data = data.merge(judge.inference(critic, data, BUDGET).select(["values"]))
        data = data.merge(policy.credit(actor, data, BUDGET).select(["advantages", "returns"]))
        results["advantages"].append(data["advantages"])
        for model, interface in ((actor, policy), (critic, judge)):
            results["metrics"].append(stat_values(interface.train_step(model, data, BUDGET)))
            model.publish_weights()
    return results | {"weights": {**actor.engine.weights(), **_named("critic", critic.engine.weights())}}


def dpo(folder: Path, family: str = "llama", n: int = 4, **settings: Any) -> dict[str, Any]:
    batches = [batch(step, preferences=True) for step in range(n)]
    return train(load(folder, family, **settings), DPOInterface(n_minibatches=2), batches, PAIRS)


def reward_model(folder: Path, **settings: Any) -> dict[str, Any]:
    """Train a reward model on pairs, and score their responses."""
    batches = [batch(step, preferences=True) for step in range(3)]
    model, judge = load(folder, "critic", head=Score(HeadInit.normal), **settings), RewardModelInterface()
    trained = train(model, judge, batches, PAIRS)
    return trained | {"rewards": judge.inference(model, batches[0], PAIRS)["rewards"]}


def gkd(folder: Path, families: tuple[str, str] = ("llama", "gpt2"), n: int = 4, **settings: Any) -> dict[str, Any]:
    """Train on the divergence from a teacher of another family, which is sharded too. It needs complete heads."""
    student, teacher = (
        load(folder, families[0], **settings),
        load(folder, families[1], optimizer=None, **settings),
    )
    student.engine.use_heads({"teacher": teacher.engine.lm_head()})
    scorer, policy = ReferenceInterface(hidden_states=True), GKDInterface(n_minibatches=2, divergence=JSD(0.3))
    batches = []
    for data in map(batch, range(n)):
        data = data.select(["input_ids", "loss_mask"])
        scores = scorer.inference(teacher, data, BUDGET)
        batches.append(data.merge(scores.rename({key: f"teacher_{key}" for key in ("logprobs", "hidden")})))
    return train(student, policy, batches)


def kto(folder: Path) -> dict[str, Any]:
    """The reference finds mismatched responses less likely than the policy, so the baseline is positive."""
    batches = [batch(step, preferences=True) for step in range(4)]
    batches = [b.with_sequences(mismatched_ref_logprobs=5 * b["mismatched_ref_logprobs"]) for b in batches]
    trained = train(load(folder), KTOInterface(n_minibatches=2, undesirable_weight=0.7), batches, PAIRS)
    assert all(metrics["kl_baseline"] > 0 for metrics in trained["metrics"])
    return trained


def one_prompt(folder: Path) -> dict[str, Any]:
    """Train each interface on one prompt, whose tokens are recorded: all other ranks have none."""
    spec = replace(PAIRS, trace_ids=("q0",))
    critic, score = {"name": "critic", "head": Value()}, {"name": "critic", "head": Score(HeadInit.normal)}
    cases: list[tuple[ModelInterface, dict[str, Any]]] = [
        *((interface, {}) for interface in (SFTInterface(), GRPOActorInterface(), DPOInterface(), KTOInterface())),
        (PPOCriticInterface(), critic),
        (RewardModelInterface(), score),
        (ILQLInterface(), {"head": Causal(ValueHead(hidden="mlp", q_heads=QHeads()))}),
    ]
    results = {}
    for interface, settings in cases:
        data = batch(0, preferences=isinstance(interface, DPOInterface | KTOInterface | RewardModelInterface)).take([0])
        drop = {"advantages", "returns", "dense_rewards"} if isinstance(interface, GRPOActorInterface) else set()
        results[type(interface).__name__] = train(
            load(folder, **settings), interface, [data.select(data.keys - drop)], spec
        )
    return results


def joint_loss(output: Any, data: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
    mask_T = data["loss_mask"]
    values_T = output.values() * mask_T
    return -output.logprobs(where_T=mask_T).sum() + values_T.square().sum(), {"value": (values_T.sum(), mask_T.sum())}


def value_loss(output: Any, data: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
    values_T = output.values() * data["loss_mask"]
    return (values_T - 1).square().sum(), {}


def plain_loss(output: Any, data: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
    logprobs_T = output.logprobs(where_T=data["loss_mask"])
    return -logprobs_T.sum(), {"nll": (-logprobs_T.sum(), data["loss_mask"].sum())}


def q_loss(output: Any, data: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
    """Move all Q heads toward 1, and the values toward the smallest target value."""
    mask_T = data["loss_mask"]
    q = output.q_values(where_T=mask_T)
    errors_T = torch.where(mask_T, (q.online_KT - 1).square().sum(0) + (output.values() - q.target_T).square(), 0)
    return errors_T.sum() - q.logprobs_KT.sum(), {"target": (q.target_T.sum(), mask_T.sum())}


def weight(data: SequenceSample) -> Tensor:
    return data["loss_mask"].sum()


def steps(model: Model, loss: Any = plain_loss, n: int = 2) -> dict[str, Any]:
    metrics = []
    for step in range(n):
        data = random_sample(LENGTHS, seed=step)
        metrics.append(stat_values(model.engine.train_batch(data, BUDGET, loss, weight)))
    return {"metrics": metrics, "weights": weights_now(model)}


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "value head": ({"head": Causal(ValueHead(hidden="mlp", init="normal"))}, joint_loss),
    "value branch": ({"head": Causal(ValueHead(layers=1, init="normal"))}, joint_loss),
    "unused head": ({"head": Causal(ValueHead(init="normal"))}, plain_loss),
    "q heads": ({"head": Causal(ValueHead(hidden="mlp", q_heads=QHeads(target_rate=0.3)))}, q_loss),
    "lora": ({"trains": Lora(rank=4)}, plain_loss),
    "trained layers": ({"trains": TopLayers(1)}, plain_loss),
    "checkpointing": ({"gradient_checkpointing": True}, plain_loss),
    "plain rows": ({"shared_prompts": "off", "sharding": Sharding(reshard=False, keep_rollout=False)}, plain_loss),
    "tied": ({"name": "gpt2"}, plain_loss),
    "balanced experts": ({"name": "qwen3_moe", "load_balancing": LoadBalancing(0.5)}, plain_loss),
    "routing biases": ({"name": "deepseek_v3", "load_balancing": LoadBalancing(0.0, bias_rate=0.01)}, plain_loss),
    "balanced experts, recomputed": (
        {"name": "qwen3_moe", "load_balancing": LoadBalancing(0.5), "gradient_checkpointing": True},
        plain_loss,
    ),
}
"""Network settings, including the trained parameters, and a loss, by kind of network."""


def settings(folder: Path) -> dict[str, Any]:
    return {kind: steps(load(folder, **given), loss) for kind, (given, loss) in KINDS.items()}


def gradient(folder: Path, family: str = "llama", **settings: Any) -> dict[str, Tensor]:
    """Return the gradient of a loss of log-probs and values, gathered to every rank."""
    model = load(folder, family, head=Causal(ValueHead(layers=1, init="normal")), **settings)
    machine, data = model.engine, random_sample(LENGTHS)
    part = shard(data, machine.data_ranks, "input_ids")[machine.data_rank]
    machine.accumulate(part, BUDGET, joint_loss, weight(data))
    network = machine.network
    names = [name for name, _ in network.named_parameters()]
    whole_or_part = [
        p.grad if current().size == 1 else whole(network.weights.like(p.grad, i))
        for i, p in enumerate(network.own_parameters())
    ]
    return of_all_stages(dict(zip(names, whole_or_part, strict=True)))


def of_all_stages(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name of all ranks, which have equal ones under the same name. This is a collective."""
    return {name: x for tensors in current().gather(own) for name, x in tensors.items()}


def replayed(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return the choices of experts in a rollout, and train on random choices, without a record for one prompt."""
    model = load(folder, "qwen3_moe", **settings)
    prompts = {"prompt_ids": [[list(range(5, 5 + n))] for n in (4, 1, 9)]}
    sampled = SequenceSample.from_sequences(["a", "b", "c"], prompts)
    rollout = model.engine.generate(sampled, GenerationConfig(n=2, max_new_tokens=5, router_replay=True), seed=0)
    data = random_sample(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    tokens = [None if s == 3 else len(ids) for s, ids in enumerate(data.sequences())]  # the second prompt
    chosen = [
        None if n is None else torch.rand(n, 3, 4, generator=generator).argsort(-1)[..., :2].flatten(1).short()
        for n in tokens
    ]
    data = with_experts(data, chosen)
    metrics = [stat_values(model.engine.train_batch(data, BUDGET, plain_loss, weight)) for _ in range(2)]
    assert metrics[0]["router_changes"] > 0.5
    return {"recorded": rollout[ROUTER_EXPERTS], "metrics": metrics, "weights": weights_now(model)}


def reduced_once(folder: Path) -> dict[str, Any]:
    """Train `grpo` and uneven shards, summing gradients over the ranks after the last micro-batch only."""
    once = Sharding(reduce_once=True)
    return {"grpo": grpo(folder, sharding=once), "uneven": uneven(folder, sharding=once)}


def uneven(folder: Path, **settings: Any) -> dict[str, Any]:
    """Trap D9: the first rank has five long texts, the second has five short ones, and the third has none."""
    long, short = random_sample([(60,)] * 5), random_sample([(5,)] * 5, seed=1)
    short = SequenceSample(tuple(f"s{i}" for i in short.ids), short.data, short.lengths)
    whole, spec, machine = SequenceSample.gather([long, short]), MicroBatchSpec(100), load(folder, **settings).engine
    rank, size = current().rank, current().size
    part = whole if size == 1 else [long, short, whole.take([])][rank]
    counts = stat_values(machine.accumulate(part, spec, plain_loss, weight(whole)))
    results = {"n": counts["n_microbatches"], **stat_values(machine.apply(weight(whole)))}
    # First one prompt for all ranks, then one with and one without trained tokens, then no trained tokens at all.
    one = random_sample([(7, 9)])
    nothing = one.with_tokens(loss_mask=torch.zeros_like(one["loss_mask"]))
    recorded = replace(BUDGET, trace_ids=one.ids)
    few = [one, SequenceSample.gather([one, _renamed(nothing)]), nothing]
    results["few"] = [stat_values(machine.train_batch(data, recorded, plain_loss, weight)) for data in few]
    return results


def calls(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return scores and samples before and after a step, mixed weights, adapter base outputs and a hash of frozen
    weights."""
    model = load(folder, **settings)
    machine, data = model.engine, random_sample(LENGTHS)
    prompts = {"prompt_ids": [[list(range(5, 5 + n))] for n in (4, 1, 9, 2, 3)]}
    sampled = SequenceSample.from_sequences(["a", "b", "c", "d", "e"], prompts)
    results: dict[str, Any] = {"logprobs": [], "tokens": [], "sampled": []}
    for step in range(2):
        results["logprobs"].append(ReferenceInterface().inference(model, data, BUDGET)["logprobs"])
        rollout = machine.generate(sampled, GenerationConfig(n=3, max_new_tokens=6), seed=step)
        results["tokens"].append(rollout["input_ids"])
        results["sampled"].append(rollout["logprobs"])
        machine.train_batch(data, BUDGET, plain_loss, weight)
    machine.load_weights({name: torch.ones_like(x) for name, x in machine.weights().items()}, 0.25)
    results["mixed"] = weights_now(model)
    adapted = load(folder, trains=Lora(rank=4), **settings).engine
    adapted.train_batch(data, BUDGET, plain_loss, weight)
    score = adapted.reference()
    results["base"] = score(data, BUDGET, lambda out, mb: mb.with_tokens(x=out.logprobs()))["x"]
    results["frozen"] = hash_of(
        load(folder, optimizer=None, **settings).engine.fixed_weights()
    )  # resumed runs compare this hash
    return results


def low(folder: Path) -> dict[str, Any]:
    """Train in bfloat16 with a value head. Return the metrics, and the dtypes of the weights (fp32)."""
    model = load(folder, dtype="bfloat16", head=Causal(ValueHead(init="normal")))
    trained = steps(model, joint_loss)
    return {"metrics": trained["metrics"], "dtypes": {str(x.dtype) for x in trained["weights"].values()}}


KEPT = {"head": Causal(ValueHead(hidden="mlp", init="normal")), "optimizer": replace(STEP, ema_decay=0.5)}


def kept(
    folder: Path, own: Path, others: dict[str, Path], family: str = "gpt2", sharding: Sharding | None = None
) -> dict[str, Any]:
    """Train, write a checkpoint midway and save. Then resume from it and from checkpoints of other numbers of ranks."""
    more = {} if sharding is None else {"sharding": sharding}
    model = load(folder, family, **KEPT, **more)
    steps(model, joint_loss)
    writer = CheckpointWriter(own, 2, current())
    writer.write(2, {"engine": model.engine.state_dict(), "number": torch.tensor(3.5)})
    writer.close()
    problems = writer.take_failures()
    results = {"problems": problems, "end": going_on(model)}
    model.engine.save(own / "saved")
    current().barrier()
    for name, path in {"own": own, **others}.items():
        results[name] = going_on(restored(folder, path, family, **more))
    return results


SAVED: dict[str, tuple[dict[str, Any], Any]] = {
    "lora on experts": ({"name": "qwen3_moe", "trains": Lora(rank=4)}, plain_loss),
    "adapters": (
        {"trains": Lora(rank=4, merge_on_save=False), "head": Causal(ValueHead(init="normal"))},
        joint_loss,
    ),
    "tied, with a value head": ({"name": "gpt2", **KEPT}, joint_loss),
    "value branch": ({"head": Causal(ValueHead(layers=1, init="normal"))}, joint_loss),
    "critic": ({"name": "critic", "head": Value()}, value_loss),
    "experts": ({"name": "qwen3_moe"}, plain_loss),
}
"""Settings and loss of models to save, by kind."""
DIVIDED: dict[str, tuple[dict[str, Any], Any]] = {
    "tensor parallel": ({"name": "qwen3", "sharding": Sharding(tensor=2)}, plain_loss),
    "replicated": ({"name": "qwen3", "sharding": Sharding(replicate=2)}, plain_loss),
    "stages, tied": ({"name": "gpt2", **KEPT, "sharding": Sharding(pipeline=2)}, joint_loss),
    "stages, lora": ({"trains": Lora(rank=4), "sharding": Sharding(pipeline=2)}, plain_loss),
    "stages, adapters": (
        {"trains": Lora(rank=4, merge_on_save=False), "sharding": Sharding(pipeline=2, tensor=2)},
        plain_loss,
    ),
    "stages of experts": ({"name": "qwen3_moe", "sharding": Sharding(pipeline=2)}, plain_loss),
}
"""The same on meshes of four ranks."""


def saved(folder: Path, own: Path, kinds: dict[str, tuple[dict[str, Any], Any]]) -> None:
    """Train models, and save them in slices, and as rank 0 saves what it has gathered."""
    no_gathering = patch.object(ShardedSaver, "_write_gathered", _refused)
    for kind, (given, loss) in kinds.items():
        model = load(folder, **given)
        steps(model, loss, 1)
        slices = nullcontext() if model.engine.network.trains.saves_adapters else no_gathering
        for name, way in {"slices": slices, "gathered": patch.object(sharded_state, "plan_files", _none)}.items():
            with way:
                model.engine.save(own / kind / name)
                if model.engine.adapter_rank is not None:
                    model.engine.save_base(own / kind / f"{name}_base")
        steps(model, loss, 1)  # a save must not leave behind anything that breaks a pass


def _refused(*_: Any) -> None:
    raise AssertionError("rank 0 gathers a model that ranks could write in slices")


def _none(*_: Any) -> None:
    """Plan no files."""


def unsaved(folder: Path, own: Path) -> dict[str, Any]:
    """Return the errors of saves that fail on one rank, and save where ranks share no folder."""
    machine, rank = load(folder).engine, current().rank
    machine.save(own / "saved")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    errors = {}
    for name, broken in {"full": 1, "full at first": 0}.items():
        target = "pwrite" if broken else "posix_fallocate"
        with patch.object(os, target, full) if rank == broken else nullcontext():
            errors[name] = _message(lambda: machine.save(own / "saved"))
    with patch.object(Path, "is_dir", lambda _: False) if rank else nullcontext():
        machine.save(own / "apart")
    with torch.no_grad():
        if rank == 1:
            machine.network.own_parameters()[0].fill_(torch.nan)
    return errors | {"nan": _message(lambda: machine.save(own / "saved"))}


def joined(folder: Path, dtype: str, keeps: bool) -> dict[str, Any]:
    """Sample before and after a step, with joined layers and with a full copy, and count bytes of the former.

    The first rollout also compares the layers with the modules.
    """
    prompts = SequenceSample.from_sequences(["a", "b", "c"], {"prompt_ids": [[[5, 6, 7]], [[8]], [[9, 4]]]})
    config = GenerationConfig(n=2, max_new_tokens=6)
    settings = {"dtype": dtype, "sharding": Sharding(keep_rollout=keeps), "sampler": InProcessSampling(max_slots=2)}
    engine: Any = load(folder, "qwen3", **settings).engine
    results: dict[str, Any] = {"same": [], "peaks": [], "left": []}
    for _ in range(2):
        with MemoryCount() as count:
            engine._rollout_module()
            results["peaks"].append(count.peak)
            sampled = engine.generate(prompts, config, seed=1)
            results["left"].append(count.live)
        engine._free_copy()
        with patch.object(Fusion, "join", return_value=False):
            results["same"].append(
                torch.equal(engine.generate(prompts, config, seed=1)["logprobs"], sampled["logprobs"])
            )
        engine._free_copy()
        engine.train_batch(random_sample(LENGTHS), BUDGET, plain_loss, weight)
    layers = engine.module.base_model.layers
    results |= {"layers": len(layers), "layer": sum(p.numel() for p in layers[0].parameters())}
    results["outer"] = sum(p.numel() for p in engine.module.parameters()) - len(layers) * results["layer"]
    return results | {"obstacle": engine.fusion.obstacle}


ADAPTED = ("llama", "gpt2", "qwen3_moe")


def write_adapters(folder: Path) -> None:
    """Write trained adapters of several families, in one process."""
    for name in ADAPTED:
        model = load(folder, name, trains=Lora(rank=4, merge_on_save=False))
        steps(model, plain_loss, 1)
        model.engine.save(folder / f"adapter of {name}")
    tied = AutoModelForCausalLM.from_pretrained(folder / "gpt2")
    config = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    get_peft_model(tied, config).save_pretrained(folder / "adapter of a tied head")


def merged_starts(folder: Path) -> dict[str, Any]:
    """Return the weights of models that start from merged adapters, and how many were merged in slices."""
    with patch.object(merge, "_merge_unread", wraps=merge._merge_unread) as unread:
        results: dict[str, Any] = {
            name: weights_now(load(folder, f"adapter of {name}")) for name in (*ADAPTED, "a tied head")
        }
    return results | {"in slices": unread.call_count}


def crossed(folder: Path, own: Path, others: dict[str, Path]) -> dict[str, Any]:
    """Combine tensor parallelism in pairs of ranks with data parallelism between pairs. A single process runs without
    either."""
    sharding = Sharding(tensor=2)
    results = kept(folder, own, others, "qwen3", sharding)
    model = load(folder, "qwen3", sharding=sharding)
    machine = model.engine
    machine.load_weights({name: torch.ones_like(x) for name, x in machine.weights().items()}, 0.25)
    return results | {"mixed": weights_now(model)}


def restored(folder: Path, path: Path, family: str = "gpt2", **settings: Any) -> Model:
    """Return a new model restored from the only checkpoint in a folder."""
    (checkpoint,) = list_checkpoints(path)
    tree = checkpoint.read()
    assert float(tree["number"]) == 3.5
    model = load(folder, family, **KEPT, **settings)
    model.engine.load_state_dict(tree["engine"])
    return model


def resumed(folder: Path, path: Path, family: str = "gpt2", **settings: Any) -> dict[str, Any]:
    """Go on from the checkpoint of `kept` in a folder."""
    return going_on(restored(folder, path, family, **settings))


def resumed_on(sharding: Sharding, folder: Path, path: Path) -> dict[str, Any]:
    """Go on from a checkpoint of a llama on any mesh."""
    return resumed(folder, path, "llama", sharding=sharding)


def unknown_moments(folder: Path) -> str:
    """Return the error of a state with moments of a parameter that the model lacks."""
    machine = load(folder).engine
    machine.train_batch(random_sample(LENGTHS), BUDGET, plain_loss, weight)
    state = whole_tree(machine.state_dict())
    moments = state["optimizer"]["optimizer"]["state"]
    moments[10_000] = moments[0]
    return _message(lambda: machine.load_state_dict(state))


def going_on(model: Model) -> dict[str, Any]:
    """Return the metrics of the next steps, the weights after them, and the averaged weights."""
    results = steps(model, joint_loss)
    average = whole_tree(model.engine.state_dict()["ema"]["average"])
    return results | {"average": average}


def mistakes(folder: Path) -> dict[str, str]:
    """Return the error messages of invalid calls on this rank."""
    machine, rank = load(folder).engine, current().rank
    data = random_sample([(5 + rank,), (7,)])
    values = random_sample([(6,)] * 6).with_tokens(advantages=torch.arange(36.0) - rank)
    masked = random_sample([(6,)] * 6).with_tokens(loss_mask=torch.arange(36) > rank)

    def nan(output: Any, part: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
        bad = torch.nan if "p3" in part.ids else 1.0
        return output.logprobs().sum() * bad, {}

    once = replace(STEP, max_nonfinite_in_a_row=1)
    whole = random_sample([(6,)] * 6)
    state = whole_tree(machine.state_dict())
    other = state | {"module": {name: x[:, :1] if x.ndim == 2 else x for name, x in state["module"].items()}}
    attempts = {
        "batch": lambda: machine.train_batch(data, BUDGET, plain_loss, weight),
        "values": lambda: machine.train_batch(values, BUDGET, plain_loss, weight),
        "mask": lambda: machine.train_batch(masked, BUDGET, plain_loss, weight),
        "reference": lambda: machine.reference(),
        "shape": lambda: machine.load_state_dict(other),
        "step": lambda: machine.apply(torch.tensor(1.0)),
        "tensor parallel": lambda: load(folder, sharding=Sharding(tensor=7)),
        "plan": lambda: load(folder, "gpt2", sharding=Sharding(tensor=current().size)),
        "heads": lambda: load(folder, sharding=Sharding(tensor=current().size)),
        "no experts": lambda: load(folder, sharding=Sharding(expert=current().size)),
        "experts": lambda: load(folder, "deepseek_v3", sharding=Sharding(expert=current().size)),
        "offload": lambda: load(folder, sharding=Sharding(offload=True)),
        "nan": lambda: load(folder, optimizer=once).engine.train_batch(whole, BUDGET, nan, weight),
    }
    return {name: _message(attempt) for name, attempt in attempts.items()}


def refused_contexts(folder: Path) -> dict[str, str]:
    """Return the error messages of models whose sequences two ranks cannot divide."""
    names = [path.name for path in sorted(folder.iterdir())]
    return {name: _message(partial(load, folder, name, sharding=Sharding(context=2))) for name in names}


def faults_of_one_rank(folder: Path) -> dict[str, Any]:
    """Return the metrics of steps in which the loss or the gradient of the last rank alone is not finite, and whether
    the weights stayed the same."""
    machine, last = load(folder).engine, current().rank == current().size - 1
    before = {name: x.clone() for name, x in machine.weights().items()}

    def nan_loss(output: Any, part: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
        return output.logprobs().sum() * (torch.nan if last else 1.0), {}

    def nan_gradient(output: Any, part: SequenceSample) -> tuple[Tensor, dict[str, Any]]:
        loss = output.logprobs().sum()
        return (loss + (loss.detach() - loss).abs().sqrt() if last else loss), {}  # the derivative of sqrt at 0

    data = random_sample([(6,)] * 6)
    metrics = [stat_values(machine.train_batch(data, BUDGET, loss, weight)) for loss in (nan_loss, nan_gradient)]
    return {"metrics": metrics, "same": all(torch.equal(x, before[name]) for name, x in machine.weights().items())}


def _message(attempt: Any) -> str:
    try:
        attempt()
    except (ValueError, RealignError) as error:
        return f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
    return ""


def _named(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": x for name, x in weights.items()}


def _renamed(data: SequenceSample) -> SequenceSample:
    return SequenceSample(tuple(f"other {i}" for i in data.ids), data.data, data.lengths)


def scenarios(folder: Path) -> dict[str, Any]:
    """Run the scenarios that give the same results on any number of ranks."""
    return {name: run(folder) for name, run in SCENARIOS.items()}


SCENARIOS = {
    f.__name__: f for f in (sft, grpo, early_stop, ppo, dpo, gkd, kto, one_prompt, settings, uneven, calls, replayed)
}


def kind(name: str, folder: Path, **settings: Any) -> dict[str, Any]:
    given, loss = KINDS[name]
    return steps(load(folder, **{**given, **settings}), loss, 3)


ON_MESHES = {f.__name__: f for f in (gradient, grpo, gspo, sft, dpo, ppo, reward_model, gkd, calls, replayed)}
ON_MESHES |= {name: partial(kind, name) for name in KINDS if name not in ("tied", "plain rows")}
"""Scenarios that give the same results on any mesh."""


def on_mesh(folder: Path, sharding: Sharding, names: Sequence[str]) -> dict[str, Any]:
    """Run scenarios on one mesh."""
    return {name: ON_MESHES[name](folder, sharding=sharding) for name in names}


def core_of_a_group(folder: Path) -> dict[str, Any]:
    """Run the scenarios of a rank of a group that take few seconds."""
    results = {"grpo": grpo(folder), "uneven": uneven(folder), "faults of one rank": faults_of_one_rank(folder)}
    return results | {"dropout": load(folder, dropout=0.1).engine.dropout_seed()}


def of_a_group(folder: Path) -> dict[str, Any]:
    """Run all scenarios of a rank of a group. `folder` contains a single-process checkpoint in `of 1`."""
    own = folder / f"of {current().size}"
    others = {path.name: path for path in folder.glob("of *") if path != own}
    more = {"low": low(folder), "kept": kept(folder, own, others), "mistakes": mistakes(folder)}
    more["faults of one rank"] = faults_of_one_rank(folder)
    more["reduced once"] = reduced_once(folder)
    return {**scenarios(folder), **more, "dropout": load(folder, dropout=0.1).engine.dropout_seed()}
