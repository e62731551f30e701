"""Worker of `verifiers_agent`: runs episodes of a verifiers environment.

This file runs in a Python environment with verifiers and without realign, so it imports nothing of realign. It reads
requests from stdin and writes answers to stdout, as lines of JSON. With a second argument N, it writes the first N
tasks as rows of a dataset instead:

    PYTHON verifiers_worker.py '{"taskset": {"id": "my_taskset"}}' 200 > rows.jsonl

By default, a role answers the messages of its task, and calls the tools of the task. Set the harness of the role for
anything else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import types
from contextlib import AsyncExitStack
from typing import Any

_HARNESS = "realign_chat"
END_S = 5.0
"""Seconds that canceled episodes have to end, after the run has ended."""
_TOOL_S = 600.0
"""Seconds that a call of a tool may take."""


def _chat_module() -> types.ModuleType:
    """Return a module of verifiers' plugins with a harness that needs no separate process."""
    import verifiers.v1 as vf
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    class Chat(vf.Harness[vf.HarnessConfig]):
        """Sends the conversation until a response calls no tool, and ends with this response."""

        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = SUPPORTS_MCP = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += map(message_to_wire, prompt or [])
            config = {"mcpServers": {name: {"url": url, "timeout": _TOOL_S} for name, url in mcp_urls.items()}}
            http = DefaultAsyncHttpxClient(verify=False)  # loads no certificates: the address is on this machine
            async with (
                AsyncExitStack() as stack,
                AsyncOpenAI(base_url=endpoint, api_key=secret, http_client=http, max_retries=0) as client,
            ):
                schemas, places, servers = await connect_mcp(config, stack)
                tools = {"tools": schemas} if schemas else {}
                while True:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **tools)
                    reply = answer.choices[0].message
                    if not reply.tool_calls:
                        return vf.ProgramResult(0, reply.content or "", "")
                    messages.append(reply.model_dump(exclude_none=True))
                    for call in reply.tool_calls:
                        text = await result(call.function, places, servers)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": text})

    async def result(function: Any, places: Any, servers: Any) -> Any:
        """Call a tool. A call that the policy made wrongly becomes a text for it."""
        if function.name not in places:
            return f"error: there is no tool {function.name!r}; the tools are {', '.join(places) or 'none'}"
        try:
            arguments = json.loads(function.arguments)
        except ValueError as error:
            return f"error: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        return await call_mcp(servers, places, function.name, arguments)

    module = types.ModuleType(_HARNESS)
    module.Chat, module.__all__ = Chat, ["Chat"]  # type: ignore[attr-defined]
    return module


class _VerifiersWorker:
    """Episodes of one environment."""

    def __init__(self, raw: dict[str, Any]) -> None:
        sys.path[0] = raw.pop("path", "")  # instead of the folder of this file
        os.environ["PYTHONPATH"] = sys.path[0]  # of the processes of tools
        sys.modules[_HARNESS] = _chat_module()
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

        kind = env_config_type(raw["taskset"]["id"], raw.get("id", ""))
        for role in agent_config_fields(kind.model_construct()):
            raw[role] = {"harness": {"id": _HARNESS}, "runtime": {"type": "subprocess"}} | raw.get(role, {})
        self._load = lambda: load_environment(resolve_env_config(json.loads(json.dumps(raw))))
        self._taskset = self._load().taskset
        self._tasks: dict[int, Any] = {}

    def task(self, idx: int) -> Any:
        """Return a task."""
        if idx not in self._tasks:
            self._tasks[idx] = next(iter(self._taskset.skip(idx).take(1)))
        return self._tasks[idx]

    async def reward(self, base_url: str, api_key: str, idx: int) -> float:
        """Run an episode, and return the sum of the rewards of its traces."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        variable = f"REALIGN_EPISODE_{api_key}"
        # verifiers takes a key by the name of a variable only. Episodes run concurrently, so each has a variable.
        os.environ[variable] = api_key
        try:
            env = self._load()
            context = ModelContext("policy", EvalClientConfig(base_url=base_url, api_key_var=variable))
            async with env.serving():
                episode = await env.run_slot(env.slots(self.task(idx))[0], context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
        return float(sum(trace.reward for trace in episode.traces))


async def serve(worker: _VerifiersWorker, out: Any) -> None:
    """Serve requests until stdin ends."""
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, **request: Any) -> None:
        outcome: dict[str, Any]
        try:
            outcome = {"reward": await worker.reward(**request)}
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        running.pop(number)
        out.write(json.dumps({"number": number, **outcome}) + "\n")
        out.flush()

    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        number = request.pop("number")
        if request.get("cancel"):
            if task := running.pop(number, None):
                task.cancel()
        else:
            running[number] = asyncio.create_task(answer(number, **request))
    for task in running.values():
        task.cancel()
    if running:
        await asyncio.wait(running.values(), timeout=END_S)
    os._exit(0)  # a late episode must not keep the process


def main() -> None:
    """Serve requests, or write rows."""
    out, sys.stdout = sys.stdout, sys.stderr  # logs must not be mixed with answers
    worker = _VerifiersWorker(json.loads(sys.argv[1]))
    if len(sys.argv) == 2:
        asyncio.run(serve(worker, out))
        return
    for idx in range(int(sys.argv[2])):
        out.write(json.dumps({"prompt": worker.task(idx).data.prompt_text, "idx": idx}) + "\n")


if __name__ == "__main__":
    main()
