"""Choose what computes the layers of a rollout: the modules of transformers, a `FusedTrunk`, or a `CompiledTrunk`.

Each rollout reads the current weights, so optimizer steps take effect. A model is fused only if all its parts are
known, and if a comparison gave the same hidden states.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from typing_extensions import override

from realign.errors import ConfigError
from realign.functional.logprobs import no_autocast
from realign.functional.packed import cu_seqlens_of, position_ids
from realign.functional.rounding import active_rounding, no_rounding
from realign.models.device import free_bytes
from realign.models.network.attention import PackedContext
from realign.models.network.decode_graphs import why_no_graphs
from realign.models.network.decoder import ModuleTrunk, Trunk
from realign.models.network.kernels import AttentionArgs
from realign.models.network.kv_cache import DecodeContext, KVCache, PrefillContext
from realign.models.network.trains import ADAPTER
from realign.samplers.in_process.compiled.fused_layers import (
    AnyLinear,
    FusedLayer,
    FusedTrunk,
    Linear,
    RMSNorm,
    gelu_tanh,
)
from realign.samplers.in_process.compiled.library import CompiledDecode, LibraryError, load_library
from realign.samplers.in_process.compiled.trunk import PROBE_LENGTH, CompiledTrunk, check_supported

TOLERANCE = 2e-5
"""Largest fp32 rounding error, relative to the largest hidden state; ADR 31 gives measurements.

Rounding differs by about 1e-6. For SmolLM2-135M, 2e-5 corresponds to about 1e-3 nats, the default of `ratio_tolerance`.
"""

logger = logging.getLogger(__name__)
FAMILIES = frozenset({"gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
"""Values of `model_type` whose layers `fused_layers` implements."""

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Types of rotary positions that do not depend on the text length."""

CPU_BYTES = 2**32
"""Memory limit for copies of weights on a CPU, in bytes. On an accelerator it is half of the free memory: the KV cache
takes a part of the other half, and the passes of a rollout need the rest."""

_PROBE_LENGTHS = (9, 4, 14, 5)
"""Lengths of the compared sequences, each longer than the steps, since a prompt has at least one token."""

_PROBE_STEPS = 3
"""Number of tokens that are decoded one by one."""


class DecodePath(StrEnum):
    """Implementation of the decode steps of a rollout. The paths differ by rounding."""

    modules = "modules"
    """Modules of the transformers model."""
    fused = "fused"
    """`FusedTrunk`, with operators of torch."""
    compiled = "compiled"
    """`CompiledTrunk`, with the compiled library."""
    graphs = "graphs"
    """`FusedTrunk`, with CUDA graphs."""


_MakeLinear: TypeAlias = Callable[[Tensor, Tensor | None], AnyLinear]
"""Returns a linear layer with a weight [outputs, K] and a bias."""

_GatherLayer: TypeAlias = Callable[[nn.Module], AbstractContextManager[object]]
"""Lends a layer its weights for the time of the context."""


class WeightGatherer(Protocol):
    """Gathers the weights of a model that has none between rollouts. All ranks call its methods together."""

    def gather_embeddings_and_heads(self) -> None:
        """Gather the weights outside of the layers."""
        ...

    def gather_layer(self, layer: nn.Module) -> AbstractContextManager[object]:
        """Gather the weights of a layer for the time of the context."""
        ...

    def on_all_ranks(self, own: bool) -> bool:
        """Return whether `own` is true on all ranks."""
        ...


