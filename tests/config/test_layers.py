"""Test layers: experiment < algorithm < command line. Choosing another class in a layer discards the fields of lower
layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from realign.cli.launch_table import derived_rows
from realign.config import ConfigError, build_experiment, compose
from tests.config.components import (
    BASE,
    GAE,
    HERE,
    Actor,
    Clip,
    GroupMean,
    GroupRelative,
    Gspo,
    ImportanceCorrection,
    Rejection,
    SequenceActor,
    TightClip,
    Zero,
)

OBJECTIVE = "interfaces.actor.objective"
MINE = f"""
from dataclasses import dataclass, field
from {HERE} import Actor, Clip, Objective

@dataclass
class Square(Objective):
    power: int = 2

@dataclass
class Shape:
    pass

@dataclass
class RoundShape(Shape):
    radius: float = 1.0

@dataclass
class FlatShape(Shape):
    width: float = 1.0

@dataclass
class MyActor(Actor):
    shape: Shape = field(default_factory=FlatShape)
"""


class Folder:
    """User folder with experiments and algorithms."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("experiment/base", BASE)

    def write(self, name: str, text: str) -> None:
        file = self.path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text if text.startswith("#") else f"# @package _global_\n{text}", encoding="utf-8")

    def actor(self, name: str, fields: str, parent: str = "base") -> None:
        """Write an experiment that overrides fields of the actor of another experiment."""
        self.write(f"experiment/{name}", f"defaults: [{parent}, _self_]\ninterfaces: {{actor: {fields}}}\n")

    def preset(self, name: str, fields: str) -> None:
        self.write(f"algorithm/{name}", f"interfaces: {{actor: {fields}}}\n")

    def experiment(self, *overrides: str, name: str = "base"):
        return build_experiment(compose([f"experiment={name}", *overrides], self.path))

    def built(self, *overrides: str, name: str = "base"):
        return self.experiment(*overrides, name=name).interfaces["actor"]

    def error(self, *overrides: str, name: str = "base") -> str:
        with pytest.raises(ConfigError) as caught:
            self.experiment(*overrides, name=name)
        assert "\n" not in str(caught.value)
        return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_file.py").write_text(MINE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_file"
    sys.modules.pop("my_file", None)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (["objective=gspo"], Gspo()),
        (["objective='gspo'"], Gspo()),
        ([f"objective._target_={HERE}.Gspo"], Gspo()),
        ([f"objective={{_target_: {HERE}.Gspo}}"], Gspo()),
        (["objective=gspo", "objective.high=0.28"], Gspo(high=0.28)),
        (["objective.high=0.28", "objective=gspo"], Gspo(high=0.28)),
        (["+objective=gspo", "++objective.high=0.28"], Gspo(high=0.28)),
        (["objective.high=0.28", f"objective._target_={HERE}.Gspo"], Gspo(high=0.28)),
        ([f"objective={{_target_: {HERE}.Gspo}}", "objective.high=0.28"], Gspo(high=0.28)),
        (["objective={high: 0.28}", "objective=gspo"], Gspo(high=0.28)),
        (["objective={high: 0.28}"], Clip(high=0.28)),
        (["objective.low=0.1"], Clip(low=0.1, high=0.25)),
        (["objective=clip", "objective=gspo", "objective.high=0.28"], Gspo(high=0.28)),
        (["objective=gspo", "objective.high=0.1", "~objective.high"], Gspo()),
    ],
)
def test_every_kind_of_spelling_of_a_choice_builds_the_same(folder, spelling, expected):
    prefixes = ("++", "+", "~", "")
    words = []
    for word in spelling:
        prefix = next(prefix for prefix in prefixes if word.startswith(prefix))
        words.append(f"{prefix}interfaces.actor.{word.removeprefix(prefix)}")
    assert folder.built(*words) == Actor(epochs=3, objective=expected)


