import sys
from pathlib import Path

import pytest

from realign.rewards import exact_answer, load_function

CASES = Path(__file__).parent / "reward_cases.py"


def test_by_module_and_by_file(tmp_path):
    assert load_function("realign.rewards.arithmetic:exact_answer") is exact_answer
    act = load_function(f"{CASES}:act")
    assert act("", "", {"value": 2}) == 2
    assert load_function(f"{CASES}:act") is act


def test_a_file_may_be_named_like_an_installed_module_and_import_its_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "math.py").write_text(
        "from neighbour_of_math import HALF\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Row:\n    x: int\n"
        "def reward(prompt, response, row):\n    return HALF * Row(4).x\n"
    )
    (tmp_path / "neighbour_of_math.py").write_text("HALF = 0.5\n")
    assert load_function(f"{tmp_path}/math.py:reward")("", "", {}) == 2.0
    import math

    assert math.sqrt(4) == 2


def test_the_name_is_relative_to_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(Path.cwd()))])
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(prompt, response, row): return 1\n")
    with pytest.raises(ValueError, match=r"no module named 'mine'; there is a file 'mine.py': write 'mine.py:...'"):
        load_function("mine:f")
    assert load_function("mine.py:f")("", "", {}) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_answer", "must be written as 'package.module:function'"),
        ("realign.rewards.arithmetic:", "must be written as"),
        (":f", "must be written as"),
        ("realign.rewards.arithmetics:exact_answer", "no module named 'realign.rewards.arithmetics'"),
        ("no_such_package.x:f", "no module named 'no_such_package'"),
        ("realign.rewards.arithmetic:exact_anwser", "did you mean 'exact_answer'"),
        (f"{CASES.parent}/reward_case.py:act", "did you mean 'reward_cases.py'"),
        ("/no/such/folder/x.py:f", "the folder '/no/such/folder' does not exist"),
        (f"{CASES}:atc", "did you mean 'act'"),
        (f"{CASES}:not_a_function", "is a int, expected a function"),
        (f"{CASES}:Scaled", "is a type, expected a function"),
        (f"{CASES}:asynchronous", "is async"),
        (f"{CASES}:two_arguments", r"takes \(prompt, response\), but is called as function\(prompt, response, row\)"),
    ],
)
def test_a_wrong_name_says_what_is_there(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_function(name)
    assert repr(name) in str(caught.value)


def test_an_import_that_fails_is_shown_with_its_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "broken_reward.py"
    file.write_text("import no_such_library\n")
    with pytest.raises(ValueError, match=r"importing .* failed: ModuleNotFoundError.*no_such_library") as caught:
        load_function(f"{file}:f")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    file.write_text("def f(prompt, response, row): return 1\n")
    assert load_function(f"{file}:f")("", "", {}) == 1
