"""Fallback for model families that cannot run packed: sequences in right-padded rows, with the family's own attention.

In a causal model the result for a token depends only on previous tokens, so padding after a sequence changes nothing.
`UnpackedModel` verifies this property for each model, and rejects models without it. Rows of a batch have similar
lengths, so padding costs little. Every batch is a separate forward pass, so training is slower than with packing.

Shapes: T packed tokens, S sequences, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realign.api.lengths import IntArray
from realign.engines.device import full_fp32
from realign.engines.network.attention import ATTENTION, use_attention
from realign.engines.network.cpu_lanes import rewrites_rope
from realign.engines.network.heads import read_body
from realign.engines.network.padding import SHORTEST, similar_lengths
from realign.errors import ConfigError

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
            error = self._later_tokens()
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

    def _later_tokens(self) -> float:
        """Return the largest relative change of hidden states by tokens that follow."""
        ids = self._text()
        return relative_error(self._run(ids)[:, :9], self._run(ids[:, :9]))

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
        return torch.cat([parts[place] for place in np.argsort(order)])

    def _run(self, ids_BL: Tensor) -> Tensor:
        hidden: Tensor = read_body(self.module)(input_ids=ids_BL, use_cache=False).last_hidden_state
        return hidden


@contextmanager
def probing(module: Any) -> Iterator[None]:
    """Run a model without gradients in full precision; an error becomes a ConfigError that names the model family."""
    try:
        with torch.no_grad(), full_fp32(next(module.parameters()).device):
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
