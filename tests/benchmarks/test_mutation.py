"""Test mutants of small sources, the sample, the selection of tests, and a run on a package of one file."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path

import pytest

from benchmarks.mutation import __main__ as mutation
from benchmarks.mutation.mutants import Mutant, mutants, required_parameters, sample
from benchmarks.mutation.selection import Project

ROOT = Path(__file__).resolve().parents[2]
SCALE = """
def scale(x, up):
    if x < 0:
        return 0
    return x * 2 if up else x
"""
SCALE_TEST = """
from toy import scale

def test_scale():
    assert scale(3, True) == 6
    assert scale(3, False) == 3
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def changes(text: str, operator: str) -> list[str]:
    """Return the mutated sources, or the changed lines if the source has several lines."""
    text = textwrap.dedent(text).strip()
    found = [each for each in mutants("x.py", text, required_parameters([text])) if each.operator == operator]
    return [each.mutated if "\n" not in text else each.change.partition("  =>  ")[2] for each in found]


@pytest.mark.parametrize(
    ("operator", "text", "expected"),
    [
        ("arithmetic", "y = (a + b) - c", ["y = (a - b) - c", "y = (a + b) + c"]),
        ("arithmetic", "y = a * b / c // d % e", [
            "y = a / b / c // d % e", "y = a * b * c // d % e", "y = a * b / c * d % e", "y = a * b / c // d * e"]),
        ("arithmetic", "y = a ** b & c", ["y = a * b & c", "y = a ** b | c"]),
        ("arithmetic", "y += x", ["y -= x"]),
        ("arithmetic", "y = 'a' + b + [c]", []),
        ("arithmetic", "y = é + (b)", ["y = é - (b)"]),
        ("drop_right", "y = a | b | c", ["y = (a) | c", "y = (a | b)"]),
        ("comparison", "y = a < b <= c", ["y = a <= b <= c", "y = a < b < c"]),
        ("comparison", "y = a > b, a >= b", ["y = a >= b, a >= b", "y = a > b, a > b"]),
        ("comparison", "y = a == b, a != b", ["y = a != b, a != b", "y = a == b, a == b"]),
        ("comparison", "y = a is b, a is not b", ["y = a is not b, a is not b", "y = a is b, a is b"]),
        ("comparison", "y = a in b, a not in b", ["y = a not in b, a not in b", "y = a in b, a in b"]),
        ("boolean", "y = a and b or c", ["y = a or b or c", "y = a and b and c"]),
        ("remove_not", "y = not (a)", ["y = (a)"]),
        ("remove_minus", "y = x[-1] - a", ["y = x[1] - a"]),
        ("remove_invert", "y = ~a & b", ["y = a & b"]),
        ("constant", "y = 0, 1, 5, 0.0, 1.0, 0.2, True", [
            "y = 1, 1, 5, 0.0, 1.0, 0.2, True", "y = 0, 0, 5, 0.0, 1.0, 0.2, True", "y = 0, 1, 6, 0.0, 1.0, 0.2, True",
            "y = 0, 1, 5, 1.0, 1.0, 0.2, True", "y = 0, 1, 5, 0.0, 0.0, 0.2, True", "y = 0, 1, 5, 0.0, 1.0, 0.4, True",
            "y = 0, 1, 5, 0.0, 1.0, 0.2, False"]),
        ("condition_true", "y = a if b else c", ["y = a if True else c"]),
        ("condition_false", "y = a if b else c", ["y = a if False else c"]),
        ("condition_true", "y = [a for a in b if a.c]", ["y = [a for a in b if True]"]),
        ("condition_true", "if a:\n    raise ValueError", []),
        ("condition_false", "if a:\n    raise ValueError", ["if False:"]),
        ("condition_false", "while a: b()", ["while False: b()"]),
        ("condition_true", "while a: b()", []),
        ("delete_call", "a.b(c)", ["pass"]),
        ("delete_assignment", "a |= b", ["pass"]),
        ("return_none", "def f(a):\n    if a: return 1\n    return 2", ["if a: return None"]),
        ("function", "y = min(a, torch.maximum(b, c))", [
            "y = max(a, torch.maximum(b, c))", "y = min(a, torch.minimum(b, c))"]),
        ("function", "y = sum(a) + a.sum()", ["y = sum(a) + a.mean()"]),
        ("unwrap", "y = (a + b).detach() + c.exp()", ["y = ((a + b)) + c.exp()", "y = (a + b).detach() + (c)"]),
        ("clamp", "y = a.clamp(b, c)", ["y = a.clamp(None, c)", "y = a.clamp(b, None)"]),
        ("clamp", "y = a.b().clamp(min=1)", ["y = (a.b())"]),
        ("where_swap", "y = torch.where(m, a, (b))", ["y = torch.where(m, b, a)"]),
        ("where_drop", "y = torch.where(m, a, 0) + torch.where(m, 0, b)", [
            "y = (a) + torch.where(m, 0, b)", "y = torch.where(m, a, 0) + (b)"]),
        ("remove_keyword", "y = f(a, b=1, c=2)", ["y = f(a, c=2)", "y = f(a, b=1)"]),
        ("remove_keyword", "y = f(b=(1), c=2)", ["y = f( c=2)", "y = f(b=(1))"]),
        ("remove_keyword", "def f(a, *, b): pass\nf(a=1, b=2)", []),
        ("remove_keyword", "y = zip(a, b, strict=True)", []),
        ("swap_arguments", "y = f(new_T, old_T, mask_T, x_S)", ["y = f(old_T, new_T, mask_T, x_S)"]),
        ("swap_arguments", "y = f(a=new_T, b=old_T)", ["y = f(a=old_T, b=new_T)"]),
        ("swap_arguments", "y = torch.maximum(a_T, b_T)", []),
        ("key", 'def f(d):\n    return d["a"] + d["b"]', ['return d["b"] + d["b"]', 'return d["a"] + d["a"]']),
        ("no_grad", "@torch.no_grad()\ndef f(): pass", ["def f(): pass"]),
    ],
)  # fmt: skip
def test_an_operator_changes_what_its_name_says(operator, text, expected):
    assert changes(text, operator) == expected


