"""The process that runs episodes of verifiers, with a fake program, and with verifiers itself (slow)."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from realign.environments.adapters import verifiers_agent
from realign.environments.adapters.verifiers_agent import episode
from tests.endpoint.chat_families import FAMILIES, SAID, family_renderer
from tests.endpoint.scripted import scripted

PROGRAM = """
import json, os, sys
config, waiting = json.loads(sys.argv[1]), {}
def answer(**found):
    print(json.dumps(found), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("cancel"):
        with open(config["log"], "a") as log:
            print("canceled", waiting.pop(asked["number"]), file=log)
    elif asked["idx"] == "late":
        waiting[asked["number"]] = asked["base_url"]
    elif asked["idx"] == "end":
        sys.exit(3)
    elif asked["idx"] == "fail":
        answer(number=asked["number"], error="TaskError: no answer")
    else:
        answer(number=asked["number"], reward=asked["idx"] * config["scale"])
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    program = tmp_path / "worker.py"
    program.write_text(PROGRAM)
    monkeypatch.setattr(verifiers_agent, "WORKER", program)
    config = {"scale": 0.5, "log": str(tmp_path / "log")}

    def start(idx, base_url="http://x/v1"):
        return episode(base_url, "key", {"idx": idx}, python=sys.executable, config=config)

    yield start
    verifiers_agent._worker.cache_clear()


def test_one_process_runs_concurrent_episodes_and_each_gets_its_own_reward(run):
    async def several():
        return await asyncio.gather(*(run(idx) for idx in (4, 2, 3)))

    assert asyncio.run(several()) == [2.0, 1.0, 1.5]
    assert asyncio.run(several()) == [2.0, 1.0, 1.5]  # on another event loop
    assert verifiers_agent._worker.cache_info().misses == 1


def test_an_episode_that_fails_costs_itself_only(run):
    async def two():
        return await asyncio.gather(run("fail"), run(2), return_exceptions=True)

    failed, fine = asyncio.run(two())
    assert (str(failed), fine) == ("TaskError: no answer", 1.0)


def test_a_late_episode_is_canceled_in_the_process(run, tmp_path):
    async def late():
        late, other = (asyncio.create_task(run(idx, f"http://{idx}/v1")) for idx in ("late", 2))
        await other  # the process has read the late one before
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        return await run(2)  # the process has read the cancellation before

    assert asyncio.run(late()) == 1.0
    assert (tmp_path / "log").read_text() == "canceled http://late/v1\n"


@pytest.mark.slow
def test_the_policy_calls_the_tools_of_a_task():
    if "VERIFIERS_PYTHON" not in os.environ:
        pytest.skip("VERIFIERS_PYTHON is not set: needs the interpreter of a Python environment with verifiers")
    config = {"taskset": {"id": "verifiers_products"}, "path": str(Path(__file__).parent)}
    family = next(family for family in FAMILIES if family.name == "qwen3")
    requests = [
        '{"name": "calc_multiply", "arguments": {"a": 3, "b": 4}}',
        '{"name": "divide", "arguments": {}}',
        '{"name": "calc_multiply", "arguments": {"a": "x"}}',
    ]
    texts = [f"<tool_call>\n{request}\n</tool_call><|im_end|>" for request in requests]
    try:
        with scripted(family_renderer(family), [*texts, f"{SAID}<|im_end|>"]) as (endpoint, session, sampler):
            run = episode(
                endpoint.base_url(session),
                session.key,
                {"idx": 0},
                python=os.environ["VERIFIERS_PYTHON"],
                config=config,
            )
            assert asyncio.run(run) == 1.0
    finally:
        verifiers_agent._worker.cache_clear()
    assert '"name": "calc_multiply"' in sampler.prompts[0]
    assert "<tool_response>\n12\n</tool_response>" in sampler.prompts[1]
    assert "error: there is no tool 'divide'" in sampler.prompts[2]
    assert "validation error" in sampler.prompts[3]
    assert len(sampler.prompts) == 4
