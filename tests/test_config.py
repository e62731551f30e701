from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from realign.api import DataflowGraph, ModelInterface
from realign.config import ConfigError, build, build_experiment, compose
from realign.config.composition import config_of
from realign.config.construct import build_graph, convert
from realign.config.experiment import resolve_config
from realign.config.files import experiments_dir, list_experiments
from realign.runtime.checks.parts import check_parts
from tests.config_parts import HERE, MUST_BE_GIVEN, Actor, Bigram, Frozen, Length, Norm, Style, write_experiment

WHERE = "interfaces.actor"


def actor(**values):
    return build({"_target_": f"{HERE}.Actor", **values}, ModelInterface, WHERE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_experiment(tmp_path)


def test_values_are_laid_over_the_defaults_of_the_class_at_every_depth():
    made = actor(
        epochs="3",
        lr=1,
        maybe=None,
        either="many",
        choice="high",
        folder="b",
        adv_norm={"std": "none", "eps": "1e-3"},
        frozen={"names": ["b", "c"]},
        rule={"_target_": f"{HERE}.Length", "scale": 2},
        rules=[{"_target_": f"{HERE}.Length"}],
        betas=[0.5, 0.6],
        weights={"a": 1},
        anything={"plain": [1, {"_target_": f"{HERE}.Length", "scale": 5}]},
        generation={"n": 4},
    )
    assert made == Actor(
        epochs=3,
        lr=1.0,
        maybe=None,
        either="many",
        choice="high",
        folder=Path("b"),
        # the mean equals the default of the field, which differs from that of Norm
        adv_norm=Norm(mean=Style.group, std=Style.none, eps=1e-3),
        frozen=Frozen(depth=7, names=("b", "c")),
        rule=Length(2.0),
        rules=[Length()],
        betas=(0.5, 0.6),
        weights={"a": 1.0},
        anything={"plain": [1, Length(5.0)]},
        generation=dataclasses.replace(Actor().generation, n=4),
    )
    assert type(made.lr) is float


def test_a_subclass_may_stand_where_its_base_is_annotated_and_keeps_its_own_defaults():
    assert actor(rule={"_target_": f"{HERE}.Length"}).rule == Length()
    with pytest.raises(
        ConfigError, match=r"actor\.rule\._target_: Norm is not a Rule \(Length of tests\..* would fit\)$"
    ):
        actor(rule={"_target_": f"{HERE}.Norm"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 2}, r"unknown key 'interfaces\.actor\.epoch'; did you mean 'epochs'\?"),
        ({"adv_norm": {"stdd": "none"}}, r"unknown key 'interfaces\.actor\.adv_norm\.stdd'; did you mean 'std'\?"),
        ({"frozen": {"dept": 1}}, r"unknown key 'interfaces\.actor\.frozen\.dept'; did you mean 'depth'\?"),
        ({"epochs": "many"}, r"interfaces\.actor\.epochs: expected int, found 'many'"),
        ({"epochs": 1.5}, r"interfaces\.actor\.epochs: expected int, found 1\.5"),
        ({"epochs": True}, r"interfaces\.actor\.epochs: expected int, found True"),
        ({"epochs": None}, r"interfaces\.actor\.epochs must not be null; expected int"),
        ({"on": "perhaps"}, r"interfaces\.actor\.on: expected bool, found 'perhaps'"),
        ({"either": [1]}, r"interfaces\.actor\.either: expected int or str, found \[1\]"),
        (
            {"choice": "lo"},
            r"interfaces\.actor\.choice: unknown choice 'lo'; did you mean 'low'\? \(valid: high, low\)",
        ),
        (
            {"adv_norm": {"std": "grup"}},
            r"interfaces\.actor\.adv_norm\.std: unknown choice 'grup'; did you mean 'group'\? "
            r"\(valid: batch, group, none\)",
        ),
        ({"adv_norm": 3}, r"interfaces\.actor\.adv_norm: expected Norm, found 3"),
        ({"adv_norm": {"eps": -1}}, r"interfaces\.actor\.adv_norm\.eps must be positive, found -1\.0"),
        ({"generation": {"n": 0}}, r"interfaces\.actor\.generation\.n=0: must be at least 1"),
        ({"rule": {"scale": 1}}, r"interfaces\.actor\.rule: expected Rule, found \{'scale': 1\}"),
        (
            {"rules": [{"_target_": f"{HERE}.Lenght"}]},
            r"interfaces\.actor\.rules\[0\]\._target_: there is no 'Lenght' in ",
        ),
        ({"rules": 3}, r"interfaces\.actor\.rules: expected a list, found 3"),
        ({"betas": [1]}, r"interfaces\.actor\.betas: expected 2 values, found 1"),
        ({"weights": {"a": 10**400}}, r"interfaces\.actor\.weights\.a: expected float, found 1000"),
        ({"weights": {"a": "x"}}, r"interfaces\.actor\.weights\.a: expected float, found 'x'"),
    ],
)
def test_trap_g6_a_wrong_value_fails_in_one_line_with_key_and_suggestion(values, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        actor(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "annotation", "raw", "meant"),
    [
        ("steps", int, "10k", "did you mean 10000?"),
        ("steps", int, "1e3", "did you mean 1000?"),
        ("steps", int, 2.5, "give a whole number"),
        ("steps", int, "5 apples", "give the number alone, without a unit"),
        ("timeout_s", float, "5m", "did you mean 300?"),
        ("timeout_s", float, "250ms", "did you mean 0.25?"),
        ("every_minutes", float, "2h", "did you mean 120?"),
        ("memory_mb", int, "1.5GB", "did you mean 1536?"),
        ("max_tokens_per_microbatch", int, "0.5k", "did you mean 500?"),
        ("max_failed_fraction", float, "10%", "did you mean 0.1?"),
        ("lr", float, "", "give a number directly after =, without a space"),
        ("lr", float, "nan", "give a number"),
        ("lr", float, "small", "give a number"),
        ("on", bool, "ja", "give true or false"),
        ("betas", tuple[float, float], 0.9, "write it in brackets, such as betas=[0.9]"),
    ],
)
def test_trap_g6_what_a_number_with_a_unit_means_is_said(key, annotation, raw, meant):
    with pytest.raises(ConfigError, match=f"^{key}: expected .*; {re.escape(meant)}$"):
        convert(raw, annotation, key)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, r"interfaces\.actor\._target_ is missing"),
        (3, r"interfaces\.actor: expected a component"),
        ({"_target_": 3}, r"interfaces\.actor\._target_ must be an import path"),
        ({"_target_": "os.system"}, r"os\.system is part of Python's standard library, which has no components"),
        ({"_target_": "subprocess.Popen"}, r"subprocess\.Popen is part of Python's standard library"),
        (
            {"_target_": "realign.cli.commands.os.system"},
            r"os\.system is not a class; expected a class that is ModelInterface",
        ),
        ({"_target_": f"{HERE}.Norm"}, r"interfaces\.actor\._target_: Norm is not a ModelInterface"),
        ({"_target_": f"{HERE}.Handmade"}, r"Handmade is not a dataclass, so its fields cannot be checked"),
        ({"_target_": f"{HERE}.Forgotten"}, r"Forgotten declares coef, but is not a @dataclass"),
        ({"_target_": f"{HERE}.Needs"}, r"interfaces\.actor\.coef is missing: give it a value \(float\)"),
        ({"_target_": f"{HERE}.Actr"}, r"there is no 'Actr' in tests\.config_parts; did you mean 'Actor'\?"),
        ({"_target_": "realign.interfaces.grppo.X"}, r"no 'grppo' in realign\.interfaces; did you mean 'grpo'\?"),
        ({"_target_": "realignn.X"}, r"no 'realignn' in the current directory .*; did you mean 'realign'\?"),
        ({"_target_": f"{HERE}.Actor.nothing"}, r"there is no 'nothing' in tests\.config_parts\.Actor"),
    ],
)
def test_trap_g6_a_wrong_target_is_refused_by_name(node, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(node, ModelInterface, WHERE)
    assert "\n" not in str(caught.value)


def test_a_target_of_another_kind_is_never_called(monkeypatch):
    called = []
    monkeypatch.setattr(os, "system", called.append)
    for target in ("realign.cli.commands.os.system", f"{HERE}.unannotated", f"{HERE}.other_kind"):
        with pytest.raises(ConfigError, match="not a function annotated -> DataflowGraph; nothing was called"):
            build_graph({"_target_": target, "command": "true"}, DataflowGraph, "graph")
        with pytest.raises(ConfigError, match="is not a class"):
            actor(anything={"_target_": target, "command": "true"})
    with pytest.raises(ConfigError, match="Popen is not a dataclass"):
        actor(anything={"_target_": "realign.rewards.sandbox.subprocess.Popen", "args": "true"})
    assert called == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"extr": True}, r"unknown key 'graph\.extr'; did you mean 'extra'\? \(valid: extra, repeats\)"),
        ({"extra": "maybe"}, r"graph\.extra: expected bool, found 'maybe'"),
        ({"repeats": 0}, r"graph\.repeats must be at least 1, found 0"),
        ({"extra": True}, r"graph: RPC 'train' reads key 'extra', which no RPC or dataset produces"),
    ],
)
def test_a_graph_function_gets_checked_arguments(values, message):
    node = {"_target_": f"{HERE}.one_call"}
    assert build_graph(node, DataflowGraph, "graph").rpcs[0].inputs == ("input_ids",)
    with pytest.raises(ConfigError, match=f"^{message}"):
        build_graph({**node, **values}, DataflowGraph, "graph")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_there_at_all", r"importing broken_\d failed: No module named 'not_there_at_all'"),
        ("def f(:", r"importing broken_\d failed: invalid syntax"),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "from realign.api import ModelInterface\n"
            "@dataclass\nclass Mine(ModelInterface):\n    a: NotImported = None\n",
            r"cannot read the annotations of Mine: name 'NotImported' is not defined",
        ),
    ],
)
def test_a_users_file_that_cannot_be_imported_says_why(tmp_path, monkeypatch, request, source, message):
    name = f"broken_{len(source) % 10}"
    (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop(name, None))
    with pytest.raises(ConfigError, match=message):
        build({"_target_": f"{name}.Mine"}, ModelInterface, WHERE)


