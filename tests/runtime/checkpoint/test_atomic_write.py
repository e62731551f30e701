from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from realign.runtime.checkpoint import atomic_write
from realign.runtime.checkpoint.atomic_write import write_checkpoint
from tests.runtime.checkpoint.test_folder import FILES, names, written


def test_a_file_that_the_system_refuses_to_grow(tmp_path):
    written(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint(tmp_path, 2, {"x": torch.zeros(10000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step_000001"]


def killed(*arguments):
    program = Path(__file__).with_name("killed_writers.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(atomic_write.__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kill_at_any_system_call_of_a_write_costs_at_most_that_checkpoint(tmp_path):
    seen = killed("every_point", tmp_path / "checkpoints")
    assert sum(record["killed"] for record in seen) > 100
    for record in seen:
        assert record["whole"], record
        assert record["warnings"] == []
        valid = [max(record["before"], default=None), record["step"]] if record["killed"] else [record["step"]]
        assert record["newest"] in valid, record
        assert record["after_start"][-1:] == ([record["newest"]] if record["newest"] else [])
        assert record["failed"] == []
        assert not any(name.startswith(".") for name in record["next"]), record
        assert record["next"][-1] == "step_000009"
        assert len(record["next"]) <= record["keep"]


@pytest.mark.slow
def test_writers_killed_at_random_moments_lose_nothing_that_was_complete(tmp_path):
    seen = killed("random", tmp_path / "checkpoints", 40)
    before = 0
    for record in seen:
        assert record["whole"], record
        assert record["warnings"] == []
        assert record["newest"] >= max(record["told"], before), record
        before = record["newest"]
    assert before > 40


def test_the_manifest_says_what_there_is(tmp_path):
    [checkpoint] = written(tmp_path, 7)
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    digest = manifest.pop("sha256")
    canonical = (
        subprocess.run(
            ["sha256sum"],
            input=json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode(),
            capture_output=True,
            check=True,
        )
        .stdout.decode()
        .split()[0]
    )
    assert digest == canonical
    assert (manifest["format"], manifest["step"]) == (1, 7)
    for name, facts in manifest["files"].items():
        found = subprocess.run(["sha256sum", checkpoint.path / name], capture_output=True, check=True).stdout.decode()
        assert facts == {"sha256": found.split()[0], "bytes": (checkpoint.path / name).stat().st_size}
    assert sorted(manifest["files"]) == FILES[1:]
