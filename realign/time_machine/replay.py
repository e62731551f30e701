"""Recompute a step of a run from the last checkpoint before it, and find where the steps of two runs part.

On the kind of CPU that ran it, the step is the same bit for bit. Nothing of the run is changed. Evaluations, callbacks
and trackers don't affect training, so they are left out.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import pdb
from bdb import BdbQuit
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors.torch import save
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from realign.api import Callback, ModelInterface, ModelSpec, SequenceSample
from realign.api.callback import CallbackResult, StepEvent
from realign.api.lengths import Lengths
from realign.api.rewards import Verifier
from realign.api.sampler import samples_externally
from realign.api.stats import TracedSequence
from realign.errors import CheckpointError, ConfigError
from realign.own_files import OwnFiles, read_regular, refuse_link, replace_bytes, replace_text
from realign.records.checkpoint.folder import CHECKPOINTS, Checkpoint, CorruptCheckpoint, Start, list_checkpoints
from realign.records.checkpoint.random_generators import seed_random
from realign.records.checkpoint.serialize import hash_of
from realign.records.metrics.details import token_records
from realign.records.metrics.samples import readable
from realign.records.record_files import json_lines
from realign.records.recorded_calls import CALLS, ROLLOUT, RecordedCall, StepHook, read_calls, recorded_calls_path
from realign.run_settings import RecordSpec
from realign.runtime.experiment import CheckpointPart, Experiment
from realign.runtime.local import LocalRuntime
from realign.runtime.reference_cache import read_references
from realign.runtime.resume import find_start
from realign.runtime.rollout.spec import Sync
from realign.runtime.run_checkpoints import continue_from, frozen_weights
from realign.runtime.run_report import RUN_JSON, parent_of, run_json
from realign.runtime.runtime_spec import Local
from realign.samplers.in_process.settings import InProcessSampling


@dataclass(frozen=True)
class ReplayedStep:
    """What a step computed."""

    step: int
    metrics: Mapping[str, float]
    batch: SequenceSample
    """The batch with every key that the calls of the step wrote."""
    traces: Mapping[str, Sequence[TracedSequence]]
    """Values of every token from the loss, by role that trains. Of several passes, the last one counts."""
    gradients: Mapping[str, Sequence[Mapping[str, float]]]
    """By role that trains: for each optimizer step, the norm of each weight's gradient, after clipping."""
    weights: Mapping[str, str]
    """By role that trains: hash of its weights before the step."""
    weights_after: Mapping[str, str]
    """By role that trains: hash of its weights after the step."""
    order: Sequence[str]
    """Keys of the batch in the order in which the step wrote them."""
    decode: Callable[..., str]
    """Decodes token ids of the lead role."""


@dataclass
class StopAfter(Callback):
    """Stops a run after a step."""

    step: int

    @override
    def on_step(self, event: StepEvent) -> CallbackResult | None:
        return CallbackResult(stop=f"step {self.step} is reached") if event.step >= self.step else None


def last_checkpoint(run: Path, step: int) -> Checkpoint | None:
    """Return the newest checkpoint of a run with at most `step` finished steps; None if there is none."""
    return max((c for c in list_checkpoints(run / CHECKPOINTS) if c.step <= step), key=lambda c: c.step, default=None)


