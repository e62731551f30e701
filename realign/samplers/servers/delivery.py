"""`Delivery`: the weights that all servers must sample with, and how a server gets them.

Weights have a label that contains the run and the number of the update. After each answer, the server's label is
compared with that of the weights it was sent. A server that restarted, or that another run updated, has another label:
its tokens are discarded, and it gets the weights again before it is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realign.errors import ConfigError
from realign.samplers.servers.inference_server import Lost, Server
from realign.samplers.servers.probe import PROMPT_TOKENS, SAMPLED, Probe, Sampled
from realign.samplers.servers.protocol import ANY_TOKEN, LOADING, Ask, Refused, ResponsePart, ServerFacts, Unavailable
from realign.samplers.servers.server_settings import ServerSettings
from realign.samplers.servers.weights import Weights

logger = logging.getLogger(__name__)
_LABEL_PREFIX = "realign-"


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
        self, name: str, settings: ServerSettings, probe: Probe, weights: Weights, base: BaseModel | None = None
    ) -> None:
        """Use `weights` as version 0.

        Args:
            name: the setting of the sampler, for messages.
            settings: settings of the sampler.
            probe: compares log-probs of servers and trainer.
            weights: the weights; with a base model, the folders of all updates contain LoRA adapters only.
            base: the base model of the adapters.
        """
        self._name, self._protocol, self._probe = name, settings.protocol(), probe
        self._timeout_s, self._sleep_level = settings.update_timeout_s, settings.sleep_level
        self._base = base
        self._publishing = asyncio.Lock()
        self._run = f"{_LABEL_PREFIX}{uuid.uuid4().hex[:12]}"
        self._updates = 0
        self.version = 0
        self.weights = weights
        self.words = _vocabulary_size(self.start_folder)

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
        return self.weights.folder if self._base is None else self._base.folder

    @property
    def rank(self) -> int | None:
        """Rank of the LoRA adapters; None if servers get the weights of the whole model."""
        return None if self._base is None else self._base.rank

    def replace(self, weights: Weights, version: int, probed: list[float]) -> None:
        """Use other weights from now on; see `Probe.expect` for `probed`."""
        self.weights, self.version = weights, version
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
        # vLLM goes on sampling when it wakes, and a server that was restarted has never been stopped.
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
        if self._base is not None:
            await self._load_adapter(server, self._base)
        elif (await self._facts(server)).receives and self.weights.digest is not None:
            await server.call(self._protocol.load_received(server.http, await self._receive(server), self.label))
        else:
            await server.call(self._protocol.load(server.http, await self._publish(), self.label))
        # Asked again after the load: a server that restarted meanwhile has another label.
        self._compare(server, await server.call(self._protocol.label(server.http)))

    async def _facts(self, server: Server) -> ServerFacts:
        """Ask a server once what it is. One that does not say it gets all weights, in the dtype of the trainer."""
        if server.facts is None:
            try:
                server.facts = await server.call(self._protocol.facts(server.http))
            except Lost:
                raise
            except (Unavailable, Refused) as error:
                logger.warning("%s: the server at %s does not say its dtype: %s", self._name, server.url, error)
                server.facts = ServerFacts()
            if self.weights.digest is not None and not server.facts.receives:
                logger.warning(
                    "%s: the server at %s gets all weights in each update, since it has no WeightReceiver (docs/guides/"
                    "servers.md)",
                    self._name,
                    server.url,
                )
        return server.facts

    async def _receive(self, server: Server) -> list[str]:
        """Let a server that has `WeightReceiver` copy the current weights, and return the files of its copy.

        It gets what changed. If its copy is not the previous one or becomes a wrong one, it gets all weights.
        """
        weights = self.weights
        if weights.base is not None:
            try:
                received = await server.call(self._protocol.receive(server.http, weights.delta, weights.base))
                if received.digest == weights.digest:
                    return received.paths
                why = f"its weights have the checksum {received.digest}"
            except (Unavailable, Refused) as error:
                why = reason_of(error)
            logger.warning("%s: the server at %s gets all weights, since %s", self._name, server.url, why)
        received = await server.call(self._protocol.receive(server.http, await self._publish()))
        if received.digest != weights.digest:
            raise Unavailable(f"its weights have the checksum {received.digest}, those of the run {weights.digest}")
        return received.paths

    async def _publish(self) -> Path:
        """Return the model folder that servers load."""
        async with self._publishing:
            return await asyncio.to_thread(self.weights.publish)

    async def _load_adapter(self, server: Server, base: BaseModel) -> None:
        """Let a server load the current adapter, after the base model if it does not have it."""
        if not self._is_own(await server.call(self._protocol.label(server.http))):  # it was restarted, or is new
            server.has_base &= server.launched
        if not server.has_base:
            await server.call(self._protocol.load(server.http, base.folder, f"{self._run}-base"))
            server.has_base, server.adapter = True, None
        await server.call(self._protocol.load_adapter(server.http, self.weights.folder, self.label))
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


def _vocabulary_size(folder: Path) -> int:
    """Return the number of tokens that the model of a folder can sample; the largest integer if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:  # of an engine that writes no model folder of transformers
        return ANY_TOKEN
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return ANY_TOKEN if size is None else int(size)
