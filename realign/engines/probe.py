"""The test that a model passes when it is loaded: packed sequences give what each sequence gives alone.

A family can ignore the registered attention function without an error (bloom adds alibi biases in its own attention),
or change its logits in a way that its config does not say. Both are found here by comparing numbers, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from realign.engines.attention import ATTENTION, CONTEXT, Backend, PackedContext, packed_inputs
from realign.engines.branches import Branch
from realign.engines.output import ScalarHead
from realign.functional.logprobs import LMHead
from realign.functional.packed import cu_seqlens_of

LENGTHS = (9, 1, 14, 5)

# Largest error, as a part of the largest number, that is rounding. Families that are wrong are off by percents.
_TOLERANCE_FP32 = 2e-4
# In bfloat16 single tokens may be far off where a mixture of experts routes them elsewhere: the median is compared.
_TOLERANCE_BF16 = 3e-2

Autocast = Callable[[], AbstractContextManager[Any]]


@torch.no_grad()
def probe(model: Any, head: LMHead | ScalarHead, *, attention: Backend, autocast: Autocast | None) -> None:
    """Check a loaded model (in eval mode) on a few short random sequences.

    Args:
        model: a transformers model with a causal, sequence- or token-classification head.
        head: what realign will use in place of the model's own head.
        attention: backend of packed attention.
        autocast: the context of bfloat16 computing; None where the model computes in fp32.

    Raises:
        ValueError: names the family and what differs.
    """
    family = f"model family {model.config.model_type!r}"
    ids_T = _random_ids(model)
    with _own_attention(model):
        alone_TH = torch.cat([_hidden(model, input_ids=x[None], use_cache=False) for x in ids_T.split(LENGTHS)])
        own = torch.cat([model(input_ids=x[None], use_cache=False).logits.flatten(0, -2) for x in ids_T.split(LENGTHS)])
    packed_TH = _packed(model, ids_T, Backend.sdpa if autocast else attention, family)
    error = _relative(packed_TH, alone_TH).max().item()
    if not error <= _TOLERANCE_FP32:
        raise ValueError(
            f"{family} cannot run packed: its hidden states differ by {error:.1e} (relative) from those of each "
            "sequence alone; it computes attention or positions in a way of its own"
        )
    error = _relative(_apply(head, alone_TH, own), own).max().item()
    if not error <= _TOLERANCE_FP32:
        raise ValueError(
            f"{family} computes its outputs from hidden states in an unknown way: they differ by {error:.1e}"
        )
    if autocast is None:
        return
    with autocast():
        error = _relative(_packed(model, ids_T, attention, family), alone_TH).median().item()
    if not error <= _TOLERANCE_BF16:
        raise ValueError(
            f"{family} with attention={attention.value} in bfloat16 differs by {error:.1e} (relative) from fp32"
        )


@torch.no_grad()
def probe_branch(model: Any, branch: Branch) -> None:
    """Check that a branch that is still a copy of the trunk's top computes, packed, what the trunk does.

    Args:
        model: the trunk, in eval mode and fp32, that passed `probe`.
        branch: made from it.

    Raises:
        ValueError: names the family and what differs.
    """
    family = f"model family {model.config.model_type!r}"
    ids_T = _random_ids(model)
    with branch.listening() as heard:
        trunk_TH = _packed(model, ids_T, Backend.sdpa, family)
    error = _relative(branch(heard), trunk_TH).max().item()
    if not error <= _TOLERANCE_FP32:
        raise ValueError(
            f"{family} cannot have a branch: a copy of its top layers differs by {error:.1e} (relative) from them"
        )


def _random_ids(model: Any) -> Tensor:
    """[T] tokens of sequences of `LENGTHS`, without pad tokens: a score is read before the first one."""
    words = model.get_input_embeddings().weight.shape[0]
    device = next(model.parameters()).device
    ids_T = torch.randint(1, words, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)
    ids_T[ids_T == (model.config.get_text_config().pad_token_id or 0)] = 1
    return ids_T


def _packed(model: Any, ids_T: Tensor, attention: Backend, family: str) -> Tensor:
    cu_seqlens = cu_seqlens_of(LENGTHS).to(ids_T.device)
    context = {CONTEXT: PackedContext(cu_seqlens, attention, LENGTHS)}
    try:
        return _hidden(model, **packed_inputs(ids_T, cu_seqlens), **context)
    except TypeError as error:
        raise ValueError(f"{family} cannot run packed: {error}") from error


def _hidden(model: Any, **inputs: Any) -> Tensor:
    hidden: Tensor = model.base_model(**inputs).last_hidden_state
    return hidden[0]


def _apply(head: LMHead | ScalarHead, hidden_TH: Tensor, own: Tensor) -> Tensor:
    """Our head on the hidden states, for the tokens of which the model's own output speaks."""
    if isinstance(head, LMHead):
        return head.logits(hidden_TH)
    last_S = torch.tensor(LENGTHS, device=hidden_TH.device).cumsum(0) - 1
    return head(hidden_TH if len(own) == len(hidden_TH) else hidden_TH[last_S])[:, None]


def _relative(got: Tensor, want: Tensor) -> Tensor:
    return (got.float() - want.float()).abs() / want.float().abs().max().clamp(min=1e-30)


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """Let the model attend as its authors wrote it."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION)
