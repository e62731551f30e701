"""`check_engine`: the conformance test of engines."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from realign.api import (
    EngineCapabilities,
    GenerationConfig,
    LossStats,
    Max,
    Mean,
    MicroBatchSpec,
    ModelOutput,
    PipelinableEngine,
    SequenceSample,
    Stats,
    stat_values,
)
from realign.api.engine import LOSS_SUM, LossFn, PostHook, StepsInHalves
from realign.api.sample import shard

OUTPUTS = ("logprobs", "values", "scores", "q_values")
"""Outputs that `EngineCapabilities.outputs` may name."""
_ACCIDENTS = (AttributeError, TypeError, LookupError, AssertionError, NotImplementedError)
"""Errors that show a gap in the code, and do not tell a caller that the engine lacks an ability."""
SPEC = MicroBatchSpec()
_TEMPERATURE = 0.7


@dataclass
class EngineCase:
    """An engine and the inputs of its checks.

    Everything that the checks learn about a pass comes back as a key of `forward` or as a metric, since an engine may
    run the functions in other processes.
    """

    make: Callable[[], PipelinableEngine]
    data: SequenceSample
    """Key `input_ids`; further keys are passed on."""
    tolerance: float
    load: Callable[[Path], PipelinableEngine] | None
    folder: Path

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.engine = self.make()
        self.has = self.engine.capabilities()
        n = self.data.n_sequences
        self.data = self.data.with_tokens(check_scale=torch.rand(len(self.data["input_ids"]), generator=generator))
        self.data = self.data.with_sequences(check_scale_S=torch.rand(n, generator=generator))
        first = [group.sequences()[0] for group in self.data.unpack()]
        self.prompts = SequenceSample.from_sequences(self.data.ids, {"prompt_ids": [[ids[:2]] for ids in first]})

    @property
    def language(self) -> bool:
        """Whether the engine has a language model."""
        return "logprobs" in self.has.outputs

    @property
    def config(self) -> GenerationConfig:
        """How responses are sampled."""
        return GenerationConfig(n=2, max_new_tokens=5, temperature=_TEMPERATURE)

    def scored(self, data: SequenceSample | None = None, spec: MicroBatchSpec = SPEC) -> Tensor:
        """Return the outputs that the checks compare, with `forward`: [T] log-probs or [S] scores."""
        return self.engine.forward(self.data if data is None else data, spec, self.hook)["check"]

    @property
    def hook(self) -> PostHook:
        """Adds the output that the checks compare."""
        language = self.language

        def hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
            return mb.with_tokens(check=output.logprobs()) if language else mb.with_sequences(check=output.scores())

        return hook

    def train(
        self,
        data: SequenceSample | None = None,
        spec: MicroBatchSpec = SPEC,
        *,
        factor: float = 1.0,
        weight: float = 1.0,
        poison: float | None = None,
        **given: Any,
    ) -> dict[str, float]:
        """Take a training step, and return its metrics.

        Args:
            data: the batch; None is that of the case.
            spec: micro-batches.
            factor: factor of the loss.
            weight: factor of the loss weight.
            poison: added to the loss of the batch's last prompt, times its scores; None adds nothing.
            **given: further arguments of `train_batch`.
        """
        loss, loss_weight = self.loss(factor, poison), partial(_loss_weight, weight)
        return stat_values(
            self.engine.train_batch(self.data if data is None else data, spec, loss, loss_weight, **given)
        )

    def loss(self, factor: float = 1.0, poison: float | None = None) -> LossFn:
        """Return the loss of a training step; see `train`."""
        language, last = self.language, self.data.ids[-1]

        def loss(output: ModelOutput, mb: SequenceSample) -> tuple[Tensor, LossStats]:
            x = output.logprobs() if language else output.scores()
            scale = mb["check_scale"] if language else mb["check_scale_S"]
            total = factor * (-(x * scale) if language else (x - scale).square()).sum()
            if poison is not None and last in mb.ids:
                total = total + poison * x.sum()
            count = torch.ones_like(x).sum()
            return total.to(torch.promote_types(x.dtype, torch.float32)), {
                "check_mean": Mean(x.detach().sum(), count),
                "check_max": Max(x.detach().max()),
            }

        return loss

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights."""
        return {name: x.detach().clone() for name, x in self.engine.weights().items()}

    def close(self, a: Tensor, b: Tensor, what: str, *, bitwise: bool = False) -> None:
        """Check that two results agree, up to rounding unless `bitwise`."""
        _require(a.shape == b.shape, f"{what}: the shapes {list(a.shape)} and {list(b.shape)} differ")
        gap = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        limit = 0.0 if bitwise else self.tolerance * max(1.0, float(b.double().abs().max()) if b.numel() else 1.0)
        _require(gap <= limit, f"{what}: the difference is {gap:.3g}")

    def same_weights(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], what: str, *, bitwise: bool) -> None:
        """Check that weights are equal."""
        _require(a.keys() == b.keys(), f"{what}: the names of the weights differ")
        for name, x in a.items():
            self.close(x, b[name], f"{what}: weight {name!r}", bitwise=bitwise)

    def same_metrics(self, a: Mapping[str, float], b: Mapping[str, float], what: str) -> None:
        """Check the metrics that do not depend on the micro-batches."""
        for name in ("loss", "grad_norm", "check_mean", "check_max"):
            if name in a or name in b or name != "grad_norm":
                x, y = a.get(name, math.nan), b.get(name, math.nan)
                _require(
                    abs(x - y) <= self.tolerance * max(1.0, abs(y)),
                    f"{what}: metric {name} changes from {y!r} to {x!r}",
                )


