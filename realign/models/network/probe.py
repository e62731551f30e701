"""Probe of a loaded model: packed sequences must give the same results as each sequence alone.

A model family can ignore the registered attention function without an error, as bloom does, which adds alibi biases
in its own attention. A family can also change its logits in a way that its config does not contain. The probe detects
both by comparing results, and raises an error. A model that cannot run packed can run as an `UnpackedModel`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from realign.api.lengths import Lengths
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.models.network.attention import (
    ATTENTION,
    AttentionContext,
    NotPackableError,
    PackedContext,
    layout_inputs,
    use_attention,
)
from realign.models.network.branches import Branch, read_stack
from realign.models.network.compiled_layers import compile_layers
from realign.models.network.decoder import ModuleTrunk, PackedDecoder
from realign.models.network.heads import read_body
from realign.models.network.kernels import CONTEXT, Backend
from realign.models.network.output import ScalarHead
from realign.models.network.passes import Layout
from realign.models.network.settings import TorchCompile
from realign.models.network.unpacked import describe

GROUPS = ((9,), (1,), (14, 5))
"""Lengths of the sequences of each prompt: different ones, a single token, and a group that can share a prefix."""
LENGTHS = tuple(n for group in GROUPS for n in group)
PREFIX = 3
"""Length of the common prefix of the last group's sequences, in tokens."""

STEPS = 3
"""Number of tokens that the probe decodes one by one."""

_WORDS = 512
"""Vocabulary of a small model."""

# Largest rounding error, relative to the largest absolute value. Incompatible families differ by percents.
TOLERANCE = 2e-4
# Applies to the median, since in bfloat16 a mixture of experts may route single tokens to other experts.
_TOLERANCE_BF16 = 3e-2

Autocast = Callable[[], AbstractContextManager[Any]]


@torch.no_grad()
def probe(
    model: Any, head: LMHead | ScalarHead, *, attention: Backend, autocast: Autocast | None, share: bool = False
) -> None:
    """Check a loaded model (in eval mode) on a few short random sequences.

    Args:
        model: a transformers model with a causal, sequence- or token-classification head.
        head: the head that realign uses instead of the model's own head.
        attention: backend of packed attention.
        autocast: the autocast context for bfloat16; None if the model computes in fp32.
        share: whether to also check passes that compute a common prefix once.

    Raises:
        NotPackableError: the family cannot run packed.
        ConfigError: the results differ. The message names the family and what differs.
    """
    family = f"model family {model.config.model_type!r}"
    ids_T = _random_ids(model)
    with _own_attention(model, family):
        alone_TH, own = _alone(model, ids_T)
    # Compared in fp32, where rounding hides nothing. With autocast, the kernel may support half precision only.
    packed_TH = _run_packed(model, ids_T, Backend.sdpa if autocast else attention, family)
    error = _relative(packed_TH, alone_TH).max().item()
    # not `error > tolerance`, which is False for NaN
    if not error <= TOLERANCE:
        raise NotPackableError(
            f"{family} cannot run packed: hidden states of packed sequences differ by {error:.1e} (relative) from "
            "hidden states of single sequences."
        )
    if isinstance(head, LMHead):
        _probe_decoding(model, ids_T, alone_TH, family)
    if share:
        _probe_shared(model, ids_T, alone_TH, Backend.sdpa if autocast else attention, family)
    _probe_head(model, head, alone_TH, own)
    if autocast is None:
        return
    with autocast():
        error = _relative(_run_packed(model, ids_T, attention, family), alone_TH).median().item()
    if not error <= _TOLERANCE_BF16:
        raise ConfigError(
            f"{family} with attention={attention.value} in bfloat16 differs by {error:.1e} (relative) from fp32. "
            "Set dtype=float32."
        )