def origin(run: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint from which a run went on to the step after `step`, or an earlier one; None: its start.

    A run that continues another one starts from the checkpoint that its run.json names.

    Raises:
        CheckpointError: the parent of the run took the step after `step`, or its checkpoint is gone.
    """
    own, parent = last_checkpoint(run, step), parent_of(run)
    if parent is None:
        return own
    folder, forked = parent
    if step < forked:
        raise CheckpointError(
            f"{run.name} is a fork at step {forked}, and its steps up to there are those of {folder}."
        )
    if own is not None and own.step >= forked:
        return own
    # Not a later one: the parent may have trained on.
    checkpoint = last_checkpoint(folder, forked)
    if checkpoint is None or checkpoint.step != forked:
        raise CheckpointError(f"The checkpoint {forked} of {folder}, from which {run.name} started, is gone.")
    return checkpoint


def check_settings(run: Path, step: int) -> None:
    """Check that a run took a step and all later ones with the same settings, which are those in its config.yaml.

    Raises:
        CheckpointError: `resume_allow` changed them later.
    """
    lines = json_lines(run / "metrics.jsonl")
    taken = {number: line.get("settings") for line in lines if isinstance(number := line.get("step"), int)}
    last = taken[max(taken)] if taken else None
    since = max((number for number, settings in taken.items() if settings != last), default=-1)
    if step <= since:
        raise CheckpointError(
            f"step {step}: {run.name} took it with other settings, which resume_allow or another version of realign "
            f"changed after step {since}. config.yaml has only the new ones, so only later steps can be recomputed."
        )


class RecordedAnswers(StepHook):
    """Answers the calls of each step with those that a run recorded, instead of making them again."""

    def __init__(self, experiment: Experiment, run: Path, *, rescore: bool = False) -> None:
        """Read from the folder of a run; with `rescore`, calls that score are made again."""
        self._experiment, self._run, self._rescore = experiment, run, rescore
        self._recorded: Mapping[str, RecordedCall] = {}

    @override
    def begin(self, step: int) -> None:
        self._recorded = _usable(self._experiment, read_calls(self._run, step), rescore=self._rescore)

    @override
    def answer(self, key: str, batch: SequenceSample | None = None) -> RecordedCall | None:
        recorded = self._recorded.get(key)
        if recorded is None or batch is None or recorded.batch.ids == batch.ids:
            return recorded
        name = key.split("/")[0]
        if self._rescore:
            raise CheckpointError(
                "--rescore gave other rewards, by which the run chooses its prompts: the recorded call "
                f"{name!r} is of other ones. Rescore the step after a checkpoint, or replay without --rescore."
            )
        raise CheckpointError(
            f"{self._run / CALLS}: the recorded call {name!r} is of other prompts than those of the step. The data or "
            "the file was changed. --rescore makes the calls again."
        )


def _usable(experiment: Experiment, recorded: Mapping[str, RecordedCall], *, rescore: bool) -> dict[str, RecordedCall]:
    """Return the recorded calls that a replay takes: with `rescore`, only those of models that don't score."""
    if not rescore:
        return dict(recorded)
    scored = {ROLLOUT}
    for rpc in experiment.graph.rpcs:
        if "rewards" in rpc.outputs or not experiment.interfaces[rpc.model].needs_engine:
            scored.add(rpc.name)
    return {key: recorded_call for key, recorded_call in recorded.items() if key.split("/")[0] not in scored}


def _bare(experiment: Experiment, run: Path, steps: range, *, rescore: bool) -> Experiment:
    """Return the experiment without what a replay does not need: evaluations, workers, and what was recorded."""
    bare = dataclasses.replace(experiment, evaluation=None, evaluations={}, callbacks={}, trackers={}, runtime=Local())
    if not all(recorded_calls_path(run, step).is_file() for step in steps):
        return bare
    keys = {key.split("/")[0] for key in _usable(experiment, read_calls(run, steps[-1]), rescore=rescore)}
    if ROLLOUT in keys:
        bare = dataclasses.replace(bare, rollout=Sync())
        keys |= {rpc.name for rpc in bare.graph.leading_to("rewards")}
    called = {rpc.model for rpc in bare.graph.rpcs if rpc.name not in keys}
    interfaces = {role: i if role in called else _without_resources(i) for role, i in bare.interfaces.items()}
    models = bare.models
    if all(rpc.name in keys for rpc in bare.graph.rpcs if rpc.method == "generate"):
        models = {role: _without_server(spec) for role, spec in models.items()}
    return dataclasses.replace(bare, interfaces=interfaces, models=models)


def _without_resources(interface: ModelInterface) -> ModelInterface:
    """Return an interface that opens nothing, such as a reward function, because no call needs it."""
    closed = copy.copy(interface)
    for name in ("open", "close"):
        setattr(closed, name, lambda: None)
    if isinstance(closed, Verifier):
        closed.known_answer = None
        setattr(closed, "check_rows", lambda rows: None)  # noqa: B010 (it would load the function)
    return closed


def _without_server(spec: ModelSpec) -> ModelSpec:
    if not samples_externally(spec):
        return spec
    bare = copy.copy(spec)
    setattr(bare, "sampler", InProcessSampling())  # noqa: B010 (the protocol has a property)
    return bare


Around: TypeAlias = Callable[[LocalRuntime], AbstractContextManager[object]]
"""Returns a context in which a step is recomputed, such as one that opens a debugger."""


def replay(
    experiment: Experiment,
    run: Path,
    step: int,
    break_in: str | None = None,
    *,
    rescore: bool = False,
) -> ReplayedStep:
    """Recompute step `step` of the run in folder `run`, whose experiment this is.

    Args:
        experiment: the experiment of the run.
        run: its folder.
        step: a step that the run has taken.
        break_in: a role whose loss opens a debugger in this step.
        rescore: see `replay_steps`.

    Raises:
        CheckpointError: the run has no such step, or its checkpoint, models or data have changed.
        ConfigError: `break_in` names no role with a loss.
    """
    debugged = nullcontext if break_in is None else partial(_debugging, role=break_in)
    (replayed,) = replay_steps(experiment, run, [step], rescore=rescore, around=debugged)
    return replayed


def replay_steps(
    experiment: Experiment, run: Path, steps: Sequence[int], *, rescore: bool = False, around: Around = nullcontext
) -> Iterator[ReplayedStep]:
    """Recompute steps of the run in folder `run`, whose experiment this is, in one pass from the same checkpoint.

    Calls that the run recorded, such as those of reward functions and environments, are not made again.

    Args:
        experiment: the experiment of the run.
        run: its folder.
        steps: steps that the run has taken, in ascending order.
        rescore: make recorded calls that score again.
        around: a context for each of these steps.

    Raises:
        CheckpointError: the run has no such step, or its checkpoint, models or data have changed.
    """
    for step in steps:
        if not 1 <= step <= experiment.steps:
            raise CheckpointError(f"step {step}: the run has steps 1 to {experiment.steps}.")
    checkpoint = origin(run, steps[0] - 1)
    check_settings(run, 1 if checkpoint is None else checkpoint.step + 1)
    with ExitStack() as stack:
        start, skip = _start(experiment, run, checkpoint)
        first = 1 if start is None else start.step + 1
        bare = _bare(experiment, run, range(first, steps[-1] + 1), rescore=rescore)
        bare.data.check("data")  # a file that was moved is named with its key
        seed_random(bare.seed)
        runtime = LocalRuntime(bare)
        runtime.hook = RecordedAnswers(bare, run, rescore=rescore)
        stack.callback(runtime.close)
        read_references(runtime.models, run)
        if start is not None:
            continue_from(start, runtime, frozen_weights(runtime), skip, ahead=runtime.ahead is not None)
        if start is None or start.new_run:
            runtime.calibrate("before")
        for number in range(first, steps[-1] + 1):
            runtime.trace_prompts = bare.prompts_at_once if number in steps else 0
            if number not in steps:
                runtime.step(number)
                continue
            with around(runtime):
                replayed = _replay_step(runtime, number)
            yield replayed


def _start(experiment: Experiment, run: Path, checkpoint: Checkpoint | None) -> tuple[Start | None, Sequence[str]]:
    """Read a checkpoint of a run, or one that it started from, and return also which parts the run left out of it."""
    parent = parent_of(run)
    changes: dict[str, Any] = {}
    if checkpoint is not None:
        changes["resume"] = str(checkpoint.path)
        if parent is not None and checkpoint.step <= parent[1]:
            changes["resume_allow"] = list(experiment.resolved)  # a fork has other settings than its parent
        if checkpoint.path.is_relative_to(run):
            changes["resume_skip"] = []
    elif CheckpointPart.counters not in experiment.resume_skip:  # with it, a new run starts from the weights of another
        changes = {"resume": None, "resume_allow": [], "resume_skip": []}
    find = dataclasses.replace(experiment, **changes)
    try:
        return find_start(find), find.resume_skip
    except CorruptCheckpoint as error:
        raise CheckpointError(f"{error}. Remove this checkpoint to start from an earlier one.") from error


def _replay_step(runtime: LocalRuntime, step: int) -> ReplayedStep:
    trained = {r: m for r, m in runtime.models.items() if m.has_engine and m.engine.capabilities().trainable}
    weights = {role: hash_of(model.engine.weights()) for role, model in trained.items()}
    with _gradient_norms(runtime) as gradients:
        metrics, batch = runtime.step(step)
    after = {role: hash_of(model.engine.weights()) for role, model in trained.items()}
    order = [*runtime.graph.dataset_keys, *(key for rpc in runtime.graph.order for key in rpc.outputs)]
    decode = runtime.models[runtime.experiment.lead_role].tokenizer.decode
    return ReplayedStep(step, metrics, batch, dict(runtime.traces), gradients, weights, after, order, decode)


@contextmanager
def _debugging(runtime: LocalRuntime, role: str) -> Iterator[None]:
    """Let calls of a role's loss, or of its `train_step` if it has no loss, start in the debugger."""
    interface = runtime.interfaces.get(role)
    if interface is None or role not in {rpc.model for rpc in runtime.graph.rpcs if rpc.method == "train_step"}:
        valid = ", ".join(sorted({rpc.model for rpc in runtime.graph.rpcs if rpc.method == "train_step"}))
        raise ConfigError(f"--break interfaces.{role}: this role does not train. Roles that do: {valid}")
    members = dict(inspect.getmembers(interface, inspect.ismethod))
    name = "loss" if "loss" in members else "train_step"
    call, debugger = members[name], pdb.Pdb()

    def debug(*args: Any, **kwargs: Any) -> Any:
        if (result := debugger.runcall(call, *args, **kwargs)) is None:  # `q`: neither method returns None
            raise BdbQuit
        return result

    setattr(interface, name, debug)
    yield


@contextmanager
def _gradient_norms(runtime: LocalRuntime) -> Iterator[dict[str, list[dict[str, float]]]]:
    """Collect the norm of each weight's gradient before every optimizer step in the context, by role."""
    norms: dict[str, list[dict[str, float]]] = {}
    # `weights` returns views of the parameters, so an address tells to which weight a parameter of an optimizer belongs
    owners = {
        weight.data_ptr(): (role, name)
        for role, model in runtime.models.items()
        if model.has_engine and model.engine.capabilities().trainable
        for name, weight in model.engine.weights().items()
    }

    def collect(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        norms_of: dict[str, dict[str, float]] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            role, name = owners.get(parameter.data_ptr(), ("", ""))
            norms_of.setdefault(role, {})[name] = float(parameter.grad.norm())
        for role, values in norms_of.items():
            norms.setdefault(role, []).append(values)

    # a hook of all optimizers, because an engine of a user need not expose its own
    handle = register_optimizer_step_pre_hook(collect)
    try:
        yield norms
    finally:
        handle.remove()


_WRITTEN = (
    *("batch.safetensors", "step.json", "metrics.jsonl", "samples.jsonl", "tokens.jsonl", RUN_JSON, "config.yaml"),
)
"""Files that `write` writes."""
_LARGEST_CONFIG = 64 << 20
"""Size in bytes above which a config.yaml isn't copied."""


def replay_folder(run: Path, step: int, chosen: Path | None = None) -> Path:
    """Return the folder for a step that is computed again: in its run, or a chosen one.

    Raises:
        ConfigError: it is a link, or has files of somebody else.
    """
    out = chosen or run / "replay" / f"step_{step:06d}"
    for folder in () if chosen else (out.parent, out):
        refuse_link(folder)
    OwnFiles(out).check(*_WRITTEN)
    return out


def write(replayed: ReplayedStep, run: Path, out: Path) -> None:
    """Write a step for a notebook (`batch.safetensors`, `step.json`), and as a run of one step for `realign view`.

    `batch.safetensors` has the packed tensors of the batch by key. `KEY/lengths` are the lengths of sequences,
    `KEY/counts` the sequences of each prompt, and `ROLE/token/NAME` the values of tokens in a loss.
    """
    OwnFiles(out).claim(*_WRITTEN)
    batch = replayed.batch
    # safetensors refuses tensors that share memory, such as two keys of one batch
    tensors: dict[str, Tensor] = {key: x.contiguous().clone() for key, x in batch.data.items()}
    for key, lengths in batch.lengths.items():
        tensors[f"{key}/lengths"], tensors[f"{key}/counts"] = (torch.tensor(x) for x in (lengths.flat, lengths.counts))
    for role, traces in replayed.traces.items():
        for name in sorted({name for trace in traces for name in trace.values}):
            parts = [trace.values[name] for trace in traces if name in trace.values]
            tensors[f"{role}/{name}"] = torch.cat(parts)
    replace_bytes(out / "batch.safetensors", save(tensors))
    summary = {
        "run": str(run),
        "step": replayed.step,
        "ids": list(batch.ids),
        "metadata": {key: list(values) for key, values in batch.metadata.items()},
        "metrics": dict(replayed.metrics),
        "gradients": {role: list(steps) for role, steps in replayed.gradients.items()},
    }
    replace_text(out / "step.json", _json(summary, indent=1))
    # 2**30 is more than any batch has: record everything
    every = RecordSpec(token_prompts=len(batch), token_responses=1 << 30, token_limit=1 << 30)
    lead = next(iter(replayed.traces), "")
    lines = {
        "metrics": [dict(replayed.metrics)],
        "samples": readable(batch, len(batch), replayed.decode),
        "tokens": token_records(batch, replayed.traces.get(lead, ()), every, replayed.decode),
    }
    for name, records in lines.items():
        texts = (_json({"step": replayed.step, **record}) + "\n" for record in records)
        replace_text(out / f"{name}.jsonl", "".join(texts))
    info = {key: value for key, value in run_json(run).items() if key != "id"}  # this folder isn't the run
    replace_text(out / RUN_JSON, _json(info, indent=1))
    if config := read_regular(run / "config.yaml", _LARGEST_CONFIG):
        replace_bytes(out / "config.yaml", config)


def _json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON. Numbers that are not finite, such as a missing reward, are null."""

    def plain(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {str(key): plain(inner) for key, inner in x.items()}
        if isinstance(x, list | tuple):
            return [plain(inner) for inner in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(value), ensure_ascii=False, default=str, indent=indent)


class Difference(NamedTuple):
    """Where two steps differ in one thing."""

    what: str
    """Such as `rewards of the batch`."""
    where: str
    """The first place that differs, such as `prompt 17, response 3, token 5 ('7')`."""
    values: tuple[str, str]
    """The value of each step at this place."""
    size: str
    """How much differs in all, such as `3 of 64, at most 0.5`."""


def differences(first: ReplayedStep, second: ReplayedStep, tolerance: float = 0.0) -> list[Difference]:
    """Return what differs between two steps, in the order of cause: weights, data, calls, loss, gradients.

    Args:
        first: a step.
        second: the same step of another run.
        tolerance: largest absolute difference of numbers that counts as equal; 0: bit for bit.
    """
    differing = [] if tolerance else _weights("before", first.weights, second.weights)
    if first.batch.ids != second.batch.ids:
        pairs = zip(first.batch.ids, second.batch.ids, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first.batch), len(second.batch)))
        ids = tuple(str(x.batch.ids[place]) if place < len(x.batch) else "none" for x in (first, second))
        differing.append(Difference("prompts (order of the data)", f"place {place}", (ids[0], ids[1]), ""))
    tokens = first.batch.lengths.get("input_ids")
    for key in dict.fromkeys(key for key in first.order if key in first.batch.data and key in second.batch.data):
        lengths = first.batch.lengths[key], second.batch.lengths[key]
        pair = first.batch[key], second.batch[key]
        differing += _compare_tensors(
            first, f"{key} of the batch", pair, lengths, tolerance, of_tokens=lengths[0] == tokens
        )
    for role in first.traces.keys() & second.traces.keys():
        last = [{(trace.prompt, trace.response): trace.values for trace in x.traces[role]} for x in (first, second)]
        for name in sorted({name for values in last[0].values() for name in values}, key=_causal):
            differing += _first_token(role, name, last[0], last[1], tolerance)
    for role, steps in first.gradients.items():
        for number, (a, b) in enumerate(zip(steps, second.gradients.get(role, ()), strict=False)):
            wrong = [name for name in a if not _close(a[name], b.get(name, math.nan), tolerance)]
            if wrong:
                name = wrong[0]
                values = _format(a[name]), _format(b.get(name, math.nan))
                where = f"optimizer step {number + 1}, {name}"
                differing.append(
                    Difference(f"gradient norm of {role}", where, values, f"{len(wrong)} of {len(a)} weights")
                )
                break
    if not differing and not tolerance:  # the same gradients, but another optimizer or learning rate
        differing = _weights("after", first.weights_after, second.weights_after)
    return differing


def _weights(when: str, first: Mapping[str, str], second: Mapping[str, str]) -> list[Difference]:
    """Return the roles whose weights have other hashes."""
    return [
        Difference(f"weights of {role} {when} the step", "", (a[:12], second.get(role, "none")[:12]), "")
        for role, a in first.items()
        if a != second.get(role)
    ]


Traced = Mapping[tuple[Hashable, int], Mapping[str, Tensor]]
"""Values of tokens by name, for each prompt and response."""


def _first_token(role: str, name: str, first: Traced, second: Traced, tolerance: float) -> list[Difference]:
    """Return the first token whose value in the loss differs."""
    for (prompt, response), values in first.items():
        a, b = values.get(name), second.get((prompt, response), {}).get(name)
        if a is None or b is None or a.shape != b.shape or not len(unequal := _unequal(a, b, tolerance)):
            continue
        at = int(unequal[0])
        where = f"prompt {prompt}, response {response}, token {at}"
        size = f"at most {float((a - b).abs().max()):.3g} in this response"
        what = f"{name.removeprefix('token/')} in the loss of {role}"
        return [Difference(what, where, (_format(a[at]), _format(b[at])), size)]
    return []


def _compare_tensors(
    step: ReplayedStep,
    what: str,
    pair: tuple[Tensor, Tensor],
    lengths: tuple[Lengths, Lengths],
    tolerance: float,
    *,
    of_tokens: bool,
) -> list[Difference]:
    """Return the first difference of a packed tensor, with the prompt, the response and the place in it."""
    a, b = pair
    same = lengths[0] == lengths[1] and a.shape == b.shape
    n = min(len(a), len(b))
    unequal = _unequal(a[:n], b[:n], tolerance)
    if same and not len(unequal):
        return []
    row = int(unequal[0]) if len(unequal) else n
    sequence = int((lengths[0].starts <= row).sum()) - 1
    prompt = int(lengths[0].prompt_of_sequence[sequence])
    response = sequence - int(lengths[0].counts[:prompt].sum())
    where = f"prompt {step.batch.ids[prompt]}, response {response}"
    inside = row - int(lengths[0].starts[sequence])
    if of_tokens:
        text = step.decode([int(step.batch["input_ids"][row])]) if row < len(step.batch["input_ids"]) else ""
        where += f", token {inside} ({text!r})"
    elif inside:
        where += f", place {inside}"
    values = tuple(_format(x[row]) if row < len(x) else "none" for x in pair)
    size = f"{len(unequal)} of {n}" if same else "other lengths"
    if same and a.is_floating_point() and a.isfinite().all() and b.isfinite().all():
        size += f", at most {float((a - b).abs().max()):.3g}"
    return [Difference(what, where, (values[0], values[1]), size)]


def _unequal(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    """Return the rows that differ; two missing values (NaN) are equal."""
    # `a == b` lets equal infinities pass, whose difference is NaN
    wrong = ~(((a - b).abs() <= tolerance) | (a == b) | a.isnan() & b.isnan()) if a.is_floating_point() else a != b
    return wrong.reshape(len(a), -1).any(1).nonzero()[:, 0]


def _close(a: float, b: float, tolerance: float) -> bool:
    """Return whether two numbers are equal up to a tolerance. Two NaN are."""
    return abs(a - b) <= tolerance or a == b or (math.isnan(a) and math.isnan(b))


def _format(x: Tensor | float) -> str:
    value = x.tolist() if isinstance(x, Tensor) else x
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _causal(name: str) -> int:
    """Return the place of a value of the loss in the order of cause."""
    order = ("mask", "logprob", "value", "advantage", "entropy", "ratio", "kl_penalty")
    short = name.removeprefix("token/")
    return order.index(short) if short in order else len(order)
