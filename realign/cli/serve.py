"""`realign serve MODEL`: serve a model to OpenAI clients. Needs the extra `serve`."""

from __future__ import annotations

import argparse
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from transformers.utils.logging import disable_progress_bar

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.api.engine import Forward, PostHook
from realign.api.sampler import Sampler
from realign.cli.arguments import settings_of
from realign.config.errors import ConfigError
from realign.endpoint import Endpoint, EndpointLimits, Renderer, Scorer, ServedPolicy, Sessions
from realign.endpoint.server import check_installed, is_loopback
from realign.engines import TransformersModel
from realign.runtime.models import open_sampler
from realign.settings import Range, Settings

KEY_VARIABLE = "REALIGN_API_KEY"
"""Environment variable with the key that clients must send."""
Port = Annotated[int, Range(ge=0, le=65535)]
"""Number of a TCP port."""


@dataclass
class Serve(Settings):
    """Settings of an endpoint: model, sampling defaults, address and limits."""

    model: TransformersModel
    """Model to load: a folder that a run saved, such as `runs/grpo/final/actor`, the folder of a run, or a name on the
    Hugging Face Hub."""
    generation: GenerationConfig = field(default_factory=lambda: GenerationConfig(max_new_tokens=2048))
    """Sampling settings of requests that set none. `max_new_tokens` is also the maximum that a request can set."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    response_template: str = ""
    """Format of tool calls and reasoning in responses, as in `AgentInterface`; empty: the tokenizer's own one."""
    name: str = ""
    """Name of the model in responses; empty: the last part of its path."""
    host: str = "127.0.0.1"
    """Address to listen on. Other addresses than loopback require a key in `REALIGN_API_KEY`."""
    port: Port = 8000
    """Port to listen on; 0 chooses a free one."""
    limits: EndpointLimits = field(default_factory=EndpointLimits)
    """Limits of requests."""
    seed: int = 0
    """Seed of the model and its sampler."""

    def run(self, say: Callable[[str], None]) -> None:
        """Serve until Ctrl-C or SIGTERM, and pass the address and a generated key to `say`.

        Raises:
            RealignError: the model cannot be loaded, the address cannot be used, or the key is missing.
        """
        check_installed()
        key = self.key(os.environ)
        with self.endpoint(key) as endpoint:
            say(f"serving {self.shown_name} at {endpoint.url}/v1")
            if KEY_VARIABLE not in os.environ:
                say(f"API key (generated; set {KEY_VARIABLE} to choose one): {key}")
            endpoint.run()

    @property
    def shown_name(self) -> str:
        """Name of the model in responses."""
        return self.name or Path(self.model.path).name

    def key(self, environment: Mapping[str, str]) -> str:
        """Return the key of the environment, or else a new one.

        Raises:
            ConfigError: the endpoint is not on a loopback address, and the environment has no key.
        """
        if key := environment.get(KEY_VARIABLE):
            return key
        if not is_loopback(self.host):
            raise ConfigError(f"host={self.host}: other machines can reach this address. Set {KEY_VARIABLE}.")
        return secrets.token_urlsafe(24)

    @contextmanager
    def endpoint(self, key: str) -> Iterator[Endpoint]:
        """Load the model and listen on the address. The caller starts the endpoint.

        Args:
            key: key that clients must send.
        """
        from realign.samplers.in_process.background import StreamingEngine

        model = self.model.load("serve", seed=self.seed)
        open_sampler(self.model, model)
        sampler: Sampler = model.external_sampler or StreamingEngine("serve", model.engine)
        with closing(sampler):
            renderer = Renderer(model.tokenizer, self.template_options, self.response_template)
            # a sampler in this process owns the engine; the forward pass runs between two of its decode steps
            forward = sampler.forward if isinstance(sampler, StreamingEngine) else _one_at_a_time(model.engine.forward)
            positions = model.engine.capabilities().positions
            backend = ServedPolicy(sampler, renderer, self.generation, positions, scorer=Scorer(forward))
            sessions = Sessions(backend, key, seed=self.seed)
            with closing(
                Endpoint(sessions, self.limits, model=self.shown_name, host=self.host, port=self.port)
            ) as endpoint:
                yield endpoint


def _one_at_a_time(forward: Forward) -> Forward:
    """Return a function that makes one call at a time, from any thread."""
    lock = threading.Lock()

    def forward_locked(data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        with lock:
            return forward(data, mb_spec, post_hook)

    return forward_locked


def serve(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign serve`: serve a model until a signal."""
    settings = serve_of(words)
    disable_progress_bar()
    settings.run(print)
    return 0


def serve_of(words: Sequence[str]) -> Serve:
    """Parse a command line `MODEL key=value ...`, with the fields of `Serve` as keys.

    Raises:
        ConfigError: the command line names no model or several, or a key or value is invalid.
    """
    return settings_of("serve", Serve, words)