class Fusion:
    """Decides whether a model's rollouts can run on a `FusedTrunk`. The first rollout makes the comparison.

    Args:
        model: the transformers model.
        compiled: whether decode steps of a fused trunk run in the compiled library, see `CompiledTrunk`.
    """

    def __init__(self, model: Any, compiled: CompiledDecode = CompiledDecode.auto) -> None:
        self._model = model
        self._args: list[AttentionArgs] | None = None
        self._joined: list[FusedLayer] | None = None
        self.lender: WeightGatherer | None = None
        """Gathers the weights, see `join`; None if the model always has them."""
        self.path = _DecodeChoice(type(model).__name__, compiled)
        """The choice of what computes the decode steps."""
        self.obstacle: str | None = None
        """Reason why the last rollout ran the model's own modules; None if it was fused, or no rollout has run."""
        self._difference: str | None = None
        self._logged: str | None = None

    @property
    def known(self) -> bool:
        """Whether a comparison has succeeded."""
        return self._args is not None

    @torch.no_grad()
    def compare(self) -> None:
        """Run the comparison now.

        A resumed run calls this with its initial weights, so that it gets the same outcome as the original run.
        """
        if self.known:
            return
        with suppress(_Unknown):
            _check_parts(self._model)
            if self.lender is not None:
                self.lender.gather_embeddings_and_heads()
            self._compare()

    def _compare(self) -> None:
        """See `_probe_args`. A difference is final: measuring it again after each step would only change its digits."""
        if self._args is not None:
            return
        if self._difference is not None:
            raise _Different(self._difference)
        try:
            self._args = _probe_args(self._model, None if self.lender is None else self.lender.gather_layer)
        except _Different as error:
            self._difference = str(error)
            raise

    def _check(self, dtype: torch.dtype) -> None:
        if self._args is None:
            _check_parts(self._model)
        if dtype != torch.float32 and _has_adapters(self._model):
            raise _Unknown(
                "its products are not in float32: a sum of weight and adapter would lose what an adapter adds"
            )
        # in each rollout, since free memory changes; a model that was refused for it is compared later
        _check_memory(self._model.base_model.layers, dtype)

    @torch.no_grad()
    def join(self, gatherer: WeightGatherer, dtype: torch.dtype) -> bool:
        """Join the layers of a model without weights, each while it has its weights; collective.

        Returns:
            Whether rollouts run the joined layers until `forget`. If not, they need all weights.
        """
        self.forget()
        if not gatherer.on_all_ranks(_knows(lambda: self._check(dtype))):
            return False
        gatherer.gather_embeddings_and_heads()
        if not gatherer.on_all_ranks(_knows(self._compare)):
            return False
        assert self._args is not None
        self._joined = list(_read_layers(self._model, self._args, dtype, Linear.of, gatherer.gather_layer))
        return True

    def forget(self) -> None:
        """Free the layers of `join`."""
        self._joined = None

    @torch.no_grad()
    def trunk(self, length: int, dtype: torch.dtype) -> Trunk:
        """Return the trunk for a rollout with the current weights: a fused one if possible, else the modules.

        Args:
            length: number of positions to support.
            dtype: dtype of matrix products.
        """
        rounded = active_rounding() is not None and not _has_adapters(self._model)
        try:
            layers = self._joined
            if layers is None:
                self._check(dtype)
                if self.lender is not None and not self.known and self._difference is None:
                    # comparing is collective, and a rank without prompts is not here
                    raise _Unknown("the memory of some rank did not suffice to join the layers")
                self._compare()
                assert self._args is not None
                store = self.path.store if rounded else None
                linear = store or (Linear if self.path.has_library(self._model.device) else Linear.of)
                with nullcontext() if store is None else no_rounding():  # `store` rounds them itself
                    layers = list(_read_layers(self._model, self._args, dtype, linear))
            base = self._model.base_model
            turns = _rotations(self._model, max(length, PROBE_LENGTH))  # the library is compared at so many positions
            embedding = base.embed_tokens.weight.detach()
            fused = FusedTrunk(embedding, layers, _norm(base.norm), turns, rounded, _scale(base))
            trunk = self.path.fastest(fused)
            self.obstacle = None
            return trunk
        except _Unknown as error:
            self.path.record(DecodePath.modules, str(error))
            if self._logged != str(error):
                logger.info("Rollouts of %s call its modules, since %s", type(self._model).__name__, error)
            self.obstacle = self._logged = str(error)
            return ModuleTrunk(self._model)