def _loss_weight(factor: float, batch: SequenceSample) -> Tensor:
    return factor * torch.ones_like(batch["check_scale"]).sum()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _check_refused(action: Callable[[], object], what: str) -> None:
    """Check that an action raises an error that is meant for the caller."""
    if not _refuses(action, what):
        raise AssertionError(f"{what} must raise an error")


def _refuses(action: Callable[[], object], what: str) -> bool:
    try:
        action()
    except _ACCIDENTS as error:
        raise AssertionError(
            f"{what} ends with {type(error).__name__}: {error}. Raise a ValueError that says why."
        ) from error
    except Exception as error:
        _require(bool(str(error)), f"{what} raises {type(error).__name__} without a message")
        return True
    return False


def _check_capabilities(case: EngineCase) -> None:
    """Check that capabilities are declared, and that undeclared outputs raise an error."""
    engine, has = case.engine, case.has
    _require(isinstance(has, EngineCapabilities), "capabilities does not return EngineCapabilities")
    _require(engine.capabilities() == has, "capabilities changes between two calls")
    unknown = has.outputs - set(OUTPUTS)
    _require(bool(has.outputs) and not unknown, f"outputs are {sorted(has.outputs)}. Valid: {', '.join(OUTPUTS)}")
    _require(float(engine.reduce(torch.tensor(1.0))) >= 1, "reduce of 1 is not the number of data-parallel ranks")
    n = {
        "logprobs": len(case.data["input_ids"]),
        "values": len(case.data["input_ids"]),
        "scores": case.data.n_sequences,
    }
    for name in OUTPUTS[:3]:
        hook = partial(_output_of, name)
        if name in has.outputs:
            _require(len(engine.forward(case.data, SPEC, hook)["check"]) == n[name], f"{name} has a wrong length")
            continue
        try:
            engine.forward(case.data, SPEC, hook)
        except Exception:  # of any kind: a run with an undeclared output raises an error before it starts
            continue
        raise AssertionError(f"ModelOutput.{name}, which outputs does not name, must raise an error")


def _output_of(name: str, output: ModelOutput, mb: SequenceSample) -> SequenceSample:
    x = getattr(output, name)()
    return mb.with_sequences(check=x) if name == "scores" else mb.with_tokens(check=x)


