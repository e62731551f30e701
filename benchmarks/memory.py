"""Memory: an exact count of what an operation allocates, and the estimate of `realign check` against measurements.

    python -m benchmarks.memory                      # all configurations, each in a separate process
    python -m benchmarks.memory configs=small        # some of them, separated by commas

The count does not depend on the load of the machine. For each configuration, two training steps and a rollout run on
the CPU. The measured number is the growth of the process's peak resident memory (Linux) over its memory before the
model was built. The process returns freed blocks of 64 KiB or more to the system at once, so that the measurement
excludes fragmentation.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.batches import TrainStep, make_actor, make_rollout, prompts
from benchmarks.peer.work import Scenario
from benchmarks.report import arguments, facts, table
from realign.api import GenerationConfig, Lengths, SequenceSample
from realign.api.memory import MemoryWork, RoleMemory
from realign.engines import OptimizerSpec
from realign.engines.memory import MemoryModel
from realign.models import Causal
from realign.models.model_shape import shape_of
from realign.models.network.passes import SharedPrompts
from realign.models.network.settings import NetworkSettings

MIB = 2**20
CHILD = "child"
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryCount(TorchDispatchMode):
    """Count the bytes of live tensors that operations inside the context create. Existing tensors are not counted.

    Memory that an operation allocates and frees internally (a kernel's workspace) is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        """Current bytes."""
        self.peak = 0
        """Maximum bytes."""
        self.largest = 0
        """Number of elements of the largest tensor."""
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation and count its results, except views of known storage."""
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self._known.add(x.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, storage.nbytes() // x.element_size())
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, n_bytes: int) -> None:
        self.live -= n_bytes


@dataclass(frozen=True)
class Configuration:
    """One comparison of estimate and measurement."""

    scenario: Scenario
    """Shape of the model; all responses have the maximum length."""
    budget: int
    """Tokens of a micro-batch."""
    threads: int = 1
    """Threads of torch, and so the number of concurrent micro-batches."""
    checkpointing: bool = False
    family: str = "qwen2"
    """Kind of the model: qwen2, or bloom, which runs unpacked."""

    def config(self) -> Any:
        """Return the config of the model."""
        scenario = self.scenario
        if self.family == "qwen2":
            return scenario.config()
        from transformers import AutoConfig

        sizes = {"hidden_size": scenario.hidden, "n_layer": scenario.layers, "n_head": scenario.heads}
        return AutoConfig.for_model(self.family, vocab_size=scenario.vocabulary, **sizes)

    @property
    def trained(self) -> Scenario:
        """The prompts of a training step: enough for four micro-batches."""
        scenario = self.scenario
        each = scenario.group * (scenario.prompt_high + scenario.max_new)
        return replace(scenario, prompts=max(1, min(scenario.prompts, 4 * self.budget // each)))

    @property
    def tokens(self) -> int:
        """Tokens of a training step."""
        return self.trained.sequences * (self.scenario.prompt_high + self.scenario.max_new)


SMALL = Scenario(
    "small",
    prompts=8,
    group=2,
    max_new=240,
    mean_new=10**6,
    prompt_low=16,
    prompt_high=16,
    vocabulary=8192,
    hidden=512,
    layers=6,
    heads=8,
    kv_heads=2,
    mlp=1408,
)
CONFIGURATIONS = {
    "small": Configuration(SMALL, budget=2048),
    "vocabulary": Configuration(replace(SMALL, name="vocabulary", vocabulary=32_768, prompts=16), 4096, 1, True),
    "rollout": Configuration(replace(SMALL, name="rollout", prompts=16, group=8, max_new=496, layers=8), 1024, 2),
    "unpacked": Configuration(replace(SMALL, name="unpacked"), budget=2048, family="bloom"),
}


def estimated(configuration: Configuration) -> RoleMemory:
    """Return the estimate for the role of a configuration."""
    scenario = configuration.scenario
    model = MemoryModel(
        shape_of(configuration.config(), Causal()),
        torch.device("cpu"),
        torch.float32,
        optimizer=OptimizerSpec(),
        gradient_checkpointing=configuration.checkpointing,
        lanes=configuration.threads,
    )
    return model.estimate(
        MemoryWork(
            trains=True,
            scores=False,
            samples=True,
            tokens=min(configuration.budget, configuration.tokens),
            optimizer_step_tokens=configuration.tokens,
            prompts=scenario.prompts,
            sequences=scenario.sequences,
            prompt=scenario.prompt_high,
            response=scenario.max_new,
        )
    )


def resident(field: str) -> int:
    """Return the resident memory of this process (VmRSS), or its peak (VmHWM), in bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", STATUS.read_text(encoding="ascii"))
    assert match is not None
    return int(match[1]) * 1024


def measured(configuration: Configuration) -> dict[str, int]:
    """Return the growth of the peak resident memory in a rollout and in training, in bytes."""
    scenario = configuration.scenario
    torch.set_num_threads(configuration.threads)
    warm = torch.randn(256, 256, requires_grad=True)
    (warm @ warm).sum().backward()  # loads the libraries
    CLEAR.write_text("5", encoding="ascii")  # resets the peak
    before = resident("VmRSS")
    actor = make_actor(
        scenario,
        model=configuration.config(),
        gradient_checkpointing=configuration.checkpointing,
        network=NetworkSettings(shared_prompts=SharedPrompts.off),
    )
    step, batch = TrainStep(actor, scenario), make_rollout(configuration.trained)
    for _ in range(2):  # the first step creates the moments
        step(batch, configuration.budget)
    trained = resident("VmHWM") - before
    CLEAR.write_text("5", encoding="ascii")
    given = prompts(scenario)
    data = SequenceSample(tuple(range(len(given)))).with_data(
        {"prompt_ids": torch.cat(given)}, lengths=Lengths.of([[len(p)] for p in given])
    )
    config = GenerationConfig(n=scenario.group, max_new_tokens=scenario.max_new, fixed_length=True)
    actor.engine.generate(data, config, seed=0)
    return {"training": trained, "rollout": resident("VmHWM") - before}


def compared(name: str) -> dict[str, Any]:
    """Measure one configuration in a new process, and return it beside the estimate, in MiB."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "benchmarks.memory", f"{CHILD}={name}"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    measured, role = json.loads(done.stdout.splitlines()[-1]), estimated(CONFIGURATIONS[name])
    expected = {"training": role.kept + role.training, "rollout": role.kept + role.rollout}
    sides = {
        what: {
            "estimate": round(expected[what] / MIB),
            "measured": round(measured[what] / MIB),
            "ratio": round(expected[what] / measured[what], 3),
        }
        for what in expected
    }
    peak = max(expected.values()) / max(measured.values())
    return {"name": name, "peak_ratio": round(peak, 3), **sides}


def main(given: Sequence[str] | None = None) -> None:
    """Compare the requested configurations; print a table and a JSON line."""
    words = arguments({"configs": ",".join(CONFIGURATIONS), CHILD: ""}, given)
    if words[CHILD]:
        print(json.dumps(measured(CONFIGURATIONS[words[CHILD]])))
        return
    rows = []
    for name in filter(None, words["configs"].split(",")):
        rows.append(compared(name))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    cells = [
        [f"{row['name']}: {what}", *(str(row[what][key]) for key in ("estimate", "measured", "ratio"))]
        for row in rows
        for what in ("training", "rollout")
    ]
    print(table(["MiB", "estimate", "measured", "ratio"], cells))
    print(json.dumps({**facts(), "configurations": rows}))


if __name__ == "__main__":
    main()
