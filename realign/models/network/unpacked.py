"""Fallback for model families that cannot run packed: right-padded rows, with the attention and cache of transformers.

In a causal model the result for a token depends only on previous tokens, so padding after a sequence changes nothing.
`UnpackedModel` verifies this property for each model, and rejects models without it. Rows of a batch have similar
lengths, so padding costs little. Every batch is a separate forward pass, so training is slower than with packing.

`OwnCache` decodes with such a model. Responses that start together have the same length at every step, so they share a
batch and a cache. If the family's cache gives other results than a pass over the whole text, each step recomputes the
text.

Shapes: T packed tokens, S sequences, B rows of a batch or rows being decoded, M members of a group, L tokens of a text,
H hidden size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api.lengths import IntArray
from realign.errors import ConfigError
from realign.models.network.attention import ATTENTION, use_attention
from realign.models.network.decoder import Decoder, SlotCache
from realign.models.network.heads import read_body
from realign.models.network.images import PromptInput, ids_of
from realign.models.network.passes import SHORTEST, rewrites_rope, similar_lengths

TOLERANCE = 2e-4
"""Largest fp32 rounding error, relative to the largest absolute value."""

UNPACKED_FAMILIES = frozenset(
    {
        "axk2", "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "bloom", "codegen", "deepseek_v32",
        "deepseek_v4", "diffllama", "doge", "falcon", "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese", "gptj", "hrm_text",
        "hy_v4", "inkling2_text", "llama4_text", "marian", "mbart", "minimax", "mpt", "mvp", "openai-gpt",
        "pegasus", "plbart", "recurrent_gemma", "rwkv", "trocr", "xglm", "xlstm", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip
"""Families of transformers 5.23 that run unpacked (docs/supported-models.yaml). Only the memory estimate reads this
set, since it knows a model by its config alone. A loaded model is probed."""

_CACHES = ("past_key_values", "cache_params", "state")
"""Names of the cache in the inputs and outputs of transformers models."""

PROMPT, STEPS = 9, 4
"""Lengths of the text with which `OwnCache` compares cached and recomputed hidden states."""


class UnpackedModel:
    """Runs a model whose family cannot run packed.

    Attributes:
        reason: why the model cannot run packed.
        similar: whether a batch may have sequences of different lengths. Otherwise it has sequences of one length,
            since the model adapts its positions to the longest row.
    """

    def __init__(self, module: Any, reason: str) -> None:
        """Switch the model to its own attention, and check that it is causal.

        Raises:
            ConfigError: the model is not causal, or needs more inputs than tokens.
        """
        self.module = module
        self.reason = reason
        self.similar = not rewrites_rope(module)
        family = f"model family {module.config.model_type!r}"
        with probing(module):
            self._choose_attention()
            ids = self._text()  # in a causal model, tokens that follow change nothing
            error = relative_error(self._run(ids)[:, :9], self._run(ids[:, :9]))
        # not `error > TOLERANCE`, which is False for NaN
        if not error <= TOLERANCE:
            raise ConfigError(
                f"{family} is not supported: it is not causal. Hidden states differ by {error:.1e} (relative) if later "
                "tokens follow."
            )

    def _choose_attention(self) -> None:
        """Use the fused attention of torch if it gives the same results, else eager attention.

        A family whose attention class could not be replaced at loading keeps this class.
        """
        if self.module.config._attn_implementation != ATTENTION:
            return
        ids = self._text()
        use_attention(self.module, "eager")
        want, error = self._run(ids), torch.inf
        with suppress(Exception):  # families without it fail when it is chosen, or when they run
            use_attention(self.module, "sdpa")
            error = relative_error(self._run(ids), want)
        if not error <= TOLERANCE:
            use_attention(self.module, "eager")

    def _text(self) -> Tensor:
        """Return 14 random tokens, [1, 14]."""
        words, device = self.module.get_input_embeddings().weight.shape[0], next(self.module.parameters()).device
        return torch.randint(1, words, (1, 14), generator=torch.Generator().manual_seed(0)).to(device)

    def hidden(self, ids_T: Tensor, lengths: IntArray) -> Tensor:
        """Return the last hidden states [T, H] of packed sequences; `lengths` [S] may contain zeros."""
        starts = np.cumsum(lengths) - lengths
        parts: list[Tensor] = []
        order: list[int] = []
        for rows in similar_lengths(lengths.tolist(), SHORTEST if self.similar else 1):
            texts = [ids_T[starts[i] : starts[i] + lengths[i]] for i in rows]
            hidden_BLH = self._run(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
            parts += [hidden_BLH[row, : lengths[i]] for row, i in enumerate(rows)]
            order += rows
        # back to the order of the batch; empty sequences, which are in no part, add no tokens
        return torch.cat([parts[place] for place in np.argsort(order)])

    def _run(self, ids_BL: Tensor) -> Tensor:
        hidden: Tensor = read_body(self.module)(input_ids=ids_BL, use_cache=False).last_hidden_state
        return hidden


@contextmanager
def probing(module: Any) -> Iterator[None]:
    """Run a model without gradients; an error becomes a ConfigError that names the model family."""
    try:
        with torch.no_grad():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:  # transformers has no common class for what a family does not support
        family = f"model family {module.config.model_type!r}"
        raise ConfigError(f"{family} is not supported: {describe(cause)}") from cause


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, relative to the largest absolute value."""
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