@pytest.mark.parametrize(
    "override", ["steps=7", "interfaces.actor.generation.n=2", "interfaces.actor.epochs=3", "evaluation={}", "data.n=3"]
)
def test_trap_g7_an_override_means_the_same_before_and_after_the_experiment(folder, override):
    before = compose([override, "experiment=bigram"], folder)
    after = compose(["experiment=bigram", override], folder)
    assert before == after
    if not override.startswith("evaluation"):
        assert before != compose(["experiment=bigram"], folder)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stepss=3"], r"unknown key 'stepss'; did you mean 'steps'\?"),
        (["+stepss=3"], r"unknown key 'stepss'; did you mean 'steps'\?"),
        (["++stepss=3"], r"unknown key 'stepss'; did you mean 'steps'\?"),
        (
            ["+microbatch.max_tokens=3"],
            r"unknown key 'microbatch\.max_tokens'; did you mean 'max_tokens_per_microbatch'",
        ),
        (
            ["microbatch.max_tokens=3"],
            r"unknown key 'microbatch\.max_tokens'; did you mean 'max_tokens_per_microbatch'",
        ),
        (["experimnt=bigram"], r"unknown key 'experimnt'; did you mean 'experiment'\?"),
        (["experiment=bigrm"], r"unknown experiment 'bigrm'; did you mean 'bigram'\?"),
        (["steps=many"], r"steps: expected int, found 'many'; give a whole number"),
        (["steps=???"], r"missing values: steps\. Set a value, such as steps=VALUE\.$"),
        (["interfaces.actor.epochs=???"], r"missing values: interfaces\.actor\.epochs"),
        (["output_dir=runs/${nme}"], r"output_dir: Interpolation key 'nme' not found"),
        (
            ["interfaces.actor.label=${oc.env:NOT_SET_ANYWHERE}"],
            r"interfaces\.actor\.label: KeyError raised while resolving",
        ),
        (["steps=["], r"cannot read the override 'steps=\['"),
    ],
)
def test_trap_g6_a_wrong_override_fails_in_one_line(folder, overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        compose([*overrides] if "bigrm" in overrides[0] else ["experiment=bigram", *overrides], folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# @package _global_\nstepps: 3\n", r"experiment/broken\.yaml: unknown key 'stepps'; did you mean 'steps'\?"),
        (
            "# @package _global_\nsteps: many\n",
            r"experiment/broken\.yaml: steps: expected int, found 'many'",
        ),
        ("# @package _global_\nsteps: [3\n", r"experiment/broken\.yaml: the file cannot be read: while parsing"),
    ],
)
def test_trap_g6_a_wrong_experiment_file_fails_in_one_line(folder, text, message):
    write_experiment(folder, "broken", text)
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        compose(["experiment=broken"], folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["~interfaces.reward"], r"RPC 'reward_inf' uses role 'reward', which has no interface"),
        (["models.actor=null"], r"RPC 'actor_gen' uses role 'actor', which has no model"),
        (["graph=null"], r"graph: expected a component, found null; set its fields"),
        (["graph._target_=realign.interfaces.grpo.dataflw"], r"graph\._target_: there is no 'dataflw' in "),
        (["interfaces.actor.kl.plce=loss"], r"unknown key 'interfaces\.actor\.kl\.plce'; did you mean 'place'\?"),
        (["steps=0"], r"steps=0: must be at least 1"),
        (["microbatch.max_tokens_per_microbatch=0"], r"microbatch.max_tokens_per_microbatch=0: must be at least 1"),
        (
            [
                "evaluation.role=actr",
                f"evaluation.data._target_={HERE}.Prompts",
                f"evaluation.reward._target_={HERE}.CountThrees",
            ],
            r"evaluation\.role: no model plays 'actr'; did you mean 'actor'\?",
        ),
        (
            ["interfaces.reward.temperature=0.5"],
            r"interfaces\.reward\.temperature=0\.5: it differs from interfaces\.actor\.generation\.temperature=1",
        ),
    ],
)
def test_parts_that_do_not_fit_fail_before_anything_is_loaded(folder, monkeypatch, overrides, message):
    monkeypatch.setattr(Bigram, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ConfigError, match=message):
        check_parts(build_experiment(compose(["experiment=bigram", *overrides], folder)))


