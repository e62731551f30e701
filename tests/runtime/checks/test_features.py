"""Test the support of images, encoder-decoder models and router replay."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from realign.api import EngineCapabilities, GenerationConfig, Model, ModelInterface
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sampling_mask import SAMPLING_MASK
from realign.config import build_experiment, compose
from realign.data import SupervisedData, TextData, WithPretraining
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.errors import ConfigError, GraphError
from realign.interfaces import ppo, raft
from realign.interfaces.agent import AgentInterface
from realign.interfaces.components import KLPenalty, KLPlace
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.decoupled_ppo import DecoupledPPOActorInterface
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.raft import RAFTActorInterface
from realign.runtime import Async, run
from realign.runtime.checks import before_loading
from realign.runtime.checks.before_loading import check_images, check_replay
from realign.runtime.checks.parts import check_exact_sampling, check_keys
from realign.runtime.datasets import check_encoder_decoders, check_image_models, check_predicted
from realign.runtime.models import load_models
from realign.runtime.ray.host import Loaded
from realign.runtime.ray.proxies import RayEngine
from realign.samplers import Vllm
from tests.encoder_decoders import tiny_pair
from tests.images import tiny_image_engine
from tests.tiny import engine_over, save_tiny, tiny_engine, tiny_tokenizer
from tests.toys import Prompts
from tests.toys import experiment as toy

GRPO = ["experiment=grpo", "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"]
COMMON = ["models.actor.path=model", "data.path=prompts.jsonl", "data.images_column=images"]


def made(*words):
    return build_experiment(compose([*words, *COMMON]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*GRPO, "runtime=ray"], "runtime=ray: workers do not support images"),
        (
            [*GRPO, "models.actor.sampler=vllm"],
            r"models\.actor\.sampler: external samplers do not support images",
        ),
        (
            ["experiment=raft", "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"],
            r"interfaces\.actor: RAFTActorInterface does not support images",
        ),
        (
            ["experiment=ppo", "models.reward.path=reward"],
            r"interfaces\.(reward|critic): \w+ does not support images",
        ),
        (
            [*GRPO, "interfaces.actor.kl.place=loss", "interfaces.ref={_target_: reference, prompt: hint}"],
            r"interfaces\.ref: ReferenceInterface does not support images",
        ),
    ],
)
def test_what_does_not_support_images_is_an_error_before_loading(words, message):
    with pytest.raises(ConfigError, match=message):
        check_images(made(*words))


def test_distributed_training_with_images_is_an_error(monkeypatch):
    experiment = made(*GRPO)
    check_images(experiment)
    monkeypatch.setattr(before_loading, "current", lambda: SimpleNamespace(size=2))
    with pytest.raises(ConfigError, match="distributed training does not support images"):
        check_images(experiment)


def test_a_model_that_does_not_read_images_is_an_error():
    experiment = made(*GRPO)
    reads = Model("actor", tiny_image_engine(), tiny_tokenizer(), 0)
    check_image_models(experiment, {"actor": reads, "ref": reads, "reward": Model("reward", None)})
    text = Model("ref", tiny_engine(), tiny_tokenizer(), 0)
    with pytest.raises(ConfigError, match=r"models\.ref: this model does not read images"):
        check_image_models(experiment, {"actor": reads, "ref": text, "reward": Model("reward", None)})


T5_GRPO = ["experiment=grpo", "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"]
T5_COMMON = ["models.actor.path=model", "data.path=prompts.jsonl"]


def models_of(engine):
    return {"actor": Model("actor", engine, tiny_tokenizer(), 0), "reward": Model("reward", None)}


@pytest.fixture(scope="module")
def pair():
    return models_of(engine_over(tiny_pair("t5")))


def test_the_ray_runtime_is_an_error(pair):
    local, ray = (build_experiment(compose([*T5_GRPO, *T5_COMMON, *words])) for words in ([], ["runtime=ray"]))
    check_encoder_decoders(local, pair)
    check_encoder_decoders(ray, models_of(tiny_engine()))
    with pytest.raises(ConfigError, match=r"^runtime=ray: not supported by encoder-decoder models \(models\.actor\)"):
        check_encoder_decoders(ray, pair)


def test_workers_report_an_encoder_decoder_model_to_the_driver():
    facts = {field.name: None for field in dataclasses.fields(Loaded)}
    capabilities = EngineCapabilities(frozenset(), trainable=False, encoder_decoder=True)
    loaded = Loaded(**{**facts, "data_rank": 0, "capabilities": capabilities})
    assert RayEngine("actor", SimpleNamespace(), [loaded]).capabilities().encoder_decoder


def test_losses_of_prompts_and_pretraining_texts_are_errors(pair, tmp_path):
    rows, texts = tmp_path / "rows.jsonl", tmp_path / "texts.jsonl"
    rows.write_text('{"prompt": "1+1=", "response": "2"}\n')
    texts.write_text('{"text": "12+34"}\n')
    tokenizer = tiny_tokenizer()
    responses, whole = (SupervisedData(str(rows), train_on_prompt=on).load(tokenizer) for on in (False, True))
    check_predicted(responses, "data", pair)
    check_predicted(whole, "data", models_of(tiny_engine()))
    with pytest.raises(ConfigError, match=r"^data\.train_on_prompt=true: not supported, because models\.actor is"):
        check_predicted(whole, "data", pair)
    prompts = build_experiment(compose([*T5_GRPO, *T5_COMMON, f"data.path={rows}"])).data
    mixed = WithPretraining(prompts, TextData(str(texts), block_tokens=4)).load(tokenizer)
    with pytest.raises(ConfigError, match=r"^data\.pretraining: not supported, .* and set ptx_coef=0\.$"):
        check_predicted(mixed, "data", pair)


@dataclass
class MeanToken(ModelInterface):
    """Reward that differs between almost all responses."""

    needs_engine = False

    def inference(self, model, data, mb_spec):
        return (
            data.select(["input_ids"])
            .with_sequences(rewards=torch.stack([ids.float().mean() for ids in data.sequences()]))
            .select(["rewards"])
        )


REPLAY = GenerationConfig(n=4, max_new_tokens=6, router_replay=True)


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("policy"), "qwen3_moe", tie_word_embeddings=False)


def experiment(tmp_path: Path, policy: Path | str, actor=None, **changes):
    settings = {
        "steps": 2,
        "batch_prompts": 4,
        "interfaces": {"actor": actor or GRPOActorInterface(generation=REPLAY), "reward": MeanToken()},
        "models": {"actor": TransformersModel(str(policy), optimizer=OptimizerSpec(lr=1e-2))},
        "data": Prompts(11),
        "evaluation": None,
        "checkpoint": None,
        "strict_ratio": True,
    }
    return toy(tmp_path, **(settings | changes))


@pytest.mark.parametrize("kind", [GRPOActorInterface, DecoupledPPOActorInterface])
@pytest.mark.parametrize("rollout", [None, Async(max_staleness=1)], ids=["sync", "async"])
def test_a_run_replays_the_choices_of_its_rollouts(tmp_path, policy, kind, rollout):
    actor = kind(generation=REPLAY, n_minibatches=2)
    changes = {"rollout": rollout} if rollout is not None else {}
    made = experiment(tmp_path, policy, actor, **changes)
    check_replay(made)
    calls = {rpc.name: rpc for rpc in made.graph.rpcs}
    assert ROUTER_EXPERTS in calls["actor_gen"].outputs
    readers = {"actor_train"} | ({"actor_inf"} if kind is DecoupledPPOActorInterface else set())
    assert readers == {name for name, rpc in calls.items() if ROUTER_EXPERTS in rpc.inputs}
    result = run(made)
    changed = result.series("router_changes")
    assert len(changed) == 2
    assert all(0 <= x <= 1 for x in changed)
    assert max(result.series("router_changed_tokens")) >= max(changed)


TRUNCATED = GenerationConfig(n=4, max_new_tokens=6, top_p=0.9)


@pytest.mark.parametrize("kind", [GRPOActorInterface, DecoupledPPOActorInterface])
@pytest.mark.parametrize("rollout", [None, Async(max_staleness=1)], ids=["sync", "async"])
def test_a_run_with_top_p_replays_the_sampling_masks_of_its_rollouts(tmp_path, kind, rollout):
    """All log-probs are normalized over the recorded tokens, so the ratio is 1 and the KL 0 before the first update."""
    policy = save_tiny(tmp_path / "policy")
    actor = kind(generation=TRUNCATED, n_minibatches=2, kl=KLPenalty(KLPlace.loss, 0.1))
    changes = {"rollout": rollout} if rollout is not None else {}
    made = experiment(tmp_path, policy, actor, **changes)
    check_replay(made)
    calls = {rpc.name: rpc for rpc in made.graph.rpcs}
    assert SAMPLING_MASK in calls["actor_gen"].outputs
    readers = {"actor_train", "ref_inf"} | ({"actor_inf"} if kind is DecoupledPPOActorInterface else set())
    assert readers == {name for name, rpc in calls.items() if SAMPLING_MASK in rpc.inputs}
    assert made.graph.unread() == []
    result = run(made)
    assert result.series("first_logprob_diff_max")[0] < 1e-4
    assert abs(result.series("ref_kl_per_sequence")[0]) < 0.2


@pytest.mark.parametrize("top_k", [0, 8])
def test_a_server_without_sampling_masks_is_rejected(tmp_path, top_k):
    actor = GRPOActorInterface(generation=dataclasses.replace(TRUNCATED, top_k=top_k))
    models = {"actor": TransformersModel("m", optimizer=OptimizerSpec(), sampler=Vllm(urls=["http://127.0.0.1:1"]))}
    made = experiment(tmp_path, "m", actor, models=models)
    with pytest.raises(ConfigError, match=r"top_.*: training normalizes .*sampler=Vllm does not return"):
        check_replay(made)


def test_an_algorithm_without_ratios_records_no_sampling_masks(tmp_path):
    for replay in (False, True):
        actor = RAFTActorInterface(generation=dataclasses.replace(TRUNCATED, sampling_replay=replay))
        interfaces = {"actor": actor, "reward": MeanToken()}
        made = experiment(tmp_path, "m", interfaces=interfaces, graph=raft.dataflow(interfaces))
        if replay:
            with pytest.raises(ConfigError, match=r"generation\.sampling_replay=true: RAFT"):
                check_replay(made)
        else:
            check_replay(made)


@pytest.mark.parametrize("role", [partial(EnvironmentInterface, "m:E"), partial(AgentInterface, "m:run")])
def test_a_conversation_with_top_p_is_replayed_if_the_setting_says_so(role):
    actor = GRPOActorInterface(generation=TRUNCATED)
    interfaces = {"actor": actor, "agent": role(generation=dataclasses.replace(TRUNCATED, sampling_replay=True))}
    graph = ppo.dataflow(interfaces)
    check_keys(graph, interfaces)
    check_exact_sampling(graph, interfaces)
    assert SAMPLING_MASK in graph.rpcs[0].outputs
    interfaces["agent"] = role(generation=TRUNCATED)
    with pytest.raises(ConfigError, match="set sampling_replay=true beside them"):
        check_exact_sampling(ppo.dataflow(interfaces), interfaces)


@pytest.mark.parametrize(("critic", "replays"), [("shared", True), ("own", False)])
def test_a_critic_replays_only_with_the_model_of_the_actor(critic, replays):
    interfaces = {"actor": ppo.PPOActorInterface(REPLAY, critic=critic), "critic": PPOCriticInterface()}
    graph = ppo.dataflow({**interfaces, "reward": MeanToken()})
    check_keys(graph, {**interfaces, "reward": MeanToken()})
    (inference,) = (rpc for rpc in graph.rpcs if rpc.name == "critic_inf")
    assert (ROUTER_EXPERTS in inference.inputs) == replays


def test_a_dense_model_is_rejected_when_it_is_loaded(tmp_path):
    dense = experiment(tmp_path, save_tiny(tmp_path / "dense"))
    with pytest.raises(ConfigError, match=r"models\.actor: .*'llama' has no routers.* Set generation\.router_replay"):
        load_models(dense)


def test_an_external_sampler_is_rejected(tmp_path):
    sampler = Vllm(urls=["http://127.0.0.1:1"])
    model = TransformersModel("m", optimizer=OptimizerSpec(), sampler=sampler)
    made = experiment(tmp_path, "m", models={"actor": model})
    with pytest.raises(ConfigError, match=r"models\.actor\.sampler=Vllm does not return the choices"):
        check_replay(made)


def test_an_algorithm_that_does_not_replay_is_rejected(tmp_path):
    actor = RAFTActorInterface(generation=REPLAY)
    interfaces = {"actor": actor, "reward": MeanToken()}
    made = experiment(tmp_path, "m", interfaces=interfaces, graph=raft.dataflow(interfaces))
    with pytest.raises(ConfigError, match=r"interfaces\.actor\.generation\.router_replay=true: RAFT"):
        check_replay(made)


def test_agents_behind_an_endpoint_are_rejected(tmp_path):
    agent = AgentInterface("m:run", generation=REPLAY)
    interfaces = {"actor": GRPOActorInterface(generation=REPLAY), "agent": agent}
    models = {"actor": TransformersModel("m", optimizer=OptimizerSpec()), "agent": SharedModel("actor")}
    graph = ppo.dataflow(interfaces)
    made = SimpleNamespace(graph=graph, interfaces=interfaces, models=models)
    with pytest.raises(ConfigError, match=r"interfaces\.agent\.generation\.router_replay=true: AgentInterface"):
        check_replay(made)


def test_an_actor_that_replays_needs_a_role_that_records():
    plain = EnvironmentInterface("m:E", generation=GenerationConfig(max_new_tokens=6))
    actor = GRPOActorInterface(generation=REPLAY)
    interfaces = {"actor": actor, "agent": plain}
    with pytest.raises(GraphError, match=r"actor\.generation\.router_replay=true needs key 'router_experts' in train"):
        check_keys(ppo.dataflow(interfaces), interfaces)
    interfaces = {"actor": actor, "agent": EnvironmentInterface("m:E", generation=REPLAY)}
    graph = ppo.dataflow(interfaces)
    check_keys(graph, interfaces)
    assert ROUTER_EXPERTS in graph.rpcs[0].outputs
