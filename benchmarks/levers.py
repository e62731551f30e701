"""Speedup of each optimization: the same rollout or training step with and without it, in alternation.

    python -m benchmarks.levers                                   # every optimization, long tail and long prompts
    python -m benchmarks.levers scenarios=long_prompts levers=shared_prompts,fused_rollout repeats=3 threads=2

An optimization is turned off by a setting or by a patch of the code. All other optimizations stay on, so the factors
cannot be multiplied. The work is that of `benchmarks.peer`: response lengths are forced.

Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.batches import TrainStep, make_actor, make_rollout, prompts
from benchmarks.peer.side_realign import forced_lengths
from benchmarks.peer.work import SCENARIOS, Scenario
from benchmarks.report import alternate, arguments, facts, table
from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.models.network.output import PackedOutput
from realign.models.network.passes import ParallelPasses, SharedPrompts
from realign.models.network.settings import NetworkSettings
from realign.samplers.in_process import rollout_model
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.settings import InProcessSampling

BUDGET = 8192


@dataclass(frozen=True)
class Lever:
    """An optimization, and how to turn it off."""

    what: str
    part: str
    """Part of a step that it speeds up: rollout or training."""
    network: NetworkSettings | None = None
    """Settings of the network that turn the optimization off."""
    sampling: InProcessSampling | None = None
    """Settings of rollouts that turn it off."""
    patches: Callable[[], Any] | None = None
    """Function that returns a context in which the code lacks the optimization."""
    repeated_prompts: bool = False
    """Whether the batch without the optimization contains each prompt once per response."""
    scores_first: bool = False
    """Whether log-probs without the optimization are computed in a separate pass before the training step."""


def _everywhere() -> Any:
    """Patch the output to compute log-probs of all tokens, not only of those that the loss needs."""
    asked = PackedOutput._token_values

    def all_tokens(self: PackedOutput, temperature: float, where_T: Any, *, with_entropy: bool) -> Any:
        found = asked(self, temperature, None, with_entropy=with_entropy)
        return tuple(None if x is None or where_T is None else x.where(where_T, 0.0) for x in found)

    return patch.object(PackedOutput, "_token_values", all_tokens)


def _loop_optimizer() -> Any:
    """Patch AdamW to update one parameter at a time instead of using one fused kernel."""
    build = torch.optim.AdamW
    return patch(
        "torch.optim.AdamW", lambda *args, **kwargs: build(*args, **kwargs | {"fused": False, "foreach": False})
    )


LEVERS = {
    "fused_rollout": Lever("decode layers in fused operators", "rollout", network=NetworkSettings(fused_rollout=False)),
    "compiled_decode": Lever(
        "compiled decode steps",
        "rollout",
        sampling=InProcessSampling(compiled_decode=CompiledDecode.off),
    ),
    "one_core": Lever(
        "one core for small products", "rollout", patches=partial(patch.object, rollout_model, "SMALL_PRODUCT", 0)
    ),
    "group_prefill": Lever("prefill of a group's prompt computed once", "rollout", repeated_prompts=True),
    "slots": Lever(
        "as many slots as fit instead of 16",
        "rollout",
        sampling=InProcessSampling(max_slots=16),
    ),
    "inexact_rollout": Lever("no sampler.exact=true", "rollout", sampling=InProcessSampling(exact=True)),
    "shared_prompts": Lever(
        "prompt of a group computed once",
        "training",
        network=NetworkSettings(shared_prompts=SharedPrompts.off),
    ),
    "parallel_passes": Lever(
        "concurrent passes", "training", network=NetworkSettings(parallel_passes=ParallelPasses.off)
    ),
    "where": Lever("log-probs only where the loss needs them", "training", patches=_everywhere),
    "old_logprobs": Lever("log-probs of the rollout used without another pass", "training", scores_first=True),
    "fused_optimizer": Lever("optimizer in one kernel", "training", patches=_loop_optimizer),
    "inexact_training": Lever("no sampler.exact=true", "training", sampling=InProcessSampling(exact=True)),
}


@contextmanager
def without(lever: Lever | None) -> Iterator[None]:
    """Run a block with the code unchanged, or without an optimization."""
    with ExitStack() as stack:
        if lever is not None and lever.patches is not None:
            stack.enter_context(lever.patches())
        yield


def rollout(scenario: Scenario, lever: Lever | None) -> Callable[[], object]:
    """Return a call that samples the scenario's responses."""
    settings = {} if lever is None else {"network": lever.network, "sampling": lever.sampling}
    actor = make_actor(scenario, **settings)
    given, n = prompts(scenario), scenario.group
    if lever is not None and lever.repeated_prompts:
        given, n = [prompt for prompt in given for _ in range(n)], 1
    data = SequenceSample.from_sequences(range(len(given)), {"prompt_ids": [[prompt] for prompt in given]})
    config = GenerationConfig(n=n, max_new_tokens=scenario.max_new)
    side = SimpleNamespace(lengths=scenario.lengths(1))

    def call() -> object:
        with without(lever), forced_lengths(side):
            return actor.engine.generate(data, config, seed=0)

    return call


