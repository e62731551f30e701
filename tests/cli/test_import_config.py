"""Test `realign import`: the command that reproduces the gradient of another tool's config."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.referee import batches, ours
from benchmarks.referee.cells import CELLS, ROWS, Cell, overrides_of
from realign.cli import import_config
from realign.cli.commands import main
from realign.cli.import_config import translate_config
from realign.config.aliases import tables
from realign.config.errors import ConfigError
from tests.docs.pages import blocks

TOOLS = {tool: table["import"][tool] for table in tables().values() for tool in table.get("import", {})}
PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
LOSSES = [
    pytest.param(row, tool, id=f"{tool} {row}")
    for (row, tool), cell in CELLS.items()
    if tool in TOOLS and tool != "areal" and isinstance(cell, Cell) and ROWS[row].kind == "policy"
]


def words(imported: import_config.Imported) -> dict[str, str]:
    return dict(word.split("=", 1) for word in imported.overrides)


@pytest.mark.parametrize(
    ("row", "tool", "settings"),
    [
        ("dpo", "trl-dpo", {"loss_type": "sigmoid"}),
        ("ipo", "trl-dpo", {"loss_type": ["ipo"], "label_smoothing": 0.1}),
        ("kto", "trl-kto", {"beta": 0.1}),
    ],
)
def test_an_imported_config_of_preferences_has_the_loss_that_the_referee_compared(row, tool, settings):
    batch = ours.with_mismatched(batches.batch("pairs", 0))
    imported = translate_config(tool, settings)
    assert imported.proof == {"peer": "trl", "kinds": {ROWS[row].kind: "pairs"}}
    assert bool(imported.refused) == ("label_smoothing" in settings)  # it has no effect there
    loss, gradient = ours.run(ROWS[row].kind, batch, imported.overrides)
    expected, expected_gradient = ours.run(ROWS[row].kind, batch, ROWS[row].preset)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)


AREAL = {
    "grpo": {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": "group"},
    "dr_grpo": {"actor.reward_norm.mean_level": "group", "actor.reward_norm.std_level": None},
    "ppo": {"critic.path": "m", "actor.kl_ctl": 0.05, "actor.gae_lambda": 0.95, "actor.adv_norm.mean_level": "batch"},
}
"""Configs of AReaL, whose names have sections, for cells of the referee."""


@pytest.mark.parametrize("row", AREAL)
def test_an_imported_config_of_areal_has_the_loss_that_the_referee_compared(row):
    cell, batch = CELLS[row, "areal"], batches.batch(ROWS[row].batch, 0)
    imported = translate_config("areal", {"actor.kl_ctl": 0.0} | AREAL[row])
    assert not imported.refused
    assert not imported.by_hand
    loss, gradient = ours.run("policy", batch, (*imported.overrides, "interfaces.actor.n_minibatches=1"))
    expected, expected_gradient = ours.run("policy", batch, overrides_of(ROWS[row], cell))
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)


def test_a_section_has_its_own_defaults_and_values_can_name_others(tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "actor: {max_new_tokens: '${gconfig.max_new_tokens}', adv_norm: {eps: 1e-4}}\ngconfig: {max_new_tokens: 9}"
    )
    given = import_config._of_file(str(path))
    assert given["actor.max_new_tokens"] == 9
    translated = words(translate_config("areal", {"actor.adv_norm.eps": 1e-4}))
    assert translated["interfaces.actor.adv_norm"].startswith("{mean: batch, std: batch, ")
    assert translated["interfaces.actor.advantage.reward_norm"].startswith("{mean: none, std: none, ")


@pytest.mark.parametrize(("row", "tool"), LOSSES)
def test_an_imported_config_has_the_loss_that_the_referee_compared_with_the_tool(row, tool):
    cell, batch = CELLS[row, tool], batches.batch(ROWS[row].batch, 0)
    imported = translate_config(tool, cell.settings)
    assert not imported.refused
    assert not imported.by_hand
    single = ("interfaces.actor.n_minibatches=1",)
    loss, gradient = ours.run("policy", batch, (*imported.overrides, *single))
    expected, expected_gradient = ours.run("policy", batch, overrides_of(ROWS[row], cell))
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)


def settings_of(rule: dict) -> dict:
    """Return settings to which a rule applies, if its tool's defaults do not contradict."""
    chosen = {name: values[0] for name, values in rule.get("when", {}).items()}
    other = {"beta": 0.04, "delta": 3.0, "loss_scale_factor": 512, "init_coef": 0.01, "dual_clip": 3.0}
    other |= {
        "c_clip": 3.0,
        "kl_ctl": 0.1,
        "upper": 2.0,
        "m2_threshold": 0.1,
        "label_smoothing": 0.1,
        "loss_weights": [0.5],
        "ld_alpha": 0.5,
        "use_weighting": True,
    }
    for name, values in rule.get("unless", {}).items():
        short = name.rpartition(".")[2]
        texts = {"estimator": "k3" if ".kl." in name else "reinforce", "kl_loss_type": "full", "adv_estimator": "rloo"}
        chosen |= {name: other.get(short, texts.get(short, "vespo"))} if chosen.get(name) is None else {}
        assert chosen[name] not in values
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_every_rule_gives_a_command_that_composes_or_says_why_not(tool):
    for rule in TOOLS[tool]["rules"]:
        extra = {"epsilon_high": 5.0} if rule.get("when", {}).get("loss_type") == ["cispo"] else {}
        imported = translate_config(tool, {**settings_of(rule), **extra})
        assert imported.overrides[0].startswith("experiment=")
        assert bool(imported.refused) >= ("refuse" in rule)