def small_model(
    module: Any, kind: Any, device: torch.device, *, layers: int = 0, trust_remote_code: bool = False
) -> Any:
    """Return a small model of the same architecture with random weights, to probe when those of `module` are unread.

    It has the first two layers, or as many as it takes until each kind of layer occurs (windowed and full attention,
    dense and sparse), and a small vocabulary. Random weights of this size make attention matter.

    Args:
        module: a transformers model.
        kind: its class, which may be an Auto class.
        device: device of the new model.
        layers: minimum number of layers.
        trust_remote_code: whether to run code in the folder of the model.
    """
    config = copy.deepcopy(module.config)
    text, stack = config.get_text_config(), read_stack(module).layers
    depth = text.num_hidden_layers
    lists = {key: x for key, x in vars(text).items() if isinstance(x, list) and len(x) == depth}
    kinds = [
        repr([*(x[i] for x in lists.values()), *((name, p.shape) for name, p in stack[i].named_parameters())])
        for i in range(depth)
    ]
    n = max(min(2, depth), layers, *(kinds.index(kind) + 1 for kind in kinds))
    text.num_hidden_layers = n
    for key, x in lists.items():
        setattr(text, key, x[:n])
    text.vocab_size = min(text.vocab_size, _WORDS)
    # the embedding rejects a padding index outside of its vocabulary
    if (pad := getattr(text, "pad_token_id", None)) is not None and pad >= text.vocab_size:
        text.pad_token_id = config.pad_token_id = 0
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        attention = module.config._attn_implementation
        small = kind.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
        for p in small.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return small.eval()


@torch.no_grad()
def probe_head(model: Any, head: LMHead | ScalarHead) -> None:
    """Check the head of a model that runs unpacked; see `probe`."""
    ids_T = _random_ids(model)
    # The body called as realign calls it, which may be otherwise than the model does. `probe` runs it packed.
    _probe_head(model, head, _bodies(model, ids_T), _alone(model, ids_T)[1])


@torch.no_grad()
def probe_shared(model: Any, *, attention: Backend, autocast: Autocast | None) -> None:
    """Check passes that compute a common prefix once, with the kernel and the precision of training.

    Args:
        model: a model that has passed `probe`.
        attention: backend of packed attention.
        autocast: the autocast context for bfloat16; None if the model computes in fp32.

    Raises:
        ConfigError: the results differ from those of packed sequences. The message names the family.
    """
    family = f"model family {model.config.model_type!r}"
    ids_T = _random_ids(model)
    packed_TH = _run_packed(model, ids_T, Backend.sdpa if autocast else attention, family)
    _probe_shared(model, ids_T, packed_TH, Backend.sdpa if autocast else attention, family)
    if autocast is None:
        return
    with autocast():
        difference_TH = _relative(_run_shared(model, ids_T, attention), packed_TH)
    # The median over all tokens would not see an error of the tokens after a shared prefix, which are fewer than half.
    after_T = torch.cat([torch.arange(n) >= PREFIX for n in GROUPS[-1]]).to(ids_T.device)
    error = difference_TH[-len(after_T) :][after_T].median().item()
    if not error <= _TOLERANCE_BF16:
        raise ConfigError(
            f"{family} with attention={attention.value} cannot share prompts in bfloat16: hidden states differ by "
            f"{error:.1e} (relative) from fp32."
        )


def _probe_decoding(model: Any, ids_T: Tensor, alone_TH: Tensor, family: str) -> None:
    """Check that prefill and decode steps of a rollout give the same results as one pass over the text."""
    # a sequence needs at least one token to prefill besides those that are decoded
    long = [s for s, n in enumerate(LENGTHS) if n > STEPS]
    texts, want = ([x.split(LENGTHS)[s] for s in long] for x in (ids_T, alone_TH))
    decoder = PackedDecoder(ModuleTrunk(model))
    hidden, states = decoder.prefill([text[:-STEPS] for text in texts])
    cache = decoder.new_cache(states[0], len(texts), max(LENGTHS))
    for slot, state in enumerate(states):
        cache.fill(slot, slot + 1, state)
    rounds = [hidden]
    for step in range(-STEPS, 0):
        tokens_B = torch.stack([text[step] for text in texts])
        positions_B = torch.tensor([len(text) + step for text in texts], device=ids_T.device)
        rounds.append(decoder.step(cache, tokens_B, positions_B, max(LENGTHS) + step))
    wanted = torch.stack([hidden_LH[-STEPS - 1 :] for hidden_LH in want], 1)
    error = _relative(torch.stack(rounds), wanted).max().item()
    if not error <= TOLERANCE:
        raise NotPackableError(
            f"{family} cannot run packed: hidden states of decode steps differ by {error:.1e} (relative) from hidden "
            "states of whole sequences."
        )


