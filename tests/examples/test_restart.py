"""The restart scripts react to each exit code as documented. `realign`, `srun` and `scontrol` are fakes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("restart.sh", "slurm/train.sbatch")
STAND_INS = {
    # Uses one line of `outcomes` per call: the exit code, and the `count` to write to last_failure.json (or -).
    "realign": """
        echo "$*" >> calls
        read -r code count < outcomes
        sed -i 1d outcomes
        mkdir -p out
        if [ "$count" != - ]; then
            printf '{\\n  "step": 7,\\n  "count": %s,\\n  "error": "disk full"\\n}\\n' "$count" > out/last_failure.json
        fi
        exit "$code"
    """,
    # As `realign`, but exits with 1 for every failure. The record contains the exit code of the rank.
    "torchrun": """
        echo "$*" >> calls
        read -r code count < outcomes
        sed -i 1d outcomes
        mkdir -p out
        if [ "$count" != - ]; then
            printf '{"step": 7, "time": "%s", "exit_code": %s, "count": %s}' "$RANDOM" "$code" "$count" \\
                > out/last_failure.json
        fi
        [ "$code" -ne 143 ] || kill -TERM $PPID  # a scheduler sends SIGTERM to the whole job
        [ "$code" -eq 0 ]
    """,
    "srun": 'exec "$@"',
    "scontrol": 'echo "$*" >> requeues',
}


@dataclass(frozen=True)
class Result:
    """Results of a script that ran in a folder."""

    code: int
    calls: list[str]
    """Arguments of each call of `realign`."""
    requeues: list[str]
    """Arguments of each call of `scontrol`."""
    errors: str


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def execute(tmp_path):
    """Run a script with an exit code, and optionally a `count`, for each call of the fake `realign`."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, body in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)

    def call(script: str, *outcomes: tuple[int, int | None]) -> Result:
        given = "".join(f"{code} {'-' if count is None else count}\n" for code, count in outcomes)
        (tmp_path / "outcomes").write_text(given)
        environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
        environment |= {"RESTART_DELAY_S": "0", "SLURM_JOB_ID": "42"}
        done = subprocess.run(
            ["bash", str(EXAMPLES / script), "grpo", "out", "seed=3"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert lines(tmp_path / "outcomes") == [], "the script made fewer calls than the test expects"
        return Result(done.returncode, lines(tmp_path / "calls"), lines(tmp_path / "requeues"), done.stderr)

    return call


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_run_gets_its_folder_resume_and_the_overrides(execute, script):
    assert execute(script, (0, None)).calls == ["experiment=grpo output_dir=out resume=auto seed=3"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_success_bugs_errors_and_ctrl_c_end_the_script_with_the_code_of_the_run(execute, script, code):
    result = execute(script, (code, None))
    assert (result.code, len(result.calls), result.requeues) == (code, 1, [])


@pytest.mark.parametrize("code", [75, 143, 138])
def test_a_slurm_job_is_requeued_after_a_transient_failure_and_after_preemption(execute, code):
    result = execute("slurm/train.sbatch", (code, 1 if code == 75 else None))
    assert (result.code, result.requeues) == (code, ["requeue 42"])


def test_the_loop_restarts_a_run_until_it_succeeds(execute):
    result = execute("restart.sh", (75, 1), (75, 1), (75, 2), (0, None))
    assert (result.code, len(result.calls)) == (0, 4)


def test_the_loop_stops_after_the_third_failure_at_the_same_step(execute):
    result = execute("restart.sh", (75, 1), (75, 2), (75, 3))
    assert (result.code, len(result.calls)) == (75, 3)
    assert "3 consecutive failures without progress" in result.errors


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setenv("RANKS", "2")


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("code", [1, 2])
def test_the_exit_code_of_the_first_rank_that_failed_decides_under_torchrun(execute, code):
    result = execute("restart.sh", (75, 1), (75, 1), (75, 2), (code, 1))
    assert (result.code, len(result.calls)) == (code, 4)
    assert execute("restart.sh", (75, 1), (0, None)).code == 0
