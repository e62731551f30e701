from __future__ import annotations

from pathlib import Path

import pytest

from realign.environments import load_environment
from realign.environments.loading import takes_seed
from realign.errors import ConfigError
from tests.environments import environment_fixtures as fixtures

FILE = Path(fixtures.__file__)
MODULE = fixtures.__name__


def test_a_class_is_found_by_module_or_file_and_made_anew_each_time():
    make = load_environment(f"{MODULE}:Tool", {"tag": "a"})
    first, second = make(), make()
    assert isinstance(first, fixtures.Tool)
    assert (first.tag, first is second) == ("a", False)
    assert type(load_environment(f"{FILE}:Tool", {})()).__name__ == "Tool"


@pytest.mark.parametrize(
    ("name", "arguments", "found"),
    [
        (
            "Tool",
            {},
            r"environment 'Tool': the name must have the form 'package\.module:Class' or 'path/to/file\.py:Class'",
        ),
        (f"{MODULE}:Tol", {}, r"has no 'Tol'; found .*did you mean 'Tool'\?"),
        (f"{MODULE}:function", {}, "is a function; expected a class"),
        (f"{MODULE}:NoStep", {}, r"has no method step\(response\)"),
        (f"{MODULE}:OddStep", {}, r"OddStep\.step' cannot be called as OddStep\.step\(self, response\): too many"),
        (f"{MODULE}:Tool", {"tags": 1}, r"cannot be called as Tool\(tags=\): got an unexpected keyword argument"),
        ("nowhere.at.all:Tool", {}, "no module named 'nowhere'"),
        ("subprocess:Popen", {}, "is in Python's standard library, which contains none"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_is_loaded(name, arguments, found):
    with pytest.raises(ConfigError, match=found):
        load_environment(name, arguments)


def test_the_check_of_a_class_gets_its_arguments_before_the_run():
    with pytest.raises(ConfigError, match="tag=a"):
        load_environment(f"{MODULE}:Checked", {"tag": "a"})


def test_a_seed_is_given_to_those_who_take_one():
    assert takes_seed(fixtures.Tool().reset)
    assert takes_seed(lambda row, **more: None)
    assert not takes_seed(fixtures.Plain().reset)
