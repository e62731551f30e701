"""From a config node to a model that can run: reading a folder or hub name, and refusing what would compute wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from realign.api.model import Model, derive_seed
from realign.engines.folders import check_path, read_states
from realign.engines.kernels import Backend
from realign.engines.optim import OptimizerSpec
from realign.functional.logprobs import LMHead

if TYPE_CHECKING:
    from realign.engines.output import ScalarHead


class Head(StrEnum):
    """What a model says about tokens: next-token logits, a score per sequence, or a value per token."""

    causal = "causal"
    score = "score"
    value = "value"


class HeadInit(StrEnum):
    """How a scalar head starts; normal and zero replace a head that the folder has."""

    keep = "keep"
    """As in the folder; where it has none, as transformers initialises one."""
    normal = "normal"
    """Weights drawn with deviation 1 / sqrt(hidden size + 1), bias 0 (arXiv:1909.08593)."""
    zero = "zero"
    """Weights and bias 0: a critic that starts without an opinion."""


class DType(StrEnum):
    """The precision of matrix products. Weights, optimizer state, log-probs, values and losses are fp32 in any case."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass
class TransformersModel:
    """A transformers model as a role of an experiment.

    Attributes:
        path: a local folder, or a name on the hub.
        head: causal | score (one number per sequence: a reward model) | value (one number per token: a critic).
        head_init: keep | normal | zero; how a head=score or value starts. It is drawn from the run's seed.
        tokenizer: folder or hub name of the tokenizer; null takes the model's.
        dtype: float32 | bfloat16 (autocast over fp32 weights).
        device: auto | cpu | cuda | cuda:0 ...; auto takes CUDA where there is one.
        attention: auto | sdpa | flash | varlen.
        gradient_checkpointing: recompute each layer in the backward pass: less memory, about a third more time.
        dropout: apply the model's dropout while training. Off, since ratios of PPO compare two passes over one text.
        optimizer: how to train it; null freezes the model.
        max_nonfinite_in_a_row: optimizer steps in a row that may be skipped for a non-finite loss or gradient; the last
            of them ends the run.
        trust_remote_code: run model code that comes with the weights.
    """

    path: str
    head: Head = Head.causal
    tokenizer: str | None = None
    dtype: DType = DType.float32
    device: str = "auto"
    attention: Backend = Backend.auto
    gradient_checkpointing: bool = False
    dropout: bool = False
    optimizer: OptimizerSpec | None = None
    max_nonfinite_in_a_row: int = 5
    trust_remote_code: bool = False
    head_init: HeadInit = HeadInit.keep

    def __post_init__(self) -> None:
        self.head, self.dtype, self.attention = Head(self.head), DType(self.dtype), Backend(self.attention)
        self.head_init = HeadInit(self.head_init)
        if self.head is Head.causal and self.head_init is not HeadInit.keep:
            raise ValueError(f"head_init={self.head_init.value} belongs to head=score or value, but head is causal")
        if self.max_nonfinite_in_a_row < 1:
            raise ValueError(f"max_nonfinite_in_a_row must be at least 1, found {self.max_nonfinite_in_a_row}")

    def load(self, name: str, *, seed: int) -> Model:
        """Read weights and tokenizer, probe the model, and build its engine.

        Args:
            name: the role, for messages and seeds.
            seed: the run's root seed; weights that the folder lacks (a new scalar head) are drawn from it.

        Raises:
            ValueError: names the role and the path or the model family, and why it cannot be used.
        """
        from realign.engines.engine import TransformersEngine

        module = self._read_module(name, seed)
        init_head(module, self.head_init, seed=derive_seed(seed, name, "head"))
        tokenizer = self._read_tokenizer(name)
        words = module.get_input_embeddings().weight.shape[0]
        if len(tokenizer) > words:
            raise ValueError(f"models.{name}: the tokenizer has {len(tokenizer)} tokens, the model only {words}")
        engine = TransformersEngine(
            name,
            module.to(pick_device(self.device)),
            tokenizer,
            dtype=torch.bfloat16 if self.dtype is DType.bfloat16 else torch.float32,
            attention=self.attention,
            optimizer=self.optimizer,
            gradient_checkpointing=self.gradient_checkpointing,
            dropout=self.dropout,
            max_nonfinite_in_a_row=self.max_nonfinite_in_a_row,
            seed=seed,
        )
        saved, saved_views = read_states(self.path)
        return Model(name, engine, tokenizer, seed, saved=saved, saved_views=saved_views)

    def _read_module(self, name: str, seed: int) -> Any:
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoModelForTokenClassification,
        )

        from realign.engines.attention import ATTENTION

        path = check_path(f"models.{name}.path", self.path)
        with _readable(f"models.{name}: cannot load {self.path!r}"):
            family = AutoConfig.from_pretrained(path, trust_remote_code=self.trust_remote_code).model_type
        classes = {
            Head.causal: AutoModelForCausalLM,
            Head.score: AutoModelForSequenceClassification,
            Head.value: AutoModelForTokenClassification,
        }
        labels = {} if self.head is Head.causal else {"num_labels": 1}
        what = f"models.{name}: model family {family!r} cannot be loaded from {self.path!r} with head={self.head.value}"
        with torch.random.fork_rng(), _readable(what):
            torch.manual_seed(derive_seed(seed, name, "init"))
            try:
                return classes[self.head].from_pretrained(
                    path,
                    dtype=torch.float32,
                    attn_implementation=ATTENTION,
                    trust_remote_code=self.trust_remote_code,
                    **labels,
                )
            except KeyError as error:
                if error.args != (ATTENTION,):
                    raise
                raise ValueError("it cannot run packed, since it chooses among attention classes of its own") from error

    def _read_tokenizer(self, name: str) -> Any:
        from transformers import AutoTokenizer

        # without these files AutoTokenizer builds an empty tokenizer of the model's family, and says nothing
        files = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
        path = check_path(f"models.{name}.tokenizer", self.tokenizer or self.path, files)
        with _readable(f"models.{name}: cannot load a tokenizer from {path!r}"):
            return AutoTokenizer.from_pretrained(path, trust_remote_code=self.trust_remote_code)