@pytest.mark.parametrize(
    "text",
    [
        '"""1 + 1 of `not a`."""',
        "x: Literal[1] | None",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "def describe(a):\n    return 1 + a",
        "raise ValueError(f'{1 + 1}', -a)",
        "y = f'{a + 1}'",
        "__all__ = ['a'] + b",
        "SOME_PANELS = (f(1, a=2),)",
        "assert a < 1",
        "if TYPE_CHECKING:\n    from a import b",
        "@dataclass(frozen=True)\nclass A:\n    a: int",
        "from a import b",
    ],
)
def test_text_types_and_asserts_are_not_mutated(text):
    assert mutants("x.py", text, {}) == []


def test_a_mutant_names_its_place():
    text = "class A:\n    def b(self):\n        return  1 + self.c\n"
    found = {each.operator: each for each in mutants("p/x.py", text, {})}
    assert found["arithmetic"].id == "p/x.py:3:19:arithmetic"
    assert found["arithmetic"].where == "A.b"
    assert found["arithmetic"].change == "return 1 + self.c  =>  return 1 - self.c"


@pytest.mark.slow
def test_each_mutant_of_the_package_compiles_differs_and_has_an_id_of_its_own():
    found = mutation.Target().mutants([])
    everything = [mutant for each in found.values() for mutant in each]
    assert len({mutant.id for mutant in everything}) == len(everything) > 2000
    original = {file: ast.dump(ast.parse((ROOT / file).read_text())) for file in found}
    for mutant in sample(found, 200, seed=0):
        assert ast.dump(ast.parse(mutant.mutated)) != original[mutant.file], mutant.id


def numbered(file: str, count: int) -> list[Mutant]:
    return [Mutant(file, i, 1, "constant", "", "", "") for i in range(count)]


