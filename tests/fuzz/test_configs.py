"""Fuzz shipped experiments with plausible and implausible overrides.

Oracles: unknown keys raise errors. The resolved config contains each accepted value, has no NaN, and builds the same
experiment again. Names in values are never called.
"""

from __future__ import annotations

import copy
import math
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from realign.config import ConfigError, ExperimentConfig, build_experiment, compose
from realign.config.composition import config_of
from realign.config.experiment import COMPONENTS, resolve_config
from realign.config.files import list_experiments
from tests.fuzz.refusals import BOUNDED, Refused, attempt

EXPERIMENTS = sorted(list_experiments())
CALLABLES = ("os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "pathlib.Path", "shutil.rmtree")
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.sampled_from([2**31, 2**63, -(2**70), 0.0, -1.0, 0.5, 1e308, math.inf, -math.inf, math.nan]),
    st.sampled_from(["", " ", "true", "1e3", "nan", "???", "../up", "a/b", "\n", "[bold]x", "auto", "none", "group"]),
    st.text(max_size=3),
    st.just([]),
    st.just([1]),
    st.just({}),
    st.just({"a": 1}),
    st.sampled_from(CALLABLES).map(lambda path: {"_target_": path}),
    st.sampled_from(CALLABLES).map(lambda path: {"_target_": path, "command": "true", "args": ["true"]}),
)


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield path and value of everything in a config, including mappings and lists."""
    if path:
        yield path, node
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


@cache
def whole(name: str) -> dict[str, Any]:
    """Return all values of a shipped experiment, including defaults."""
    overrides = [f"experiment={name}"]
    if name == "grpo_agent":  # either an agent or a command must be set
        overrides.append("interfaces.agent.agent=module:function")
    try:
        config = compose(overrides)
    except ConfigError as error:  # values that users must set
        missing = str(error).partition(". Set")[0].removeprefix("missing values: ").split(", ")
        values = {"interfaces.reward.function": "realign.rewards.arithmetic:exact_answer"}
        config = compose([*overrides, *(f"{key}={values.get(key, 'x')}" for key in missing)])
    return resolve_config(config, build_experiment(config))


@contextmanager
def no_call() -> Iterator[None]:
    """Fail if a config calls a function that could cause damage."""
    refuse = mock.Mock(side_effect=AssertionError("called"))
    with mock.patch.multiple(os, system=refuse, popen=refuse), mock.patch.object(subprocess, "Popen", refuse):
        yield


def put(node: Any, path: tuple[Any, ...], value: Any) -> None:
    """Set the value at `path`."""
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value


def get(node: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at `path`, or None if there is none."""
    for key in path:
        if not isinstance(node, Mapping | list) or (isinstance(node, Mapping) and key not in node):
            return None
        node = node[key]
    return node


def check(plain: Mapping[str, Any]) -> Any:
    """Build an experiment from plain values. An accepted config must build the same experiment again."""

    def build() -> tuple[ExperimentConfig, Any]:
        config = config_of(copy.deepcopy(dict(plain)))
        return config, build_experiment(config)

    with no_call():
        outcome = attempt(build)
    if isinstance(outcome, Refused):
        assert "\n" not in outcome.message
        return outcome
    taken = resolve_config(*outcome)
    assert not [path for path, value in leaves(taken) if isinstance(value, float) and math.isnan(value)]
    again = config_of(copy.deepcopy(taken))
    assert resolve_config(again, build_experiment(again)) == taken
    return taken


@BOUNDED
@given(st.sampled_from(EXPERIMENTS), st.data())
def test_a_value_that_is_odd(name, data):
    plain = copy.deepcopy(whole(name))
    path = data.draw(st.sampled_from([path for path, _ in leaves(plain)]))
    value = data.draw(ODD)
    put(plain, path, copy.deepcopy(value))
    outcome = check(plain)
    if isinstance(outcome, Refused):
        return
    shown = get(outcome, path)
    if isinstance(value, int | float) and not isinstance(value, bool) and isinstance(shown, int | float):
        # the accepted value is the given one; one without effect becomes the default, and the launch table says so
        idle = build_experiment(config_of(copy.deepcopy(plain))).idle
        assert float(shown) == float(value) or any(line.startswith(f"{'.'.join(map(str, path))}=") for line in idle)
    if path[-1] == "_target_" or (isinstance(value, dict) and value.get("_target_") in CALLABLES):
        assert value in (None, {}), f"{'.'.join(map(str, path))} took {value}"


@BOUNDED
@given(st.sampled_from(EXPERIMENTS), st.data())
def test_a_key_that_is_misspelt_or_missing(name, data):
    plain = copy.deepcopy(whole(name))
    paths = [path for path, _ in leaves(plain) if isinstance(path[-1], str)]
    path = data.draw(st.sampled_from(paths))
    owner = get(plain, path[:-1]) if path[:-1] else plain
    value = owner.pop(path[-1])
    if data.draw(st.booleans()):
        check(plain)
        return
    wrong = data.draw(st.sampled_from([path[-1] + "s", path[-1][:-1], path[-1].upper(), "x." + path[-1], ""]))
    assume(wrong not in owner)
    owner[wrong] = value
    outcome = check(plain)
    roles = (len(path) == 2 and path[0] in COMPONENTS) or path[:-1][-1:] in (("rename",), ("template_options",))
    assert isinstance(outcome, Refused) or roles, f"{wrong!r} beside {path}"


KEYS = st.sampled_from([".".join(map(str, path)) for path, _ in leaves(whole("grpo_arithmetic"))])
TYPED = (
    *("1", "-1", "null", "???", "nan", "''", "[]", "{}", "{a: 1}", "ten", "${steps}", "${nothing}", "1,2", "a b", "é"),
    *("{_target_: os.system}", "${oc.env:HOME}", "range(3)", "\\", "'", "[", "${", "$", "=", "a=b", "!!x", "&y"),
)
OVERRIDES = st.one_of(
    st.builds(
        "{}{}={}".format,
        st.sampled_from(["", "", "+", "++", "~"]),
        KEYS,
        st.sampled_from(TYPED),
    ),
    KEYS.map("~{}".format),
    st.text(max_size=8),
    st.sampled_from(
        ["experiment=grpo", "algorithm=rloo", "experiment=", "algorithm=no", "+a.b=1", "hydra.mode=MULTIRUN"]
    ),
)


@BOUNDED
@given(st.lists(OVERRIDES, min_size=1, max_size=3))
def test_overrides_as_they_are_typed(overrides):
    with no_call():
        config = attempt(lambda: compose(["experiment=grpo_arithmetic", *overrides]))
        if isinstance(config, Refused):
            assert "\n" not in config.message
            return
        outcome = attempt(lambda: build_experiment(config))
    if isinstance(outcome, Refused):
        return
    taken = resolve_config(config, outcome)
    OmegaConf.create(taken)
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if value in ("1", "-1") and "." in key and not key.startswith(("trackers", "hydra")):
            shown = get(taken, tuple(int(part) if part.isdigit() else part for part in key.split(".")))
            later = any(other.lstrip("+~").startswith(key.split(".")[0]) for other in overrides if other != override)
            assert later or shown is None or float(shown) == float(value) or isinstance(shown, str)