def training(scenario: Scenario, lever: Lever | None) -> Callable[[], object]:
    """Return a call that executes a GRPO training step on a rollout batch of the scenario."""
    settings = {} if lever is None else {"network": lever.network, "sampling": lever.sampling}
    with without(lever):
        step = TrainStep(make_actor(scenario, **settings), scenario)
    batch = make_rollout(scenario)

    def call() -> object:
        with without(lever):
            if lever is not None and lever.scores_first:
                score(step.actor, batch)
            return step(batch, BUDGET)

    return call


def score(actor: Model, batch: SequenceSample) -> SequenceSample:
    """Compute the log-probs of the responses."""
    return actor.engine.forward(
        batch,
        MicroBatchSpec(max_tokens_per_microbatch=BUDGET),
        lambda out, part: part.with_tokens(old_logprobs=out.logprobs(where_T=part["loss_mask"])),
    )


def measure(scenario: Scenario, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Measure seconds with all optimizations, seconds without one of them, and their ratio."""
    rows = []
    for part, make in (("rollout", rollout), ("training", training)):
        mine = {name: LEVERS[name] for name in names if LEVERS[name].part == part}
        calls = {"": make(scenario, None), **{name: make(scenario, lever) for name, lever in mine.items()}}
        found = alternate(calls, repeats)
        rows += [
            {
                "scenario": scenario.name,
                "lever": name,
                "part": part,
                "on_s": round(found[""].wall, 4),
                "off_s": round(found[name].wall, 4),
                "ratio": round(found[name].wall / found[""].wall, 2),
            }
            for name in mine
        ]
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    """Format the results as a table."""
    cells = [
        (
            LEVERS[r["lever"]].what,
            r["part"],
            r["scenario"],
            f"{r['off_s']:.2f}",
            f"{r['on_s']:.2f}",
            f"{r['ratio']:.2f}x",
        )
        for r in rows
    ]
    return table(("optimization", "part", "scenario", "off s", "on s", "speedup"), cells)


def main(given: list[str] | None = None) -> None:
    """Run the requested optimizations; print the table and the JSON line."""
    defaults = {"scenarios": "long_tail,long_prompts", "levers": ",".join(LEVERS), "repeats": "5", "threads": "2"}
    words = arguments(defaults, given)
    torch.set_num_threads(int(words["threads"]))
    for kind, known in (("scenarios", SCENARIOS), ("levers", LEVERS)):
        if wrong := [name for name in words[kind].split(",") if name not in known]:
            sys.exit(f"unknown {kind[:-1]} {wrong[0]!r}; valid: {', '.join(known)}")
    rows = []
    for name in words["scenarios"].split(","):
        rows += measure(SCENARIOS[name], words["levers"].split(","), int(words["repeats"]))
    print(show(rows))
    print(json.dumps({"benchmark": "levers", **facts(), "levers": rows}))


if __name__ == "__main__":
    main()