def _alone(model: Any, ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the hidden states [T, H] and the outputs of the model's head, with a pass for each sequence."""
    hidden: list[Tensor] = []
    with read_body(model).register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state[0])):
        own = [model(input_ids=x[None], use_cache=False).logits.flatten(0, -2) for x in ids_T.split(LENGTHS)]
    # opt calls a part of its body only
    return torch.cat(hidden) if hidden else _bodies(model, ids_T), torch.cat(own)


def _bodies(model: Any, ids_T: Tensor) -> Tensor:
    """Return the hidden states [T, H] of the model without its head, with a pass for each sequence."""
    return torch.cat([_hidden(model, input_ids=x[None], use_cache=False) for x in ids_T.split(LENGTHS)])


def _probe_head(model: Any, head: LMHead | ScalarHead, alone_TH: Tensor, own: Tensor) -> None:
    error = _relative(_apply(head, alone_TH, own), own).max().item()
    if not error <= TOLERANCE:
        raise ConfigError(
            f"model family {model.config.model_type!r} is not supported: its outputs differ by {error:.1e} (relative) "
            "from its last layer applied to its hidden states"
        )


def _run_shared(model: Any, ids_T: Tensor, attention: Backend) -> Tensor:
    """Return the hidden states [T, H] of a pass that computes the common prefix of the last group once."""
    layout = Layout.of(Lengths.of(GROUPS), np.array([0, 0, PREFIX]))
    return _hidden(model, **layout_inputs(ids_T, layout, attention))[layout.rows_on(ids_T.device)]


def _probe_shared(model: Any, ids_T: Tensor, alone_TH: Tensor, attention: Backend, family: str) -> None:
    error = _relative(_run_shared(model, ids_T, attention), alone_TH).max().item()
    if not error <= TOLERANCE:
        raise ConfigError(
            f"{family} cannot share prompts: hidden states differ by {error:.1e} (relative) from hidden states of "
            "single sequences. Set shared_prompts=off."
        )


@torch.no_grad()
def probe_divided(model: Any, attend: Callable[[PackedContext], AttentionContext], parts: int, index: int) -> float:
    """Return the error of a pass whose rows several processes divide, relative to that of one process; collective.

    It is at most `TOLERANCE` unless something other than attention mixes rows.

    Args:
        model: a model that has passed `probe`.
        attend: returns attention over the rows of all processes.
        parts: number of processes.
        index: which of them this is.

    Raises:
        ConfigError: attention cannot be divided among these processes.
    """
    ids_T = _random_ids(model)
    layout = Layout.plain(Lengths.of(GROUPS)).divide(parts, index)
    whole_TH = _run_packed(model, ids_T, Backend.sdpa, f"model family {model.config.model_type!r}")
    inputs = layout_inputs(ids_T, layout, Backend.sdpa)
    own_TH = _hidden(model, **inputs | {CONTEXT: attend(inputs[CONTEXT])})
    assert layout.own is not None
    known = len(whole_TH[layout.own.start : layout.own.stop])  # the rest is padding
    error_TH = _relative(own_TH[:known], whole_TH[layout.own.start :][:known])
    return error_TH.max().item() if known else 0.0


@torch.no_grad()
def probe_stages(model: Any, run: Callable[[Any, Mapping[str, Any]], Tensor]) -> float:
    """Return the error of a pass whose layers run in stages, relative to that of an ordinary pass.

    Args:
        model: a model that has passed `probe`.
        run: returns the last hidden states [R, H] of the model, given the keywords of a call.
    """
    ids_T = _random_ids(model)
    inputs = layout_inputs(ids_T, Layout.plain(Lengths.of(GROUPS)), Backend.sdpa)
    want_TH = _hidden(model, **inputs)
    try:
        got_TH = run(model, inputs)
    except (RuntimeError, TypeError, AttributeError, IndexError, ValueError):  # layers return other things
        return float("inf")
    return _relative(got_TH, want_TH).max().item() if got_TH.shape == want_TH.shape else float("inf")


