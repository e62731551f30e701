"""Part `faults`: one of two servers is killed while it generates, while it loads weights and while it is paused."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.jobs import kill_descendants
from benchmarks.report import table
from benchmarks.servers.task import loaded, prepared, prompts, sampling
from realign.api import GenerationConfig, MicroBatchSpec, Model, Sampler, SequenceSample
from realign.api.sampler import Completion, requests_of, sample_of
from realign.interfaces.components.scoring import score_logprobs

LIMIT_S = 600
"""Seconds to wait for a response. vLLM takes minutes to start."""
BETWEEN_S = 0.5
"""Seconds between the events of a phase."""
TOLERANCE = 1e-3
"""Largest valid difference of two log-probs of the same weights, in nats."""
CONFIG = GenerationConfig(max_new_tokens=40, fixed_length=True)


def faults(folder: Path, words: Mapping[str, str]) -> dict[str, Any]:
    """Kill a server in each phase, and check every response."""
    task = prepared(folder)
    policies = [loaded(task.model, seed) for seed in range(len(PHASES) + 1)]
    data = prompts(int(words["responses"]))
    spec = sampling(words, 64, servers=2, weights_dir=str(folder / "weights"), restarts=5)
    rows, totals = [], Counter[str]()
    with closing(spec.open("actor", policies[0].engine, policies[0].tokenizer)) as sampler:
        for version, (phase, play) in enumerate(PHASES.items(), 1):
            handles = [sampler.submit(request) for request in requests_of(data, CONFIG, version)]
            play(sampler, policies[version], version)
            done = [handle.result(LIMIT_S) for handle in handles]
            wrong = wrong_tokens(data, done, policies)
            lost = sum(len(one.ids) != CONFIG.max_new_tokens for one in done)
            totals += Counter({"responses": len(done), "lost": lost, "wrong_tokens": wrong})
            versions = sorted({v for one in done for v in one.versions.tolist()})
            rows.append([phase, str(len(done)), str(lost), str(wrong), ", ".join(map(str, versions))])
    print(table(["killed while it", "responses", "lost or too long", "tokens of wrong weights", "versions"], rows))
    counts = {key: totals[key] for key in ("responses", "lost", "wrong_tokens")}
    return {"good": not totals["lost"] and not totals["wrong_tokens"], **counts}


def _generate(sampler: Sampler, policy: Model, version: int) -> None:
    time.sleep(BETWEEN_S)
    kill_server(version)
    time.sleep(BETWEEN_S)
    sampler.update(policy.engine, version)


def _update(sampler: Sampler, policy: Model, version: int) -> None:
    update = threading.Thread(target=sampler.update, args=(policy.engine, version))
    update.start()
    time.sleep(BETWEEN_S)
    kill_server(version)
    update.join()


def _pause(sampler: Sampler, policy: Model, version: int) -> None:
    sampler.pause()
    kill_server(version)
    sampler.update(policy.engine, version)
    sampler.resume()


PHASES: Mapping[str, Callable[[Sampler, Model, int], None]] = {
    "generates": _generate,
    "gets weights": _update,
    "is paused": _pause,
}


def kill_server(number: int) -> None:
    """Kill all processes of one of the servers that this process has started."""
    started = psutil.Process().children(recursive=True)
    guards = [x for x in started if "guard.py" in str(x.as_dict(["cmdline"]))]  # of a zombie, it is None
    kill_descendants(guards[number % len(guards)])


def wrong_tokens(data: SequenceSample, done: Sequence[Completion], policies: Sequence[Model]) -> int:
    """Return the number of tokens whose log-prob is not that of the weights of their version."""
    sample = sample_of(data, done, 1)
    wrong = torch.zeros_like(sample["loss_mask"])
    for version, policy in enumerate(policies):
        own_T = score_logprobs(policy, sample, MicroBatchSpec(), 1.0)["logprobs"]
        wrong |= (sample["versions"] == version) & ((own_T - sample["logprobs"]).abs() > TOLERANCE)
    return int(wrong.sum())