def test_the_resolved_config_holds_every_default_and_builds_the_same_run(folder):
    config = compose(["experiment=bigram", "interfaces.actor.adv_norm.std=none", "seed=3"], folder)
    experiment = build_experiment(config)
    plain = yaml.safe_load(yaml.safe_dump(resolve_config(config, experiment)))
    assert plain["interfaces"]["actor"]["objective"]["low"] == 0.2
    assert plain["interfaces"]["actor"]["adv_norm"]["std"] == "none"
    assert plain["graph"] == {"_target_": "realign.interfaces.grpo.dataflow"}
    assert plain["output_dir"] == "runs/bigram"
    again = build_experiment(config_of(plain))
    assert again == experiment


ALTERNATIVES = {"interfaces.agent.agent=mine.py:agent"}
"""Values among them that are not required, since a setting of another kind can replace them."""


@pytest.mark.parametrize("name", sorted(list_experiments()))
def test_trap_g7_every_shipped_experiment_composes_and_builds(name):
    given = MUST_BE_GIVEN.get(name, [])
    for left_out in [value for value in given if value not in ALTERNATIVES]:
        with pytest.raises(ConfigError, match=f"missing values: {left_out.partition('=')[0]}"):
            compose([f"experiment={name}", *(g for g in given if g != left_out)])
    before, after = (["steps=3", f"experiment={name}"], [f"experiment={name}", "steps=3"])
    assert compose([*before, *given]) == compose([*after, *given])
    experiment = build_experiment(compose([f"experiment={name}", *given]))
    assert experiment.steps >= 1
    assert list_experiments()[name], "the first comment line of an experiment says what it is"


def test_importing_and_composing_need_neither_torch_nor_transformers(folder):
    code = (
        "import sys; from realign.config import compose;"
        "assert 'hydra' not in sys.modules;"
        f"compose(['experiment=bigram'], {str(folder)!r});"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=experiments_dir().parent)


def test_a_model_that_no_interface_plays_is_refused():
    given = ["models.actor.path=m", "models.reward.path=r", "data.path=p.jsonl"]
    with pytest.raises(ConfigError, match=r"models\.actr: no interface plays 'actr'; did you mean 'actor'\?"):
        build_experiment(compose(["experiment=ppo", *given, "models.actr.path=x"]))
