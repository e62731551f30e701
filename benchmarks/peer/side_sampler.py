"""Rollouts of realign's in-process sampler."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer.side_realign import actor, forced_lengths
from benchmarks.peer.work import GREEDY, Scenario
from realign.api import GenerationConfig, SequenceSample


class Side:
    """Samples the responses of a step."""

    def __init__(self, scenario: Scenario, folder: Path, steps: int, options: dict[str, Any]) -> None:
        self.scenario = scenario
        self.lengths: list[int] = []
        self.engine = actor(scenario, folder, "cpu").load("actor", seed=0).engine
        config = GenerationConfig(max_new_tokens=GREEDY, greedy=True, fixed_length=True)
        out = self.engine.generate(self._data(1).take([0]), config, seed=0)
        self.greedy = out["input_ids"][out["loss_mask"]].tolist()
        self.patches = ExitStack()
        self.patches.enter_context(forced_lengths(self))  # patched until the process ends

    def _data(self, number: int) -> SequenceSample:
        prompts = [[torch.tensor(ids)] for ids in self.scenario.prompt_ids(number)]
        return SequenceSample.from_sequences(range(len(prompts)), {"prompt_ids": prompts})

    def step(self, number: int) -> dict[str, Any]:
        """Sample the responses of a step (from 1)."""
        data, self.lengths = self._data(number), self.scenario.lengths(number)
        config = GenerationConfig(n=self.scenario.group, max_new_tokens=self.scenario.max_new)
        started = time.perf_counter()
        out = self.engine.generate(data, config, seed=number)
        wall = time.perf_counter() - started
        found = [int(mask.sum()) for mask in out.sequences("loss_mask")]
        return {"wall": wall, "lengths": found, "greedy": self.greedy}