def describe(cause: Exception) -> str:
    """Return the message of an error of transformers in one line."""
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def cost(role: str, reason: str, decoding: str | None) -> str:
    """Return the warning about what running unpacked costs.

    Args:
        role: role of the model.
        reason: why it cannot run packed.
        decoding: description of the rollouts of a language model; None for other models.
    """
    reason = reason.rstrip(".")
    rollouts = "" if decoding is None else f" Rollouts {decoding}."
    return (
        f"models.{role}: {reason}. It runs unpacked: results are equally exact, but slower. Training and scoring run a "
        "forward pass for each batch of sequences of similar length, and shared prompts are computed for each response."
        f"{rollouts} value_head.layers, branch=reference and sharding are not available."
    )


@dataclass(eq=False)
class ResponseGroup:
    """Responses of equal length that run as a batch: all of one prompt that started together."""

    ids_ML: Tensor
    """Tokens of each member; needed only without a cache."""
    past: dict[str, Any]
    """The cache of transformers, by the name of the model's keyword; without it, each step recomputes the text."""

    def members(self, rows: Sequence[int]) -> ResponseGroup:
        """Return a copy with the given members, in this order."""
        index = torch.tensor(rows, device=self.ids_ML.device)
        return ResponseGroup(self.ids_ML[index], _select(self.past, index, len(self.ids_ML)))


class GroupedCache(SlotCache):
    """Slots whose states are rows of groups, which grow on their own."""

    def __init__(self, slots: int, length: int) -> None:
        self.slots = slots
        self.length = length
        self._at: list[tuple[ResponseGroup, int] | None] = [None] * slots

    @override
    def reach(self, length: int, slots: int | None = None) -> int:
        return length

    @override
    def fill(self, first: int, last: int, prompt: ResponseGroup) -> None:
        # a copy even for one response: the cache grows in place, and the prompt may start further responses later
        group = prompt.members([0] * (last - first))
        for member, slot in enumerate(range(first, last)):
            self._at[slot] = (group, member)

    @override
    def resize(self, slots: int, length: int) -> None:
        self._at = self._at[:slots] + [None] * (slots - self.slots)
        self.slots, self.length = slots, length

    @override
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._at[target] = self._at[source]

    def groups(self, rows: int) -> Iterator[tuple[ResponseGroup, list[int]]]:
        """Yield each group of the first `rows` slots, and the slots of its members in order.

        Members that no slot uses any longer are dropped.
        """
        members_of: dict[int, list[tuple[int, int]]] = {}
        groups: dict[int, ResponseGroup] = {}
        for slot, place in enumerate(self._at[:rows]):
            assert place is not None
            groups[id(place[0])] = place[0]
            members_of.setdefault(id(place[0]), []).append((place[1], slot))
        for key, members in members_of.items():
            group, members = groups[key], sorted(members)
            if len(members) < len(group.ids_ML):
                group = group.members([member for member, _ in members])
                for member, (_, slot) in enumerate(members):
                    self._at[slot] = (group, member)
            yield group, [slot for _, slot in members]


