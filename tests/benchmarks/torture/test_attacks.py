"""A fault of `benchmarks.torture`, with the real command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.torture.attacks import Attack, Lab, Scene, Series


@pytest.mark.slow
def test_a_fault_that_the_real_command_line_meets_is_survived(tmp_path):
    pipe = Attack("pipe", (2,), "is not a regular file", before=lambda scene: block(scene.run.folder), after=free)
    lab = Lab(tmp_path)
    (result,) = lab.execute(Series("pipe", [pipe]))
    assert result.problem == "", [log.read_text()[-2000:] for log in tmp_path.rglob("*.log")]
    assert (result.code, result.lost, result.not_possible) == (2, 0, "")


def block(folder: Path) -> None:
    folder.mkdir()
    (folder / "realign.log").mkdir()


def free(scene: Scene) -> None:
    (scene.run.folder / "realign.log").rmdir()
