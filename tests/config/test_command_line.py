"""Test automatic quotes, and YAML files as experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from realign.config import compose
from realign.config.command_line import _PLAIN, prepare, quote_override
from realign.config.errors import ConfigError
from tests.config_parts import EXPERIMENT


@pytest.mark.parametrize(
    "value",
    ["données/日本.jsonl", "größe", "a (b).jsonl", "a & b", "x!y", "50%", "C:/a b/ü", "~/daten/ä.jsonl", "a;b", "?"],
)
def test_text_that_hydra_cannot_read_arrives_unchanged(value):
    words = ["experiment=grpo_arithmetic", f"data.path={value}", "name=x"]
    assert compose(words).data["path"] == value


def test_an_override_that_is_too_long_is_refused_before_it_is_parsed():
    with pytest.raises(ConfigError, match=r"'name=x{55}'\.\.\.: an override has 1,000,005 characters; at most 100,000"):
        prepare(["steps=1", "name=" + "x" * 10**6])


@pytest.mark.parametrize("word", ["a=1,2", "a=[ü", "a={ü: 1", "a='ü", "a=${ü}", "a=ü,b", "steps=5", "~a", "a=", "ü"])
def test_lists_sweeps_interpolations_and_readable_values_stay_unchanged(word):
    assert quote_override(word) == word


@given(st.from_regex(_PLAIN, fullmatch=True))
def test_hydra_reads_every_override_that_is_plain(word):
    OverridesParser.create().parse_override(word)


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ein ordner").mkdir()
    (tmp_path / "ein ordner" / "mein lauf.yaml").write_text(EXPERIMENT)
    return tmp_path


@pytest.mark.parametrize("word", ["./ein ordner/mein lauf.yaml", "experiment=ein ordner/mein lauf.yaml"])
def test_the_path_of_a_yaml_file_is_an_experiment(here, word):
    config = compose([word, "steps=9"])
    assert (config.name, config.steps, config.batch_prompts) == ("bigram", 9, 4)


def test_a_file_may_build_on_a_shipped_experiment_and_have_its_name(here):
    (here / "grpo.yaml").write_text("defaults: [/experiment/grpo_arithmetic]\nname: mine\n")
    config = compose(["./grpo.yaml"])
    assert (config.name, config.batch_prompts) == ("mine", 64)
    assert (
        compose(["experiment=grpo", "models.actor.path=x", "data.path=x", "interfaces.reward.function=x"]).name
        == "grpo"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "experiment=bad.yaml: this file does not exist"),
        ("a: [", "bad.yaml: the file cannot be read"),
        ("stepss: 3\n", "bad.yaml: unknown key 'stepss'; did you mean 'steps'?"),
        ("hydra: {searchpath: ['pkg://os']}\n", "hydra.searchpath"),
        ("hydra: {job: {env_set: {PATH: x}}}\n", "hydra.job.env_set"),
        ("hydra: {callbacks: {x: {_target_: os.system}}}\n", "hydra.callbacks"),
        ("hydra: {launcher: {_target_: os.system}}\n", "hydra.launcher"),
        ("name: ${oc.env:HOME_SECRET_TOKEN}\n", "HOME_SECRET_TOKEN"),
    ],
)
def test_a_file_is_checked_like_every_other(here, text, message):
    if text is not None:
        (here / "bad.yaml").write_text(f"{EXPERIMENT}{text}" if text.startswith("hydra") else text)
    with pytest.raises(ConfigError) as caught:
        compose(["bad.yaml", "steps=1"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
