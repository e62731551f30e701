from __future__ import annotations

import sys

import pytest

from realign.environments import load_environment
from realign.environments.adapters import import_optional, reasoning_gym_rows
from realign.errors import ConfigError

ADAPTERS = "realign.environments.adapters"


def test_a_missing_package_is_an_error_before_the_run_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"needs the package gymnasium\. Run pip install 'realign-rl\[gymnasium\]'"):
        load_environment(f"{ADAPTERS}.gymnasium_text:GymnasiumText", {"id": "FrozenLake-v1"})


def test_rows_of_reasoning_gym_name_the_extra_if_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym\. Run pip install 'realign-rl\[tasks\]'"):
        next(reasoning_gym_rows.rows("chain_sum"))


def test_a_package_without_one_of_its_dependencies_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "half_a_package.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_optional("half_a_package", extra="x", user="y")
