from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import CONFIGURATIONS, SMALL, Configuration, MemoryCount, compared, estimated
from realign.engines import Causal
from realign.engines.model_shape import shape_of


def test_tensors_count_while_they_live_and_views_do_not():
    weight = torch.ones(10, 10, requires_grad=True)
    with MemoryCount() as count:
        doubled = weight * 2
        view = doubled.view(100)
        assert count.live == 400
        del doubled
        assert count.live == 400
        del view
        assert count.live == 0
        detached = weight.detach()  # storage that existed before does not count
        assert count.live == 0
        del detached
    assert count.peak == 400
    assert count.largest == 100


def test_the_backward_pass_counts():
    weight = torch.ones(10, 10, requires_grad=True)
    with MemoryCount() as count:
        total = (weight * weight).exp().sum()
        forward = count.peak
        total.backward()
        del total
        assert count.live == 400  # the gradient
    assert forward == 400 + 400  # the square is freed as soon as its exponential exists
    assert count.peak > forward


def test_what_is_freed_at_once_still_sets_the_peak():
    with MemoryCount() as count:
        for _ in range(3):
            torch.zeros(1000).sum()
        assert count.live == 0
    assert count.peak == 4004


def test_a_comparison_measures_in_a_process_of_its_own(monkeypatch):
    tiny = replace(SMALL, name="tiny", hidden=64, layers=2, heads=2, mlp=64, vocabulary=128, max_new=8, prompts=2)
    monkeypatch.setitem(CONFIGURATIONS, "tiny", Configuration(tiny, budget=64))
    role = estimated(CONFIGURATIONS["tiny"])
    seen = {}

    def run(command, env, **options):
        seen.update(command=command[1:], threshold=env["MALLOC_MMAP_THRESHOLD_"])
        sizes = {"training": role.kept + role.training, "rollout": 2 * (role.kept + role.rollout)}
        return type("Done", (), {"stdout": "a line\n" + json.dumps(sizes)})

    monkeypatch.setattr(memory.subprocess, "run", run)
    found = compared("tiny")
    assert seen == {"command": ["-m", "benchmarks.memory", "child=tiny"], "threshold": "65536"}
    assert (found["training"]["ratio"], found["rollout"]["ratio"]) == (1.0, 0.5)


@pytest.mark.slow
def test_the_child_prints_its_peaks():
    """A separate process, as in the benchmark: memory that earlier tests freed would be used again."""
    lines = [
        "from dataclasses import replace",
        "from benchmarks import memory",
        "from benchmarks.memory import CONFIGURATIONS, SMALL, Configuration",
        "tiny = replace(SMALL, name='tiny', hidden=64, layers=2, heads=2, mlp=64, vocabulary=128, max_new=8)",
        "tiny = replace(tiny, prompts=2)",
        "CONFIGURATIONS['tiny'] = Configuration(tiny, budget=64, threads=1)",
        "memory.main(['child=tiny'])",
    ]
    out = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    found = json.loads(out.splitlines()[-1])
    assert found.keys() == {"training", "rollout"}
    assert found["training"] > 0


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_estimates_of_the_configurations_are_below_8_gib(name):
    role = estimated(CONFIGURATIONS[name])
    assert 200 * 2**20 < role.kept + role.passing < 8 * 2**30


def test_a_training_step_has_four_micro_batches_or_the_whole_batch():
    rollout, small = CONFIGURATIONS["rollout"], CONFIGURATIONS["small"]
    assert rollout.tokens == 4 * rollout.budget < rollout.scenario.sequences * 512
    assert small.trained == small.scenario


def test_the_unpacked_configuration_is_a_model_that_runs_unpacked():
    shape = shape_of(CONFIGURATIONS["unpacked"].config(), Causal())
    assert (shape.unpacked, shape.layers, shape.hidden, shape.words) == (True, 6, 512, 8192)