class OwnCache(Decoder):
    """Decodes with the cache of transformers, or without a cache.

    Attributes:
        cached: whether the family's cache gives the results of a pass over the whole text.
    """

    # only the host knows which rows share a group
    reads_rows = True

    def __init__(self, module: Any) -> None:
        """Compare decoding with and without the cache of a model that runs unpacked."""
        self._module = module
        self._takes_positions = "position_ids" in inspect.signature(self._body.forward).parameters
        self.cached = True
        try:
            self.cached = self._error() <= TOLERANCE
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a family can fail in any way if its cache does not support this use
            self.cached = False

    def describe(self) -> str:
        """Return what rollouts do, for the warning about the cost."""
        if self.cached:
            return "decode the responses of each prompt as a batch, one prompt after another"
        return "recompute the whole text for every token"

    @torch.no_grad()
    def _error(self) -> float:
        """Return the largest relative difference of hidden states between cached and recomputed decoding."""
        words, device = self._module.get_input_embeddings().weight.shape[0], next(self._module.parameters()).device
        ids_ML = torch.randint(1, words, (3, PROMPT + STEPS), generator=torch.Generator().manual_seed(0)).to(device)
        ids_ML[:, :PROMPT] = ids_ML[0, :PROMPT]
        want_MLH = self._whole(ids_ML)
        hidden, states = self.prefill([ids_ML[0, :PROMPT]])
        cache = self.new_cache(states[0], 3, PROMPT + STEPS)
        cache.fill(0, 3, states[0])
        errors = [hidden[0] - want_MLH[0, PROMPT - 1]]
        slots = torch.arange(3, device=device)
        for at in range(PROMPT, PROMPT + STEPS):
            if at == PROMPT + STEPS // 2:  # the first response ends
                cache.move([2], [0], at)
                slots = slots[[2, 1]]
            hidden = self.step(cache, ids_ML[slots, at], torch.full_like(slots, at), at)
            errors.append((hidden - want_MLH[slots, at]).flatten())
        return float(torch.cat(errors).abs().max() / want_MLH.abs().max().clamp(min=1e-30))

    def _whole(self, ids_ML: Tensor) -> Tensor:
        """Return the hidden states [M, L, H] of whole texts."""
        hidden: Tensor = self._body(input_ids=ids_ML, use_cache=False).last_hidden_state
        return hidden

    @property
    def _body(self) -> Any:
        return read_body(self._module)

    @override
    def prefill(self, texts: Sequence[PromptInput]) -> tuple[Tensor, list[ResponseGroup]]:
        # a pass for each text; texts of unpacked models have no images
        hidden, states = [], []
        for ids in map(ids_of, texts):
            out = self._body(input_ids=ids[None], use_cache=self.cached)
            hidden.append(out.last_hidden_state[0, -1])
            states.append(ResponseGroup(ids[None], _cache_of(out) if self.cached else {}))
        return torch.stack(hidden), states

    @override
    def bytes_per_slot(self, like: ResponseGroup, length: int) -> int:
        # tensors with an axis for the tokens grow with the length
        tokens = like.ids_ML.shape[1]
        parts = _tensors(like.past)
        # the 8 bytes are the token id
        return 8 * length + sum(x.nbytes * (length if tokens in x.shape[1:] else tokens) // tokens for x in parts)

    @override
    def new_cache(self, like: ResponseGroup, slots: int, length: int, limit: int | None = None) -> GroupedCache:
        return GroupedCache(slots, length)

    @override
    def step(self, cache: GroupedCache, tokens_B: Tensor, positions_B: Tensor, longest: int) -> Tensor:
        # a pass for each group
        hidden_BH: Tensor | None = None
        for group, slots in cache.groups(len(tokens_B)):
            index = torch.tensor(slots, device=tokens_B.device)
            hidden_MH = self._append(group, tokens_B[index][:, None], positions_B[index][:, None])
            if hidden_BH is None:
                hidden_BH = hidden_MH.new_empty(len(tokens_B), hidden_MH.shape[1])
            hidden_BH[index] = hidden_MH
        assert hidden_BH is not None
        return hidden_BH

    def _append(self, group: ResponseGroup, tokens_M1: Tensor, positions_M1: Tensor) -> Tensor:
        """Append a token to each member of a group, and return its hidden states [M, H]."""
        group.ids_ML = torch.cat([group.ids_ML, tokens_M1], 1)
        if group.past:
            placed = {"position_ids": positions_M1} if self._takes_positions else {}
            out = self._body(input_ids=tokens_M1, use_cache=True, **group.past, **placed)
            group.past = _cache_of(out)
        else:
            out = self._body(input_ids=group.ids_ML, use_cache=False)
        hidden: Tensor = out.last_hidden_state[:, -1]
        return hidden


def _cache_of(out: Any) -> dict[str, Any]:
    """Return name and value of the cache in the output of a transformers model.

    Raises:
        ValueError: the output has no cache.
    """
    for name in _CACHES:
        if (past := getattr(out, name, None)) is not None:
            return {name: past}
    raise ValueError("the model returns no cache")


def _select(x: Any, rows_M: Tensor, batch: int) -> Any:
    """Return a copy of a cache with the given rows of the batch; `batch` is the number of rows of `x`."""
    if isinstance(x, Tensor):
        # a tensor without rows, such as a counter, belongs to all of them
        return x.index_select(0, rows_M) if x.ndim > 1 and x.shape[0] == batch else x.clone()
    if isinstance(x, Mapping):
        return type(x)({key: _select(part, rows_M, batch) for key, part in x.items()})  # type: ignore[call-arg]
    if isinstance(x, list | tuple):
        return type(x)(_select(part, rows_M, batch) for part in x)
    if not _holds_states(x):
        return x
    copied = copy.copy(x)
    for name, part in vars(x).items():
        setattr(copied, name, _select(part, rows_M, batch))
    return copied


def _tensors(x: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a cache."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for part in x.values():
            yield from _tensors(part)
    elif isinstance(x, list | tuple):
        for part in x:
            yield from _tensors(part)
    elif _holds_states(x):
        yield from _tensors(vars(x))


def _holds_states(x: Any) -> bool:
    """Return whether an object is a cache or the cache of a layer."""
    name = type(x).__name__
    return hasattr(x, "__dict__") and (name.endswith(("Cache", "Layer")) or "cache" in type(x).__module__)