def test_a_sample_is_proportional_with_at_least_three_of_each_file():
    found = {"a": numbered("a", 900), "b": numbered("b", 90), "c": numbered("c", 5), "d": numbered("d", 2), "e": []}
    drawn = sample(found, 100, seed=1)
    assert len(set(drawn)) == len(drawn) == 100
    counts = {file: sum(mutant.file == file for mutant in drawn) for file in found}
    assert counts == {"a": 84, "b": 11, "c": 3, "d": 2, "e": 0}


def test_a_sample_depends_on_its_seed_only_and_ends_where_there_are_no_more():
    found = {"a": numbered("a", 30), "b": numbered("b", 10)}
    assert sample(found, 12, seed=1) == sample(dict(reversed(found.items())), 12, seed=1)
    assert sample(found, 12, seed=1) != sample(found, 12, seed=2)
    assert len(sample(found, 1, seed=1)) == 1
    assert len(sample(found, 100, seed=1)) == 40
    assert sample({"a": []}, 5, seed=0) == []


@pytest.fixture
def project(tmp_path):
    files = {
        "toy/__init__.py": "from .deep import lowest\nfrom .other import thing\n",
        "toy/deep/__init__.py": "from toy.deep.inner import lowest\n",
        "toy/deep/inner.py": "def lowest(): ...\ndef second(): ...\n",
        "toy/deep/unmirrored.py": "def hidden(): ...\n",
        "toy/other.py": "from toy.deep.unmirrored import hidden\nthing = 1\n",
        "tests/deep/test_inner.py": "",
        "tests/test_by_name.py": "def f():\n    from toy import lowest as x\n",
        "tests/test_by_module.py": "from toy.deep import inner\n",
        "tests/test_by_attribute.py": "import toy as t\nx = t.lowest\n",
        "tests/test_by_path.py": "import toy.deep.inner\n",
        "tests/test_other.py": "from toy import thing\n",
        "tests/test_none.py": "import toy\n",
    }
    return Project(write(tmp_path, files), "toy")


def test_tests_are_those_that_import_the_file_by_any_of_its_names(project):
    expected = ["deep/test_inner", "test_by_attribute", "test_by_module", "test_by_name", "test_by_path"]
    assert project.tests_of("toy/deep/inner.py") == [f"tests/{name}.py" for name in expected]
    assert project.tests_of("toy/other.py") == ["tests/test_other.py"]


def test_a_file_without_a_mirror_has_the_tests_of_the_files_that_import_it(project):
    assert project.tests_of("toy/deep/unmirrored.py") == ["tests/test_other.py"]


@pytest.mark.slow
def test_the_test_files_that_import_a_component_are_found():
    found = Project(ROOT, "realign").tests_of("realign/interfaces/components/truncation.py")
    assert found[0] == "tests/interfaces/components/test_truncation.py"
    assert "tests/interfaces/test_ppo_graph.py" in found
    assert "tests/interfaces/test_dpo.py" not in found


def test_a_mutant_runs_its_mirror_then_the_fastest_tests_within_the_budget(tmp_path):
    seconds = {"tests/a.py": 9.0, "tests/b.py": 2.0, "tests/c.py": 1.0, "tests/d.py": 30.0, "tests/e.py": 0.1}
    results = {test: "failed" if test == "tests/e.py" else "passed" for test in seconds}
    found = {test: {"version": "", "result": results[test], "seconds": seconds[test]} for test in seconds}
    (tmp_path / "tests.json").write_text(json.dumps(found))
    measured = mutation.Measured(tmp_path, "toy", tmp_path / "tests.json", dict.fromkeys(seconds, 20.0))
    expected = ["tests/a.py", "tests/c.py", "tests/b.py"]
    assert mutation.affordable(list(seconds), "tests/a.py", measured, budget=3) == expected
    assert mutation.affordable(list(seconds), "tests/a.py", measured, budget=2) == expected[:2]
    assert measured.left_out() == {"tests/d.py": "takes more than 20 s", "tests/e.py": "fails without a mutant"}