@pytest.mark.parametrize("fields", ["{}", "{objective: gspo}", f"{{objective: {{_target_: {HERE}.Gspo, low: 0.01}}}}"])
def test_every_spelling_of_a_choice_means_the_same_over_every_experiment(folder, fields):
    folder.actor("above", fields)
    for words in (
        [f"{OBJECTIVE}=tight_clip", f"{OBJECTIVE}.low=0.3"],
        [f"{OBJECTIVE}.low=0.3", f"{OBJECTIVE}=tight_clip"],
        [f"{OBJECTIVE}._target_={HERE}.TightClip", f"{OBJECTIVE}.low=0.3"],
        [f"{OBJECTIVE}={{_target_: {HERE}.TightClip, low: 0.3}}"],
        ["interfaces.actor={objective: tight_clip}", f"{OBJECTIVE}.low=0.3"],
    ):
        assert folder.built(*words, name="above").objective == TightClip(low=0.3)


def test_a_word_in_yaml_takes_fields_of_higher_layers(folder):
    folder.actor("words", "{objective: gspo, correction: importance_correction}")
    assert folder.built(name="words").objective == Gspo()
    assert folder.built(f"{OBJECTIVE}.high=0.1", name="words").objective == Gspo(high=0.1)
    folder.actor("child", "{objective: {high: 0.1}}", parent="words")
    assert folder.built(name="child").objective == Gspo(high=0.1)
    assert folder.built("interfaces.actor.correction.cap=3", name="words").correction == ImportanceCorrection(cap=3)
    assert folder.built("interfaces.actor.correction=none", name="words").correction is None
    assert folder.built("interfaces.actor.correction=null", name="words").correction is None


def test_components_in_components_and_mappings_of_components_take_words(folder):
    words = ["interfaces.actor.advantage=group_relative", "interfaces.actor.advantage.baseline=zero"]
    assert folder.built(*words).advantage == GroupRelative(Zero())
    assert folder.built(*reversed(words)).advantage == GroupRelative(Zero())
    more = ["interfaces.actor.advantage.baseline=group_mean", "interfaces.actor.advantage.baseline.min_size=4"]
    assert folder.built(words[0], *more).advantage == GroupRelative(GroupMean(4))
    assert folder.built(*reversed(more), words[0]).advantage == GroupRelative(GroupMean(4))
    terms = ["interfaces.actor.terms.a=gspo", "interfaces.actor.terms.a.high=0.5", "interfaces.actor.terms.b=clip"]
    assert folder.built(*terms).terms == {"a": Gspo(high=0.5), "b": Clip()}
    correction = ["interfaces.actor.correction.rejection=rejection", "interfaces.actor.correction.rejection.cap=9"]
    assert folder.built(*correction).correction == ImportanceCorrection(rejection=Rejection(9))


def test_a_class_in_a_users_file_is_chosen_by_target_and_has_words_of_its_own(folder, mine):
    target = f"{OBJECTIVE}._target_={mine}.Square"
    for words in ([target, f"{OBJECTIVE}.power=3"], [f"{OBJECTIVE}.power=3", target]):
        assert folder.built(*words).objective.power == 3
    folder.actor("clipped", "{objective: {dual: 3, high: 0.3}}")
    made = folder.experiment(target, name="clipped")
    assert type(made.interfaces["actor"].objective).__name__ == "Square"
    assert len(made.dropped) == 2
    actor = f"interfaces.actor._target_={mine}.MyActor"
    made = folder.built("interfaces.actor.shape.radius=2", "interfaces.actor.shape=round_shape", actor, name="clipped")
    assert (made.shape.radius, made.epochs, made.objective) == (2.0, 3, Clip(dual=3, high=0.3))
    # The file is imported now, so that the class has a word.
    assert folder.built(f"{OBJECTIVE}=square", f"{OBJECTIVE}.power=3").objective.power == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["objective=gsop"], "interfaces.actor.objective: unknown choice 'gsop'; did you mean 'gspo'? (valid: clip, "),
        (["objective=gsop", "objective.high=1"], "interfaces.actor.objective: unknown choice 'gsop'; did you mean"),
        (["objective=none"], "interfaces.actor.objective: unknown choice 'none'"),
        (["objective=null"], "interfaces.actor.objective must not be null; expected Objective (valid: clip, gspo"),
        (["objective=gspo", "objective.dual=3"], "unknown key 'interfaces.actor.objective.dual'"),
        (
            ["objective=gspo", "objective.high=3"],
            "interfaces.actor.objective.high=3.0: must be at least 0 and",
        ),
        (
            ["correction=none", "correction.cap=3"],
            "interfaces.actor.correction.cap sets a field of interfaces.actor.",
        ),
        (
            ["correction.cap=3", "correction=null"],
            "interfaces.actor.correction.cap sets a field of interfaces.actor.",
        ),
        (["objective=gspo", f"objective._target_={HERE}.Clip"], "gspo and tests.config.components.Clip are chosen for"),
        (
            [f"objective={{_target_: {HERE}.Clip}}", "objective=gspo"],
            "config.components.Clip and gspo are chosen",
        ),
        (["label=gspo", "label.x=1"], "interfaces.actor.label=gspo is not a component, but a further key sets a field"),
        (["+epochs=2"], "Could not append to config. An item is already at 'interfaces.actor.epochs'"),
    ],
)
def test_overrides_that_do_not_fit_together_are_errors(folder, words, message):
    prefixed = [f"+interfaces.actor.{w[1:]}" if w[0] == "+" else f"interfaces.actor.{w}" for w in words]
    assert message in folder.error(*prefixed)