class _DecodeChoice:
    """Chooses what computes the decode steps of a model, and warns if a resumed run chooses something else.

    Args:
        model: name of the model's class, for the log.
        compiled: whether decode steps of a fused trunk run in the compiled library or as CUDA graphs.
    """

    def __init__(self, model: str, compiled: CompiledDecode) -> None:
        self.compiled = compiled
        self.required_by, self.cure = "compiled_decode=on", "compiled_decode=auto"
        """The setting that requires the library, and the one that doesn't, for errors; `ExactModel` sets its own."""
        self.now: DecodePath | None = None
        """What computed the decode steps of the last rollout; None if no rollout has run."""
        self.resumed: str | None = None
        """The `DecodePath` of the checkpoint from which the run resumed, until the first rollout."""
        self._model = model
        self.store: _MakeLinear | None = None
        """Stores a linear layer as the library reads it, rounded; None if rollouts need its weights in torch too."""
        self._difference: float | None = None
        """Difference of the library from torch, measured once; training changes its digits, not its size."""
        self._logged: str | None = None

    @property
    def saved(self) -> str | None:
        """The `DecodePath` that a checkpoint records; None if no rollout has run."""
        return self.resumed if self.now is None else self.now.value

    def has_library(self, device: torch.device) -> bool:
        """Return whether the library computes decode steps, so that torch has products with many rows only."""
        if device.type != "cpu" or self.compiled is CompiledDecode.off:
            return False
        return not isinstance(load_library(), LibraryError)

    def fastest(self, trunk: FusedTrunk) -> Trunk:
        """Return the trunk with compiled decode steps, if the setting allows them and this machine has the library.

        On CUDA it is the same trunk, and `now` tells whether its steps can be graphs.

        Raises:
            ConfigError: the setting requires what this machine does not have.
        """
        if self.compiled is CompiledDecode.off:
            self.record(DecodePath.fused, "compiled_decode=off")
            return trunk
        device = trunk.embedding.device
        try:
            if device.type != "cuda":
                compiled = self._compile_trunk(trunk)
                self.record(DecodePath.compiled, "a compiled library is available")
                return compiled
            if (obstacle := why_no_graphs(device)) is not None:
                raise ValueError(obstacle)
            self.record(DecodePath.graphs, "the device replays CUDA graphs")
        except ValueError as error:
            self.record(DecodePath.fused, str(error))
            if self._logged != str(error):
                logger.info("Decode steps of %s run in torch, since %s", self._model, error)
            self._logged = str(error)
        return trunk

    def _compile_trunk(self, trunk: FusedTrunk) -> CompiledTrunk:
        """Return the trunk with compiled decode steps.

        Raises:
            ValueError: the library does not implement the trunk, is not available, or computes something else.
        """
        check_supported(trunk)
        library = load_library()
        if isinstance(library, LibraryError):
            raise ValueError(str(library))
        compiled = CompiledTrunk(trunk, library)
        if self._difference is None:
            self._difference = compiled.difference(trunk)
        if not self._difference <= TOLERANCE:
            raise ValueError(
                f"hidden states of the compiled library differ by {self._difference:.1e} (relative) from torch"
            )
        self.store = compiled.store if compiled.stores_all else None
        return compiled

    def record(self, path: DecodePath, reason: str) -> None:
        """Record what computes the decode steps, and warn if it differs from that of the resumed run.

        Raises:
            ConfigError: the setting requires the library.
        """
        if self.compiled is CompiledDecode.on and path not in (DecodePath.compiled, DecodePath.graphs):
            raise ConfigError(
                f"sampler.{self.required_by}: decode steps cannot be compiled, since {reason}. Set {self.cure}."
            )
        if self.resumed is not None and self.resumed != path:
            warnings.warn(
                f"Decode steps of the checkpoint ran in {self.resumed!r}, and those of this run in {path.value!r}, "
                f"since {reason}. The run continues. Its samples can differ slightly from those of an uninterrupted "
                "run.",
                stacklevel=2,
            )
        self.now, self.resumed = path, None