def test_the_example_of_the_page_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(import_config, "REFEREE", tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    config, shown = blocks(text[text.index("<!-- import: grpo_config.yaml -->") :])[:2]
    (tmp_path / "grpo_config.yaml").write_text(config.code)
    command, *expected = shown.code.splitlines()
    assert main(command.removeprefix("$ realign ").split()) == 0
    printed = capsys.readouterr().out.splitlines()
    for line, line_shown in zip(expected[:-1], printed[:-1], strict=True):
        assert line_shown.startswith(line.removesuffix("...")), line
    assert printed[-1].startswith("Proof: not computed. In a checkout")


def test_flags_of_openrlhf_are_read_with_several_values_and_by_their_old_names():
    flags = ["--advantage_estimator", "group_norm", "--eps_clip_low_high", "0.2", "0.3", "--init_kl_coef=0"]
    flags += ["--pretrain", "a/b"]
    translated = words(translate_config("openrlhf", import_config._of_words(flags)))
    assert translated["experiment"] == "grpo"
    assert translated["interfaces.actor.objective.high"] == "0.3"
    assert translated["interfaces.actor.kl.place"] == "none"
    assert translated["models.actor.path"] == "a/b"


def test_what_has_no_equivalent_is_named():
    imported = translate_config("trl", {"loss_type": "vespo", "top_entropy_quantile": 0.5, "mine": 1})
    assert imported.refused == ["loss_type=vespo is not available."]
    assert imported.by_hand == ["top_entropy_quantile (TRL): not available.", "mine: not known to realign"]


def test_a_value_out_of_range_is_an_error():
    with pytest.raises(ConfigError, match=r"objective\.high=-0\.8: must be at least 0"):
        translate_config("trl", {"loss_type": "cispo"})


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("${oc.env:HOME}/model", "${oc.env:HOME}/model is an interpolation, which is not resolved"),
        (["a", "${x}"], "['a', '${x}'] is an interpolation, which is not resolved"),
        ("m" * 5_000, "the value has 5,000 characters"),
        ([0] * 5_000, "the value has 15,000 characters"),
        ([[[[[1]]]]], "lists are nested more than 4 times"),
    ],
    ids=["interpolation", "list", "text", "elements", "nested"],
)
def test_a_value_that_is_not_read_is_left_to_the_user_and_never_resolved(value, why, monkeypatch):
    monkeypatch.setenv("HOME", "/secret")
    imported = translate_config("trl", {"model_name_or_path": value, "loss_type": "grpo"})
    assert imported.by_hand == [f"model_name_or_path: {why}"]
    assert "/secret" not in str(imported)
    assert "models.actor.path=MODEL" in imported.overrides


def test_an_integer_beyond_the_floats_is_an_error_or_a_value():
    huge = 10**3000 - 1
    assert f"steps={huge}" in translate_config("trl", {"max_steps": huge}).overrides
    with pytest.raises(ConfigError, match="expected float"):
        translate_config("trl", {"temperature": huge})


REPEATED = zip("abcdefg", "bcdefgh", strict=True)
BOMB = "a: &a [1,1]\n" + "".join(f"{new}: &{new} [*{old}{f',*{old}' * 9}]\n" for old, new in REPEATED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "expected a mapping of settings to values, found list"),
        ("beta: !!python/object/apply:os.system [ls]\n", "the file cannot be read"),
        (BOMB, "repeat too many values"),
        ('run_name: "a\\e[2Jb"\n', "run_name: the value has control characters"),
        ("'a b$(ls)': 1\n", "is no name of a setting"),
        ("\x00\x01", "the file cannot be read"),
        ("".join(f"k{i}: 1\n" for i in range(2_001)), "2,001 settings; at most 2,000"),
        ("a: [" + "1," * 60_000 + "1]\n", "more than 100,000 characters"),
    ],
    ids=["list", "tag", "aliases", "control", "name", "binary", "size", "length"],
)
def test_a_file_that_is_no_config_is_an_error_line(tmp_path, capsys, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert main(["import", "trl", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) <= 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("import", "realign import trl|trl-dpo|trl-kto|"),
        ("import vrel a.yaml", "did you mean 'verl'"),
        ("import trl", "no settings"),
        ("import trl nothing.yaml", "nothing.yaml: the file cannot be read"),
        ("import verl a=1 b", "'b': expected name=value or --name value"),
    ],
)
def test_a_wrong_command_line_is_an_error(line, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    assert message.lower() in capsys.readouterr().err.lower()


def test_values_with_spaces_and_quotes_reach_the_command_as_text(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(import_config, "REFEREE", tmp_path)
    assert main(["import", "trl", "model_name_or_path=my models/it's; rm -rf ~"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"'models\.actor\.path='\"'\"'my models/it", printed)