def read_head(module: Any, *, dropout: bool = False) -> LMHead | ScalarHead:
    """What the last layer of a transformers model computes, as a value that shares its parameters.

    Args:
        module: the model.
        dropout: keep the dropout that transformers puts before the head of a token classifier.

    Raises:
        ValueError: names the family, if no such layer is found.
    """
    from realign.engines.output import ScalarHead

    config = module.config.get_text_config()
    scalar: Any = getattr(module, "score", None) or getattr(module, "classifier", None)
    if isinstance(scalar, nn.Linear) and scalar.out_features == 1:
        before = getattr(module, "dropout", None)
        rate = before.p if dropout and isinstance(before, nn.Dropout) else 0.0
        return ScalarHead(scalar.weight, scalar.bias, rate)
    last: Any = module.get_output_embeddings()
    if not isinstance(last, nn.Linear) or module.base_model is module:
        raise ValueError(f"model family {config.model_type!r} has no linear last layer over a base model")
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return LMHead(last.weight, last.bias, scale, getattr(config, "final_logit_softcapping", None))


@torch.no_grad()
def init_head(module: Any, init: HeadInit, *, seed: int) -> None:
    """Start the scalar head of a transformers model anew, in place; `keep` leaves it."""
    if init is HeadInit.keep:
        return
    head: Any = read_head(module)
    deviation = 0.0 if init is HeadInit.zero else (head.weight_1H.shape[1] + 1) ** -0.5
    drawn_1H = torch.randn(head.weight_1H.shape, generator=torch.Generator().manual_seed(seed))
    head.weight_1H.copy_(deviation * drawn_1H)
    if head.bias_1 is not None:
        head.bias_1.zero_()


def pick_device(device: str) -> torch.device:
    """The device of that name; `auto` is CUDA where there is one.

    Raises:
        ValueError: CUDA is asked for and there is none.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch sees no CUDA device; use cpu or auto")
    return torch.device(device)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn what transformers raises, often pages long, into one line; the whole stays attached as the cause."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: {kind}{first}") from error
