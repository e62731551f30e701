"""Every shipped reward function that reads an answer reads it alike, whatever a file or pandas made of it."""

import importlib
import inspect
import pkgutil

import pytest

import realign.rewards
from realign.rewards import reasoning
from realign.rewards.unit_tests import UnitTestsFunction
from tests.answer_cells import FOUR, NOTHING

RESPONSES = {  # a right and a wrong response of each
    "exact_answer": ("4", "5"),
    "tagged_answer": ("<think></think><answer>4</answer>", "<think></think><answer>None</answer>"),
    "same_value": (r"so \boxed{4}", r"so \boxed{5}"),
    "verified": ("4", "None"),
    "last_number": ("it is 4", "it is 5"),
}


def reading(column):
    """Return the shipped functions that fail on a row without this column, by name."""
    readers = {}
    for module in pkgutil.iter_modules(realign.rewards.__path__):
        for name, function in vars(importlib.import_module(f"realign.rewards.{module.name}")).items():
            own = getattr(function, "__module__", "") == f"realign.rewards.{module.name}"
            if not own or not callable(function) or isinstance(function, type) or name.startswith("_"):
                continue
            if list(inspect.signature(function).parameters) == ["prompt", "response", "row"]:
                source = inspect.getsource(function if inspect.isroutine(function) else type(function))
                readers |= {name: function} if f'row["{column}"]' in source else {}
    return readers


@pytest.fixture(autouse=True)
def verifier(monkeypatch):
    monkeypatch.setattr(reasoning, "_verifier", lambda task: lambda answer, entry: float(answer == entry["answer"]))


FUNCTIONS = reading("answer") | {"last_number": reasoning.last_number}


def test_all_functions_are_found():
    assert FUNCTIONS.keys() == RESPONSES.keys()
    assert reading("tests").keys() == {"passes"}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_row_without_an_answer_gives_no_reward_to_any_response(name):
    for cell in NOTHING:
        row = {"prompt": "2+2=", "task": "sums", "answer": cell}
        for response in (*RESPONSES[name], "None", "nan", "", "[]"):
            assert FUNCTIONS[name]("", response, row) is None, repr(cell)


@pytest.mark.parametrize("name", RESPONSES)
def test_the_same_answer_gives_the_same_reward_however_it_came(name):
    right, wrong = RESPONSES[name]
    for cell in FOUR:
        row = {"prompt": "2+2=", "task": "sums", "answer": cell}
        assert (FUNCTIONS[name]("", right, row), FUNCTIONS[name]("", wrong, row)) == (1.0, 0.0), repr(cell)


def test_programs_without_tests_have_no_reward_and_a_list_of_tests_is_run_as_a_whole(monkeypatch):
    run = []
    monkeypatch.setattr("realign.rewards.unit_tests.runs_to_its_end", lambda program, *_: run.append(program) or True)
    passes = UnitTestsFunction(mode="off")
    for cell in (None, "", " \n", [], [None], ()):
        assert passes("", "x = 1", {"tests": cell}) is None
    assert run == []
    assert passes("", "x = 1", {"tests": ["assert x", "assert x == 1"]}) == 1.0
    assert run == ["x = 1\n\nassert x\nassert x == 1\n"]
