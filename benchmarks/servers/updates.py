"""Part `updates`: duration of weight updates, and log-probs of vLLM and of the training engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.servers.task import largest_gap, loaded, prepared, prompts, sampling
from realign.api import GenerationConfig

TEMPERATURES = (1.0, 0.7)


def updates(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Give a server the weights of three policies, and compare the log-probs of its responses."""
    task = prepared(folder)
    models = [loaded(task.model, seed) for seed in range(3)]
    started = time.time()
    rows, update_s, gaps = [], [], []
    with closing(sampling(words, 64).open("actor", models[0].engine, models[0].tokenizer)) as sampler:
        start_s = time.time() - started
        data = prompts(int(words["responses"]))
        for version, model in enumerate(models):
            if version:
                began = time.time()
                sampler.update(model.engine, version)
                update_s.append(time.time() - began)
            for temperature in TEMPERATURES:
                config = GenerationConfig(max_new_tokens=32, temperature=temperature)
                began = time.time()
                sample = sampler.generate(data, config, seed=version)
                seconds, tokens = time.time() - began, int(sample["loss_mask"].sum())
                gaps.append(largest_gap(model, sample, temperature))
                rows.append([str(version), f"{temperature:g}", str(tokens), f"{seconds:.2f}", f"{gaps[-1]:.1e}"])
    print(table(["version", "temperature", "tokens", "seconds", "largest log-prob gap"], rows))
    median = statistics.median(update_s)
    print(f"server started in {start_s:.0f} s; update in {median:.2f} s")
    return {"good": max(gaps) < 1e-2, "gap": max(gaps), "update_s": median, "start_s": round(start_s)}
