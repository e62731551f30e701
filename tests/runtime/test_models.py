from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, ModelInterface
from realign.engines import OptimizerSpec, SharedModel, TransformersModel
from realign.errors import ConfigError, DataError
from realign.interfaces.components import Critic, KLPenalty, KLPlace, ValueObjective
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.reward_model import RewardModelInterface
from realign.runtime.checks.parts import check_parts
from realign.runtime.local import LocalRuntime
from realign.runtime.models import check_outputs, check_vocabularies, load_models, save_models
from realign.testing import BigramEngine
from tests.engines.distributed.run_ranks import run_ranks
from tests.runtime import teachers
from tests.tiny import save_tiny, tiny_engine
from tests.toys import CountToken, experiment

GENERATION = GenerationConfig(n=2, max_new_tokens=4, fixed_length=True)
MEASURED = KLPenalty(KLPlace.reward, coef=1e-9)
"""KL penalty that requires the reference and hardly changes the reward."""


@dataclass
class Keeper(ReferenceInterface):
    """Interface that stores a number and adopts the stored number of an earlier interface."""

    kept: float = 0.0

    def state_dict(self):
        return {"kept": self.kept} if self.kept else {}

    def load_saved_state(self, saved):
        self.kept = saved.get("kept", -1.0)


class Rising(CountToken):
    """Reward with the values 0, 1, 2, ..."""

    def inference(self, model, data, mb_spec):
        rewards = torch.arange(float(data.lengths["input_ids"].flat.size))
        return data.with_sequences(rewards=rewards).select(["rewards"])


def shared(tmp_path, actor, **changes):
    models = {"actor": TransformersModel(str(actor), optimizer=OptimizerSpec(lr=1e-2)), "ref": SharedModel("actor")}
    policy = PPOActorInterface(generation=GENERATION, kl=MEASURED)
    interfaces = {"actor": policy, "ref": Keeper(), "reward": Rising()}
    settings = {"interfaces": interfaces, "models": models, "evaluation": None}
    return experiment(tmp_path, **(settings | changes))


def test_state_of_interfaces_goes_with_the_weights_and_is_adopted(tmp_path):
    first = shared(tmp_path, save_tiny(tmp_path / "model"))
    models = load_models(first)
    assert first.interfaces["ref"].kept == -1.0  # adopt was called without saved state
    first.interfaces["ref"].kept = 0.25
    save_models(tmp_path / "out", models, first.interfaces)
    folder = tmp_path / "out" / "actor"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["actor"]  # a role with a shared model has no folder
    assert json.loads((folder / "interface_state.json").read_text()) == first.interfaces["actor"].state_dict()
    assert json.loads((folder / "interface_state_ref.json").read_text()) == {"kept": 0.25}
    second = shared(tmp_path, folder)
    again = load_models(second)
    assert again["actor"].saved == first.interfaces["actor"].state_dict()
    assert second.interfaces["ref"].kept == 0.25
    second.interfaces["ref"].kept = 0.0
    save_models(tmp_path / "out", again, second.interfaces)
    assert not (folder / "interface_state_ref.json").exists()  # no files of the earlier save remain


def test_averaged_weights_come_with_the_state_of_interfaces(tmp_path):
    actor = TransformersModel(str(save_tiny(tmp_path / "m")), optimizer=OptimizerSpec(ema_decay=0.5))
    both = shared(tmp_path, "", models={"actor": actor, "ref": SharedModel("actor")})
    models = load_models(both)
    both.interfaces["ref"].kept = 0.25
    save_models(tmp_path / "out", models, both.interfaces)
    for name in ("interface_state.json", "interface_state_ref.json"):
        texts = [(tmp_path / "out" / folder / name).read_text() for folder in ("actor", "actor_ema")]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("text", ["[1]", "{", '"x"'])
def test_a_state_file_that_holds_no_state_is_named(tmp_path, text):
    folder = save_tiny(tmp_path / "model")
    (folder / "interface_state.json").write_text(text)
    with pytest.raises(DataError, match=r"interface_state\.json' (is not a JSON file|must contain a JSON object)"):
        load_models(shared(tmp_path, folder))


def test_a_shared_model_is_the_trained_one_and_counts_its_versions(tmp_path):
    # a ReferenceInterface must not change with the actor
    policy = PPOActorInterface(generation=GENERATION, kl=MEASURED)
    interfaces = {"actor": policy, "ref": policy, "reward": Rising()}
    runtime = LocalRuntime(shared(tmp_path, save_tiny(tmp_path / "model"), interfaces=interfaces))
    actor, ref = runtime.models["actor"], runtime.models["ref"]
    _, batch = runtime.step(1)
    mask_T = batch["loss_mask"]
    assert torch.allclose(batch["ref_logprobs"][mask_T], batch["logprobs"][mask_T], atol=1e-5)
    assert actor.version == ref.version == 1
    assert ref.call_seed("generate") != actor.call_seed("generate")
    scored = [runtime.interfaces["ref"].inference(model, batch, MicroBatchSpec())["logprobs"] for model in (actor, ref)]
    assert torch.equal(*scored)  # also equal after the step
    assert not torch.allclose(scored[0][mask_T], batch["logprobs"][mask_T], atol=1e-4)