def test_an_interval_contains_the_score():
    assert mutation.interval(90, 100) == [0.8256, 0.9448]
    assert mutation.interval(0, 0) == [0.0, 1.0]


@pytest.mark.slow
def test_a_run_kills_what_tests_notice_and_lists_what_survives(tmp_path, capsys, monkeypatch):
    files = {
        "toy/__init__.py": "from toy.code.numbers import scale\n",
        "toy/code/numbers.py": SCALE,
        "tests/code/test_numbers.py": SCALE_TEST,
        "tests/test_broken.py": "from toy import scale\n\ndef test_broken():\n    assert scale(1, True) == 0\n",
    }
    target = mutation.Target(write(tmp_path / "project", files), "toy", ("code",), ("pytest", "hypothesis"))
    monkeypatch.setattr(mutation, "EXPLAINED", tmp_path / "explained.jsonl")
    wanted = ("5:14:arithmetic", "3:10:comparison")
    (tmp_path / "ids").write_text("".join(f"toy/code/numbers.py:{each}\n" for each in wanted))
    given = [f"only={tmp_path / 'ids'}", f"folder={tmp_path / 'results'}"]

    assert mutation.main(given, target) == 1
    text = capsys.readouterr().out
    found = json.loads(text.splitlines()[-1])
    assert (found["sample"], found["killed"], found["survived"], found["score"]) == (2, 1, 1, 0.5)
    assert found["left_out"] == ["tests/test_broken.py"]
    assert "toy/code/numbers.py:3:10:comparison in scale\n    if x < 0:  =>  if x <= 0:\n    not explained" in text
    survivors = tmp_path / "results" / "survivors.txt"
    assert survivors.read_text().split()[0] == "toy/code/numbers.py:3:10:comparison"
    records = [json.loads(line) for line in (tmp_path / "results" / "results.jsonl").read_text().splitlines()]
    killed = next(record for record in records if record["result"] == "killed")
    assert killed["failed"] == "tests/code/test_numbers.py::test_scale"
    assert (target.root / "toy/code/numbers.py").read_text() == SCALE

    why = {"file": "toy/code/numbers.py", "where": "scale", "change": "if x < 0:  =>  if x <= 0:", "why": "0 is 0"}
    (tmp_path / "explained.jsonl").write_text(json.dumps(why) + "\n")
    assert mutation.main([f"only={survivors}", given[1]], target) == 0
    assert "explained: 0 is 0" in capsys.readouterr().out
    monkeypatch.setattr(mutation, "run_mutants", lambda runner, results, plan, limits, end: started.extend(plan))
    started: list[tuple[Mutant, list[str]]] = []
    assert mutation.main(["mutants=1000", given[1]], target) == 0
    assert len(started) == len(target.mutants([])["toy/code/numbers.py"]) - 2  # two results are already recorded


@pytest.mark.slow
def test_an_endless_loop_and_a_dying_process_are_killed_mutants(tmp_path):
    test = "from toy.code import f\n\ndef test_f():\n    f()\n"
    files = {"toy/__init__.py": "", "toy/code.py": "def f(): ...\n", "tests/test_code.py": test}
    root = write(tmp_path / "project", files)
    (tmp_path / "copies").mkdir()
    runner = mutation.Runner(root, "toy", tmp_path / "copies", 1, ("pytest", "hypothesis"))
    bodies = {
        "loop": "def f():\n    while True: ...\n",
        "death": "import os\ndef f(): os.kill(os.getpid(), 9)\n",
        "same": "def f(): ...  # same\n",
    }
    outcomes = {}
    limits = {"loop": 5, "death": 300, "same": 300}
    jobs = [
        mutation.Job(name, ["tests/test_code.py"], limits[name], ("toy/code.py", text)) for name, text in bodies.items()
    ]
    runner.run(jobs, lambda job, outcome: outcomes.update({job.name: outcome.result}))
    assert outcomes == {"loop": "timeout", "death": "failed", "same": "passed"}
