"""`Sglang`: sample with servers of SGLang.

Interface: https://docs.sglang.io (native API: `/generate`, `/update_weights_from_disk`, `/pause_generation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from realign.api.generation import GenerationConfig
from realign.samplers.servers.protocol import (
    LOADING,
    Ask,
    Refused,
    ResponsePart,
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

if TYPE_CHECKING:
    from httpx2 import AsyncClient

_ALL = -1
"""Value of `top_k` for the whole vocabulary."""


class SglangProtocol(ServerProtocol):
    """The HTTP interface of SGLang, compared with the source of version 0.5.23."""

    title = "SGLang"

    @override
    async def sample(self, http: AsyncClient, ask: Ask) -> ResponsePart:
        answer = await post(http, "/generate", _generate_request(ask), tokens=ask.tokens)
        reason = item(answer, "meta_info", "finish_reason", "type")
        pairs = items(answer, "meta_info", "output_token_logprobs")
        label = answer["meta_info"].get("weight_version")
        logprobs = [item(pair, 0) for pair in pairs]
        ids = [item(pair, 1) for pair in pairs]
        kept: list[Any] = []
        if ask.config.sampling_replay:  # `output_token_logprobs` are those of the whole vocabulary
            kept = items(answer, "meta_info", "output_token_sampling_mask")
            logprobs = items(answer, "meta_info", "output_token_sampling_logprobs")
        return check_part(ids, logprobs, reason, ask, None if label is None else str(label), kept)

    @override
    async def score(self, http: AsyncClient, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        ask = Ask(ids, GenerationConfig(max_new_tokens=1), (), 0, adapter=adapter)
        body = _generate_request(ask) | {"logprob_start_len": 0}
        answer = await post(http, "/generate", body, tokens=len(ids))
        rows = items(answer, "meta_info", "input_token_logprobs")
        # The first token has no log-prob.
        return check_scores([item(pair, 0) for pair in rows[1:]], ids)

    @override
    async def stop(self, http: AsyncClient) -> None:
        await post(http, "/pause_generation", {"mode": "abort"})

    @override
    async def start(self, http: AsyncClient) -> None:
        await post(http, "/continue_generation", {})

    @override
    async def load(self, http: AsyncClient, folder: Path, label: str) -> None:
        body = {
            "model_path": str(folder.absolute()),
            "weight_version": label,
            "abort_all_requests": True,
            "flush_cache": True,
            "keep_pause": True,
        }
        done = await post(http, "/update_weights_from_disk", body)
        if not item(done, "success"):
            raise Refused(f"POST /update_weights_from_disk: {done.get('message')}")

    @override
    async def load_adapter(self, http: AsyncClient, folder: Path, label: str) -> None:
        # If loading fails halfway, the server keeps this label, and isn't used before it has the adapter.
        await _set_label(http, LOADING)
        with suppress(Refused):  # it exists if an earlier attempt failed afterwards
            await self.unload_adapter(http, label)
        done = await post(http, "/load_lora_adapter", {"lora_name": label, "lora_path": str(folder.absolute())})
        if not item(done, "success"):
            raise Refused(f"POST /load_lora_adapter: {done.get('error_message')}")
        await post(http, "/flush_cache", text=True)
        await _set_label(http, label)

    @override
    async def unload_adapter(self, http: AsyncClient, name: str) -> None:
        done = await post(http, "/unload_lora_adapter", {"lora_name": name})
        if not item(done, "success"):
            raise Refused(f"POST /unload_lora_adapter: {done.get('error_message')}")

    @override
    async def sleep(self, http: AsyncClient, level: int) -> None:
        """Free all memory: SGLang has one level, which does not keep the weights."""
        await post(http, "/release_memory_occupation", {})

    @override
    async def wake_weights(self, http: AsyncClient) -> None:
        await post(http, "/resume_memory_occupation", {"tags": ["weights"]})

    @override
    async def wake_cache(self, http: AsyncClient) -> None:
        await post(http, "/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})

    @override
    async def check_health(self, http: AsyncClient) -> None:
        """Ask for the model: `/health` samples a token, which a stopped server does not."""
        await get(http, "/model_info")

    @override
    async def label(self, http: AsyncClient) -> str | None:
        return str(item(await get(http, "/model_info"), "weight_version"))


async def _set_label(http: AsyncClient, label: str) -> None:
    """Set the label of the weights."""
    done = await post(http, "/update_weight_version", {"new_version": label, "abort_all_requests": False})
    if not item(done, "success"):
        raise Refused(f"POST /update_weight_version: {done.get('message')}")


def _generate_request(ask: Ask) -> dict[str, Any]:
    """Return the body of a request of the native API."""
    sampling = sampling_settings(ask.config, ask.stop_ids) | {
        "max_new_tokens": ask.config.max_new_tokens,
        "min_new_tokens": least_tokens(ask.config),
        "top_k": ask.config.top_k or _ALL,
        "sampling_seed": ask.seed,
        "no_stop_trim": True,
    }
    adapter = {} if ask.adapter is None else {"lora_path": ask.adapter}
    masks = {"return_sampling_mask": True} if ask.config.sampling_replay else {}
    return (
        adapter
        | masks
        | {
            "input_ids": list(ask.ids),
            "sampling_params": sampling,
            "return_logprob": True,
            # No log-probs of the prompt.
            "logprob_start_len": -1,
            "stream": False,
        }
    )


@dataclass
class Sglang(Servers):
    """Samples with SGLang: running servers (`urls`), or servers that the run starts and stops."""

    protocol: ClassVar[type[ServerProtocol]] = SglangProtocol
    package: ClassVar[str] = "sglang"
    command: ClassVar[str] = (
        "{python} -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port} "
        "--sampling-backend pytorch"
    )
    variables: ClassVar[dict[str, str]] = {}
    sleep_arguments: ClassVar[str] = "--enable-memory-saver"
    returns_masks: ClassVar[bool] = True

    @override
    def lora_arguments(self, rank: int) -> str:
        """Return the arguments for two adapters, which the server has during an update."""
        return f"--enable-lora --max-lora-rank {rank} --lora-target-modules all --max-loaded-loras 2"
