"""The fake server of the tests and the clients agree with the definitions of the real servers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realign.api import GenerationConfig
from tests.samplers.servers import schema
from tests.samplers.servers.fake_server import KINDS, Adapted, FakeServer, prompts, random_table

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "record_server_schemas.py"


class Words:
    """Tokenizer with 12 tokens."""

    def __len__(self):
        return 12


def weights(seed):
    return Adapted(random_table(5).logits_VV, random_table(seed).logits_VV)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_request_and_each_answer_of_the_fake_has_the_recorded_fields(kind):
    server = FakeServer(kind, random_table(0))
    try:
        for lora in ("merged", "adapter"):
            spec = KINDS[kind](urls=[server.url], lora=lora, sleep_level=2)
            sampler = spec.open("actor", weights(0), Words())
            sampler.generate(prompts(), GenerationConfig(n=2, max_new_tokens=9, temperature=0.7, top_p=0.9), seed=1)
            sampler.generate(prompts(), GenerationConfig(max_new_tokens=3, greedy=True, stop_strings=["end"]), seed=1)
            sampler.update(weights(1), 1)
            sampler.sleep()
            sampler.wake()
            sampler.close()
    finally:
        server.close()
    assert {exchange.path for exchange in server.exchanges} == set(schema.recorded(kind)["paths"])
    faults = []
    for exchange in server.exchanges:
        faults += schema.request_faults(kind, exchange.method, exchange.path, exchange.query, exchange.body)
        if exchange.status == 200:
            faults += schema.answer_faults(kind, exchange.path, exchange.answer)
        else:
            assert exchange.path.endswith("unload_lora_adapter")
    assert faults == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({"prompt": [1], "top_kk": 3}, "/v1/completions.top_kk: unknown"),
        ({"prompt": [1], "min_tokens": "3"}, "/v1/completions.min_tokens: '3' is no integer"),
        ({"prompt": [-1]}, "/v1/completions.prompt: [-1] has none of the types"),
    ],
)
def test_a_wrong_request_is_found(body, fault):
    assert schema.request_faults("vllm", "POST", "/v1/completions", {}, body) == [fault]


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "variable", "usual"),
    [("vllm", "REALIGN_TEST_VLLM", ".servers/venv/bin/python"), ("sglang", "REALIGN_TEST_SGLANG", "")],
)
def test_the_recorded_definitions_are_those_of_the_servers(tmp_path, kind, variable, usual):
    """The variables name an interpreter that has vLLM, and a wheel or source folder of SGLang."""
    where = os.environ.get(variable) or (str(ROOT / usual) if usual else "")
    if not where or not Path(where).exists():
        pytest.skip(f"{kind} is not installed: set {variable}")
    command = [where, SCRIPT, kind] if kind == "vllm" else [sys.executable, SCRIPT, kind, where]
    subprocess.run([*command, tmp_path / "found.json"], check=True, capture_output=True)
    assert json.loads((tmp_path / "found.json").read_text()) == schema.recorded(kind)
