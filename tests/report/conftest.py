"""A real run on bigrams, whose folder the tests of the report read."""

from __future__ import annotations

from pathlib import Path

import pytest

from realign.interfaces.components import KLPenalty
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import run
from realign.runtime.metrics.record_spec import RecordSpec
from tests.runtime.test_step import GENERATION, BigramModel, CountToken, experiment

RECORDS = RecordSpec(every_steps=2, token_prompts=2, token_responses=3, system_seconds=0.05)


def make_run(folder: Path, **changes) -> Path:
    """Run GRPO with a KL penalty on bigrams, and return the folder of the run."""
    actor = GRPOActorInterface(generation=GENERATION, kl=KLPenalty("loss", 0.1))
    settings = {
        "interfaces": {"actor": actor, "ref": ReferenceInterface(), "reward": CountToken()},
        "models": {"actor": BigramModel(), "ref": BigramModel()},
        "records": RECORDS,
        "steps": 4,
        "sample_prompts": 2,
        "output_dir": folder,
    }
    return run(experiment(folder.parent, **settings | changes)).output_dir


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("report") / "toy")