def test_a_shared_model_answers_but_does_not_train(tmp_path):
    models = load_models(shared(tmp_path, save_tiny(tmp_path / "model")))
    prompts = experiment(tmp_path).data.sample([(0, 0), (0, 1)])
    greedy = GenerationConfig(max_new_tokens=3, greedy=True)
    answers = [models[role].engine.generate(prompts, greedy, seed=1)["input_ids"] for role in ("actor", "ref")]
    assert torch.equal(*answers)
    assert not models["ref"].engine.capabilities().trainable
    with pytest.raises(ValueError, match=r"models.ref shares the model of role 'actor' and cannot train"):
        models["ref"].engine.train_batch(prompts, MicroBatchSpec(), None, None)


def test_a_role_that_shares_cannot_be_trained_by_the_graph(tmp_path):
    folder = save_tiny(tmp_path / "model")
    models = {"ref": TransformersModel(str(folder)), "actor": SharedModel("ref")}
    with pytest.raises(ConfigError, match=r"'actor_train' trains this model, which shares the model of role 'ref'"):
        load_models(shared(tmp_path, folder, models=models))


@pytest.mark.parametrize("of", ["ref", "critic", "actr"])
def test_only_a_role_with_a_model_of_its_own_is_shared(tmp_path, of):
    models = {"actor": TransformersModel("x"), "ref": SharedModel(of), "critic": SharedModel("actor")}
    with pytest.raises(ConfigError, match=rf"models\.ref\.of='{of}': must be a role with its own model. .*: actor\."):
        check_parts(shared(tmp_path, "x", models=models))


def test_a_model_that_takes_no_part_cannot_be_shared():
    with pytest.raises(ConfigError, match=r"models\.ref\.of='actor': no RPC uses this role"):
        SharedModel("actor").load("ref", seed=0)


def test_interfaces_ignore_what_was_kept_unless_they_say_otherwise():
    ModelInterface().load_saved_state({"gain": 2.0})
    assert Model("x", None).saved == {}


class Words:
    """Tokenizer with these words, in this order."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: i for i, word in enumerate(self.words)}


def test_roles_that_exchange_token_ids_must_mean_the_same_by_them():
    actor, padded, other = Words("a", "b"), Words("a", "b", "<pad>"), Words("b", "a", "c")
    models = {"actor": Model("actor", None, actor), "ref": Model("ref", None, padded), "rule": Model("rule", None)}
    check_vocabularies(models, "actor")
    with pytest.raises(ConfigError, match=r"models\.reward: .* Token 'a' has id 1 in .* and 0 in"):
        check_vocabularies(models | {"reward": Model("reward", None, other)}, "actor")
    with pytest.raises(ConfigError, match=r"models\.reward: .* Id 1 is 'c' in models\.reward and 'b' in models\.actor"):
        check_vocabularies(models | {"reward": Model("reward", None, Words("a", "c"))}, "actor")


@pytest.mark.parametrize(
    ("head", "interface", "message"),
    [
        (
            "causal",
            PPOCriticInterface(),
            r"PPOCriticInterface.* needs scores and values .*whose head has logprobs. Set .*head=",
        ),
        ("causal", RewardModelInterface(), "needs scores"),
        (
            "causal",
            PPOActorInterface(critic=Critic.shared, value=ValueObjective(coef=0.1)),
            r"PPOActorInterface.* needs values of models\.x, .* Set models\.x\.head\.value_head, with head=causal\.$",
        ),
        (
            "score",
            ReferenceInterface(),
            "needs logprobs of models.x, whose head has scores and values. Set .*head=causal",
        ),
    ],
)
def test_a_model_without_the_head_that_its_interface_needs_is_refused(head, interface, message):
    model = Model("x", tiny_engine(model={"head": head}), None)
    with pytest.raises(ConfigError, match=message):
        check_outputs("x", model.engine.capabilities().outputs, interface)


@pytest.mark.parametrize(
    ("critic", "role", "cure"),
    [("none", "ref", r"models\.ref\.optimizer\.$"), ("shared", "critic", r"SharedModel, of: actor\}'\.$")],
)
def test_an_optimizer_that_no_call_uses_is_refused(tmp_path, critic, role, cure):
    trained = TransformersModel("nowhere", optimizer=OptimizerSpec(lr=1e-2))
    value = ValueObjective(coef=0.1) if critic == "shared" else None
    kl = MEASURED if role == "ref" else KLPenalty()
    first = shared(
        tmp_path,
        "nowhere",
        models={"actor": trained, role: trained},
        interfaces={
            "actor": PPOActorInterface(generation=GENERATION, kl=kl, critic=critic, value=value),
            "ref": ReferenceInterface(),
            "critic": PPOCriticInterface(),
            "reward": Rising(),
        },
    )
    with pytest.raises(ConfigError, match=rf"models\.{role}\.optimizer: it has no effect, since no RPC .*{cure}"):
        load_models(first)


def test_a_value_head_gives_values_beside_log_probs():
    assert BigramEngine().capabilities().outputs == {"logprobs", "values", "scores", "q_values"}
    assert tiny_engine().capabilities().outputs == {"logprobs"}
    assert tiny_engine(model={"head": "value"}).capabilities().outputs == {"values", "scores"}


@pytest.mark.slow
def test_hidden_states_and_head_of_a_teacher_have_the_same_weights_on_any_number_of_ranks(tmp_path):
    teachers.prepare(tmp_path)
    wanted = teachers.divergences(tmp_path)
    # a teacher that shares the student's model is the student before the step, as is one that copies it after each step
    assert wanted["shared"] == wanted["copied"]
    assert len({tuple(values) for values in wanted.values()}) == len(wanted) - 1
    for rank in run_ranks(2, teachers.divergences, tmp_path):
        for kind, values in wanted.items():
            assert rank[kind] == pytest.approx(values, rel=1e-4), kind