class _Unknown(Exception):
    """The model has a feature that `fused_layers` does not support."""


class _Different(_Unknown):
    """The fused layers compute other hidden states than the modules."""


@dataclass(eq=False)
class _Recorder(PackedContext):
    """Packed attention that records the attention arguments of each layer."""

    args: list[AttentionArgs] = field(default_factory=list, init=False)

    @override
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        self.args.append(args)
        return super().attend(layer, q, k, v, args)


def _knows(step: Callable[[], None]) -> bool:
    """Return whether a step does not raise `_Unknown`, whose reason `Fusion.trunk` tells."""
    try:
        step()
    except _Unknown:
        return False
    return True


def _probe_args(model: Any, gather_layer: _GatherLayer | None) -> list[AttentionArgs]:
    """Compare prefill and decoding with the modules, and return the attention arguments of each layer.

    Raises:
        _Unknown: the layers of the model attend in an unknown way.
        _Different: the hidden states differ.
    """
    device, words = next(model.parameters()).device, len(model.get_input_embeddings().weight)
    ids_T = torch.randint(words, (sum(_PROBE_LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)
    cu_seqlens = cu_seqlens_of(_PROBE_LENGTHS).to(device)
    positions_T = position_ids(cu_seqlens)
    recorder = _Recorder(cu_seqlens, lengths=_PROBE_LENGTHS)
    with no_autocast(ids_T):
        with ExitStack() as hooks:
            if gather_layer is not None:
                for layer in model.base_model.layers:
                    hooks.enter_context(_gathering_in_forward(layer, gather_layer))
            want_TH = ModuleTrunk(model)(ids_T, positions_T, recorder)
        if len(recorder.args) != len(model.base_model.layers) or any(a.sinks_H is not None for a in recorder.args):
            raise _Unknown("its layers do not each call attention once, without sinks")
        got_TH = _prefill_and_decode(model, recorder.args, ids_T, positions_T, gather_layer)
    error = float((got_TH - want_TH).abs().max() / want_TH.abs().max())
    # not `error > TOLERANCE`, which is False for NaN
    if not error <= TOLERANCE:
        raise _Different(f"hidden states differ by {error:.1e} (relative) from the modules")
    return recorder.args


@contextmanager
def _gathering_in_forward(layer: nn.Module, gather_layer: _GatherLayer) -> Iterator[None]:
    """Lend the layer its weights in each forward pass inside this context."""
    gathered = ExitStack()

    def take(*_: Any) -> None:
        gathered.enter_context(gather_layer(layer))

    hooks = [layer.register_forward_pre_hook(take), layer.register_forward_hook(lambda *_: gathered.close())]
    try:
        yield
    finally:
        gathered.close()  # after an error in the layer
        for hook in hooks:
            hook.remove()


def _prefill_and_decode(
    model: Any, args: list[AttentionArgs], ids_T: Tensor, positions_T: Tensor, gather_layer: _GatherLayer | None
) -> Tensor:
    """Return hidden states [T, H]; the last `_PROBE_STEPS` tokens of each sequence are decoded one by one.

    Copies of all layers in fp32 may exceed the memory, so each layer is copied, computes all tokens, and is freed.
    """
    device = ids_T.device
    ends = cu_seqlens_of(_PROBE_LENGTHS)[1:].to(device).long()
    prompts = [n - _PROBE_STEPS for n in _PROBE_LENGTHS]
    given_T = torch.ones(len(ids_T), dtype=torch.bool, device=device)
    for step in range(_PROBE_STEPS):
        given_T[ends - _PROBE_STEPS + step] = False
    turns = _rotations(model, max(_PROBE_LENGTHS))
    steps = [given_T, *(ends - _PROBE_STEPS + step for step in range(_PROBE_STEPS))]
    base = model.base_model
    hidden = [F.embedding(ids_T[at], base.embed_tokens.weight) * _scale(base) for at in steps]
    for i, layer in enumerate(_read_layers(model, args, torch.float32, Linear.of, gather_layer)):
        prefill = PrefillContext(cu_seqlens_of(prompts).to(device), lengths=prompts)
        layer.add_to(hidden[0], i, turns[:, positions_T[given_T]], prefill)
        read = list(prefill.per_sequence())
        cache = KVCache(read[0], len(prompts), max(_PROBE_LENGTHS))
        for row, kv in enumerate(read):
            cache.fill(row, row + 1, kv)
        for step, at in enumerate(steps[1:]):
            context = DecodeContext(cache, positions_T[at], max(_PROBE_LENGTHS) - _PROBE_STEPS + step)
            layer.add_to(hidden[1 + step], i, turns[:, positions_T[at]], context)
    hidden_TH = torch.empty(len(ids_T), hidden[0].shape[1], device=device)
    for at, x in zip(steps, hidden, strict=True):
        hidden_TH[at] = x
    return _norm(base.norm)(hidden_TH)


def _check_parts(model: Any) -> None:
    """Raise `_Unknown` if the model has a part that `_read` does not support."""
    base, config = model.base_model, model.config
    if config.model_type not in FAMILIES:
        raise _Unknown(f"model family {config.model_type!r} is not supported")
    _check_children("the model", base, {"embed_tokens", "layers", "norm", "rotary_emb"}, set())
    rope = getattr(base.rotary_emb, "rope_type", None)
    if not _ROPE_TYPES.issuperset(rope.values() if isinstance(rope, dict) else [rope]):
        raise _Unknown(f"rotary positions of type {rope!r} are not supported")
    for layer in base.layers:
        dropouts = {"resid_attn_dropout", "resid_mlp_dropout"}
        norms_of_mlp = {"pre_feedforward_layernorm", "post_feedforward_layernorm"} if _has_added_norms(layer) else set()
        needed = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"} | norms_of_mlp
        _check_children("a layer", layer, needed, dropouts)
        attention, mlp = layer.self_attn, layer.mlp
        projections = {"qkv_proj"} if hasattr(attention, "qkv_proj") else {"q_proj", "k_proj", "v_proj"}
        norms = {"q_norm", "k_norm"} if hasattr(attention, "q_norm") else set()
        _check_children("attention", attention, projections | norms | {"o_proj"}, set())
        inner = {"gate_up_proj"} if hasattr(mlp, "gate_up_proj") else {"gate_proj", "up_proj"}
        _check_children("an mlp", mlp, inner | {"down_proj"}, {"act_fn", "activation_fn"})
        for linear in (*(getattr(attention, n) for n in projections), attention.o_proj, mlp.down_proj):
            _check_plain(_base(linear), nn.Linear)
        for name in inner:
            _check_plain(_base(getattr(mlp, name)), nn.Linear)
    _check_plain(base.embed_tokens, type(base.embed_tokens) if _scale(base) != 1 else nn.Embedding)


def _check_children(what: str, module: nn.Module, needed: set[str], allowed: set[str]) -> None:
    children = {name for name, _ in module.named_children()}
    if not needed <= children <= needed | allowed:
        raise _Unknown(f"{what} consists of {sorted(children)} instead of {sorted(needed)}")


def _has_added_norms(layer: Any) -> bool:
    return hasattr(layer, "post_feedforward_layernorm")


def _scale(base: Any) -> float:
    """Return the factor of a model's embeddings."""
    return float(getattr(base.embed_tokens, "embed_scale", 1.0))


def _has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _base(linear: Any) -> Any:
    """Return the layer that an adapter adapts, or a layer without one itself."""
    return linear.get_base_layer() if hasattr(linear, "lora_A") else linear


def _check_plain(module: nn.Module, kind: type[nn.Module]) -> None:
    """Raise `_Unknown` unless the module has only an fp32 weight and optionally a bias (no adapter or shard)."""
    weight: Any = module.weight
    if type(module) is not kind or type(weight) is not nn.Parameter or weight.dtype != torch.float32:
        description = (
            f"{type(module).__module__}.{type(module).__qualname__} in {str(weight.dtype).removeprefix('torch.')}"
        )
        raise _Unknown(f"a layer is {description} instead of a plain float32 {kind.__name__} (an adapter or a cast)")


def _kinds(model: Any) -> list[str]:
    """Return the kinds of layers that rotate differently; none if all rotate alike."""
    return getattr(model.base_model.rotary_emb, "layer_types", [])


def _cos_sin(model: Any, positions_T: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return cosine and sine of each position for each kind of layers. The factor of yarn is in both."""
    base = model.base_model
    like, positions = base.embed_tokens.weight[:1], positions_T[None]  # the weight only tells dtype and device
    return [base.rotary_emb(like, positions, kind) for kind in _kinds(model)] or [base.rotary_emb(like, positions)]


def _rotations(model: Any, length: int) -> Tensor:
    """Return the rotations of `FusedTrunk.turns`."""
    device = next(model.parameters()).device
    found = _cos_sin(model, torch.arange(length, device=device))
    # 1 for the part of a head that a family does not rotate
    pairs = model.base_model.layers[0].self_attn.head_dim // 2
    turns = torch.ones(len(found), length, 1, pairs, dtype=torch.complex64, device=device)
    for kind, (cos, sin) in enumerate(found):
        half = cos.shape[-1] // 2
        turns[kind, :, 0, :half] = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
    return turns


def _order(model: Any) -> Tensor:
    """Return the order of a head's rows that makes rotary pairs adjacent."""
    device = next(model.parameters()).device
    rotated = _cos_sin(model, torch.zeros(1, dtype=torch.int64, device=device))[0][0].shape[-1]
    order = torch.arange(model.base_model.layers[0].self_attn.head_dim, device=device)
    # transformers pairs entry i with i + half, and complex numbers pair neighbors
    order[:rotated] = order[:rotated].view(2, rotated // 2).t().flatten()
    return order


def _read_layers(
    model: Any,
    args: list[AttentionArgs],
    dtype: torch.dtype,
    linear: _MakeLinear,
    gather_layer: _GatherLayer | None = None,
) -> Iterator[FusedLayer]:
    """Yield a fused copy of each layer, which has its weights only in the context of `gather_layer`.

    Raises:
        _Unknown: a module has forward hooks, which would not run; or joined layers differ.
    """
    base = model.base_model
    if any(m._forward_hooks or m._forward_pre_hooks for m in base.modules()):
        raise _Unknown("a module has forward hooks")
    order_D, kinds = _order(model), _kinds(model)
    for i, (layer, own) in enumerate(zip(base.layers, args, strict=True)):
        with nullcontext() if gather_layer is None else gather_layer(layer):
            fused = _read_layer(layer, own, order_D, dtype, linear)
        yield fused._replace(rotation=kinds.index(model.config.layer_types[i]) if kinds else 0)


def _check_memory(layers: nn.ModuleList, dtype: torch.dtype) -> None:
    """Check that the copies of the weights fit."""
    weights = [p for layer in layers for p in layer.parameters()]
    copied = sum(p.numel() for p in weights) * dtype.itemsize
    device = weights[0].device
    if copied > copies_limit(device):
        # on a GPU without the number, which differs in each rollout
        limit = "half of the free memory" if device.type == "cuda" else f"the limit of {CPU_BYTES}"
        raise _Unknown(f"copies of the weights need {copied} bytes, more than {limit}")


def copies_limit(device: torch.device) -> int:
    """Return the memory that a rollout may use for copies of weights, in bytes; see `CPU_BYTES`."""
    return free_bytes(device) // 2 if device.type == "cuda" else CPU_BYTES


def _read_layer(
    layer: Any, args: AttentionArgs, order_D: Tensor, dtype: torch.dtype, linear: _MakeLinear
) -> FusedLayer:
    def made(weight: Tensor, bias: Tensor | None) -> AnyLinear:
        return linear(weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype))

    attention, mlp = layer.self_attn, layer.mlp
    size = len(order_D)
    if hasattr(attention, "qkv_proj"):
        keys = attention.num_key_value_heads
        parts = _weight(attention.qkv_proj).unflatten(0, (-1, size)).split_with_sizes
        queries = attention.qkv_proj.out_features // size - 2 * keys
        weights, biases = parts((queries, keys, keys)), _biases(attention.qkv_proj)
    else:
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights = tuple(_weight(p).unflatten(0, (-1, size)) for p in projections)
        biases = _biases(*projections)
        queries, keys = len(weights[0]), len(weights[1])
    # values keep their order, since only scores are free to permute a head
    joined = torch.cat([weights[0][:, order_D], weights[1][:, order_D], weights[2]]).flatten(0, 1)
    if biases is not None:
        by_head = biases.view(-1, size)
        biases = torch.cat([by_head[: queries + keys, order_D], by_head[queries + keys :]]).flatten()
    qk_norm = None
    if hasattr(attention, "q_norm"):
        (q, eps), (k, eps_of_keys) = _scale_and_eps(attention.q_norm), _scale_and_eps(attention.k_norm)
        if eps != eps_of_keys:
            raise _Unknown("queries and keys are normalized with different eps")
        qk_norm = RMSNorm.of(torch.cat([q[order_D].expand(queries, -1), k[order_D].expand(keys, -1)]), eps)
    inner = (mlp.gate_up_proj,) if hasattr(mlp, "gate_up_proj") else (mlp.gate_proj, mlp.up_proj)
    activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
    # one function for all classes of it, by which `check_supported` recognizes it
    if isinstance(activation, nn.SiLU | SiLUActivation | GELUTanh):
        activation = gelu_tanh if isinstance(activation, GELUTanh) else F.silu
    sandwiched = _has_added_norms(layer)
    return FusedLayer(
        attention_norm=_norm(layer.input_layernorm),
        qkv=made(joined, biases),
        heads=(queries, keys),
        qk_norm=qk_norm,
        args=args,
        output=made(_weight(attention.o_proj), attention.o_proj.bias),
        mlp_norm=_norm(layer.pre_feedforward_layernorm if sandwiched else layer.post_attention_layernorm),
        gate_up=made(_cat([_weight(p) for p in inner]), _biases(*inner)),
        activation=activation,
        down=made(_weight(mlp.down_proj), mlp.down_proj.bias),
        added_norms=(_norm(layer.post_attention_layernorm), _norm(layer.post_feedforward_layernorm))
        if sandwiched
        else None,
    )


def _norm(module: Any) -> RMSNorm:
    return RMSNorm.of(*_scale_and_eps(module))


def _scale_and_eps(norm: Any) -> tuple[Tensor, float]:
    """Return by what a norm multiplies, and its eps. Those of Gemma have `eps`, and their weights start at 0."""
    return (1 + norm.weight, norm.eps) if hasattr(norm, "eps") else (norm.weight, norm.variance_epsilon)


def _weight(linear: Any) -> Tensor:
    """Return the weight with which a linear layer computes, including its adapter."""
    if _base(linear) is linear or linear.disable_adapters:
        return _rounded(linear.weight)
    up, down = (_rounded(part[ADAPTER].weight) for part in (linear.lora_B, linear.lora_A))
    return _rounded(linear.weight) + linear.scaling[ADAPTER] * (up @ down)


def _rounded(weight: Tensor) -> Tensor:
    weight = weight.detach()
    return weight if active_rounding() is None else weight.to(torch.bfloat16).float()


def _biases(*linears: Any) -> Tensor | None:
    """Return the joined biases of the layers; None if no layer has one."""
    biases = [x.bias for x in linears if x.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise _Unknown("only some of the joined layers have a bias")
    return _cat(biases) if biases else None


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
