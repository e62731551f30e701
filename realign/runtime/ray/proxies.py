"""The driver's proxies of models in worker processes: an engine, and copies of the policy that only sample."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample, Stats, merge_stats
from realign.api.engine import (
    Agree,
    EngineCapabilities,
    Forward,
    LossFn,
    LossWeightFn,
    PipelinableEngine,
    PostHook,
    StepIf,
)
from realign.api.in_process_sampler import IN_PROCESS
from realign.api.sample import TOKENS, Shards, shard
from realign.api.sampler import Capabilities, Completion, FutureHandle, Request, WeightSource
from realign.engines.training.stepper import step_weight
from realign.functional import LMHead
from realign.runtime.ray.host import Loaded
from realign.runtime.ray.workers import HOOK, WorkerGroup

PROMPTS = "prompt_ids"


class RayEngine(PipelinableEngine):
    """Engine that shards each batch across the ranks of a worker group, and merges the results in order.

    Functions passed by interfaces (hooks, losses) are pickled and run in the workers. Their side effects there are
    lost.
    """

    def __init__(self, name: str, group: WorkerGroup, ranks: Sequence[Loaded]) -> None:
        """Create the engine of the role `name`, which the ranks of `group` have loaded."""
        self.name = name
        self.group = group
        self._loaded = ranks[0]
        self._data_rank_of = [loaded.data_rank for loaded in ranks]
        self._agree: Agree | None = None

    @override
    def capabilities(self) -> EngineCapabilities:
        return self._loaded.capabilities

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        return self._cut("forward", data, TOKENS, mb_spec, HOOK, hook=post_hook)

    @override
    def use_heads(self, heads: Mapping[str, LMHead]) -> None:
        """Give each worker a copy."""
        given = {role: (head.weight_VH, head.bias_V, head.scale, head.softcap) for role, head in heads.items()}
        self._tell("use_heads", given)

    @override
    def reference(self, layers: int | None = None) -> Forward:
        """Create the copies in the workers, where they stay."""
        self._tell("reference", layers)

        def score(data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
            return self._cut("score", data, TOKENS, mb_spec, HOOK, layers, hook=post_hook)

        return score

    @override
    def measure(self, data: SequenceSample, mb_spec: MicroBatchSpec, loss_fn: LossFn) -> Stats:
        given = [(part, mb_spec, HOOK) for part in self._shards(data, TOKENS)]
        return merge_stats(self._ask("measure", given, loss_fn))

    @override
    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """Send one RPC, or several with `step_if` or `agree_on_steps`, which run in the driver.

        An engine without halves runs `step_if` in the worker. The driver calls it again on the same metrics, so that
        what it remembers is here too.
        """
        if not self._loaded.steps_in_halves:
            functions = (loss_fn, loss_weight_fn, step_if)
            stats, received = self.group.ask(self.name, "train_batch", [(data, mb_spec, HOOK)], functions)[0]
            if step_if is not None:
                for metrics in received:
                    step_if(metrics)
            return stats
        # computed here, since each rank sees only its part of the batch
        weight = step_weight(data, loss_weight_fn)
        agree = self._agree
        if float(weight) == 0:
            if agree is not None:
                agree(True)
            return self._tell("skip", "zero_weight_steps")
        given = [(part, mb_spec, HOOK, weight) for part in self._shards(data, TOKENS)]
        if step_if is None and agree is None:
            halves = self._ask("train", given, loss_fn)
            # the second half already is about the whole batch, and the same on all ranks
            return {**merge_stats(own for own, _ in halves), **halves[0][1]}
        # No other request between the halves, except that of a model in the same processes whose answer `agree` awaits.
        with self.group.busy if agree is None else nullcontext():
            stats = merge_stats(self._ask("accumulate", given, loss_fn))
            vetoed = agree is not None and not agree(self._tell("finite"))
            vetoed |= step_if is not None and not step_if(stats)
            return {**stats, **self._tell("apply", weight, vetoed)}

    @override
    def agree_on_steps(self, agree: Agree | None) -> None:
        if not self._loaded.steps_in_halves:
            super().agree_on_steps(agree)
        self._agree = agree

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        return self._cut("generate", data, PROMPTS, config, seed)

    @override
    def start_step(self, version: int) -> None:
        self._tell("start_step", version)

    @override
    def save(self, path: Path) -> None:
        """Write on the machine of rank 0, so `path` should be on a shared disk."""
        self._tell("save", Path(path).absolute())

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._tell("state_dict")

    @override
    def fixed_weights(self) -> dict[str, Any]:
        return self._tell("fixed_weights")

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        self._tell("load_state_dict", state, weights_only)

    @override
    def weights(self) -> dict[str, Tensor]:
        return self._tell("weights")

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        self._tell("load_weights", weights, mix)

    def _tell(self, verb: str, *arguments: Any) -> Any:
        """Send the same arguments to all ranks, and return the answer of the first rank."""
        return self.group.ask(self.name, verb, [arguments])[0]

    def _cut(self, verb: str, data: SequenceSample, key: str, *arguments: Any, hook: Any = None) -> SequenceSample:
        """Give each rank its part, and put the results together."""
        parts = self._shards(data, key)
        return parts.restore(self._ask(verb, [(part, *arguments) for part in parts], hook))

    def _shards(self, data: SequenceSample, key: str) -> Shards:
        return shard(data, self._loaded.data_ranks, key)

    def _ask(self, verb: str, of_parts: Sequence[tuple[Any, ...]], hook: Any = None) -> list[Any]:
        """Send each shard of a batch to its data rank, and return one answer per shard."""
        answers = self.group.ask(self.name, verb, [of_parts[part] for part in self._data_rank_of], hook)
        # Of the ranks with the same part, the last one is in the last stage of a pipeline, which has the results.
        of_part = dict(zip(self._data_rank_of, answers, strict=True))
        return [of_part[part] for part in range(self._loaded.data_ranks)]


class RemoteSampler:
    """Implements `realign.api.Sampler`. Each call goes to the worker with the fewest active calls."""

    def __init__(self, role: str, group: WorkerGroup) -> None:
        """Create a sampler of the policy `role`. Each process of `group` has loaded a copy of the policy."""
        self._role = role
        self._group = group
        self._version = 0
        self._lock = threading.Lock()
        self._calls = [0] * len(group)
        self._waiting: set[FutureHandle] = set()
        self._closed = False

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._version

    def capabilities(self) -> Capabilities:
        """See `Sampler.capabilities`; workers do not report tokens of unfinished responses."""
        return IN_PROCESS

    def submit(self, request: Request) -> FutureHandle:
        """See `Sampler.submit`; starts one thread per response."""
        handle = FutureHandle(request)
        with self._lock:
            if self._closed:
                raise _closed_error(self._role)
            self._waiting.add(handle)
        threading.Thread(target=self._complete, args=(handle,), name=f"request of {self._role}", daemon=True).start()
        return handle

    def _complete(self, handle: FutureHandle) -> None:
        """Sample a response in a worker and complete the handle; runs in a thread."""
        r = handle.request
        try:
            with self._worker() as worker:
                arguments = (r.id, r.response_index, r.prompt_ids, r.config, r.seed)
                fields = self._group.ask(self._role, "complete", [arguments], only=worker)[0]
            self._end(handle, Completion(*fields))
        except BaseException as error:
            self._end(handle, error)

    def _end(self, handle: FutureHandle, outcome: Completion | BaseException) -> None:
        """Complete a handle, unless it was canceled or the sampler was closed."""
        with self._lock:
            waited = handle in self._waiting
            self._waiting.discard(handle)
        # `close` may have ended the handle, or a caller canceled it, while the worker was still sampling
        if not waited or not handle.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Completion):
            handle.future.set_result(outcome)
        else:
            handle.future.set_exception(outcome)

    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """See `Sampler.generate`."""
        with self._worker() as worker:
            sampled: SequenceSample = self._group.ask(self._role, "sample", [(data, config, seed)], only=worker)[0]
        return sampled

    def update(self, source: WeightSource, version: int) -> None:
        """See `Sampler.update`; returns after all workers have the new weights."""
        # without the lock of a group: the workers go on sampling while they take new weights
        self._group.ask(self._role, "update", [(source.weights(), version)])
        self._version = version

    def pause(self) -> None:
        """See `Sampler.pause`."""
        self._group.ask(self._role, "pause", [()])

    def resume(self) -> None:
        """See `Sampler.resume`."""
        self._group.ask(self._role, "resume", [()])

    def sleep(self) -> None:
        """See `Sampler.sleep`."""
        self._group.ask(self._role, "sleep", [()])

    def wake(self) -> None:
        """See `Sampler.wake`."""
        self._group.ask(self._role, "wake", [()])

    def close(self) -> None:
        """See `Sampler.close`; kills the workers."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, set()
        for handle in waiting:
            if handle.future.set_running_or_notify_cancel():
                handle.future.set_exception(_closed_error(self._role))
        self._group.kill()

    @contextmanager
    def _worker(self) -> Iterator[int]:
        with self._lock:
            worker = min(range(len(self._calls)), key=self._calls.__getitem__)
            self._calls[worker] += 1
        try:
            yield worker
        finally:
            with self._lock:
                self._calls[worker] -= 1


def _closed_error(role: str) -> RuntimeError:
    return RuntimeError(f"The sampler of models.{role} is closed.")
