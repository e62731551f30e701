"""What each lever of speed brings: the same rollout or training step with it and without it, in alternation.

    python -m benchmarks.levers                                   # every lever, long tail and long prompts
    python -m benchmarks.levers scenarios=long_prompts levers=shared_prompts,fused_rollout repeats=3 threads=2

A lever is off where its setting says so, or where this file takes it out of the code. Everything else stays, the other
levers too, so that the factors do not multiply. The work is that of `benchmarks.peer`: lengths are forced.

Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from realign.engines.network.cpu_lanes import ParallelPasses
from realign.engines.network.output import PackedOutput
from realign.engines.network.shared_prefix import SharedPrompts
from realign.engines.sampling import trunk

BUDGET = 8192


@dataclass(frozen=True)
class Lever:
    """One lever, and how it is taken away."""

    what: str
    part: str
    """rollout | training."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine without it."""
    patches: Callable[[], Any] | None = None
    """Gives a context in which the code is without it."""
    repeated_prompts: bool = False
    """Without it the prompts stand in the batch once for each response."""
    scores_first: bool = False
    """Without it log-probs are computed in a pass of their own before the training step."""


def _everywhere() -> Any:
    """Log-probs of all tokens, whatever a loss asks for."""
    asked = PackedOutput._token_values

    def all_tokens(self: PackedOutput, temperature: float, where_T: Any, *, with_entropy: bool) -> Any:
        found = asked(self, temperature, None, with_entropy=with_entropy)
        return tuple(None if x is None or where_T is None else x.where(where_T, 0.0) for x in found)

    return patch.object(PackedOutput, "_token_values", all_tokens)


def _loop_optimizer() -> Any:
    """AdamW parameter by parameter instead of in one kernel."""
    build = torch.optim.AdamW
    return patch(
        "torch.optim.AdamW", lambda *args, **kwargs: build(*args, **kwargs | {"fused": False, "foreach": False})
    )


LEVERS = {
    "fused_rollout": Lever("decode layers in few operators", "rollout", engine={"fused_rollout": False}),
    "one_core": Lever(
        "one core for small products", "rollout", patches=partial(patch.object, trunk, "SMALL_PRODUCT", 0)
    ),
    "group_prefill": Lever("prompt of a group read once", "rollout", repeated_prompts=True),
    "slots": Lever("as many slots as fit, not 16", "rollout", engine={"max_slots": 16}),
    "shared_prompts": Lever(
        "prompt of a group computed once", "training", engine={"shared_prompts": SharedPrompts.off}
    ),
    "parallel_passes": Lever("passes side by side", "training", engine={"parallel_passes": ParallelPasses.off}),
    "where": Lever("log-probs only where the loss needs them", "training", patches=_everywhere),
    "old_logprobs": Lever("no pass for log-probs that the rollout gave", "training", scores_first=True),
    "fused_optimizer": Lever("optimizer in one kernel", "training", patches=_loop_optimizer),
}


@contextmanager
def without(lever: Lever | None) -> Iterator[None]:
    """The code as it is, or without a lever."""
    with ExitStack() as stack:
        if lever is not None and lever.patches is not None:
            stack.enter_context(lever.patches())
        yield


def rollout(scenario: Scenario, lever: Lever | None) -> Callable[[], object]:
    """A call that samples the scenario's responses."""
    actor = make_actor(scenario, **(lever.engine if lever else {}))
    given, n = prompts(scenario), scenario.group
    if lever is not None and lever.repeated_prompts:
        given, n = [prompt for prompt in given for _ in range(n)], 1
    data = SequenceSample.from_sequences(range(len(given)), {"prompt_ids": [[prompt] for prompt in given]})
    config = GenerationConfig(n=n, max_new_tokens=scenario.max_new)
    side = SimpleNamespace(lengths=scenario.lengths(1))

    def call() -> object:
        with without(lever), forced_lengths(side):
            return actor.machine.generate(data, config, seed=0)

    return call


def training(scenario: Scenario, lever: Lever | None) -> Callable[[], object]:
    """A call that makes a training step of GRPO on such a rollout."""
    with without(lever):
        step = TrainStep(make_actor(scenario, **(lever.engine if lever else {})), scenario)
    batch = make_rollout(scenario)

    def call() -> object:
        with without(lever):
            if lever is not None and lever.scores_first:
                score(step.actor, batch)
            return step(batch, BUDGET)

    return call


def score(actor: Model, batch: SequenceSample) -> SequenceSample:
    """Log-probs of the responses."""
    return actor.machine.forward(
        batch,
        MicroBatchSpec(max_tokens_per_microbatch=BUDGET),
        lambda out, part: part.with_tokens(old_logprobs=out.logprobs(where_T=part["loss_mask"])),
    )


def measure(scenario: Scenario, names: list[str], repeats: int) -> list[dict[str, Any]]:
    """Seconds with all levers, and without one at a time, and their ratio."""
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
    """The results for people."""
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
    return table(("lever", "part", "scenario", "off s", "on s", "brings"), cells)


def main(given: list[str] | None = None) -> None:
    """Run the levers that are asked for, print the table and the JSON line."""
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