def _check_forward(case: EngineCase) -> None:
    """Check that `forward` adds keys in the order of the batch, without gradients, independent of the packing."""
    data, together, language = case.data, case.scored(), case.language

    def graph(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        x = output.logprobs() if language else output.scores()
        return mb.with_sequences(check=torch.full((mb.n_sequences,), x.requires_grad or torch.is_grad_enabled()))

    _require(not bool(case.engine.forward(data, SPEC, graph)["check"].any()), "forward computes gradients")
    out = case.engine.forward(data, SPEC, case.hook)
    _require(out.keys == {"check"}, f"forward returns keys {sorted(out.keys)}, not only those that the hook added")
    _require(out.ids == data.ids, "forward returns the ids in another order")
    case.close(out["check"], together, "equal calls of forward")
    alone = [case.scored(prompt) for prompt in data.unpack()]
    case.close(torch.cat(alone), together, "prompts packed together and alone")
    for spec in _specs(data):
        case.close(case.scored(spec=spec), together, f"forward with {spec}")
    back = data.take(range(len(data))[::-1])
    turned = case.engine.forward(back, SPEC, case.hook)
    case.close(
        torch.cat([turned.take([i])["check"] for i in range(len(data))[::-1]]), together, "prompts in reverse order"
    )


def _specs(data: SequenceSample) -> Sequence[MicroBatchSpec]:
    longest = int(data.lengths["input_ids"].flat.max())
    return MicroBatchSpec(n_microbatches=2), MicroBatchSpec(max_tokens_per_microbatch=longest)


def _check_train(case: EngineCase) -> None:
    """Check that loss, gradient and metrics do not depend on micro-batches and the order of prompts."""
    before = case.weights()
    metrics = case.train()
    after = case.weights()
    _require(any(not torch.equal(x, before[name]) for name, x in after.items()), "a training step changes no weight")
    for name in ("loss", "check_mean", "check_max"):
        _require(name in metrics, f"train_batch does not return metric {name}")
    orders = {f"training with {spec}": (case.data, spec) for spec in _specs(case.data)}
    orders["prompts in reverse order"] = (case.data.take(range(len(case.data))[::-1]), SPEC)
    for what, (data, spec) in orders.items():
        case.engine = case.make()
        case.same_metrics(case.train(data, spec), metrics, what)
        case.same_weights(case.weights(), after, what, bitwise=False)


def _check_weight(case: EngineCase) -> None:
    """Check that the sum of the loss is divided once, by the weight of the whole batch."""
    metrics = case.train()
    after = case.weights()
    for spec in (SPEC, MicroBatchSpec(n_microbatches=2)):
        case.engine = case.make()
        case.same_metrics(case.train(spec=spec, factor=4.0, weight=4.0), metrics, "loss and weight times 4")
        case.same_weights(case.weights(), after, "loss and weight times 4", bitwise=False)
    case.engine = case.make()
    quarter = case.train(weight=4.0)["loss"]
    _require(
        abs(4 * quarter - metrics["loss"]) <= case.tolerance * max(1.0, abs(metrics["loss"])),
        "the loss is not divided by its weight",
    )


def _check_skip(case: EngineCase) -> None:
    """Check that a skipped step changes nothing, neither now nor in the next step."""
    case.train()
    after = case.weights()
    seen: list[dict[str, float]] = []

    def veto(stats: Stats) -> bool:
        seen.append(stat_values(stats))
        return False

    reasons: dict[str, dict[str, Any]] = {
        "a loss that is not finite": {"poison": math.nan},
        "an infinite gradient": {"factor": math.inf},
        "a weight of 0": {"weight": 0.0},
        "a gradient of 0": {"factor": 0.0},
        "step_if that returns False": {"step_if": veto},
    }
    for what, given in reasons.items():
        case.engine = case.make()
        before = case.weights()
        for spec in (SPEC, MicroBatchSpec(n_microbatches=2)):
            case.train(spec=spec, **given)
            case.same_weights(case.weights(), before, f"a step with {what}", bitwise=True)
        case.train()
        case.same_weights(case.weights(), after, f"the step after one with {what}", bitwise=True)
    _require(bool(seen) and all("check_mean" in stats for stats in seen), "step_if does not receive the metrics")
    # Without the loss, which an engine may add after `step_if`.
    case.same_metrics({**seen[1], "loss": 0.0}, {**seen[0], "loss": 0.0}, "step_if with 2 micro-batches")
    case.engine = case.make()
    case.train(step_if=lambda stats: True)
    case.same_weights(case.weights(), after, "a step with step_if that returns True", bitwise=True)


def _check_start_step(case: EngineCase) -> None:
    """Check that schedules follow the number that `start_step` sets, and not the number of calls."""
    results = []
    for versions in ([5], [1, 3, 5], [9, 5, 5]):
        case.engine = case.make()
        before = case.weights()
        for version in versions:
            case.engine.start_step(version)
        case.same_weights(case.weights(), before, "start_step", bitwise=True)
        metrics = case.train() if case.has.trainable else {}
        results.append((metrics.get("lr"), case.weights()))
    for rate, weights in results[1:]:
        _require(rate == results[0][0], f"the learning rate depends on earlier calls of start_step: {rate!r}")
        case.same_weights(weights, results[0][1], "a step after several calls of start_step", bitwise=True)


def _check_weights(case: EngineCase) -> None:
    """Check that `load_weights` copies and mixes what `weights` returned, and refuses other weights."""
    engine, own, before = case.engine, case.weights(), case.scored()
    _require(bool(own), "weights returns nothing")
    generator = torch.Generator().manual_seed(1)
    other = {k: x + 0.05 * torch.randn(x.shape, generator=generator).to(x) for k, x in own.items()}
    engine.load_weights(other)
    case.same_weights(case.weights(), other, "load_weights", bitwise=True)
    _require(not torch.equal(case.scored(), before), "forward does not use the weights of load_weights")
    engine.load_weights(own)
    case.close(case.scored(), before, "forward after the first weights were loaded again", bitwise=True)
    engine.load_weights(other, 0.25)
    mixed = {name: 0.75 * x + 0.25 * other[name] for name, x in own.items()}
    case.same_weights(case.weights(), mixed, "load_weights with mix=0.25", bitwise=False)
    name, x = next(iter(own.items()))
    wrong = {
        "a missing weight": ({k: x for k, x in own.items() if k != name}, 1.0),
        "an unknown weight": ({**own, "check.unknown": x}, 1.0),
        "a weight of another shape": ({**own, name: x[None]}, 1.0),
        "mix=0": (own, 0.0),
        "mix=1.5": (own, 1.5),
    }
    now = case.weights()
    for what, (weights, mix) in wrong.items():
        _check_refused(partial(engine.load_weights, weights, mix), f"load_weights with {what}")
        case.same_weights(case.weights(), now, f"load_weights with {what}, which is refused,", bitwise=True)


def _check_state(case: EngineCase) -> None:
    """Check that training continues bit for bit from a state, and that `weights_only` restores the weights."""
    for _ in range(2):
        case.train()
    state, weights = _copy(case.engine.state_dict()), case.weights()
    metrics, after = case.train(), case.weights()
    for steps in (0, 1):  # into a new engine, and into one that trained
        case.engine = case.make()
        for _ in range(steps):
            case.train(factor=2.0)
        case.engine.load_state_dict(_copy(state))
        case.same_weights(case.weights(), weights, "load_state_dict", bitwise=True)
        again = case.train()
        case.same_weights(case.weights(), after, "the step after load_state_dict", bitwise=True)
        _require(again["loss"] == metrics["loss"], "the loss after load_state_dict differs")
        _require(again.get("lr") == metrics.get("lr"), "the learning rate after load_state_dict differs")
    case.engine = case.make()
    case.engine.load_state_dict(_copy(state), weights_only=True)
    case.same_weights(case.weights(), weights, "load_state_dict with weights_only", bitwise=True)


def _copy(tree: Any) -> Any:
    """Copy a state as a checkpoint stores it, and check that it contains tensors and plain values only."""
    if isinstance(tree, DTensor):  # a checkpoint contains whole tensors
        return tree.full_tensor().detach().clone()
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, Mapping):
        return {key: _copy(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copy(value) for value in tree)
    plain = tree is None or isinstance(tree, bool | int | float | str)
    _require(plain, f"state_dict contains a {type(tree).__name__}, which a checkpoint cannot store")
    return copy.copy(tree)


def _check_save(case: EngineCase) -> None:
    """Check that `save` writes a folder from which the model can be loaded."""
    if case.has.trainable:
        case.train()
    path, scored, weights = case.folder / "model", case.scored(), case.weights()
    case.engine.save(path)
    _require(path.is_dir() and any(path.iterdir()), "save writes no folder")
    case.same_weights(case.weights(), weights, "the engine after save", bitwise=True)
    if case.load is not None:
        case.engine = case.load(path)
        case.close(case.scored(), scored, "the loaded model")


def _check_generate(case: EngineCase) -> None:
    """Check the keys of `generate`, its log-probs, and that a response depends on seed, id and index only."""
    if not case.language:
        _check_refused(
            lambda: case.engine.generate(case.prompts, case.config, seed=3), "generate without a language model"
        )
        return
    out = _generate(case, case.prompts, case.config)
    keys = {"input_ids", "prompt_mask", "loss_mask", "logprobs", "truncated", "response_index"}
    _require(out.keys == keys, f"generate returns keys {sorted(out.keys)}, not {sorted(keys)}")
    _require(out.ids == case.prompts.ids, "generate returns the ids in another order")
    dtypes = {key: out[key].dtype for key in ("prompt_mask", "loss_mask", "truncated")}
    _require(set(dtypes.values()) == {torch.bool}, f"generate returns dtypes {dtypes}, not bool")
    _require(torch.equal(out["loss_mask"], ~out["prompt_mask"]), "loss_mask is not the complement of prompt_mask")
    _require(bool((out["logprobs"][out["prompt_mask"]] == 0).all()), "a prompt token has a log-prob other than 0")
    owners = [prompt for prompt in case.prompts.sequences("prompt_ids") for _ in range(case.config.n)]
    _require(out.n_sequences == len(owners), f"generate returns {out.n_sequences} responses, not {len(owners)}")
    indices = list(range(case.config.n)) * len(case.prompts)
    _require(out["response_index"].tolist() == indices, "response_index is not the index of each response of a prompt")
    for prompt, ids, given in zip(owners, out.sequences(), out.sequences("prompt_mask"), strict=True):
        _require(ids[given].tolist() == prompt.tolist(), "a sequence does not start with its prompt")
        count = int((~given).sum())
        _require(0 < count <= case.config.max_new_tokens, f"a response has {count} tokens, against max_new_tokens")
    longest = torch.stack([(~given).sum() == case.config.max_new_tokens for given in out.sequences("prompt_mask")])
    _require(not bool((out["truncated"].cpu() & ~longest).any()), "a response is truncated below max_new_tokens")
    fixed = _generate(case, case.prompts, replace(case.config, fixed_length=True))
    counts = {int((~given).sum()) for given in fixed.sequences("prompt_mask")}
    _require(counts == {case.config.max_new_tokens}, f"with fixed_length, responses have {sorted(counts)} tokens")
    _require(len(case.engine.generate(case.prompts.take([]), case.config, seed=3)) == 0, "no prompts have responses")


def _generate(case: EngineCase, prompts: SequenceSample, config: GenerationConfig, seed: int = 3) -> SequenceSample:
    return case.engine.generate(prompts, config, seed=seed)


def _check_seeds(case: EngineCase) -> None:
    """Check that a response depends on the seed, the id and its index, and on nothing else."""
    if not case.language:
        return
    config = replace(case.config, fixed_length=True, temperature=1.0)
    all_ids = [ids.tolist() for ids in _generate(case, case.prompts, config).sequences()]
    again = [ids.tolist() for ids in _generate(case, case.prompts, config).sequences()]
    _require(again == all_ids, "equal calls of generate differ")
    alone = [_generate(case, prompt, config) for prompt in case.prompts.unpack()]
    _require([x.tolist() for out in alone for x in out.sequences()] == all_ids, "a response depends on other prompts")
    back = _generate(case, case.prompts.take(range(len(case.prompts))[::-1]), config)
    pairs = [out.sequences() for out in reversed(back.unpack())]
    _require([x.tolist() for pair in pairs for x in pair] == all_ids, "a response depends on the order of prompts")
    # `case.config` has two responses per prompt, so every other one is the first.
    first = _generate(case, case.prompts, replace(config, n=1)).sequences()
    _require([x.tolist() for x in first] == all_ids[::2], "the first response depends on the number of responses")
    other = [ids.tolist() for ids in _generate(case, case.prompts, config, seed=4).sequences()]
    _require(other != all_ids, "the seed has no effect")
    _require(any(a != b for a, b in zip(all_ids[::2], all_ids[1::2], strict=True)), "responses to a prompt are equal")
    # Equal prompts, so that only the id can make responses differ.
    twins = SequenceSample.from_sequences(
        range(4), {"prompt_ids": [[case.prompts.sequences("prompt_ids")[0]] for _ in range(4)]}
    )
    drawn = {tuple(ids.tolist()) for ids in _generate(case, twins, replace(config, n=1)).sequences()}
    _require(len(drawn) > 1, "the id of a prompt has no effect")


def _check_temperature(case: EngineCase) -> None:
    """Check that log-probs are those of the model at the temperature, and that greedy responses need no seed."""
    if not case.language:
        return
    out = _generate(case, case.prompts, case.config)

    def hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(check=output.logprobs(temperature=_TEMPERATURE))

    scored = case.engine.forward(out.select(["input_ids", "prompt_mask", "loss_mask"]), SPEC, hook)["check"]
    mask = out["loss_mask"]
    case.close(out["logprobs"][mask], scored[mask], "log-probs of generate and of forward at the same temperature")
    config = replace(case.config, greedy=True)
    both = [_generate(case, case.prompts, config, seed).sequences() for seed in (3, 4)]
    _require([x.tolist() for x in both[0]] == [x.tolist() for x in both[1]], "greedy responses depend on the seed")


def _check_router_replay(case: EngineCase) -> None:
    """Check that choices of experts are recorded and replayed, or refused."""
    if not case.language:
        return
    config = replace(case.config, router_replay=True)
    if not case.has.router_replay:
        _check_refused(
            lambda: _generate(case, case.prompts, config), "generate with router_replay, which is no capability,"
        )
        return
    out = _generate(case, case.prompts, config)
    _require("router_experts" in out, "generate with router_replay returns no router_experts")
    case.scored(out.select(["input_ids", "prompt_mask", "loss_mask", "router_experts"]))


def _check_sampling_replay(case: EngineCase) -> None:
    """Check that sampling masks are recorded, and that log-probs are normalized over them, or that both are refused."""
    if not case.language:
        return
    config = replace(case.config, top_k=4, sampling_replay=True)
    if not case.has.sampling_replay:
        _check_refused(
            lambda: _generate(case, case.prompts, config), "generate with sampling_replay, which is no capability,"
        )
        return
    out = _generate(case, case.prompts, config)
    _require("sampling_mask" in out, "generate with sampling_replay returns no sampling_mask")

    def hook(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
        return mb.with_tokens(check=output.logprobs(temperature=_TEMPERATURE))

    given = out.select(["input_ids", "prompt_mask", "loss_mask", "sampling_mask"])
    scored = case.engine.forward(given, SPEC, hook)["check"]
    mask = out["loss_mask"]
    case.close(out["logprobs"][mask], scored[mask], "log-probs of generate and of forward over the recorded tokens")


def _check_heads(case: EngineCase) -> None:
    """Check that `lm_head` is live or a copy as declared, and that `use_heads` works or raises an error."""
    if not case.language:
        _check_refused(case.engine.lm_head, "lm_head without a language model")
        return
    try:
        head = case.engine.lm_head()
    except Exception:  # of any kind, also that its `ModelOutput` has no `lm_head`
        _check_refused(partial(case.engine.use_heads, {}), "use_heads of an engine without lm_head")
        return
    copied = head.weight_VH.detach().clone()
    if not _refuses(lambda: case.engine.use_heads({"check": head}), "use_heads"):
        same = case.engine.forward(case.data, SPEC, _divergence_from_itself)["check"]
        case.close(same, torch.zeros_like(same), "the divergence of the model from itself")
    if case.has.trainable:
        case.train()
        now = case.engine.lm_head().weight_VH
        if torch.equal(now, copied):  # LoRA does not train the head
            return
        wanted, what = (
            (now, "live_head, but it does not follow")
            if case.has.live_head
            else (copied, "not live_head, but it follows")
        )
        _require(torch.equal(head.weight_VH, wanted), f"the head is {what} a training step")


def _divergence_from_itself(output: ModelOutput, mb: SequenceSample) -> SequenceSample:
    return mb.with_tokens(check=output.divergence("check", output.hidden_states().detach()))


def _check_reference(case: EngineCase) -> None:
    """Check that `reference` keeps the current weights, or raises an error."""
    references: list[Any] = []
    if _refuses(lambda: references.append(case.engine.reference()), "reference"):
        return
    before = case.scored()
    if case.has.trainable:
        case.train()
        _require(not torch.equal(case.scored(), before), "a training step does not change the outputs")
    case.close(references[0](case.data, SPEC, case.hook)["check"], before, "the reference after a training step")


def _check_measure(case: EngineCase) -> None:
    """Check that `measure` returns the metrics and the sum of a loss, and trains nothing."""
    language, before = case.language, case.weights()

    def loss(output: ModelOutput, mb: SequenceSample) -> tuple[Tensor, LossStats]:
        x = output.logprobs() if language else output.scores()
        return x.sum(), {"check_mean": Mean(x.detach().sum(), torch.ones_like(x).sum())}

    total = float(case.scored().double().sum())
    for spec in (SPEC, *_specs(case.data)):
        values = stat_values(case.engine.measure(case.data, spec, loss))
        for name, wanted in ((LOSS_SUM, total), ("check_mean", total / len(case.scored()))):
            gap = abs(values.get(name, math.nan) - wanted)
            _require(
                gap <= case.tolerance * max(1.0, abs(wanted)), f"measure with {spec}: {name!r} differs by {gap:.3g}"
            )
    case.same_weights(case.weights(), before, "measure", bitwise=True)


def _check_frozen(case: EngineCase) -> None:
    """Check that an engine that is not trainable refuses to train."""
    if not case.has.trainable:
        before = case.weights()
        _check_refused(case.train, "train_batch of an engine that is not trainable")
        case.same_weights(case.weights(), before, "train_batch of an engine that is not trainable", bitwise=True)


def _check_parts(case: EngineCase) -> None:
    """Check that each process computes its part of a batch as the whole batch is computed."""
    engine, ranks, rank = case.engine, case.engine.data_ranks, case.engine.data_rank
    _require(0 <= rank < ranks, f"data_rank is {rank}, but data_ranks is {ranks}")

    def check(own: SequenceSample, whole: SequenceSample, key: str, what: str) -> None:
        if own.keys:  # a process without prompts, or without results, returns none
            of_part = whole.take([whole.ids.index(i) for i in own.ids])
            case.close(own[key].float(), of_part[key].float(), f"{what} and the same prompts of the whole batch")

    part = shard(case.data, ranks, "input_ids")[rank]
    whole = engine.forward(case.data, SPEC, case.hook)
    check(engine.forward_part(part, SPEC, case.hook), whole, "check", "forward_part")
    if case.language:
        own = engine.generate_part(shard(case.prompts, ranks, "prompt_ids")[rank], case.config, seed=3)
        check(own, _generate(case, case.prompts, case.config), "input_ids", "generate_part")
    references: list[Any] = []
    if not _refuses(lambda: references.append(engine.reference_part()), "reference_part"):
        check(references[0](part, SPEC, case.hook), whole, "check", "reference_part")


def _check_halves(case: EngineCase) -> None:
    """Check that `accumulate` and `apply` together are `train_batch`, and that a veto in between skips the step."""
    if not isinstance(case.engine, StepsInHalves):
        return
    case.train()
    after, case.engine = case.weights(), case.make()
    before, weight = case.weights(), _loss_weight(1.0, case.data)
    part = shard(case.data, case.engine.data_ranks, "input_ids")[case.engine.data_rank]
    halves = case.engine
    assert isinstance(halves, StepsInHalves)
    for vetoed in (True, False):
        halves.accumulate(part, SPEC, case.loss(), weight)
        case.same_weights(case.weights(), before, "accumulate", bitwise=True)
        _require(halves.finite(), "finite is False after a finite loss and gradient")
        halves.apply(weight, vetoed=vetoed)
        what = "apply with vetoed" if vetoed else "accumulate and apply"
        case.same_weights(case.weights(), before if vetoed else after, what, bitwise=True)


def _check_resident(case: EngineCase) -> None:
    """Check that `resident` lists tensors which may move to other memory and back, or raises an error."""
    listed: list[Tensor] = []
    if _refuses(lambda: listed.extend(case.engine.resident()), "resident"):
        return
    before = case.scored()
    _require(bool(listed), "resident lists no tensor")
    again = {id(x) for x in case.engine.resident()}
    _require(again == {id(x) for x in listed}, "resident lists other tensors in the next call")
    for x in {id(x): x for x in listed if not isinstance(x, DTensor)}.values():  # only whole tensors are moved
        x.data = x.detach().clone()
    case.close(case.scored(), before, "forward after the resident tensors have moved", bitwise=True)


TRAINING = frozenset({"train", "weight", "skip", "state", "halves"})
"""Checks of engines that train."""

ENGINE_CHECKS: Mapping[str, Callable[[EngineCase], None]] = MappingProxyType(
    {
        "capabilities": _check_capabilities,
        "forward": _check_forward,
        "train": _check_train,
        "weight": _check_weight,
        "skip": _check_skip,
        "frozen": _check_frozen,
        "start_step": _check_start_step,
        "weights": _check_weights,
        "state": _check_state,
        "save": _check_save,
        "generate": _check_generate,
        "seeds": _check_seeds,
        "temperature": _check_temperature,
        "router_replay": _check_router_replay,
        "sampling_replay": _check_sampling_replay,
        "heads": _check_heads,
        "reference": _check_reference,
        "measure": _check_measure,
        "parts": _check_parts,
        "halves": _check_halves,
        "resident": _check_resident,
    }
)
"""The checks of the engine contract, by name."""


def check_engine(
    make: Callable[[], PipelinableEngine],
    data: SequenceSample,
    *,
    load: Callable[[Path], PipelinableEngine] | None = None,
    folder: Path | None = None,
    tolerance: float = 1e-4,
    only: str | None = None,
) -> None:
    """Check an implementation of `realign.api.PipelinableEngine` against its contract.

    An engine on several ranks is checked by a call on every rank. Use an optimizer whose step is a smooth function of
    the gradient, such as SGD: rounding then stays small.

    Args:
        make: constructs an engine, always with the same weights and the state before training. Earlier engines are no
            longer used.
        data: a batch with `input_ids`: at least two prompts, and sequences of at least two tokens.
        load: loads a folder that `save` wrote; None checks only that there is one.
        folder: an empty folder for `save`, which all ranks of the engine can read; None uses a temporary one.
        tolerance: largest difference between results that are equal but for rounding, relative to values above 1.
        only: name of one of `ENGINE_CHECKS`; None runs all that apply to the engine's capabilities.

    Raises:
        AssertionError: the engine violates the contract. The message names the violation.
    """
    for name in ENGINE_CHECKS if only is None else (only,):
        with tempfile.TemporaryDirectory() as temporary:
            case = EngineCase(make, data, tolerance, load, folder or Path(temporary))
            if case.has.trainable or name not in TRAINING:
                ENGINE_CHECKS[name](case)


__all__ = ["ENGINE_CHECKS", "EngineCase", "check_engine"]
