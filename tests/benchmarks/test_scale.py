from __future__ import annotations

import pytest

from benchmarks.scale.rollouts import GROUP, PROMPTS, rollout_words
from benchmarks.scale.runtimes import runtime_jobs, runtime_words
from benchmarks.scale.task import prepare
from realign.config import compose
from realign.config.experiment import build_experiment


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("scale") / "task")


def test_every_run_is_a_valid_experiment(task, tmp_path):
    for words in (job.words for job in runtime_jobs(tmp_path, runtime_words(task, 3)).values()):
        assert build_experiment(compose(list(words))).steps == 3
    made = build_experiment(compose(rollout_words(task, 4, seed=2)))
    assert (made.seed, made.batch_prompts, made.interfaces["actor"].generation.n) == (2, PROMPTS, GROUP)
