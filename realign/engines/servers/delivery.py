"""`Delivery`: the weights that all servers must sample with, the folders they load, and how a server gets them.

Weights have a label that contains the run and the number of the update. After each answer, the server's label is
compared with that of the weights it was sent. A server that restarted, or that another run updated, has another label:
its tokens are discarded, and it gets the weights again before it is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from safetensors.torch import load_file, save_file

from realign.api.sampler import WeightSource
from realign.engines.files.folders import AVERAGED
from realign.engines.servers.inference_server import Server
from realign.engines.servers.probe import PROMPT_TOKENS, SAMPLED, Probe, Sampled
from realign.engines.servers.protocol import ANY_TOKEN, LOADING, Ask, Refused, ResponsePart, Unavailable
from realign.engines.servers.server_settings import ServerSettings
from realign.errors import ConfigError, TransientError

logger = logging.getLogger(__name__)
_LABEL_PREFIX = "realign-"
_SHARED_MEMORY = Path("/dev/shm")
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class BaseModel:
    """The base model of LoRA adapters."""

    folder: Path
    """Model folder."""
    rank: int
    """Rank of the adapters."""


class Delivery:
    """Sends the current weights to servers. All methods but `replace` are called in the event loop of the sampler."""

    def __init__(
        self, name: str, settings: ServerSettings, probe: Probe, folder: Path, base: BaseModel | None = None
    ) -> None:
        """Use the weights of `folder` as version 0.

        Args:
            name: the setting of the sampler, for messages.
            settings: settings of the sampler.
            probe: compares log-probs of servers and trainer.
            folder: the weights; with a base model, the folders of all updates contain LoRA adapters only.
            base: the base model of the adapters.
        """
        self._name, self._protocol, self._probe = name, settings.protocol(), probe
        self._timeout_s, self._sleep_level = settings.update_timeout_s, settings.sleep_level
        self._base = base
        self._run = f"{_LABEL_PREFIX}{uuid.uuid4().hex[:12]}"
        self._updates = 0
        self.version = 0
        self.folder = folder
        self.words = vocabulary_size(self.start_folder)

    @property
    def label(self) -> str:
        """The label of the current weights. Two updates with the same version have different labels."""
        return f"{self._run}-{self._updates}"

    @property
    def adapter(self) -> str | None:
        """Name of the current LoRA adapter; None if servers get the weights of the whole model."""
        return None if self._base is None else self.label

    @property
    def start_folder(self) -> Path:
        """Model folder that a server can be started with."""
        return self.folder if self._base is None else self._base.folder

    @property
    def rank(self) -> int | None:
        """Rank of the LoRA adapters; None if servers get the weights of the whole model."""
        return None if self._base is None else self._base.rank

    def replace(self, folder: Path, version: int, probed: list[float]) -> None:
        """Use other weights from now on.

        Args:
            folder: the weights.
            version: their version.
            probed: see `Probe.expect`.
        """
        self.folder, self.version = folder, version
        self._updates += 1
        self._probe.expect(probed)

    async def send(self, server: Server) -> None:
        """Send the current weights to a server that is stopped, and check that it uses them.

        Raises:
            Unavailable: the server failed.
            ConfigError: the server computes other log-probs than the trainer.
        """
        await self._load_current(server)
        await self._compare_scores(server)

    async def _load_current(self, server: Server) -> None:
        await self._call("loading weights", self._load(server))
        server.checked_at = time.monotonic()

    async def check(self, server: Server, part: ResponsePart) -> None:
        """Check that a server sampled with the current weights.

        Raises:
            Unavailable: it did not.
            ConfigError: another run sent it weights.
        """
        if part.label is not None:
            self._compare(server, part.label)
            return
        ended = time.monotonic()
        async with server.check_lock:  # one check is valid for all answers before it
            if server.checked_at <= ended:
                began = time.monotonic()
                self._compare(server, await server.call(self._protocol.label(server.http)))
                server.checked_at = began

    async def check_rejection(self, server: Server) -> None:
        """Check that a server that rejected a request has the current weights.

        Raises:
            Unavailable: it was restarted, so that it rejects the name of the adapter.
        """
        self._compare(server, await server.call(self._protocol.label(server.http)))

    async def sleep(self, server: Server) -> None:
        """Let a server that is stopped free its memory, if the settings say so.

        Raises:
            Unavailable: the server failed.
        """
        if self._sleep_level and not server.asleep:
            server.asleep = server.without_cache = True  # also if the call fails
            await self._call("freeing memory", server.call(self._protocol.sleep(server.http, self._sleep_level)))

    async def wake(self, server: Server) -> None:
        """Let a server that is asleep allocate its memory and load the current weights; it is then stopped.

        Raises:
            Unavailable: the server failed.
            ConfigError: see `send`.
        """
        label = await server.call(self._protocol.label(server.http))
        keeps_weights = self._sleep_level in self._protocol.keeps_weights
        if label != LOADING and not self._is_own(label):  # it was restarted, and is awake
            server.asleep = server.without_cache = False
        if server.asleep:
            await self._call("allocating memory", server.call(self._protocol.wake_weights(server.http)))
            server.asleep = False
            server.has_base &= keeps_weights
        await self.stop(server)
        if not keeps_weights or label != self.label:
            await self._load_current(server)
        if server.without_cache:  # only now: loading needs memory too
            await self._call("allocating memory", server.call(self._protocol.wake_cache(server.http)))
            server.without_cache = False
            await self.stop(server)
        await self._compare_scores(server)

    async def stop(self, server: Server) -> None:
        """Let a server return the tokens of its requests, and hold later requests.

        Raises:
            Unavailable: the server failed.
        """
        await self._call("stopping", server.call(self._protocol.stop(server.http)))

    async def start(self, server: Server) -> None:
        """Let a server that is stopped continue.

        Raises:
            Unavailable: the server failed.
        """
        await self._call("continuing", server.call(self._protocol.start(server.http)))

    async def _call(self, what: str, call: Coroutine[Any, Any, None]) -> None:
        """Make a call within the time limit."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await call
        except (Unavailable, Refused, TimeoutError) as error:
            raise Unavailable(f"{what} failed: {reason_of(error)}") from error

    async def _load(self, server: Server) -> None:
        """Let a server load the current weights."""
        if self._base is None:
            await server.call(self._protocol.load(server.http, self.folder, self.label))
        else:
            await self._load_adapter(server, self._base)
        self._compare(server, await server.call(self._protocol.label(server.http)))

    async def _load_adapter(self, server: Server, base: BaseModel) -> None:
        """Let a server load the current adapter, after the base model if it does not have it."""
        if not self._is_own(await server.call(self._protocol.label(server.http))):  # it was restarted, or is new
            server.has_base &= server.launched
        if not server.has_base:
            await server.call(self._protocol.load(server.http, base.folder, f"{self._run}-base"))
            server.has_base, server.adapter = True, None
        await server.call(self._protocol.load_adapter(server.http, self.folder, self.label))
        if server.adapter not in (None, self.label):
            with suppress(Refused):  # the server has removed it by itself
                await server.call(self._protocol.unload_adapter(server.http, server.adapter))
        server.adapter = self.label

    def _is_own(self, label: str | None) -> bool:
        """Whether a server has the label of any weights of this run."""
        return label is not None and label.startswith(self._run)

    def _compare(self, server: Server, label: str | None) -> None:
        """Compare the label of a server with that of the current weights."""
        if label == self.label:
            return
        if label is not None and label.startswith(_LABEL_PREFIX) and not self._is_own(label):
            raise ConfigError(
                f"{self._name}: the server at {server.url} got weights from another run. Give each run its own servers."
            )
        raise Unavailable(f"it has other weights ({label!r}), so it was restarted")

    async def _compare_scores(self, server: Server) -> None:
        """Compare log-probs, if there is a text for it."""
        if self._probe.active:
            await self._call("comparing weights", self._score(server))

    async def _score(self, server: Server) -> None:
        """Compare the log-probs of a server that is stopped with those of the trainer, and let it sample a response.

        The trainer can score the response only while it has the same weights, so the sampler compares it later.
        """
        probe = self._probe
        prompt = probe.ids[:PROMPT_TOKENS]
        ask = Ask(prompt, SAMPLED, (), self._updates, self.words, self.adapter)
        await server.call(self._protocol.start(server.http))
        logprobs = await server.call(self._protocol.score(server.http, probe.ids, self.adapter))
        part = await server.call(self._protocol.sample(server.http, ask))
        await server.call(self._protocol.stop(server.http))
        where = f"{self._name}: the server at {server.url}"
        gap = probe.check(logprobs, first=not self._updates, where=where)
        server.sampled = Sampled(where, [*prompt, *part.ids], part.logprobs, self._updates)
        if not self._updates:
            logger.info("%s: its log-probs differ from those of the trainer by %.2g nats on average", where, gap)

    def take_sampled(self, server: Server) -> Sampled | None:
        """Return the response of a server under the current weights that was not compared yet."""
        sampled, server.sampled = server.sampled, None
        return sampled if sampled is not None and sampled.update == self._updates else None


