from __future__ import annotations

import importlib.util
import json
import logging

import pytest

from realign.endpoint import Renderer
from realign.endpoint.response_templates import response_template
from realign.errors import ConfigError
from tests.endpoint.chat_families import FAMILIES, RESPONSE_TEMPLATES, TOOLS, family_tokenizer

NAMED = {family.name: family for family in FAMILIES}
EXACT = [family for family in FAMILIES if family.parts and family.name != "hermes2_pro"]


def tokenizer(name: str, *, parses: bool = False):
    return family_tokenizer(NAMED[name], parses=parses)


def without_trl(monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "trl" else find(name))


def test_without_the_setting_the_tokenizer_determines_the_response_template():
    assert response_template(tokenizer("qwen3"), "") is None
    assert response_template(tokenizer("qwen3", parses=True), "") == RESPONSE_TEMPLATES["qwen3"]


def test_auto_prefers_the_response_template_of_the_tokenizer(monkeypatch):
    without_trl(monkeypatch)
    assert response_template(tokenizer("qwen3", parses=True), "auto") == RESPONSE_TEMPLATES["qwen3"]


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    without_trl(monkeypatch)
    for given in ("auto", "qwen3"):
        with pytest.raises(ConfigError, match=r"realign-rl\[tools\]"):
            response_template(tokenizer("qwen3"), given)


def test_a_json_file_replaces_the_response_template_of_the_tokenizer(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps(RESPONSE_TEMPLATES["llama3"]))
    renderer = Renderer(tokenizer("llama3_2", parses=True), response_template=str(file))
    assert renderer.tokenizer.response_template == RESPONSE_TEMPLATES["llama3"]


def test_files_that_are_missing_or_invalid_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        response_template(tokenizer("qwen3"), str(tmp_path / "missing.json"))
    file = tmp_path / "wrong.json"
    for text in ("[]", '{"fields": {}}', '{"fields": {"content": {"close": "x"}}}', "{"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="response_template="):
            response_template(tokenizer("qwen3"), str(file))


def test_the_response_template_of_another_family_is_a_configuration_error(tmp_path):
    file = tmp_path / "qwen3.json"
    file.write_text(json.dumps(RESPONSE_TEMPLATES["qwen3"]))
    with pytest.raises(ConfigError, match="start anchor"):
        Renderer(tokenizer("llama3_2"), response_template=str(file))


def test_a_chat_template_that_requires_tools_can_have_a_response_template(tmp_path):
    file = tmp_path / "qwen3.json"
    file.write_text(json.dumps(RESPONSE_TEMPLATES["qwen3"]))
    renderer = Renderer(tokenizer("hermes2_pro"), response_template=str(file))
    assert renderer.tokenizer.response_template == RESPONSE_TEMPLATES["qwen3"]


def test_tools_without_a_response_template_are_reported_once(caplog):
    renderer = Renderer(tokenizer("mistral_v13"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            renderer.render([{"role": "user", "content": "x"}], TOOLS)
    assert [record.levelname for record in caplog.records if "response_template=auto" in record.message] == ["WARNING"]


@pytest.mark.slow
def test_trl_knows_the_chat_templates_of_the_families():
    """The fixtures of the response templates are those of TRL."""
    pytest.importorskip("trl", reason="needs the extra tools")
    for family in EXACT:
        found = Renderer(tokenizer(family.name), response_template="auto").tokenizer.response_template
        assert found == RESPONSE_TEMPLATES[family.parts], family.name
    assert response_template(tokenizer("hermes2_pro"), "qwen2_5") == RESPONSE_TEMPLATES["qwen3"]
    with pytest.raises(ConfigError, match="TRL knows no response template"):
        response_template(tokenizer("hermes2_pro"), "auto")
    with pytest.raises(ConfigError, match=r"unknown family.*qwen3"):
        response_template(tokenizer("qwen3"), "qwen99")
