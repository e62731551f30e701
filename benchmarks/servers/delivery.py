"""Part `delivery`: bytes and seconds of an update of SmolLM2-135M by each way in which servers get weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.report import table
from benchmarks.servers.task import largest_gap, prompts, sampling
from realign.api import GenerationConfig, MicroBatchSpec, Model, ModelOutput, SequenceSample, Stats
from realign.demo.smollm2 import smollm2
from realign.engines import OptimizerSpec, TransformersModel
from realign.samplers.servers.server_settings import Updates
from realign.samplers.servers.vllm import VllmProtocol
from realign.samplers.servers.weights import WeightFolders, Weights, size_of

UPDATES = 3
WAYS: Mapping[str, tuple[str, Updates, bool]] = {
    "float32, shared memory": ("float32", Updates.full, False),
    "bfloat16, shared memory": ("bfloat16", Updates.full, False),
    "bfloat16, files": ("bfloat16", Updates.full, True),
    "bfloat16, delta": ("bfloat16", Updates.delta, False),
}


def delivery(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Train SmolLM2-135M some steps for each way, and report what the server gets after each of them."""
    rows, results, good = [], {}, True
    for way, (dtype, updates, on_disk) in WAYS.items():
        if words["way"] not in way:
            continue
        spec = TransformersModel(str(words["model"] or smollm2()), optimizer=OptimizerSpec(lr=float(words["lr"])))
        model = spec.load("actor", seed=0)
        more = {"weights_dir": str(folder / "weights")} if on_disk else {}
        settings = sampling(words, 64, dtype=dtype, updates=updates, **more)
        with _measured() as seen, closing(settings.open("actor", model.engine, model.tokenizer)) as sampler:
            data = prompts(8, words=1000)
            config = GenerationConfig(max_new_tokens=16)
            sample = sampler.generate(data, config, seed=0)
            for version in range(1, UPDATES + 1):
                _train(model, sample)
                seen.append({})
                began = time.time()
                sampler.update(model.engine, version)
                seen[-1]["update_s"] = time.time() - began
                sample = sampler.generate(data, config, seed=version)
                seen[-1]["gap"] = largest_gap(model, sample, 1.0)
        for update in seen[1:]:  # not the start of the server
            rows.append(
                [
                    way,
                    f"{update['sent'] / 1e6:.1f}",
                    f"{update['write_cpu_s']:.2f}",
                    f"{update['load_s']:.2f}",
                    f"{update['update_s']:.2f}",
                    update["checksum"],
                    f"{update['gap']:.2g}",
                ]
            )
        good &= all(update["gap"] < (1e-3 if dtype == "float32" else 1.0) for update in seen[1:])
        good &= updates is not Updates.delta or all(update["checksum"] == "confirmed" for update in seen[1:])
        results[way] = {
            "bytes": [update["sent"] for update in seen[1:]],
            "write_cpu_s": round(statistics.median(update["write_cpu_s"] for update in seen[1:]), 2),
            "server_s": round(statistics.median(update["load_s"] for update in seen[1:]), 2),
            "update_s": round(statistics.median(update["update_s"] for update in seen[1:]), 2),
        }
    print(table(["way", "MB", "write (CPU s)", "server (s)", "update (s)", "checksum", "largest log-prob gap"], rows))
    return {"good": good, "ways": results}


def _train(model: Model, sample: SequenceSample) -> None:
    """Take a step of policy gradients with alternating advantages."""

    def loss(output: ModelOutput, part: SequenceSample) -> tuple[torch.Tensor, Stats]:
        logprobs_T = output.logprobs(temperature=1.0, where_T=part["loss_mask"])
        signs_T = 1 - 2 * (torch.arange(len(logprobs_T)) // 7 % 2)
        return -(logprobs_T * signs_T).sum(), {}

    model.engine.train_batch(sample, MicroBatchSpec(), loss, lambda part: part["loss_mask"].sum())


@contextmanager
def _measured() -> Iterator[list[dict[str, Any]]]:
    """Note the bytes that a server gets, and the seconds of writing and loading, in the last of the dicts."""
    seen: list[dict[str, Any]] = [{}]
    write, load, load_received = WeightFolders.write, VllmProtocol.load, VllmProtocol.load_received
    receive = VllmProtocol.receive

    def timed_write(self: WeightFolders, *given: Any) -> Weights:
        began = time.process_time()
        weights = write(self, *given)
        cpu_s = time.process_time() - began
        seen[-1] |= {"write_cpu_s": cpu_s, "weights": weights, "load_s": 0.0, "sent": 0, "checksum": "-"}
        return weights

    async def timed_load(self: VllmProtocol, http: Any, path: Path, label: str) -> None:
        began = time.time()
        await load(self, http, path, label)
        seen[-1]["load_s"] += time.time() - began
        seen[-1]["sent"] += size_of(path)

    async def timed_load_received(self: VllmProtocol, *given: Any) -> None:
        began = time.time()
        await load_received(self, *given)
        seen[-1]["load_s"] += time.time() - began

    async def timed_receive(self: VllmProtocol, http: Any, path: Path, base: str | None = None) -> Any:
        began = time.time()
        received = await receive(self, http, path, base)
        seen[-1]["load_s"] += time.time() - began
        seen[-1]["sent"] += size_of(path)
        seen[-1]["checksum"] = "confirmed" if received.digest == seen[-1]["weights"].digest else "differs"
        return received

    with (
        patch.object(WeightFolders, "write", timed_write),
        patch.object(VllmProtocol, "load", timed_load),
        patch.object(VllmProtocol, "load_received", timed_load_received),
        patch.object(VllmProtocol, "receive", timed_receive),
    ):
        yield seen
