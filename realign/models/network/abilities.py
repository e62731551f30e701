"""`prepare_module`: make a transformers model run packed, and find by probing it what it can do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.functional.rounding import RoundedWeights, rounding
from realign.models.network.attention import NotPackableError
from realign.models.network.compiled_layers import compile_layers
from realign.models.network.encoder_decoder import EncoderDecoder, EncoderDecoderCache
from realign.models.network.heads import IMAGE_FAMILIES, is_encoder_decoder, read_head
from realign.models.network.images import ImageInputs
from realign.models.network.kernels import Backend
from realign.models.network.passed_context import pass_context_on
from realign.models.network.passes import ParallelPasses, SharedPrompts, rewrites_rope
from realign.models.network.probe import Autocast, compile_probed, probe, probe_head, probe_shared
from realign.models.network.recurrence import segment_recurrent_layers
from realign.models.network.routers import RouterReplay
from realign.models.network.settings import NetworkSettings
from realign.models.network.trains import All
from realign.models.network.unpacked import OwnCache, UnpackedModel, cost
from realign.models.network.value_head import ValueNetwork

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Abilities:
    """What a model can do under its settings."""

    autocast: Callable[[], AbstractContextManager[Any]]
    """Context of all passes."""
    rounded: RoundedWeights | None
    """The weights that this context rounds; None if it rounds none."""
    shares: bool
    """Whether the prompt of a group is computed once."""
    parallel: bool = False
    """Whether micro-batches may run concurrently."""
    fuses: bool = False
    """Whether rollouts may join the weights of a layer, see `realign.samplers.in_process.compiled`."""
    replay: RouterReplay | None = None
    """Replays choices of experts; None if the model cannot."""
    no_replay: str = ""
    """Why choices of experts cannot be replayed."""
    images: ImageInputs | None = None
    """Reads the images of prompts; None if the model does not support images."""
    unpacked: UnpackedModel | EncoderDecoder | None = None
    """Runs a model that cannot run packed; None if it runs packed."""
    own_cache: OwnCache | None = None
    """Samples from such a model; None if it runs packed, or has a scalar head."""


def prepare_module(
    name: str, module: Any, settings: NetworkSettings, value_head: ValueNetwork | None = None, probed: Any = None
) -> Abilities:
    """Prepare a module and its value head for packed passes in eval mode, and return what they can do.

    Args:
        name: role of the model, for messages.
        module: a transformers model.
        settings: how passes are computed.
        value_head: its value head.
        probed: probed in place of a module whose weights are unread, see `probe.small_model`.

    Raises:
        ConfigError: the model family is not supported.
    """
    where, device = f"models.{name}", next(module.parameters()).device
    for part in (module, *(() if value_head is None else (value_head,))):
        part.eval()
    # Both before the probe, which would otherwise find that these families cannot run packed.
    segment_recurrent_layers(module)
    hooked = pass_context_on(module)
    if probed is not None:
        segment_recurrent_layers(probed)
        pass_context_on(probed)
    probed = module if probed is None else probed
    half = settings.dtype == torch.bfloat16
    autocast: Autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16, enabled=half)
    cast, rounded = autocast if half else None, None
    if settings.rounds_weights(device):
        rounded = RoundedWeights()
        autocast = cast = partial(rounding, rounded)
    replay, no_replay = _find_replay(module)
    # A branch records the inputs of the trunk's layers with hooks, which cannot tell concurrent passes apart.
    alone = (value_head is not None and value_head.branch is not None) or rewrites_rope(module) or hooked
    on_cpu = device.type == "cpu"
    abilities = Abilities(
        autocast,
        rounded,
        shares=settings.shared_prompts is SharedPrompts.auto,
        parallel=settings.parallel_passes is ParallelPasses.auto and on_cpu and not alone,
        fuses=settings.fused_rollout and isinstance(read_head(module), LMHead),
        replay=replay,
        no_replay=no_replay,
    )
    try:
        if is_encoder_decoder(module.config):
            family = f"model family {module.config.model_type!r}"
            raise NotPackableError(f"{family} is an encoder-decoder model, which cannot run packed.")
        # On a CPU only the family can be wrong, which is an error. On an accelerator it may be the kernel, which only
        # means that prompts are not shared.
        share = abilities.shares and on_cpu
        probe(probed, read_head(probed), attention=settings.attention, autocast=cast, share=share)
    except NotPackableError as error:
        abilities = _unpack(name, abilities, module, value_head, probed, str(error))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if abilities.shares and not on_cpu:
        abilities = replace(abilities, shares=can_share(name, probed, settings.attention, cast))
    # After the probe, which changes the attention of all layers.
    plain = abilities.unpacked is None and value_head is None and settings.trains == All()
    if plain and module.config.model_type in IMAGE_FAMILIES:
        abilities = replace(abilities, images=ImageInputs(module))
    if settings.torch_compile.compiles:
        _compile(where, abilities, module, probed, settings)
    return abilities


def can_share(name: str, module: Any, attention: Backend, autocast: Autocast | None) -> bool:
    """Return whether the kernel of an accelerator computes shared prompts correctly; log the reason if not."""
    try:
        probe_shared(module, attention=attention, autocast=autocast)
    except (ConfigError, RuntimeError) as error:
        logger.warning("models.%s: prompts are not shared. %s", name, error)
        return False
    return True


def _find_replay(module: Any) -> tuple[RouterReplay | None, str]:
    """Return what replays choices of experts, or why nothing does."""
    try:
        return RouterReplay(module), ""
    except ConfigError as error:
        return None, str(error)


def _unpack(
    name: str, abilities: Abilities, module: Any, value_head: ValueNetwork | None, probed: Any, reason: str
) -> Abilities:
    """Return what a model can do that runs without packing, and log what that costs."""
    unpacked: UnpackedModel | EncoderDecoder
    own_cache: OwnCache | None = None
    try:
        if value_head is not None and value_head.branch is not None:
            raise ConfigError(f"{reason} Set head.value_head.layers=0.")
        if is_encoder_decoder(module.config):
            unpacked = EncoderDecoder(module, reason)
            own_cache = EncoderDecoderCache(unpacked)
        else:
            unpacked = UnpackedModel(module, reason)
            probe_head(probed, read_head(probed))
            own_cache = OwnCache(module) if isinstance(read_head(module), LMHead) else None
    except ConfigError as error:
        raise ConfigError(f"models.{name}: {error}") from error
    decoding = None if own_cache is None else own_cache.describe()
    logger.warning(cost(name, reason, decoding))
    no_replay = f"{reason} Replay requires a model that can run packed."
    plain = Abilities(abilities.autocast, abilities.rounded, shares=False)
    return replace(plain, no_replay=no_replay, unpacked=unpacked, own_cache=own_cache)


def _compile(where: str, abilities: Abilities, module: Any, probed: Any, settings: NetworkSettings) -> None:
    """Compile the decoder layers, see `compile_layers`."""
    what = f"{where}.torch_compile={settings.torch_compile.value}"
    if abilities.unpacked is not None:
        reason = abilities.unpacked.reason.rstrip(".")
        raise ConfigError(f"{what}: requires a model that can run packed. {reason}. Set torch_compile=off.")
    if abilities.images is not None:
        raise ConfigError(f"{what}: not supported by models that read images. Set torch_compile=off.")
    try:
        compile_probed(probed, settings.torch_compile)
        if probed is not module:
            compile_layers(module, settings.torch_compile)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error} Set torch_compile=off.") from error