CLIPPED = "{objective: {low: 0.3, dual: 3}}"


@pytest.mark.parametrize("word", ["gspo", f"{{_target_: {HERE}.Gspo}}"])
def test_a_higher_layer_with_another_class_discards_fields_and_reports_them(folder, word):
    folder.actor("clipped", CLIPPED)
    folder.actor("child", f"{{objective: {word}}}", parent="clipped")
    on_the_command_line = folder.experiment(f"{OBJECTIVE}={word}", name="clipped")
    for made, by in ((folder.experiment(name="child"), "experiment=child"), (on_the_command_line, "the command line")):
        assert made.interfaces["actor"].objective == Gspo()
        assert made.dropped == [
            f"{OBJECTIVE}.low=0.3 of experiment/clipped.yaml (by {by})",
            f"{OBJECTIVE}.dual=3 of experiment/clipped.yaml (by {by})",
        ]
        row = dict(derived_rows(made))["config keys replaced by a higher layer"]
        assert row == f"{OBJECTIVE}.low=0.3, {OBJECTIVE}.dual=3 of experiment/clipped.yaml (by {by})"


def test_fields_for_the_same_class_are_merged_however_it_is_named(folder):
    folder.actor("clipped", CLIPPED)
    for choice in (["objective=clip"], [f"objective._target_={HERE}.Clip"], [f"objective._target_={HERE}_again.Clip"]):
        if "_again" in choice[0]:
            choice = ["objective._target_=realign.again.Clip"]
            sys.modules["realign.again"] = sys.modules[HERE]
        try:
            made = folder.experiment(*(f"interfaces.actor.{word}" for word in choice), name="clipped")
        finally:
            sys.modules.pop("realign.again", None)
        assert made.interfaces["actor"].objective == Clip(low=0.3, dual=3)
        assert made.dropped == []


def test_another_interface_keeps_the_settings_that_it_shares_and_drops_the_others(folder):
    fields = f"{{only_here: 4, objective: {{low: 0.3}}, advantage: {{_target_: {HERE}.GAE, lam: 0.5}}}}"
    folder.actor("full", fields)
    target = f"interfaces.actor._target_={HERE}.SequenceActor"
    made = folder.experiment(target, name="full")
    assert made.interfaces["actor"] == SequenceActor(epochs=3, advantage=GAE(0.5))
    assert sorted(made.dropped) == [
        "interfaces.actor.objective.low=0.3 of experiment/full.yaml (by the command line)",
        "interfaces.actor.only_here=4 of experiment/full.yaml (by the command line)",
    ]
    assert folder.built(target, f"{OBJECTIVE}=clip", name="full").objective == Clip(low=0.3)
    assert folder.built(target, f"{OBJECTIVE}._target_={HERE}.Clip", name="full").objective == Clip(low=0.3)
    assert folder.built(target, f"{OBJECTIVE}.high=0.5", name="full").objective == Gspo(high=0.5)
    assert "unknown key 'interfaces.actor.only_here'" in folder.error(target, "interfaces.actor.only_here=1")


