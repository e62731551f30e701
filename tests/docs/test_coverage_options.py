"""Test the script that disconnects options: the package reads the default, and tests read the value."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from realign.interfaces.components import Clip
from realign.interfaces.ppo import PPOActorInterface

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("coverage_options", ROOT / "scripts" / "coverage_options.py")
script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # `inspect` looks for it there
spec.loader.exec_module(script)
ROOTS = {"actor": "realign.interfaces.ppo.PPOActorInterface"}


@dataclass
class Base:
    """Settings with and without defaults."""

    needed: int
    width: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass
class Derived(Base):
    """The same settings with another default."""

    width: int = 4


def read_by(module: str, settings: Base, name: str) -> object:
    """Return a field as code of a module reads it."""
    return eval(f"settings.{name}", {"__name__": module, "settings": settings})


def test_the_package_reads_the_default_and_tests_read_the_value():
    assert script.disconnect(Base, "width")
    assert script.disconnect(Base, "names")
    for settings, default in ((Base(1, 7, ["b"]), 3), (Derived(1, 7, ["b"]), 4)):
        assert (settings.width, settings.names) == (7, ["b"])
        assert read_by("realign.interfaces.ppo", settings, "width") == default
        assert read_by("realign.interfaces.ppo", settings, "names") == ["a"]
        assert read_by("realign.settings", settings, "width") == 7
        assert read_by("realign.config.construct", settings, "width") == 7


def test_a_field_without_a_default_stays_as_it_is():
    assert not script.disconnect(Base, "needed")
    assert read_by("realign.interfaces.ppo", Base(5), "needed") == 5


def test_an_option_is_a_field_of_a_class_of_the_package():
    assert script.field_of("actor.epochs", ROOTS) == (PPOActorInterface, "epochs")
    assert script.field_of("actor.early_stop.kl", ROOTS)[1] == "kl"
    assert script.field_of("realign.api.RPC", ROOTS) is None


def test_a_process_that_a_test_starts_disconnects_the_field_when_the_class_is_defined(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(script.start_file((Clip, "low")))
    code = """
from realign.interfaces.components import Clip
def read_by(module):
    return eval("Clip(low=0.7).low", {"__name__": module, "Clip": Clip})
print(read_by("realign.functional"), read_by("tests"), Clip(high=0.7).high)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["0.2", "0.7", "0.7"]


@dataclass
class Answers:
    """Outcomes by test and by whether its field is disconnected, and the requested tests."""

    outcomes: dict[tuple[str, bool], str]
    costs: dict[str, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def of(self, test: str, place: object) -> str:
        """Return an outcome."""
        self.asked.append(test)
        return self.outcomes[test, place is not None]

    def cost(self, test: str) -> float:
        """Return the cost of a test."""
        return self.costs.get(test, 0.0)


@pytest.mark.parametrize(
    ("disconnected", "intact", "found"),
    [
        ("failed", "passed", ("held", "a")),
        ("passed", "passed", ("not held", "")),
        ("slow", "passed", ("unclear", "a (slow)")),
        ("skipped", "skipped", ("unclear", "a (skipped)")),
        ("failed", "failed", ("unclear", "a (failed, with the option failed)")),
    ],
)
def test_an_option_is_held_if_a_test_passes_with_it_and_fails_without(disconnected, intact, found):
    assert script.check(Answers({("a", True): disconnected, ("a", False): intact}), ["a"], (Base, "width")) == found


def test_the_cheapest_tests_run_first_and_none_runs_after_one_that_holds_the_option():
    answers = Answers({("b", True): "passed", ("a", True): "failed", ("a", False): "passed"}, {"b": 1, "a": 2, "c": 3})
    assert script.check(answers, ["c", "a", "b"], (Base, "width")) == ("held", "a")
    assert answers.asked == ["b", "a", "a"]


def test_nothing_runs_for_a_field_without_a_default_or_a_name_that_is_no_field():
    assert script.check(Answers({}), ["a"], (Base, "needed")) == ("no default", "")
    assert script.check(Answers({}), ["a"], None) == ("no field", "")


def test_results_are_read_from_the_file_instead_of_running_a_test_again(tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(script, "outcome", lambda *run: runs.append(run) or ("passed", 1.5))
    for _ in range(2):
        results = script.Results(tmp_path / "results.jsonl", 60)
        assert results.of("a", (Base, "width")) == results.of("a", None) == "passed"
        assert (results.cost("a"), results.cost("b")) == (1.5, 0)
    assert runs == [([], (Base, "width"), 60), ([], None, 60)]


def test_a_test_that_was_slow_before_and_one_that_was_not_collected_do_not_run(tmp_path):
    (tmp_path / "results.jsonl").write_text('["a", "", "passed", 2.5]\n')
    results = script.Results(tmp_path / "results.jsonl", 60, longest=2.0)
    assert [results.of("a", None), results.of("a", (Base, "width")), results.of("b", None)] == [
        "passed",
        "too long",
        "not found",
    ]


def test_rows_and_options_of_rows_are_selected_by_name():
    data = {
        "rows": {"A1": {"options": ["x.a", "x.b"], "tests": ["t"]}, "A2": {"does": "."}, "B1": {"options": ["x.c"]}}
    }
    a, b, c = ("A1", "x.a", ["t"]), ("A1", "x.b", ["t"]), ("B1", "x.c", [])
    assert script.selected(data, []) == [a, b, c]
    assert script.selected(data, ["A1:x.b", "B1"]) == [b, c]
    assert script.selected(data, ["A2"]) == []


@pytest.mark.slow
def test_a_test_that_needs_the_option_fails_without_it_and_another_does_not():
    needs = "interfaces/test_ppo.py::test_a_dual_clip_bounds_what_a_negative_advantage_can_cost"
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
from coverage_options import Checks, Results
rows = [("X1", "clip.dual", [{needs!r}]), ("X1", "clip.low", [{needs!r}])]
print(Checks(rows, {{"clip": "realign.interfaces.components.Clip"}}, Results(None, 120)).run())
"""
    lines = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    found = [line.split(maxsplit=2) for line in lines if line.startswith("X")]
    assert found == [["X1", "clip.dual", f"held      {needs}"], ["X1", "clip.low", "not held"]]


@pytest.mark.very_slow
@pytest.mark.slow
def test_the_tests_of_a_sample_of_the_rows_hold_their_options():
    """The whole takes an hour: `python scripts/coverage_options.py`. This leaves out tests that start processes."""
    always = ["C7", "C8", "F4", "F5"]
    data = yaml.safe_load((ROOT / "docs" / "coverage.yaml").read_text(encoding="utf-8"))
    long = ("ray", "distributed", "end_to_end", "cli/", "demo", "servers", "stages", "test_presets", "torchrun")
    others = [
        f"{row}:{option}"
        for row, option, tests in script.selected(data, [])
        if row not in always and not any(part in test for test in tests for part in long)
    ]
    chosen = [*always, *random.Random(20261123).sample(others, 12)]
    command = [sys.executable, "scripts/coverage_options.py", "--timeout", "60", *chosen]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " held " in done.stdout
