from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import openai
import pytest

from realign.cli.serve import KEY_VARIABLE, serve_of
from realign.config.errors import ConfigError
from tests.endpoint.scripted import tokenizer, user
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = save_tiny(tmp_path_factory.mktemp("serve") / "model")
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "fe80::1", "192.0.2.1", "example.com"])
def test_another_address_than_loopback_requires_a_key(folder, host):
    settings = serve_of([folder, f"host={host}"])
    with pytest.raises(ConfigError, match=f"Set {KEY_VARIABLE}"):
        settings.key({})
    assert settings.key({KEY_VARIABLE: "x"}) == "x"
    assert len(serve_of([folder]).key({})) >= 32


def test_the_endpoint_of_a_model_answers_within_its_context_window(folder):
    with serve_of([folder, "port=0", "name=mine"]).endpoint("k") as endpoint:
        endpoint.start()
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="k", max_retries=0) as client:
            assert client.models.list().data[0].id == "mine"
            out = client.chat.completions.create(model="mine", messages=user("ab"), seed=1)
            assert out.usage.total_tokens <= 128
            assert out == client.chat.completions.create(model="mine", messages=user("ab"), seed=1).model_copy(
                update={"id": out.id, "created": out.created}
            )


def test_a_port_in_use_is_a_configuration_error(folder):
    with serve_of([folder, "port=0"]).endpoint("k") as endpoint:
        port = endpoint.url.rpartition(":")[2]
        with pytest.raises(ConfigError, match=f"port={port}"), serve_of([folder, f"port={port}"]).endpoint("k"):
            pass


@pytest.mark.slow
def test_the_command_serves_until_an_interrupt(folder):
    environment = {**os.environ, KEY_VARIABLE: "a-key"}
    command = [sys.executable, "-m", "realign", "serve", folder, "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout is not None
        address = re.search(r"at (http://127\.0\.0\.1:\d+/v1)", run.stdout.readline())
        assert address is not None
        with openai.OpenAI(base_url=address[1], api_key="a-key", max_retries=2) as client:
            assert client.chat.completions.create(model="m", messages=user("ab"), max_tokens=3).choices
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=120)
    assert (run.returncode, "Traceback" in err) == (130, False), err
    assert "a-key" not in out
