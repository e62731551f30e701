import sys
import traceback
from pathlib import Path

import pytest

from realign.errors import ConfigError, RealignError
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
    Path("beside_me.py").write_text("def f(prompt, response, row): return 1\n")
    message = r"no module named 'beside_me'\. There is a file 'beside_me.py'; use 'beside_me.py:\.\.\.'"
    with pytest.raises(ConfigError, match=message):
        load_function("beside_me:f")
    assert load_function("beside_me.py:f")("", "", {}) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_answer", "the name must have the form 'package.module:function'"),
        ("realign.rewards.arithmetic:", "the name must have the form"),
        (":f", "the name must have the form"),
        ("realign.rewards.arithmetics:exact_answer", "no module named 'realign.rewards.arithmetics'"),
        ("no_such_package.x:f", "no module named 'no_such_package'"),
        ("realign.rewards.arithmetic:exact_anwser", "did you mean 'exact_answer'"),
        (f"{CASES.parent}/reward_case.py:act", "did you mean 'reward_cases.py'"),
        ("/no/such/folder/x.py:f", "the folder '/no/such/folder' does not exist"),
        (f"{CASES}:atc", "did you mean 'act'"),
        (f"{CASES}:not_a_function", "is a int; expected a function"),
        (f"{CASES}:Scaled", "is a type; expected a function"),
        (f"{CASES}:two_arguments", r"takes \(prompt, response\), but is called as function\(prompt, response, row\)"),
    ],
)
def test_a_wrong_name_says_what_is_there(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(name)
    assert repr(name) in str(caught.value)


CONSTRUCTOR = """\
class Reward:
    def __init__(self, scale):
        if scale < 0:
            raise ValueError("scale is negative")

reward = Reward(-1)
"""


@pytest.mark.parametrize("by_module", [False, True])
def test_a_constructor_that_raises_on_import_keeps_its_traceback_and_a_note_names_the_function(
    tmp_path, monkeypatch, by_module
):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = tmp_path / f"broken_constructor_{by_module}.py"
    file.write_text(CONSTRUCTOR)
    name = f"{file.stem if by_module else file}:reward"
    with pytest.raises(ValueError, match="scale is negative") as caught:
        load_function(name)
    assert str(caught.value) == "scale is negative"
    assert not isinstance(caught.value, RealignError)
    frame = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (frame.filename, frame.lineno) == (str(file), 4)
    assert caught.value.__notes__ == [f"while importing reward function {name!r}"]


def test_a_missing_package_of_the_file_keeps_its_traceback_and_the_file_can_be_imported_after_a_correction(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "broken_reward.py"
    file.write_text("import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_library") as caught:
        load_function(f"{file}:f")
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == str(file)
    file.write_text("def f(prompt, response, row): return 1\n")
    assert load_function(f"{file}:f")("", "", {}) == 1


def test_a_file_that_exits_on_import_is_a_config_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "exiting_reward.py"
    file.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match=r"exiting_reward\.py:f': its module exits while it is imported"):
        load_function(f"{file}:f")
