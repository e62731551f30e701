"""Test which environment variables look like secrets."""

from __future__ import annotations

import pytest

from realign.secrets import secret_variables, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN", "CI_JOB_TOKEN", "AWS_SESSION_TOKEN"),
        *("AWS_PROFILE", "DB_PASSWORD", "PGPASSWORD", "MYSQL_PWD", "CLIENT_SECRET", "SECRETS", "SSH_AUTH_SOCK"),
        *("GOOGLE_APPLICATION_CREDENTIALS", "hf_token", "MASTER_KEY", "PRIVATE_KEYS", "GH_PAT", "APIKEY"),
    ],
)
def test_a_name_that_looks_like_a_secret_is_dropped(name):
    assert secret_variables({name: "x"}) == [name]
    assert without_secrets({name: "x"}) == {}
    assert secret_variables({name: "x"}, keep=(name,)) == []


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "PWD", "OLDPWD", "HOME", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "PYTHONPATH", "KEYBOARD"),
        *("HF_HOME", "CUDA_VISIBLE_DEVICES", "GIT_AUTHOR_NAME", "LANG", "MONKEY", "XDG_RUNTIME_DIR"),
    ],
)
def test_an_ordinary_name_stays(name):
    assert secret_variables({name: "x"}) == []


def test_a_url_with_a_password_is_dropped_unless_it_is_a_proxy():
    url = "postgres://user:word@host/base"
    assert secret_variables({"DATABASE_URL": url, "https_proxy": url, "SITE": "https://host/a:b"}) == ["DATABASE_URL"]
