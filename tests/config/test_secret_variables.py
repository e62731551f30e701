import pytest

from realign.cli.commands import main
from realign.config import ConfigError, build_experiment, compose
from realign.config.experiment import resolve_config

SECRET = "s3cret/value"


@pytest.fixture(autouse=True)
def secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("JUDGE_TOKEN", SECRET)
    monkeypatch.setenv("DATABASE_URL", "postgres://user:s3cret@host/base")
    monkeypatch.setenv("ORDINARY", "plain")
    monkeypatch.setenv("REALIGN_URL_VARIABLES", "JUDGE_TOKEN")


def config(*overrides):
    return compose(["experiment=grpo_arithmetic", *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ["interfaces.reward.function='http://h/${oc.env:HF_TOKEN}'"],
        ["interfaces.reward.function='http://h/${oc.env:DATABASE_URL}'"],
        ["interfaces.reward.function='http://h/${oc.env:${oc.decode:HF_TOKEN}}'"],
        ["interfaces.reward.function='http://h/${oc.env:HF_TOKEN,none}'"],
        ["interfaces.reward.keep_environment=['${oc.env:HF_TOKEN}']"],
        ["name='${oc.env:HF_TOKEN}'", "interfaces.reward.function='http://h/${name}'"],
        ["name='${oc.env:JUDGE_TOKEN}'", "interfaces.reward.function='http://h/${name}'"],
        ["output_dir='runs/${oc.env:HF_TOKEN}'"],
        ["models.actor.path='https://h/${oc.env:JUDGE_TOKEN}'"],
        ["interfaces.reward.function='${oc.env:JUDGE_TOKEN}'"],
    ],
)
def test_no_value_of_a_config_reads_a_secret(overrides):
    with pytest.raises(ConfigError, match="looks like a secret, and a config cannot read secrets") as caught:
        config(*overrides)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://user:s3cret@h/x", "http://h/x?api_key=s3cret", "http://s3cret@h"])
def test_credentials_in_the_url_of_a_reward_server_are_refused_before_anything_is_written(url):
    with pytest.raises(ConfigError, match=r"^interfaces\.reward\.function: reward function 'http") as caught:
        config(f"interfaces.reward.function='{url}'")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("variable", ["HF_TOKEN: s3cret", "PROXY: 'http://u:s3cret@h'", "AWS_ID: s3cret"])
def test_a_secret_in_the_variables_of_servers_is_refused(variable):
    with pytest.raises(ConfigError, match=r"^models\.actor\.sampler\.environment\.\w+ looks like a secret") as caught:
        config("models.actor.sampler=vllm", f"+models.actor.sampler.environment={{{variable}}}")
    assert "s3cret" not in str(caught.value)


def test_an_allowed_secret_stays_an_interpolation_in_every_form_of_the_config(capsys):
    url = "http://h/${oc.env:ORDINARY}?key=${oc.env:JUDGE_TOKEN}"
    override = f"interfaces.reward.function='{url}'"
    made = config(override)
    resolved = resolve_config(made, build_experiment(made))
    assert resolved["interfaces"]["reward"]["function"] == "http://h/plain?key=${oc.env:JUDGE_TOKEN}"
    assert SECRET not in str(resolved)
    assert main(["--cfg", "job", "--resolve", "experiment=grpo_arithmetic", override]) == 0
    assert SECRET not in capsys.readouterr().out
