"""`LocalRuntime`: executes the graph of RPCs step by step, in this process, so that debuggers work."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from realign.api import (
    RPC,
    Calibratable,
    DataflowGraph,
    MicroBatchSpec,
    Model,
    ModelInterface,
    SequenceSample,
    derive_seed,
    stat_values,
)
from realign.api.rewards import total_rewards
from realign.api.sample import TOKENS
from realign.api.sampler import Sampler, SharedByRanks
from realign.api.stats import TracedSequence
from realign.data import Dataset
from realign.data.dataset import content_hash
from realign.data.encoding import DecodedSequence, decode_row
from realign.errors import ConfigError, RunError
from realign.ranks import current
from realign.records.metrics.details import Spans
from realign.records.metrics.samples import readable
from realign.records.recorded_calls import ROLLOUT, StepHook, call_key, only
from realign.runtime.calls import call, is_stale
from realign.runtime.checks.auto_memory import with_memory_choices
from realign.runtime.checks.before_loading import open_interfaces, used_interfaces
from realign.runtime.checks.during_training import check_ratio, default_tolerance
from realign.runtime.checks.known_answers import check_verifiers
from realign.runtime.datasets import load_datasets
from realign.runtime.evaluation.base import in_set
from realign.runtime.evaluation.scores import sequence_stats
from realign.runtime.experiment import Experiment
from realign.runtime.models import external_samplers, load_models, save_on_all_ranks
from realign.runtime.out_of_memory import SMALLER, memory_limited
from realign.runtime.processes.watchdog import Watch
from realign.runtime.reference_cache import load_with_cache, read_references, score_rows
from realign.runtime.role_sync import RoleSync
from realign.runtime.rollout.asynchronous import RolloutAhead
from realign.runtime.rollout.prompts import PromptStream
from realign.runtime.rollout.spec import Async
from realign.runtime.steps_together import run_in_turns, steps_together


@dataclass
class Counters:
    """Counters of the steps so far."""

    optimizer_steps: float = 0.0
    """Optimizer steps of all models."""
    rewards_seen: int = 0
    """Responses with a reward."""
    reward_ema: float | None = None
    """Latest value of the metric `reward_ema`."""
    best_reward: float | None = None
    """Highest reward of a response that was trained on."""
    ratio_checked: set[str] = field(default_factory=set)
    """Training RPCs whose first log-probs were compared with the sampler's."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain values."""
        # a sorted list, because JSON has no sets and equal states must have equal bytes
        return vars(self) | {"ratio_checked": sorted(self.ratio_checked)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """Restore counters from a `state_dict`."""
        return cls(**{**state, "ratio_checked": set(state["ratio_checked"])})


class _SleepingSamplers:
    """Lets samplers sleep in training calls, if this frees memory; callable from any thread."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        """Keep the samplers that free memory, all of which are awake."""
        self._samplers = [sampler for sampler in samplers if sampler.capabilities().frees_memory]
        self._asleep = False
        # `RayRuntime` makes independent calls in threads; the lock is held until all samplers have woken, so that none
        # of these calls finds one asleep
        self._lock = threading.Lock()

    def sleep(self) -> None:
        """Let the samplers sleep until `wake`."""
        with self._lock:
            if not self._asleep:
                self._asleep = True
                for sampler in self._samplers:
                    sampler.sleep()

    def wake(self) -> None:
        """Wake the samplers, so that the next call can sample."""
        with self._lock:
            if self._asleep:
                self._asleep = False
                for sampler in self._samplers:
                    sampler.wake()


HELD_OUT_SAMPLES = 64
"""Held-out prompts whose responses are recorded: enough to count which answers training fixed."""
_REWARD_MEMORY = 0.9
"""Weight of the previous value in `reward_ema`, a smoothed `reward` for display, as in DeepSpeed-Chat."""


@dataclass(frozen=True)
class CallResult:
    """Result of one RPC."""

    batch: SequenceSample
    """Input batch with the keys that the RPC wrote."""
    stats: dict[str, float]
    """Metrics of a train_step."""
    seconds: float
    traces: Sequence[TracedSequence] = ()
    """Per-token values of the traced prompts (of a train_step)."""


def _changes(model: Model) -> tuple[int, int | None]:
    """Return counts that differ once a train_step has changed the model; the second is None if nobody counts it."""
    return model.version, model.engine.updates_begun() if model.has_engine else 0


class LocalRuntime:
    """The loaded experiment: models, data, and the execution of the graph."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.interfaces: Mapping[str, ModelInterface] = experiment.interfaces
        self.counters = Counters()
        self.models: dict[str, Model] = {}
        self.spans = Spans()
        """Start and end of calls and phases."""
        self.trace_prompts = 0
        """Number of prompts of the next step whose per-token values the train_step calls return."""
        self.traces: dict[str, Sequence[TracedSequence]] = {}
        """Traced sequences of the last step, by role."""
        self._at_training: dict[str, tuple[int, int | None]] = {}  # see `_changes`, when a role's train_step began
        self.hook = StepHook()
        """Sees the calls of the steps, or answers in their place."""
        self.ahead: RolloutAhead | None = None
        """Samples and scores prompts for later steps, with rollout=async."""
        self.watch = Watch()
        """Receives the current call."""
        self.batches_ahead = 0
        """Batches of prompts drawn before the first step, minus the steps before it. Nonzero only after resuming with
        another batch size or another data position."""
        try:
            # first, because a reward function that cannot be opened should not cost the time that loading takes
            open_interfaces(experiment)
            with memory_limited("loading the models", SMALLER):
                self.models = self._load_models()
                self.sync = RoleSync(experiment.graph.sync, self.models)
            self.datasets = load_datasets(experiment, self.models)
            self.prompts = PromptStream(
                self.dataset,
                experiment.prompts_at_once,
                experiment.seed,
                experiment.shuffle,
                curriculum=experiment.curriculum,
            )
            self.known_answers = check_verifiers(experiment, self.models, self.datasets.held_out, self.prompts)
            """A line with the rewards of known answers for each interface with `known_answer`."""
            if isinstance(rollout := experiment.rollout, Async):
                samplers = {role: self._background_sampler(rollout, role) for role in experiment.sampled_roles}
                for model in (self.models[role] for role in samplers):
                    if model.external_sampler is None:
                        model.background_sampler = samplers[model.name]
                        model.publish_weights(model.version)  # a spec may load other weights each time
                self.ahead = RolloutAhead(
                    rollout,
                    experiment.graph,
                    self.models,
                    self.prompts,
                    self._make,
                    samplers,
                    owners={role: experiment.owner_of(role) for role in experiment.roles},
                    batch_prompts=experiment.batch_prompts,
                    steps=experiment.steps,
                    dynamic_sampling=experiment.dynamic_sampling,
                )
        except BaseException:
            # also on Ctrl-C: servers and worker processes that have started would outlive this process
            self.close()
            raise

    def _background_sampler(self, rollout: Async, role: str) -> Sampler:
        """Return the sampler for asynchronous rollout: the external sampler, or one with a copy of the model."""
        if (external := self.models[role].external_sampler) is not None:
            if current().size == 1:
                return external
            if isinstance(external, SharedByRanks):
                return external.of_rank_0()
            raise ConfigError(
                f"models.{role}.sampler: {type(external).__name__} has no method of_rank_0, which rollout=async needs "
                "under torchrun. Set rollout=sync."
            )
        e = self.experiment
        return e.models[role].background_sampler(role, seed=e.seed, recompute=rollout.recompute)

    @cached_property
    def _samplers(self) -> _SleepingSamplers:
        """The external samplers that sleep while models train; none if they sample concurrently."""
        return _SleepingSamplers([] if self.ahead is not None else external_samplers(self.models))

    def _make(self, rpc: RPC, model: Model, batch: SequenceSample) -> SequenceSample:
        """Execute an RPC ahead of its step; can be called from any thread."""
        with self.spans.span(rpc.name, rpc.method):
            return call(rpc, model, self.interfaces[rpc.model], batch, self.experiment.microbatch, self.graph)[0]

    def _load_models(self) -> dict[str, Model]:
        """Load the model of every role; a runtime with remote models returns proxies."""
        experiment = with_memory_choices(self.experiment)
        return load_models(experiment, partial(load_with_cache, experiment))

    @property
    def graph(self) -> DataflowGraph:
        """RPCs of a step."""
        return self.experiment.graph

    @property
    def microbatch(self) -> MicroBatchSpec:
        """Token budget of a forward pass."""
        return self.experiment.microbatch

    @property
    def dataset(self) -> Dataset:
        """The training data."""
        return self.datasets.training

    @cached_property
    def data_sha256(self) -> str | None:
        """Hash of the dataset's content, see `content_hash`."""
        return content_hash(self.dataset)

    def batch(self, number: int) -> SequenceSample:
        """Return batch `number` of the prompts (counted from 1), which depends only on seed and number.

        Without dynamic sampling and a curriculum this is the batch of step `number`. With dynamic sampling a step may
        draw several batches, and rows that the step has already used are not yet removed here.
        """
        return self.prompts.preview(self.prompts.places(number - 1))

    def cache_references(self, *, resumed: bool) -> list[str]:
        """Let references with `cache_reference` score the rows of the whole run; return a line for each of them.

        A resumed run has the log-probs in its folder.
        """
        if resumed:
            read_references(self.models, self.experiment.output_dir)
        doing = self.watch.doing("scoring the rows with the reference")
        with doing, memory_limited("scoring the rows with the reference", SMALLER):
            return score_rows(self.experiment, self.models, self.batch, self.datasets)

    def step(self, step: int) -> tuple[dict[str, float], SequenceSample]:
        """Execute the graph once, on the next prompts.

        `rollout_tokens` counts sampled tokens (no prompt tokens). `rollout_tokens_per_s` divides them by the seconds
        of the generate RPC. `train_tokens_per_s` is packed tokens (with prompts, once per epoch) per second of the
        train_step RPC. `train_tflop_per_s` estimates its floating-point operations: 6 per weight and token.
        With dynamic sampling the rollout metrics cover all sampled tokens, including those that are
        not trained on.

        Returns:
            The metrics of the step, and the batch with every key that was produced.
        """
        started = time.perf_counter()
        self.traces, self._at_training = {}, {}
        self.hook.begin(step)
        values: dict[str, float] = {}
        with self.spans.span("step", "phase"):
            start, calls = self._begin_step(step, values)
            rollout_metrics = dict(values)
            batch = self._calls(calls, start, values)
            # before the next prompts start, which a curriculum chooses by these rewards
            self.prompts.record(batch)
            if self.ahead is not None:
                self.ahead.advance()
            # after the calls, because dynamic sampling draws during them; an answer of the hook has them already
            order = self.prompts.order.metrics()
            values |= {name: value for name, value in order.items() if name not in values}
            if self.ahead is not None:
                read = {key for rpc in calls for key in rpc.inputs}
                self.hook.on_rollout(only(start, {*start.data, *read}), rollout_metrics | order)
            with memory_limited("weight sync", SMALLER), self.spans.span("weight sync", "phase"):
                values |= self.sync.after_step(step)
            if "rewards" in batch:
                self.counters.rewards_seen += int(batch["rewards"].isfinite().sum())
                rewards_S = total_rewards(batch)
                if bool((valid_S := rewards_S.isfinite()).any()):
                    best = self.counters.best_reward
                    highest = float(rewards_S[valid_S].max())
                    self.counters.best_reward = highest if best is None else max(best, highest)
            values |= stat_values(sequence_stats(batch))
            if math.isfinite(reward := values.get("reward", math.nan)):
                # starts at the first reward; a start at 0 would look like learning
                before = reward if self.counters.reward_ema is None else self.counters.reward_ema
                self.counters.reward_ema = values["reward_ema"] = (
                    _REWARD_MEMORY * before + (1 - _REWARD_MEMORY) * reward
                )
            values["step_s"] = time.perf_counter() - started
        return values, batch

    def _begin_step(self, step: int, values: dict[str, float]) -> tuple[SequenceSample, Sequence[RPC]]:
        """Return the batch of a step and the calls that it still needs, and add metrics to `values`.

        Dynamic sampling and asynchronous rollout return responses with rewards. Otherwise, the batch has prompts only.
        """
        graph, sampling = self.experiment.graph, self.experiment.dynamic_sampling
        leading = graph.leading_to("rewards")
        rest = [rpc for rpc in graph.order if rpc not in leading]
        if (rollout := self.hook.answer(ROLLOUT)) is not None:
            values |= rollout.metrics
            return rollout.batch, rest
        if self.ahead is not None:
            with self.watch.doing("asynchronous rollout", limited=True), self.spans.span("wait for rollout", "phase"):
                return self.ahead.take(step, values, self.counters.best_reward), rest
        if sampling is None:
            self.prompts.drawn = step - 1 + self.batches_ahead  # one per step: the position follows from the step
            return self.prompts.draw(), graph.order
        used: set[int] = set()  # no row repeats within the step

        def draw(number: int) -> SequenceSample | None:
            if (prompts := self.prompts.draw_new(used)) is None:
                return None
            scored = self._calls(leading, prompts, values, number)
            self.prompts.record(scored)  # also those that the filter drops
            return scored

        batch, sampling_metrics = sampling.fill(self.experiment.batch_prompts, draw, self.counters.best_reward)
        values |= sampling_metrics
        return batch, rest

    def _calls(
        self, rpcs: Sequence[RPC], batch: SequenceSample, values: dict[str, float], draw: int = 0
    ) -> SequenceSample:
        """Execute these RPCs on `batch` and add their metrics to `values`; return the batch with the keys they wrote.

        `draw` numbers the batches of one step. Each batch uses separate random numbers; batch 0 uses those of a step
        without dynamic sampling.
        """
        together = steps_together(rpcs) if self.experiment.skip_together else [[rpc] for rpc in rpcs]
        for calls in together:
            if len(calls) == 1:
                results = [self._call(calls[0], batch, draw)]
            else:
                results = run_in_turns(
                    [(rpc.name, self.models[rpc.model].engine, partial(self._call, rpc, batch, draw)) for rpc in calls]
                )
            for rpc, result in zip(calls, results, strict=True):
                self._note(rpc, result, values)
            batch = results[-1].batch
        return batch

    def _call(self, rpc: RPC, batch: SequenceSample, draw: int = 0) -> CallResult:
        """Execute one RPC on `batch`; see `_calls` for `draw`."""
        started = time.perf_counter()
        model, key = self.models[rpc.model], call_key(rpc, draw)
        if (answer := self.hook.answer(key, batch)) is not None:
            device = next(iter(batch.data.values())).device
            return CallResult(batch.merge(answer.batch.to(device)), {}, time.perf_counter() - started)
        if rpc.method == "train_step":
            self._samplers.sleep()
            self._at_training.setdefault(rpc.model, _changes(model))
        else:
            self._samplers.wake()
        if draw:
            model = model.replaced(seed=derive_seed(model.seed, "draw", draw))
        mb_spec, traces = self.experiment.microbatch, list[TracedSequence]()
        if rpc.method == "train_step" and TOKENS in rpc.inputs and self.trace_prompts:
            mb_spec = replace(mb_spec, trace_ids=batch.ids[: self.trace_prompts])
        doing = self.watch.doing(f"call {rpc.name!r}", batch, limited=True)
        with doing, self.spans.span(rpc.name, rpc.method):
            batch, stats = call(rpc, model, self.interfaces[rpc.model], batch, mb_spec, self.graph, traces)
        self.hook.on_call(key, rpc, model, batch)
        return CallResult(batch, stats, time.perf_counter() - started, traces)

    def models_changed(self) -> bool:
        """Return whether the step in progress may have changed a model."""
        return any(then[1] is None or _changes(self.models[role]) != then for role, then in self._at_training.items())

    def _note(self, rpc: RPC, made: CallResult, values: dict[str, float]) -> None:
        """Add the metrics of an RPC to those of its step."""
        # dynamic sampling makes the same call several times in a step
        total = values[f"time/{rpc.name}_s"] = values.get(f"time/{rpc.name}_s", 0.0) + made.seconds
        prefix = "" if rpc.model == self.experiment.lead_role else f"{rpc.model}/"
        values |= {f"{prefix}{name}": value for name, value in made.stats.items()}
        if rpc.method == "train_step":
            self.traces[rpc.model] = made.traces
            self.counters.optimizer_steps += made.stats.get("optimizer_steps", 0.0)
            # `call` has already advanced the version, so the step trained from `version - 1`; older samples have
            # another policy, and their ratio need not be 1
            if "prox_logprobs" in rpc.inputs or not is_stale(made.batch, self.models[rpc.model].version - 1):
                self._check_ratio(rpc, made.stats)
            rate = values[f"{prefix}train_tokens_per_s"] = made.stats.get("tokens", 0.0) / made.seconds
            model = self.models[rpc.model]
            if model.has_engine and (weights := model.engine.capabilities().products):
                values[f"{prefix}train_tflop_per_s"] = 6 * weights * rate / 1e12
        if rpc.method == "generate" and "loss_mask" in rpc.outputs:
            sampled = float(made.batch["loss_mask"].sum())
            values["rollout_tokens"] = values.get("rollout_tokens", 0.0) + sampled
            values["rollout_tokens_per_s"] = values["rollout_tokens"] / total

    def evaluations_due(self, step: int) -> list[str]:
        """Return the config keys of the evaluations to run after this step; all of them after the last step."""
        evaluations, last = self.experiment.all_evaluations, step == self.experiment.steps
        return [where for where, evaluation in evaluations.items() if last or step % evaluation.every_steps == 0]

    def evaluate(self, due: Sequence[str] | None = None) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Run evaluations; return metrics `eval/...` and readable samples, both empty if there are none.

        Args:
            due: config keys of the evaluations to run; None runs all of them.
        """
        values: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        started = time.perf_counter()
        self._samplers.wake()
        for where, evaluation in self.experiment.all_evaluations.items():
            if due is not None and where not in due:
                continue
            name = where.partition(".")[2]
            doing, span = self.watch.doing(where), self.spans.span(where, "phase")
            with doing, span, memory_limited(where, f"Lower {where}.batch_prompts."):
                measured, scored = evaluation.measure(self, self.datasets.held_out[where])
            names = in_set(name, measured)
            values |= {names[metric]: value for metric, value in measured.items()}
            recorded = self.readable(scored, HELD_OUT_SAMPLES)
            samples += [({"evaluation": name} if name else {}) | record for record in recorded]
        return values | ({"time/evaluation_s": time.perf_counter() - started} if values else {}), samples

    def calibrate(self, when: str) -> dict[str, float]:
        """Run the calibration "before" or "after" training and return its metrics; empty if it is not configured."""
        calibration = self.experiment.calibration
        if calibration is None or not calibration.due(when):
            return {}
        started = time.perf_counter()
        self._samplers.wake()
        interface = self.interfaces[calibration.role]
        prompts = self.datasets.calibration
        assert isinstance(interface, Calibratable)  # `Experiment` has checked it
        assert prompts is not None
        target = calibration.target(interface, self.dataset) if when == "before" else (0.0, 1.0)
        with memory_limited("calibration", "Lower calibration.batch_prompts."):
            values = calibration.run(
                interface,
                self.models[calibration.role],
                self.models[calibration.policy],
                prompts,
                self.experiment.microbatch,
                when=when,
                target=target,
            )
        return values | {"time/calibration_s": time.perf_counter() - started}

    def first_row(self) -> list[DecodedSequence]:
        """Return the first row of the first batch as text, with the trained tokens marked."""
        return decode_row(self.batch(1), self.models[self.experiment.lead_role].tokenizer)

    def readable(self, batch: SequenceSample, prompts: int) -> list[dict[str, Any]]:
        """Return the first prompts of a batch with responses and rewards as text, see `samples.readable`."""
        return readable(batch, prompts, self.models[self.experiment.lead_role].tokenizer.decode)

    def save(self, folder: Path) -> None:
        """Save each trained model, see `save_on_all_ranks`."""
        doing, span = self.watch.doing("saving the models"), self.spans.span("saving the models", "phase")
        with doing, span, memory_limited("saving the models", SMALLER):
            save_on_all_ranks(folder, self.models, self.interfaces)

    def check_progress(self) -> None:
        """Check that the run made at least one optimizer step.

        Raises:
            RunError: it made none.
        """
        if self.counters.optimizer_steps:
            return
        why = "Every gradient was zero or non-finite. Check whether all rewards are equal."
        if "rewards" in self.graph.producers and self.counters.rewards_seen == 0:
            why = "Every reward was missing. Check whether the reward function returns None or fails."
        raise RunError(
            f"steps={self.experiment.steps}: the run made no optimizer step. {why} The metrics *_steps in "
            "metrics.jsonl count the skipped steps."
        )

    def close(self) -> None:
        """Stop asynchronous rollout, and close the interfaces and external samplers."""
        with ExitStack() as stack:  # closes the rest even if one of them fails to close
            if self.ahead is not None:
                # a stack runs the last callback first: stop the rollout, then close what its threads wait for, and only
                # then wait for the threads
                stack.callback(self.ahead.join)
            for interface in used_interfaces(self.experiment).values():
                stack.callback(interface.close)
            for sampler in external_samplers(self.models):
                stack.callback(sampler.close)
            if self.ahead is not None:
                stack.callback(self.ahead.stop)

    def _check_ratio(self, rpc: RPC, stats: Mapping[str, float]) -> None:
        """Check the log-probs of an RPC once, on the first step whose first mini-batch has trained tokens."""
        difference = stats.get("first_logprob_diff_max")
        if difference is None or rpc.name in self.counters.ratio_checked:
            return
        self.counters.ratio_checked.add(rpc.name)
        tolerance = self.experiment.ratio_tolerance
        if tolerance is None:
            tolerance = default_tolerance(self.experiment.models[rpc.model])
        check_ratio(rpc, difference, tolerance, strict=self.experiment.strict_ratio)