def test_interpolations_work_across_layers(folder):
    folder.write(
        "experiment/tied",
        "defaults: [base, _self_]\n"
        "interfaces: {actor: {epochs: '${batch_prompts}', terms: {a: '${interfaces.actor.objective}'}}}\n",
    )
    words = [f"{OBJECTIVE}=gspo", f"{OBJECTIVE}.high=0.5", "batch_prompts=7"]
    made = folder.built(*words, name="tied")
    assert (made.epochs, made.terms) == (7, {"a": Gspo(high=0.5)})
    made = folder.built(*words, "interfaces.actor.terms.b=clip", "interfaces.actor.terms.b.low=0.1", name="tied")
    assert made.terms == {"a": Gspo(high=0.5), "b": Clip(low=0.1)}
    folder.actor(
        "copied", f"{{terms: {{a: {{_target_: {HERE}.Clip, low: 0.5}}}}, objective: '${{interfaces.actor.terms.a}}'}}"
    )
    assert folder.built(name="copied").objective == Clip(low=0.5)
    assert folder.built(f"{OBJECTIVE}=gspo", name="copied").objective == Gspo()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["~interfaces.actor.objective"], Clip(high=0.25)),
        (["~interfaces.actor.objective.low"], Clip(high=0.25, dual=3)),
        (["~interfaces.actor.objective", f"{OBJECTIVE}=gspo"], Gspo()),
        (["~interfaces.actor.objective.low", f"{OBJECTIVE}=gspo"], Gspo()),
    ],
)
def test_keys_can_be_deleted(folder, words, expected):
    folder.actor("clipped", CLIPPED)
    assert folder.built(*words, name="clipped").objective == expected


@pytest.fixture
def presets(folder: Folder) -> Folder:
    folder.actor("clipped", "{objective: {low: 0.3, dual: 3}, correction: {cap: 3}, epochs: 6, label: mine}")
    folder.preset("mine", f"{{objective: {{_target_: {HERE}.Gspo, low: 0.01}}, style: gspo}}")
    folder.preset("worded", "{objective: gspo}")
    folder.preset("clip", "{objective: clip}")
    return folder


def test_a_preset_resets_the_settings_of_the_algorithm_and_nothing_else(presets):
    made = presets.experiment("algorithm=mine", name="clipped")
    assert made.interfaces["actor"] == Actor(
        objective=Gspo(low=0.01), style=made.interfaces["actor"].style, epochs=6, label="mine"
    )
    assert [line.partition(" (")[0] for line in made.dropped] == [
        f"{OBJECTIVE}.low=0.3 of experiment/clipped.yaml",
        f"{OBJECTIVE}.dual=3 of experiment/clipped.yaml",
        "interfaces.actor.correction.cap=3 of experiment/clipped.yaml",
    ]
    # the class is the same, and its fields are still discarded
    assert presets.built("algorithm=clip", name="clipped").objective == Clip()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([f"objective._target_={HERE}.Clip"], Clip()),
        ([f"objective={{_target_: {HERE}.Clip, dual: 3}}"], Clip(dual=3)),
        (["objective.dual=3", "objective=clip"], Clip(dual=3)),
        (["~objective"], Clip(high=0.25)),  # the default of the class, not the experiment's
        (["~objective.low"], Gspo()),
    ],
)
def test_what_is_typed_wins_over_a_preset(presets, words, expected):
    prefixed = [f"~interfaces.actor.{w[1:]}" if w[0] == "~" else f"interfaces.actor.{w}" for w in words]
    made = presets.built("algorithm=mine", *prefixed, name="clipped")
    assert (made.objective, made.style.name, made.correction) == (expected, "gspo", None)


