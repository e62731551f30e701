"""The laboratory of `benchmarks.torture`, with a program that leaves the files of a run instead of a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.torture import attacks
from benchmarks.torture.attacks import Attack, Lab, NotPossible, Scene, Series, keep_copy, problem_in, restore_copy
from benchmarks.torture.runs import MARK, Run

PROGRAM = """
import json, os, sys, time
from pathlib import Path

out, fault = Path(sys.argv[1]), Path(sys.argv[1]).with_name("fault")
how = fault.read_text() if fault.exists() else ""
gates = os.environ.get("REALIGN_TORTURE_GATES", "").split()
out.mkdir(exist_ok=True)
for call in gates:
    mark = os.environ["REALIGN_TORTURE_MARK"]
    Path(f"{mark}.reached.{call}").touch()
    while not Path(f"{mark}.open.{call}").exists():
        time.sleep(0.005)
if how == "hang":
    time.sleep(3600)
if how in ("2", "75"):
    print("warning: first\\nerror: the disk is full")
    sys.exit(int(how))
if how == "bug":
    raise KeyError("x")
steps = 1 if how == "short" else 2
lines = [json.dumps({"step": step, "seconds": time.time()}) for step in range(steps)]
(out / "metrics.jsonl").write_text("".join(f"{line}\\n" for line in lines))
(out / "samples.jsonl").write_text("a\\nb\\n" if how != "lost" else "a\\n")
(out / "final").mkdir(exist_ok=True)
(out / "final" / "model.safetensors").write_text("w" + " " * (how == "other"))
print("done")
"""


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = Lab(tmp_path / "lab")

    def run(name: str, settings: object) -> Run:
        folder = found.folder / name
        folder.mkdir()
        return Run(folder / "run", [sys.executable, str(program), str(folder / "run")], folder / "run.mark")

    monkeypatch.setattr(found, "run", run)
    return found


def fails(how: str):
    return lambda scene: scene.folder.joinpath("fault").write_text(how)


def mended(scene: Scene) -> None:
    (scene.folder / "fault").unlink()


def attack(how: str, code: int, **changes) -> Attack:
    return Attack(how, (code,), before=fails(how), after=mended, **changes)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (attack("75", 75), ""),
        (attack("75", 75, says="disk is +full"), ""),
        (attack("75", 2), "exit code 75 (error: the disk is full)"),
        (attack("75", 75, says="read-only"), "the output does not contain 'read-only'"),
        (attack("bug", 1), "a traceback (KeyError: 'x')"),
        (attack("bug", 0), "exit code 1 (KeyError: 'x')"),
        (Attack("nothing"), ""),
        (attack("lost", 0), "other samples than the undisturbed run"),
        (attack("other", 0), "other weights than the undisturbed run"),
        (attack("short", 0), "other metrics than the undisturbed run"),
    ],
)
def test_an_attack_is_survived_if_it_ends_as_documented_and_the_run_is_that_without_it(lab, found, problem):
    (result,) = lab.execute(Series("one", [found]))
    assert result.problem == problem
    assert result.lost == (found.name == "lost")
    assert not result.not_possible


def test_a_hung_process_is_killed_and_reported(lab, monkeypatch):
    monkeypatch.setattr(attacks, "LONGEST_S", 0.5)
    (result,) = lab.execute(Series("one", [attack("hang", 0)]))
    assert (result.code, result.problem) == (None, "hung for 0.5 s")


def test_a_run_that_cannot_be_resumed_costs_its_samples_and_every_attack_of_the_series(lab):
    stays = [replace(attack("2", 2), after=lambda scene: None) for _ in range(2)]
    for result in lab.execute(Series("one", stays)):
        assert result.problem == "it cannot be resumed (error: the disk is full)"
        assert result.lost == 2


def test_what_the_machine_does_not_allow_is_not_counted_as_tried(lab):
    def impossible(_: Scene) -> None:
        raise NotPossible("no mounts")

    results = lab.execute(Series("one", [Attack("mount", before=impossible), attack("75", 75)]))
    assert [(r.not_possible, r.problem) for r in results] == [("no mounts", ""), ("", "")]
    (result,) = lab.execute(Series("two", [attack("75", 75)], before=impossible))
    assert result.not_possible == "no mounts"


def test_acts_happen_while_the_process_waits_in_the_first_reward_of_their_step(lab):
    seen: list[str] = []
    acts = {step: lambda scene, step=step: seen.append(f"{step} {running(scene)}") for step in (2, 3)}
    (result,) = lab.execute(Series("one", [Attack("acts", at=acts)]))
    assert (result.problem, seen) == ("", ["2 True", "3 True"])
    marks = sorted(path.name for path in (lab.folder / "one").glob("run.mark.reached.*"))
    assert marks == ["run.mark.reached.33", "run.mark.reached.65"]  # 8 prompts with 4 responses per step


def running(scene: Scene) -> bool:
    assert scene.launch is not None
    return scene.launch.process.poll() is None


def test_changes_of_a_process_do_not_reach_the_next_one(lab):
    seen: list[tuple[list[str], dict[str, str]]] = []

    def change(scene: Scene) -> None:
        seen.append((list(scene.more), dict(scene.environment)))
        scene.more, scene.environment[MARK + "_OTHER"] = ["more"], "1"

    lab.execute(Series("one", [Attack("a", before=change), Attack("b", before=change)]))
    assert seen == [([], {}), ([], {})]


def test_a_copy_of_the_run_folder_replaces_what_an_attack_left(lab, tmp_path):
    run = Run(tmp_path / "run", [], tmp_path / "run.mark")
    scene = Scene(tmp_path, lab.task, run, run, lab.folder, stack=None)  # type: ignore[arg-type]
    run.folder.mkdir()
    (run.folder / "a").write_text("1")
    keep_copy(scene)
    (run.folder / "a").write_text("2")
    (run.folder / "b").touch()
    restore_copy(scene)
    assert [(p.name, p.read_text()) for p in run.folder.iterdir()] == [("a", "1")]


@pytest.mark.parametrize(
    ("code", "text", "problem"),
    [
        (0, "fine", ""),
        (0, "error: x", "1 lines of errors"),
        (2, "error: x", ""),
        (2, "x", "0 lines of errors"),
        (75, "error: x\nerror: y", "2 lines of errors"),
        (143, "stopped after step 3", ""),
        (2, "error: " + "x" * 3000, "an error of 3007 characters"),
        (0, "Traceback (most recent call last)\nE", "a traceback (E)"),
        (1, "E", "exit code 1 (E)"),
        (137, "", "exit code 137 (no output)"),
    ],
)
def test_the_end_of_a_process_is_compared_with_the_table_of_exit_codes(code, text, problem):
    assert problem_in(Attack("any", (0, 2, 75, 143)), code, text) == problem


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
