"""`ServerSettings`: the settings that samplers over inference servers share."""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.parse import urlsplit

from typing_extensions import override

from realign.api.sampler import Capabilities, SamplerSpec
from realign.errors import ConfigError
from realign.samplers.servers.protocol import ServerProtocol
from realign.settings import Count, NonNegativeInt, Positive, Range

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Hosts of this machine."""


class LoraTransport(StrEnum):
    """How servers get a policy with LoRA adapters (models.ROLE.trains=lora)."""

    merged = "merged"
    """As weights of the whole model, with the adapters added. Works with every model."""
    adapter = "adapter"
    """The base model once, and only the adapter in each update. The server must support LoRA for the model."""


class Updates(StrEnum):
    """What servers get in an update of the whole model."""

    full = "full"
    """All weights. Servers on the same machine read them from shared memory."""
    delta = "delta"
    """Only the bits that changed, with a checksum of the result. Needs vLLM with `realign_worker`, and a copy of the
    weights in the memory of the server's host. Other servers get all weights."""


@dataclass
class ServerSettings(SamplerSpec, ABC):
    """Settings of a sampler on inference servers. API keys go into the environment variable `REALIGN_SERVER_KEYS`."""

    urls: list[str] = field(default_factory=list)
    """URLs of servers that already run, such as `http://127.0.0.1:8000`. Empty: the run starts its own."""
    launch: str | None = None
    """Command that starts a server; `{model}`, `{port}` and `{python}` stand for the model folder, the port and the
    interpreter. null uses the server's usual command."""
    python: str | None = None
    """Python interpreter of the environment that has the server installed; null uses the one of the run."""
    arguments: str = ""
    """More arguments for the command, such as `--max-model-len 4096`."""
    environment: dict[str, str] = field(default_factory=dict)
    """Extra environment variables for the servers that the run starts."""
    servers: Count = 1
    """Start this many servers. Each finds its number in the environment variable `REALIGN_SERVER_INDEX`, from 0."""
    devices: list[str] = field(default_factory=list)
    """`CUDA_VISIBLE_DEVICES` of each server, such as `["0,1", "2,3"]` for two servers with two GPUs each. Empty: the
    same GPUs as the run."""
    weights_dir: str | None = None
    """Folder through which servers get new weights. Required, on a file system that both can read, if a server is on
    another machine; null uses shared memory, or the temporary folder without it."""
    lora: LoraTransport = LoraTransport.merged
    """How to send a policy with LoRA adapters: merged (as a whole model) | adapter (only the adapter). See
    `LoraTransport`."""
    updates: Updates = Updates.full
    """What to send in a weight update: full (all weights) | delta (only what changed). See `Updates`."""
    sleep_level: Annotated[int, Range(ge=0, le=2)] = 0
    """What servers free on the GPU while models train (rollout=sync): 0: nothing. 1: the KV cache and the weights, of
    which vLLM keeps a copy in host memory. 2: both, without a copy."""
    untie: bool = False
    """Send tied output embeddings as separate weights. vLLM on a CPU needs this, since it doesn't update tied ones."""
    probe_tolerance: Positive | None = 0.005
    """Check after each update that servers have the new weights: their log-probs of a fixed text may differ from the
    trainer's by at most this, in nats per token, plus 4 times the difference at the first weights. A sampled response
    may differ by 1. null skips the check."""
    concurrency: Count = 256
    """Maximum number of concurrent requests per server."""
    request_timeout_s: Positive = 1800.0
    """Time limit of one request in seconds. A request that exceeds it counts as a failure of the server."""
    update_timeout_s: Positive = 600.0
    """Time limit for loading new weights, in seconds."""
    start_timeout_s: Positive = 900.0
    """Time limit for the start of a server until its first answer, in seconds."""
    patience_s: Positive = 300.0
    """Stop the run with exit code 75 after this many seconds without a working server: one that completes requests, or
    hasn't failed three yet."""
    restarts: NonNegativeInt = 3
    """Maximum number of restarts per server (of those that the run starts)."""

    protocol: ClassVar[type[ServerProtocol]]
    package: ClassVar[str]
    command: ClassVar[str]
    variables: ClassVar[dict[str, str]]
    sleep_arguments: ClassVar[str]
    delta_arguments: ClassVar[str] = ""
    returns_masks: ClassVar[bool] = False
    """Whether the server returns sampling masks."""

    @abstractmethod
    def lora_arguments(self, rank: int) -> str:
        """Return the arguments of the usual command for adapters of a rank.

        Raises:
            ConfigError: the server does not support the rank.
        """

    def check(self, where: str) -> None:
        """See `SamplerSpec`.

        Raises:
            ConfigError: a URL is invalid, the server is not installed, or settings exclude each other.
        """
        if self.updates is Updates.delta and not self.delta_arguments:
            raise ConfigError(f"{where}.updates=delta: only servers of vLLM take deltas. Set updates=full.")
        if self.updates is Updates.delta and self.lora is LoraTransport.adapter:
            raise ConfigError(f"{where}.updates=delta: lora=adapter sends adapters only. Set updates=full.")
        for url in self.urls:
            _check_url(f"{where}.urls", url)
        if self.urls:
            for name in ("launch", "python", "arguments", "environment", "devices"):
                if getattr(self, name):
                    raise ConfigError(f"{where}.{name}: it applies to servers that the run starts, but urls are set.")
            remote = next((url for url in self.urls if urlsplit(url).hostname not in LOCAL), None)
            if remote and self.weights_dir is None:
                raise ConfigError(
                    f"{where}.weights_dir=null: {remote} is on another machine. Set weights_dir to a folder that both "
                    "machines can read."
                )
            return
        if self.launch is None and self.python is None and find_spec(self.package) is None:
            raise ConfigError(
                f"{where}: {self.package} is not installed in the environment of the run. Set {where}.python to the "
                f"interpreter of an environment that has it, or {where}.urls to running servers."
            )
        if self.python is not None and not Path(self.python).expanduser().exists():
            raise ConfigError(f"{where}.python={self.python!r}: no such file")
        if self.devices and len(self.devices) != self.servers:
            raise ConfigError(
                f"{where}.devices={self.devices}: has {len(self.devices)} values, but {where}.servers={self.servers}. "
                "Give one text for each server."
            )
        # Only for its errors: they come before any model is loaded.
        self.command_line(f"{where}.launch", Path("model"), 0)

    @override
    def capabilities(self) -> Capabilities:
        """Say what servers can do. Tokens depend on the requests that a server decodes together."""
        return Capabilities(
            bitwise=False,
            logprobs_at_temperature=True,
            stop_strings=True,
            lora=True,
            abort=False,
            sampling_replay=self.returns_masks,
            frees_memory=self.sleep_level > 0,
        )

    def command_line(self, where: str, model: Path, port: int, rank: int | None = None) -> list[str]:
        """Return the command that starts a server.

        Args:
            where: key of the command, for messages.
            model: folder of the weights.
            port: port on which it listens.
            rank: rank of the LoRA adapters that it gets; None if it gets none.

        Raises:
            ConfigError: the command has an unknown placeholder, or quotes that are not closed.
        """
        import shlex

        values = {"model": str(model), "port": str(port), "python": self.python or sys.executable}
        command = self.launch or " ".join(
            [
                self.command,
                self.lora_arguments(rank) if rank is not None else "",
                self.sleep_arguments if self.sleep_level else "",
                self.delta_arguments if self.updates is Updates.delta else "",
            ]
        )
        words = f"{command} {self.arguments}"
        try:
            return [word.format(**values) for word in shlex.split(words)]
        except (ValueError, LookupError) as error:
            raise ConfigError(
                f"{where}: {words!r} is no valid command ({error}). Valid placeholders: {{model}}, {{port}} and "
                "{python}."
            ) from error

    def launch_dtype(self) -> str | None:
        """Return the dtype that the command of a server says."""
        words = self.command_line("launch", Path("model"), 0)
        values = [after for word, after in itertools.pairwise(words) if word == "--dtype"]
        values += [word.removeprefix("--dtype=") for word in words if word.startswith("--dtype=")]
        # The last one counts, as in the parser of the server.
        return values[-1] if values and not self.urls else None

    def server_variables(self, index: int) -> dict[str, str]:
        """Return the environment variables of a server that the run starts."""
        device = {"CUDA_VISIBLE_DEVICES": self.devices[index]} if self.devices else {}
        return {**self.variables, "REALIGN_SERVER_INDEX": str(index), **device, **self.environment}


def _check_url(where: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if valid and (parts.username or parts.password or parts.query or parts.fragment):
        raise ConfigError(f"{where}: a URL contains credentials or parameters. Use the form http://host:port.")
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{where}: {url!r} is no valid URL. Use the form http://host:port.")
