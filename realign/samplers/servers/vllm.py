"""`Vllm`: sample with servers of vLLM.

Interface: https://docs.vllm.ai/en/latest/ (OpenAI-compatible server, RL endpoints and development endpoints). The
servers need `VLLM_SERVER_DEV_MODE=1` and `--logprobs-mode processed_logprobs`; `Vllm` starts them so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from realign.api.generation import GenerationConfig
from realign.errors import ConfigError
from realign.samplers.servers.protocol import (
    LOADING,
    Ask,
    Received,
    Refused,
    ResponsePart,
    ServerFacts,
    ServerProtocol,
    check_part,
    check_scores,
    get,
    item,
    items,
    least_tokens,
    post,
    sampling_settings,
)
from realign.samplers.servers.server_sampler import Servers
from realign.samplers.servers.server_settings import Updates

if TYPE_CHECKING:
    from httpx2 import AsyncClient

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank`."""

RECEIVER = "realign_worker.WeightReceiver"
"""See `realign_worker`."""
_WORKER_FOLDER = Path(__file__).with_name("worker")


class VllmProtocol(ServerProtocol):
    """The HTTP interface of vLLM, tested with version 0.32."""

    title = "vLLM"
    keeps_weights = frozenset({1})

    @override
    async def sample(self, http: AsyncClient, ask: Ask) -> ResponsePart:
        answer = await post(
            http, "/v1/completions", _completion_request(ask), tokens=len(ask.ids) + ask.config.max_new_tokens
        )
        choice = item(answer, "choices", 0)
        ids = item(choice, "token_ids")
        logprobs = item(choice, "logprobs", "token_logprobs") if ids else []
        return check_part(ids, logprobs, item(choice, "finish_reason"), ask)

    @override
    async def score(self, http: AsyncClient, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        ask = Ask(ids, GenerationConfig(max_new_tokens=1), (), 0, adapter=adapter)
        body = _completion_request(ask) | {"logprobs": None, "prompt_logprobs": 0}
        answer = await post(http, "/v1/completions", body, tokens=len(ids))
        rows = zip(ids, items(answer, "choices", 0, "prompt_logprobs"), strict=False)
        # The first token has no log-prob.
        return check_scores([item(row, str(token), "logprob") for token, row in list(rows)[1:]], ids)

    @override
    async def stop(self, http: AsyncClient) -> None:
        await post(http, "/pause", params={"mode": "abort"})

    @override
    async def start(self, http: AsyncClient) -> None:
        await post(http, "/resume")

    @override
    async def load(self, http: AsyncClient, folder: Path, label: str) -> None:
        await self._load(http, label, "reload_weights", {"weights_path": str(folder.absolute())})

    @override
    async def facts(self, http: AsyncClient) -> ServerFacts:
        config = item(await get(http, "/server_info", {"config_format": "json"}), "vllm_config")
        dtype = str(item(config, "model_config", "dtype")).removeprefix("torch.")
        return ServerFacts(dtype, item(config, "parallel_config", "worker_extension_cls") == RECEIVER)

    @override
    async def receive(self, http: AsyncClient, folder: Path, base: str | None = None) -> Received:
        call = {"method": "realign_receive", "kwargs": {"folder": str(folder.absolute())}}
        if base is not None:
            call = {"method": "realign_change", "kwargs": {"folder": str(folder.absolute()), "base": base}}
        results = items(await post(http, "/collective_rpc", call), "results")
        copied = next((result for result in results if result is not None), None)
        return Received(item(copied, "digest"), [str(path) for path in items(copied, "paths")])

    @override
    async def load_received(self, http: AsyncClient, paths: Sequence[str], label: str) -> None:
        await self._load(http, label, "realign_load", {"paths": list(paths)})

    async def _load(self, http: AsyncClient, label: str, method: str, arguments: Mapping[str, Any]) -> None:
        """Let all workers load weights by one of their methods."""
        # If loading fails halfway, the server has this label, and is not used before it gets all weights again.
        await post(http, "/update_weight_version", {"new_version": LOADING})
        await post(http, "/collective_rpc", {"method": method, "kwargs": arguments})
        await self._finish_loading(http, label)

    @override
    async def load_adapter(self, http: AsyncClient, folder: Path, label: str) -> None:
        await post(http, "/update_weight_version", {"new_version": LOADING})
        body = {"lora_name": label, "lora_path": str(folder.absolute()), "load_inplace": True}
        await post(http, "/v1/load_lora_adapter", body, text=True)
        await self._finish_loading(http, label)

    @override
    async def unload_adapter(self, http: AsyncClient, name: str) -> None:
        await post(http, "/v1/unload_lora_adapter", {"lora_name": name}, text=True)

    @override
    async def sleep(self, http: AsyncClient, level: int) -> None:
        await post(http, "/sleep", params={"level": level, "mode": "abort"})

    @override
    async def wake_weights(self, http: AsyncClient) -> None:
        """Wake the weights. vLLM then continues sampling, which fails without the KV cache."""
        await post(http, "/wake_up", params={"tags": "weights"})

    @override
    async def wake_cache(self, http: AsyncClient) -> None:
        """Wake the KV cache. vLLM then continues sampling."""
        done = await post(http, "/wake_up", params={"tags": "kv_cache"})
        if item(done, "status") != "awake":
            raise Refused("POST /wake_up: the server is still asleep")

    async def _finish_loading(self, http: AsyncClient, label: str) -> None:
        """Forget what was computed with earlier weights, and set the label."""
        done = await post(http, "/reset_prefix_cache")
        if not item(done, "success"):
            raise Refused("POST /reset_prefix_cache: the prefix cache of earlier weights was not removed")
        await post(http, "/update_weight_version", {"new_version": label})

    @override
    async def label(self, http: AsyncClient) -> str | None:
        return str(item(await get(http, "/weight_info"), "weight_version"))


def _completion_request(ask: Ask) -> dict[str, Any]:
    """Return the body of a completion request. vLLM selects an adapter by the name of the model."""
    model = {} if ask.adapter is None else {"model": ask.adapter}
    return (
        sampling_settings(ask.config, ask.stop_ids)
        | model
        | {
            "prompt": list(ask.ids),
            "max_tokens": ask.config.max_new_tokens,
            "min_tokens": least_tokens(ask.config),
            "top_k": ask.config.top_k,
            "seed": ask.seed,
            "include_stop_str_in_output": True,
            # The log-prob of the sampled token, and of no alternatives.
            "logprobs": 0,
            "return_token_ids": True,
        }
    )


@dataclass
class Vllm(Servers):
    """Samples with vLLM: running servers (`urls`), or servers that the run starts and stops."""

    protocol: ClassVar[type[ServerProtocol]] = VllmProtocol
    package: ClassVar[str] = "vllm"
    command: ClassVar[str] = (
        "{python} -m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 --port {port} "
        "--logprobs-mode processed_logprobs"
    )
    variables: ClassVar[dict[str, str]] = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    sleep_arguments: ClassVar[str] = "--enable-sleep-mode"
    delta_arguments: ClassVar[str] = f"--worker-extension-cls {RECEIVER}"

    @override
    def server_variables(self, index: int) -> dict[str, str]:
        variables = super().server_variables(index)
        if self.updates is Updates.delta:
            paths = [str(_WORKER_FOLDER), variables.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables

    @override
    def lora_arguments(self, rank: int) -> str:
        """Return the arguments for two adapters, which the server has during an update."""
        largest = next((size for size in _RANKS if size >= rank), None)
        if largest is None:
            raise ConfigError(f"trains.rank={rank}: vLLM supports at most {_RANKS[-1]}. Set sampler.lora=merged.")
        return f"--enable-lora --max-loras 1 --max-cpu-loras 2 --max-lora-rank {largest}"
