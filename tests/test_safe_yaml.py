"""Test that YAML of others is read in bounded time and memory, and that nothing else reads YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import realign
from realign.safe_yaml import LONGEST, check_yaml, load_yaml
from tests.config_parts import bomb
from tests.syntax_trees import calls_of


@pytest.mark.parametrize("levels", [6, 9, 300])
def test_aliases_that_repeat_too_many_values_are_refused(levels):
    with pytest.raises(yaml.YAMLError, match="repeat too many values"):
        check_yaml(bomb(levels))


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [*a]",
        "a: &a {b: *a}",
        "date: 9999-99-99",
        f"number: {'9' * 5000}",
        "[" * 600,  # deeper than the stack of Python
        "&a " + "[" * 600 + "*b",
        "a: [unclosed",
        "x" * (LONGEST + 1),
    ],
)
def test_every_text_that_cannot_be_read_is_a_yaml_error(text):
    with pytest.raises(yaml.YAMLError, match=r"\w"):
        load_yaml(text)


def test_nothing_else_reads_yaml():
    package, files = Path(realign.__file__).parent, []
    for file, name, _ in calls_of(package, r"yaml\.\w*load|OmegaConf\.load"):
        if name in ("yaml.load", "yaml.safe_load", "yaml.full_load", "yaml.load_all", "OmegaConf.load"):
            files.append(str(file.relative_to(package)))
    assert files == ["config/aliases.py", "safe_yaml.py"]  # the first reads a file of the package, names.yaml
