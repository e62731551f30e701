"""`check_engine` passes for the package's engines, and each of its checks fails for an engine that is broken there."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from realign.api import EngineCapabilities, PipelinableEngine, SequenceSample
from realign.api.engine import StepsInHalves
from realign.engines import OptimizerSpec, Schedule, SharedModel, TransformersModel
from realign.models import Lora
from realign.runtime.ray.host import Host
from realign.runtime.ray.proxies import RayEngine
from realign.testing import ENGINE_CHECKS, BigramEngine, check_engine, random_batch
from realign.testing.bigram import BigramOutput
from tests.engines.distributed.run_ranks import run_ranks
from tests.tiny import random_sample, save_tiny
from tests.toys import BigramModel

DATA = random_batch().select(["input_ids"])
TEXTS = random_sample([[6, 5], [7], [4, 3, 9]])
STEP = OptimizerSpec(lr=1e-2, eps=1e-3, schedule=Schedule("linear", total=40, unit="train_step"))
"""A step that is a smooth function of the gradient."""

pytestmark = pytest.mark.filterwarnings("ignore:.* is not finite")


def saved_bigram(path: Path) -> BigramEngine:
    engine, tables = BigramEngine(seed=9), np.load(path / "bigram.npz")
    engine.load_weights({name: torch.from_numpy(tables[name]) for name in tables})
    return engine


def test_the_bigram_engine_passes():
    check_engine(BigramEngine, DATA, load=saved_bigram)
    check_engine(lambda: BigramEngine(trainable=False), DATA)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, settings in {
        "llama": {"family": "llama"},
        "qwen3_moe": {"family": "qwen3_moe"},
        "value": {"family": "llama", "head": "value"},
    }.items():
        save_tiny(folder / name, **settings)
    return folder


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"optimizer": STEP}),
        ("llama", {}),
        pytest.param("llama", {"optimizer": STEP, "trains": Lora(rank=4)}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"optimizer": STEP}, marks=pytest.mark.slow),
    ],
    ids=["all", "frozen", "lora", "moe"],
)
def test_the_transformers_engine_passes(folders, name, settings):
    def made(path=folders / name, settings=settings):
        return TransformersModel(str(path), device="cpu", **settings).load("actor", seed=0).engine

    check_engine(made, TEXTS, load=lambda path: made(path, {}))


def test_a_shared_model_passes_as_a_frozen_one(folders):
    def made():
        actor = TransformersModel(str(folders / "llama"), device="cpu", optimizer=STEP).load("actor", seed=0)
        return SharedModel("actor").load("ref", seed=0, loaded={"actor": actor}).engine

    for name in ENGINE_CHECKS.keys() - {"weights"}:  # only the role that owns the model loads weights
        check_engine(made, TEXTS, only=name)


def check_rank(folders: Path, out: Path) -> bool:
    def made(path: Path = folders / "llama"):
        return TransformersModel(str(path), device="cpu", optimizer=STEP).load("actor", seed=0).engine

    check_engine(made, TEXTS, load=made, folder=out)
    return True


@pytest.mark.slow
def test_the_sharded_engine_passes_on_two_ranks(folders, tmp_path):
    assert run_ranks(2, check_rank, folders, tmp_path, seconds=400) == [True, True]


class HereGroup:
    """The one worker of a `WorkerGroup`, in this process."""

    def __init__(self, host):
        self.host, self.busy = host, nullcontext()

    def ask(self, role, verb, parts, hook=None):
        given = tuple(hook if isinstance(x, str) and x == "<hook>" else x for x in parts[0])
        return [self.host.ask(role, verb, given)]


def test_the_proxy_of_ray_passes(folders):
    spec = TransformersModel(str(folders / "llama"), device="cpu", optimizer=STEP)

    def made():
        host = Host(0, 1)
        return RayEngine("actor", HereGroup(host), [host.load({"actor": spec}, 0, frozenset())["actor"]])

    check_engine(made, TEXTS, load=lambda path: TransformersModel(str(path)).load("actor", seed=0).engine)


def test_the_proxy_of_ray_passes_with_an_engine_that_has_no_halves():
    def made():
        host = Host(0, 1)
        return RayEngine("actor", HereGroup(host), [host.load({"actor": BigramModel()}, 0, frozenset())["actor"]])

    assert not isinstance(BigramEngine(), StepsInHalves)
    check_engine(made, DATA)
    with pytest.raises(ValueError, match=r"cannot wait for other models before a step\. Set skip_together=false"):
        made().agree_on_steps(lambda finite: finite)


class HidesValues(BigramEngine):
    def capabilities(self):
        return EngineCapabilities(frozenset({"logprobs"}), trainable=True)


class LeaksBetweenSequences(BigramEngine):
    def output(self, mb):
        out = super().output(mb)
        return BigramOutput(out.logits_VV, out.values_V, out.ids_T, torch.tensor([0, len(out.ids_T)]))


class ReturnsAllKeys(BigramEngine):
    def forward(self, data, mb_spec, post_hook):
        return data.merge(super().forward(data, mb_spec, post_hook))


class ForwardWithGradient(BigramEngine):
    def forward(self, data, mb_spec, post_hook):
        parts = data.split(mb_spec)
        results = [post_hook(self.output(mb), mb) for mb in parts]
        return parts.restore([r.select(r.keys - data.keys) for r in results])


class MicroBatchMeans(BigramEngine):
    def train_batch(self, data, mb_spec, loss_fn, loss_weight_fn, step_if=None):
        def mean(output, mb):
            loss, stats = loss_fn(output, mb)
            return loss / loss_weight_fn(mb) * loss_weight_fn(data), stats

        return super().train_batch(data, mb_spec, mean, loss_weight_fn, step_if)


class DividesBySequences(BigramEngine):
    def train_batch(self, data, mb_spec, loss_fn, loss_weight_fn, step_if=None):
        return super().train_batch(data, mb_spec, loss_fn, lambda d: torch.tensor(float(d.n_sequences)), step_if)


class StepsAnyway(BigramEngine):
    def train_batch(self, data, mb_spec, loss_fn, loss_weight_fn, step_if=None):
        return super().train_batch(data, mb_spec, loss_fn, loss_weight_fn)


class CountsSkippedSteps(BigramEngine):
    """Its learning rate falls with every call, also with those that are skipped."""

    def train_batch(self, *given):
        stats = super().train_batch(*given)
        self.lr /= 2
        return stats


class TakesNan(BigramEngine):
    def train_batch(self, data, mb_spec, loss_fn, loss_weight_fn, step_if=None):
        before = self.weights()["logits"].clone()
        stats = super().train_batch(data, mb_spec, loss_fn, loss_weight_fn, step_if)
        if not stats["loss"].total.isfinite():
            self.logits_VV = before * torch.nan
        return stats


class TrainsFrozen(BigramEngine):
    def capabilities(self):
        return replace(super().capabilities(), trainable=False)


class CountsCalls(BigramEngine):
    def start_step(self, version):
        self.lr /= 2


class IgnoresMix(BigramEngine):
    def load_weights(self, weights, mix=1.0):
        super().load_weights(weights, 1.0 if 0 < mix <= 1 else mix)


class TakesAnyWeights(BigramEngine):
    def load_weights(self, weights, mix=1.0):
        super().load_weights({**self.weights(), **{k: x for k, x in weights.items() if k == "logits"}}, mix)


class ForgetsItsRate(CountsSkippedSteps):
    """Its learning rate is not in its state."""


class SavesNothing(BigramEngine):
    def save(self, path):
        pass


class SavesTheStart(BigramEngine):
    def save(self, path):
        BigramEngine().save(path)


class TrainsOnPrompts(BigramEngine):
    def generate(self, data, config, *, seed):
        out = super().generate(data, config, seed=seed)
        return out.with_tokens(loss_mask=torch.ones_like(out["loss_mask"]))


class StopsEarly(BigramEngine):
    def generate(self, data, config, *, seed):
        return super().generate(data, replace(config, max_new_tokens=config.max_new_tokens - 1), seed=seed)


class SeedsByPosition(BigramEngine):
    def generate(self, data, config, *, seed):
        numbered = SequenceSample.from_sequences(
            range(len(data)), {"prompt_ids": [[x] for x in data.sequences("prompt_ids")]}
        )
        out = super().generate(numbered, config, seed=seed)
        return SequenceSample(data.ids, out.data, out.lengths)


class IgnoresIndex(BigramEngine):
    def generate(self, data, config, *, seed):
        first = super().generate(data, replace(config, n=1), seed=seed)
        twice = [[x] * config.n for x in first.sequences()]
        out = SequenceSample.from_sequences(data.ids, {"input_ids": twice})
        return out.with_tokens(**{k: [[x] * config.n for x in first.sequences(k)] for k in ("prompt_mask", "logprobs")})


class IgnoresSeed(BigramEngine):
    def generate(self, data, config, *, seed):
        return super().generate(data, config, seed=0)


class LogprobsAtOne(BigramEngine):
    def generate(self, data, config, *, seed):
        out = super().generate(data, config, seed=seed)
        return out.with_tokens(logprobs=out["logprobs"] * config.temperature)


class IgnoresReplay(BigramEngine):
    def generate(self, data, config, *, seed):
        return super().generate(data, replace(config, router_replay=False), seed=seed)


class IgnoresMasks(BigramEngine):
    def generate(self, data, config, *, seed):
        return super().generate(data, replace(config, sampling_replay=False), seed=seed)


class SaysLiveHead(BigramEngine):
    def capabilities(self):
        return replace(super().capabilities(), live_head=True)


class ForgetsHeads(BigramEngine):
    def use_heads(self, heads):
        pass


class LiveReference(BigramEngine):
    def reference(self, layers=None):
        return self.forward


class MeasuresByTraining(BigramEngine):
    def measure(self, data, mb_spec, loss_fn):
        measured = super().measure(data, mb_spec, loss_fn)
        self.train_batch(data, mb_spec, loss_fn, lambda d: torch.tensor(1.0))
        return measured


class OverlapsParts(BigramEngine):
    data_ranks = 2

    def forward_part(self, part, mb_spec, post_hook):
        return self.forward(part.with_tokens(input_ids=part["input_ids"].flip(0)), mb_spec, post_hook)


class StepsTwice(BigramEngine):
    """A step in halves whose second half ignores the veto."""

    def accumulate(self, part, mb_spec, loss_fn, weight):
        self._half = part, mb_spec, loss_fn, lambda batch: weight
        return {}

    def finite(self):
        return True

    def apply(self, weight, *, vetoed=False):
        return self.train_batch(*self._half)

    def skip(self, reason):
        return {}


class ListsCopies(BigramEngine):
    def resident(self):
        return [x.clone() for x in self.parameters]


BROKEN = [
    ("capabilities", HidesValues, "ModelOutput.values, which outputs does not name, must raise"),
    ("forward", LeaksBetweenSequences, "prompts packed together and alone"),
    ("forward", ReturnsAllKeys, "not only those that the hook added"),
    ("forward", ForwardWithGradient, "forward computes gradients"),
    ("train", MicroBatchMeans, "training with"),
    ("weight", DividesBySequences, "loss and weight times 4|metric loss"),
    ("skip", StepsAnyway, "a step with step_if that returns False"),
    ("skip", TakesNan, "a step with a loss that is not finite"),
    ("skip", CountsSkippedSteps, "the step after one with"),
    ("frozen", TrainsFrozen, "train_batch of an engine that is not trainable must raise"),
    ("start_step", CountsCalls, "a step after several calls of start_step"),
    ("weights", IgnoresMix, "load_weights with mix=0.25"),
    ("weights", TakesAnyWeights, "load_weights"),
    ("state", ForgetsItsRate, "the step after load_state_dict"),
    ("save", SavesNothing, "save writes no folder"),
    ("save", SavesTheStart, "the loaded model"),
    ("generate", TrainsOnPrompts, "loss_mask is not the complement"),
    ("generate", StopsEarly, "a response is truncated below max_new_tokens|with fixed_length"),
    ("seeds", SeedsByPosition, "a response depends on"),
    ("seeds", IgnoresIndex, "responses to a prompt are equal"),
    ("seeds", IgnoresSeed, "the seed has no effect"),
    ("temperature", LogprobsAtOne, "log-probs of generate and of forward"),
    ("router_replay", IgnoresReplay, "router_replay, which is no capability, must raise"),
    ("sampling_replay", IgnoresMasks, "sampling_replay, which is no capability, must raise"),
    ("heads", SaysLiveHead, "live_head, but it does not follow"),
    ("heads", ForgetsHeads, "use_heads|'check'"),
    ("reference", LiveReference, "the reference after a training step"),
    ("measure", MeasuresByTraining, "measure: weight|measure with"),
    ("parts", OverlapsParts, "forward_part and the same prompts of the whole batch"),
    ("halves", StepsTwice, "apply with vetoed"),
    ("resident", ListsCopies, "resident lists other tensors in the next call"),
]


@pytest.mark.parametrize(("name", "engine", "message"), BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_a_broken_engine_fails(name, engine, message):
    load = saved_bigram if name == "save" else None
    with pytest.raises((AssertionError, KeyError), match=message):
        check_engine(engine, DATA, load=load, only=name)


def test_a_missing_method_is_an_error_at_once():
    class Empty(PipelinableEngine):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Empty()