def test_a_key_that_the_class_of_a_preset_does_not_have_names_the_preset(presets):
    message = presets.error("algorithm=mine", f"{OBJECTIVE}.dual=3", name="clipped")
    assert "unknown key 'interfaces.actor.objective.dual'" in message
    assert message.endswith("; algorithm=mine sets the class of interfaces.actor.objective")
    typed = presets.error("algorithm=mine", f"{OBJECTIVE}=gspo", f"{OBJECTIVE}.dual=3", name="clipped")
    assert "algorithm=mine" not in typed


def test_a_preset_on_a_preset_resets_once_and_a_second_preset_again(presets):
    presets.write("algorithm/child", "defaults: [mine, _self_]\ninterfaces: {actor: {objective: {high: 0.02}}}\n")
    made = presets.experiment("algorithm=child", name="clipped").interfaces["actor"]
    assert (made.objective, made.style.name, made.epochs) == (Gspo(low=0.01, high=0.02), "gspo", 6)
    presets.write("experiment/on_child", "defaults: [clipped, _self_, /algorithm/child]\nsteps: 3\n")
    assert presets.built("algorithm=worded", name="on_child") == presets.built("algorithm=worded", name="clipped")


def test_a_preset_resets_the_settings_that_a_users_class_adds_and_those_of_its_base_class(folder, mine):
    own = """
@dataclass
class Shaped(Actor):
    ALGORITHM_SETTINGS = (*Actor.ALGORITHM_SETTINGS, "terms.first", "label")
    objective: Objective = field(default_factory=Square)
"""
    (folder.path / "my_file.py").write_text(MINE + own, encoding="utf-8")
    fields = "objective: clip, label: y, only_here: 2, terms: {first: clip, second: clip}"
    folder.actor("shaped", f"{{_target_: {mine}.Shaped, {fields}}}")
    folder.preset("leaf", "{style: gspo}")
    made = folder.built("algorithm=leaf", name="shaped")
    assert (type(made).__name__, type(made.objective).__name__) == ("Shaped", "Square")
    assert (made.label, made.only_here) == ("x", 2)
    assert made.terms == {"second": Clip()}


def test_an_experiment_may_build_on_a_preset_and_choose_otherwise(presets):
    presets.write(
        "experiment/on_preset",
        "defaults: [base, /algorithm/mine, _self_]\ninterfaces: {actor: {objective: {high: 0.02}}}\n",
    )
    assert presets.built(name="on_preset").objective == Gspo(low=0.01, high=0.02)
    presets.actor("otherwise", f"{{objective: {{_target_: {HERE}.Clip}}}}", parent="on_preset")
    made = presets.experiment(name="otherwise")
    assert made.interfaces["actor"].objective == Clip()
    assert len(made.dropped) == 3
    assert presets.built(f"{OBJECTIVE}=tight_clip", name="otherwise").objective == TightClip()


def test_a_preset_that_lists_what_it_owns_is_told_to_leave_it_out(folder):
    folder.write("algorithm/old", "owns: [interfaces.actor.objective]\ninterfaces: {actor: {epochs: 1}}\n")
    assert "algorithm/old.yaml: remove owns: a preset resets the settings" in folder.error("algorithm=old")


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("base", "experiment/wrong.yaml: defaults takes a list, such as [/experiment/grpo, _self_], found 'base'"),
        (
            "[{rollout: async}]",
            "experiment/wrong.yaml: defaults: cannot read {'rollout': 'async'}. Write the name of a",
        ),
        ("['base@models']", "experiment/wrong.yaml: defaults: cannot read 'base@models'. Write the name of a file"),
        ("[{override /algorithm: mine}]", "defaults: cannot read {'override /algorithm': 'mine'}. Write the name of"),
        ("[_self_, _self_]", "experiment/wrong.yaml: defaults lists _self_ twice"),
        ("[wrong, _self_]", "experiment/wrong.yaml: the defaults list of this file includes the file itself"),
        ("[bse]", "unknown experiment 'bse'; did you mean 'base'?"),
        ("[/algorithm/nothing]", "unknown algorithm 'nothing'"),
    ],
)
def test_a_defaults_list_that_cannot_be_read_is_an_error(folder, defaults, message):
    folder.write("experiment/wrong", f"defaults: {defaults}\nsteps: 3\n")
    assert message in folder.error(name="wrong")
