"""Memory: an exact count of what an operation allocates, and the estimate of `realign check` against measurements.

    python -m benchmarks.memory                      # all configurations, each in a separate process
    python -m benchmarks.memory configs=small        # some of them, separated by commas
    python -m benchmarks.memory configs= ranks=4     # host memory of 4 ranks that load and save a model of 1.2B weights

The count does not depend on the load of the machine. For each configuration, two training steps and a rollout run on
the CPU. The measured number is the growth of the process's peak resident memory (Linux) over its memory before the
model was built. The process returns freed blocks of 64 KiB or more to the system at once, so that the measurement
excludes fragmentation.

With `ranks`, that many processes load a model in slices, save it, and write and read a checkpoint. The numbers are
growths of the peak resident memory of each process over its memory after a smaller model took the same way. The model
needs 5 GB of disk space, twice.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

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


RANKED: dict[str, int] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Sizes of the model that ranks load and save: 1.2 billion weights."""


def write_zeros(folder: Path, sizes: Mapping[str, int]) -> None:
    """Write a model folder of a llama whose weights are 0, without memory for them."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    from realign.engines.distributed.saved_files import plan_files
    from tests.tiny import tiny_tokenizer

    config = LlamaConfig(**sizes, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in module.named_parameters()]
    config.architectures = [type(module).__name__]
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    files = plan_files(module, module.state_dict(), names, module.num_parameters())
    assert files is not None
    files.create(folder)


def _rank(rank: int, size: int, work: Path, sizes: Mapping[str, int]) -> None:
    """Load, save, write and read a checkpoint as one rank, and write the growth of the peak memory as JSON."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{work}/meeting", rank=rank, world_size=size)
    _saved_and_loaded(work / "small", {**sizes, "vocab_size": 1024, "num_hidden_layers": 2})
    peaks = _saved_and_loaded(work / "large", sizes)
    (work / f"{rank}.json").write_text(json.dumps(peaks), encoding="utf-8")
    torch.distributed.destroy_process_group()


def _saved_and_loaded(work: Path, sizes: Mapping[str, int]) -> dict[str, int]:
    from realign.engines import TransformersModel
    from realign.ranks import current
    from realign.records.checkpoint.folder import CheckpointWriter, list_checkpoints

    ranks = current()
    ranks.lead(lambda: write_zeros(work / "start", sizes))
    peaks: dict[str, int] = {}
    before = resident("VmRSS")

    def peak(phase: str, action: Callable[[], Any]) -> Any:
        CLEAR.write_text("5", encoding="ascii")
        result = action()
        peaks[phase] = resident("VmHWM") - before
        ranks.barrier()
        return result

    spec = TransformersModel(str(work / "start"), device="cpu", optimizer=OptimizerSpec())
    engine: Any = peak("load", lambda: spec.load("actor", seed=0)).engine
    peaks["slice"] = sum(x.to_local().nbytes for x in engine.network.weights.sharded.values())
    peak("save", lambda: engine.save(work / "saved"))
    writer = CheckpointWriter(work / "checkpoints", 1, ranks)

    def write() -> None:
        writer.write(1, {"engine": engine.state_dict()})
        writer.close()

    peak("write checkpoint", write)
    (checkpoint,) = list_checkpoints(work / "checkpoints")
    peak("read checkpoint", lambda: engine.load_state_dict(checkpoint.read()["engine"]))
    return peaks


def by_rank(size: int, sizes: Mapping[str, int] = RANKED) -> list[dict[str, Any]]:
    """Return, for each phase, the largest growth of a rank's memory and its ratio to the rank's slice of the model."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as work:
        with patch.dict(os.environ, environment):
            torch.multiprocessing.spawn(_rank, (size, Path(work), sizes), nprocs=size)
        ranks = [json.loads(Path(work, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    slice_ = max(of_rank["slice"] for of_rank in ranks)
    peaks = {phase: max(of_rank[phase] for of_rank in ranks) for phase in ranks[0] if phase != "slice"}
    return [
        {"phase": phase, "slice": round(slice_ / MIB), "measured": round(n / MIB), "ratio": round(n / slice_, 3)}
        for phase, n in peaks.items()
    ]


def main(given: Sequence[str] | None = None) -> None:
    """Compare the requested configurations; print a table and a JSON line."""
    words = arguments({"configs": ",".join(CONFIGURATIONS), "ranks": "0", CHILD: ""}, given)
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
    if cells:
        print(table(["MiB", "estimate", "measured", "ratio"], cells))
    ranked = by_rank(int(words["ranks"])) if int(words["ranks"]) else []
    if ranked:
        head = ["phase", "slice", "measured", "ratio"]
        print(table(["MiB of a rank", *head[1:]], [[str(row[key]) for key in head] for row in ranked]))
    print(json.dumps({**facts(), "configurations": rows, "ranks": ranked}))


if __name__ == "__main__":
    main()