def reason_of(error: BaseException) -> str:
    """Return the text of an error, or its type if it has none."""
    return str(error) or type(error).__name__


@runtime_checkable
class HasAdapter(Protocol):
    """A source of weights that can save its LoRA adapters alone."""

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the adapters; None if the model has none."""
        ...

    def save_adapter(self, path: Path) -> None:
        """Write an adapter folder of peft."""
        ...

    def save_base(self, path: Path) -> None:
        """Write a model folder with the weights of the base model."""
        ...


class WeightFolders:
    """Writes the weights of a role for servers."""

    def __init__(self, parent: str | None, *, untie: bool = False) -> None:
        """Create the folder.

        Args:
            parent: folder in which it is created; None: shared memory if the system has it, or the temporary folder.
            untie: whether to write tied output embeddings as separate weights.

        Raises:
            ConfigError: the folder cannot be created.
        """
        if parent is None and _SHARED_MEMORY.is_dir():
            parent = str(_SHARED_MEMORY)
        try:
            if parent is not None:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self.root = Path(tempfile.mkdtemp(prefix="realign-weights-", dir=parent))
        except OSError as error:
            raise ConfigError(f"weights_dir={parent!r}: cannot be written: {error}") from error
        self._untie = untie

    def write(self, source: WeightSource, number: int) -> Path:
        """Write the weights of an update, and return their folder.

        Raises:
            TransientError: there is not enough space.
        """

        def save(folder: Path) -> None:
            source.save(folder)
            shutil.rmtree(folder.with_name(f"{folder.name}{AVERAGED}"), ignore_errors=True)
            self._prepare(folder)

        return self._write(self.root / f"update_{number}", save)

    def write_adapter(self, source: HasAdapter, number: int) -> Path:
        """Write the LoRA adapter of an update alone; see `write`."""
        return self._write(self.root / f"update_{number}", source.save_adapter)

    def write_base(self, source: HasAdapter) -> Path:
        """Write the base model of LoRA adapters; see `write`."""

        def save(folder: Path) -> None:
            source.save_base(folder)
            self._prepare(folder)

        return self._write(self.root / "base", save)

    def _prepare(self, folder: Path) -> None:
        if self._untie:
            untie(folder)

    def _write(self, folder: Path, save: Callable[[Path], None]) -> Path:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            save(folder)
        except OSError as error:
            raise TransientError(
                f"{folder}: the weights for the servers were not written: {error}. Set weights_dir to a folder with "
                "more space."
            ) from error
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove all other versions."""
        for other in self.root.glob("update_*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


def untie(folder: Path) -> None:
    """Separate the output embeddings of a model folder, if they are tied to the input embeddings.

    Raises:
        ConfigError: the input embeddings have an unknown name.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if not config.get("tie_word_embeddings"):
        return
    for file in sorted(folder.glob("*.safetensors")):
        weights = load_file(file)
        name = next((key for key in weights if key.endswith(_EMBEDDINGS)), None)
        if name is None:
            continue
        save_file(weights | {_HEAD: weights[name].clone()}, file, metadata={"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.exists():
            listed = json.loads(index.read_text(encoding="utf-8"))
            listed["weight_map"][_HEAD] = file.name
            index.write_text(json.dumps(listed), encoding="utf-8")
        path.write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
        return
    raise ConfigError(f"untie=true: the model has no weight that ends in {_EMBEDDINGS}. Set untie=false.")


def vocabulary_size(folder: Path) -> int:
    """Return the number of tokens that the model of a folder can sample; the largest integer if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # of an engine that writes no model folder of transformers
        return ANY_TOKEN
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return ANY_TOKEN if size is None else int(size)