@torch.no_grad()
def probe_branch(model: Any, branch: Branch) -> None:
    """Check that a new branch gives the same results as its trunk on packed sequences.

    Args:
        model: the trunk, in eval mode and fp32; it must have passed `probe`.
        branch: an unchanged copy of the trunk's top layers.

    Raises:
        ConfigError: the results differ. The message names the family and the error.
    """
    family = f"model family {model.config.model_type!r}"
    ids_T = _random_ids(model)
    with branch.listening() as recorded:
        trunk_TH = _run_packed(model, ids_T, Backend.sdpa, family)
    error = _relative(branch(recorded), trunk_TH).max().item()
    if not error <= TOLERANCE:
        raise ConfigError(
            f"{family} cannot have a branch: a copy of its top layers differs by {error:.1e} (relative) from the model"
        )


@torch.no_grad()
def compile_probed(model: Any, backend: TorchCompile) -> None:
    """Compile the decoder layers of a model, and compare the result with the original layers.

    Args:
        model: a model that has passed `probe`, in eval mode.
        backend: backend of `torch.compile`.

    Raises:
        ConfigError: the layers cannot be compiled, or the results differ.
    """
    ids_T, layout = _random_ids(model), Layout.plain(Lengths.of(GROUPS))
    want_TH = _hidden(model, **layout_inputs(ids_T, layout, Backend.sdpa))
    compile_layers(model, backend)
    try:
        got_TH = _hidden(model, **layout_inputs(ids_T, layout, Backend.sdpa))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways, for example without a C++ compiler
        raise ConfigError(f"the layers cannot be compiled: {describe(error)}.") from error
    difference = _relative(got_TH, want_TH).max().item()
    if not difference <= TOLERANCE:
        raise ConfigError(f"hidden states of compiled layers differ by {difference:.1e} (relative).")


def _random_ids(model: Any) -> Tensor:
    """Return random tokens [T] for sequences of `LENGTHS`, without pad tokens, since a score is read before them."""
    words = model.get_input_embeddings().weight.shape[0]
    device = next(model.parameters()).device
    ids_T = torch.randint(1, words, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)
    ids_T[ids_T == (getattr(model.config.get_text_config(), "pad_token_id", None) or 0)] = 1
    # the sequences of the last group start alike
    ids_T[-LENGTHS[-1] :][:PREFIX] = ids_T[-sum(GROUPS[-1]) :][:PREFIX]
    return ids_T


def _run_packed(model: Any, ids_T: Tensor, attention: Backend, family: str) -> Tensor:
    try:
        return _hidden(model, **layout_inputs(ids_T, Layout.plain(Lengths.of(GROUPS)), attention))
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a family does with inputs that it does not expect
        if attention is Backend.sdpa:
            raise NotPackableError(f"{family} cannot run packed: {describe(error)}.") from error
        _run_packed(model, ids_T, Backend.sdpa, family)  # an error of a kernel says nothing about the family
        raise ConfigError(
            f"{family} with attention={attention.value} failed, and runs with sdpa: {describe(error)}. Set "
            "attention=sdpa."
        ) from error


def _hidden(model: Any, **inputs: Any) -> Tensor:
    hidden: Tensor = read_body(model)(**inputs).last_hidden_state
    return hidden[0]


def _apply(head: LMHead | ScalarHead, hidden_TH: Tensor, own: Tensor) -> Tensor:
    """Apply the head of realign to the hidden states of those tokens for which the model returns an output."""
    if isinstance(head, LMHead):
        return head.logits(hidden_TH)
    last_S = torch.tensor(LENGTHS, device=hidden_TH.device).cumsum(0) - 1
    return head(hidden_TH if len(own) == len(hidden_TH) else hidden_TH[last_S])[:, None]


def _relative(got: Tensor, want: Tensor) -> Tensor:
    # a new critic returns 0 everywhere, and 0 / 0 would be NaN
    return (got.float() - want.float()).abs() / want.float().abs().max().clamp(min=1e-30)


@contextmanager
def _own_attention(model: Any, family: str) -> Iterator[None]:
    """Use the model's original eager attention within the context.

    Raises:
        NotPackableError: the model was not loaded with the attention of realign, since its family does not allow it.
    """
    if model.config._attn_implementation != ATTENTION:
        raise NotPackableError(f"{family} cannot run packed: its attention classes cannot be replaced.")
    use_attention(model, "eager")
    try:
        yield
    finally:
        use_attention(model, ATTENTION)
