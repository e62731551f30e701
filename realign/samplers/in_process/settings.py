"""`InProcessSampling`: settings for sampling with a role's own engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from typing_extensions import override

from realign.api.in_process_sampler import IN_PROCESS
from realign.api.sampler import Capabilities, SamplerSpec
from realign.errors import ConfigError, SettingsError
from realign.samplers.in_process.compiled.library import CompiledDecode, LibraryError, load_library
from realign.settings import Count, Range


@dataclass
class InProcessSampling(SamplerSpec):
    """Samples with the weights of the training engine, or with a copy of them if rollout=async."""

    external: ClassVar[bool] = False

    max_slots: Count | None = None
    """Decode at most this many sequences at once; null: as many as fit the KV cache, which has 1 GiB on a CPU."""
    cache_fraction: Annotated[float, Range(gt=0, le=1)] = 0.5
    """Without `max_slots`, use this fraction of a GPU's free memory for the KV cache, as measured when a rollout
    starts. Ignored on a CPU."""

    sync_every: Count | None = None
    """Check every this many decode steps which responses have ended; null: 8 on an accelerator, 1 on a CPU. In between,
    steps start without waiting for the device, and ended responses keep their slots. Samples depend on it only by
    rounding. Rollouts with stop strings or router_replay use 1."""
    compiled_decode: CompiledDecode = CompiledDecode.auto
    """Start a decode step at once instead of operator by operator: auto | on | off. On a CPU, a library does this that
    the first rollout compiles and caches; on CUDA, a graph that is captured for each power of two of rows. Where
    neither works, such as without a C++ compiler, auto uses operators, and on is an error."""

    exact: bool = False
    """Make log-probs of rollouts, scoring and training equal bit for bit, so that ratios before the first update are
    exactly 1. Slower. For models on a CPU whose decode steps can be compiled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact and self.compiled_decode is CompiledDecode.off:
            raise SettingsError("exact=true: incompatible with compiled_decode=off. Remove one of them.")

    def check(self, where: str) -> None:
        """See `SamplerSpec.check`.

        Raises:
            ConfigError: `compiled_decode=on` without a GPU, or `exact`, but the library cannot be built.
        """
        if not self.exact and (self.compiled_decode is not CompiledDecode.on or torch.cuda.is_available()):
            return
        if isinstance(library := load_library(), LibraryError):
            setting, cure = ("exact=true", "false") if self.exact else ("compiled_decode=on", "auto")
            raise ConfigError(f"{where}.{setting}: {library}. Install a C++ compiler, or set it to {cure}.")

    @override
    def capabilities(self) -> Capabilities:
        return IN_PROCESS
