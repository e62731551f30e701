"""The last layer of a model (config node `models.ROLE.head`): its output, how to read it, and its initialization."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from realign.errors import ConfigError, SettingsError
from realign.functional.logprobs import LMHead
from realign.models.network.output import ScalarHead
from realign.settings import Count, NonNegativeInt, Range, Settings

IMAGE_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl"})
"""Values of `model_type` of language models that read images, see `realign.models.network.images`."""


class HeadInit(StrEnum):
    """Initialization of the last layer of a new scalar head."""

    normal = "normal"
    """Normal weights with standard deviation 1 / sqrt(hidden size + 1), bias 0 (arXiv:1909.08593)."""
    zero = "zero"
    """Weights and bias 0, so that a new critic predicts the value 0 everywhere."""


class ValueHidden(StrEnum):
    """Architecture of a value head."""

    linear = "linear"
    """One linear layer."""
    mlp = "mlp"
    """Two linear layers with ReLU between them; the inner size is twice the hidden size (as in trlX)."""


@dataclass
class QHeads(Settings):
    """Heads that predict the value of choosing each token, each with a target head that follows it slowly (ILQL)."""

    n: Count = 2
    """Number of Q heads. The smallest of their target values counts."""
    target_rate: Annotated[float, Range(gt=0, le=1)] = 0.005
    """How fast target heads follow: the fraction of a Q head's weights that its target takes over per optimizer step
    (Polyak averaging)."""


@dataclass
class ValueHead(Settings):
    """A head that predicts the value of the state before each token, on a language model or a copy of its top."""

    layers: NonNegativeInt = 0
    """Give the head its own copy of this many top layers and the final norm, which start with the model's weights and
    aren't recomputed by gradient_checkpointing. With 0, the head reads the model's last hidden states."""
    hidden: ValueHidden = ValueHidden.linear
    """Architecture of the head: linear | mlp."""
    init: HeadInit = HeadInit.zero
    """Initialization of the last layer if the model folder has no `value_head.safetensors`: zero | normal."""
    q_heads: QHeads | None = None
    """Q heads of the same architecture, saved with the value head. New ones are initialized as torch initializes linear
    layers. They require layers=0. null means none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.q_heads is not None and self.layers:
            raise SettingsError(f"layers={self.layers}: q_heads read the trunk's last hidden states. Set layers=0")


class Head(Settings, ABC):
    """Output of a model: `Causal`, `Score` or `Value`."""

    is_scalar: ClassVar[bool]
    """Whether the last layer returns one number instead of one per token of the vocabulary."""

    def __str__(self) -> str:
        """Return the name of this head in a config."""
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def outputs(self) -> frozenset[str]:
        """Outputs of an engine with this head; see `EngineCapabilities.outputs`."""

    @property
    def replaces(self) -> bool:
        """Whether a new head replaces the head in the model folder."""
        return False

    @abstractmethod
    def auto_class(self, config: Any) -> Any:
        """Return the class of transformers that loads a model with this config (of transformers) and this head.

        Raises:
            ConfigError: models with this config have no such head.
        """

    def start(self, module: Any, *, seed: int) -> None:
        """Replace the head of a transformers model in place, if `replaces` is true."""


@dataclass
class Causal(Head):
    """A language model: logits of the next token, and optionally values."""

    is_scalar: ClassVar[bool] = False

    value_head: ValueHead | None = None
    """A value head, which computes values in the same forward pass as the log-probs, and is saved with the model. null
    means none."""
    vocabulary: Count | None = None
    """Number of tokens in the softmax, counted from token id 0. Higher ids, such as padding tokens and unused rows of
    the embedding, are never sampled. The reference model needs the same number. null means all tokens."""

    @property
    @override
    def outputs(self) -> frozenset[str]:
        return frozenset({"logprobs"} | value_outputs(self.value_head))

    @override
    def auto_class(self, config: Any) -> Any:
        return _language_model_class(config)


@dataclass
class _ScalarHead(Head):
    """A head that returns one number."""

    is_scalar: ClassVar[bool] = True

    init: HeadInit | None = None
    """Initialization of the head. normal | zero replace the head in the folder, seeded by the run. null keeps the
    head in the folder. If the folder has none, transformers initializes one, which is only valid for a model that
    trains."""

    @property
    @override
    def outputs(self) -> frozenset[str]:
        return frozenset({"values", "scores"})

    @property
    @override
    def replaces(self) -> bool:
        return self.init is not None

    def _check_decoder(self, config: Any) -> None:
        """Raise ConfigError for an encoder-decoder model."""
        if is_encoder_decoder(config):
            raise ConfigError(
                f"head={self}: not supported by encoder-decoder models such as {config.model_type!r}. Use a decoder "
                "model. For a critic, set head.value_head of the actor, and share its model."
            )

    @override
    def start(self, module: Any, *, seed: int) -> None:
        if self.init is not None:
            head: Any = read_head(module)
            init_linear(head.weight_1H, head.bias_1, self.init, seed=seed)


@dataclass
class Score(_ScalarHead):
    """A reward model: one number per sequence."""

    @override
    def auto_class(self, config: Any) -> Any:
        self._check_decoder(config)
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification


@dataclass
class Value(_ScalarHead):
    """A critic: one number per token."""

    @override
    def auto_class(self, config: Any) -> Any:
        self._check_decoder(config)
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification


def is_encoder_decoder(config: Any) -> bool:
    """Return whether a transformers config is that of an encoder-decoder model, such as T5 or BART."""
    return bool(getattr(config, "is_encoder_decoder", False))


def value_outputs(spec: ValueHead | None) -> set[str]:
    """Return the outputs of an engine that a value head adds."""
    if spec is None:
        return set()
    return {"values", "scores"} | ({"q_values"} if spec.q_heads is not None else set())


def _language_model_class(config: Any) -> Any:
    """Return the class of transformers that loads the language model with this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    if is_encoder_decoder(config):
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if config.model_type in IMAGE_FAMILIES else AutoModelForCausalLM


_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of the soft cap of logits in configs; the last two are those of recurrent_gemma and xlstm."""


def read_body(module: Any) -> Any:
    """Return a transformers model without its head; the model itself if no such part is found.

    Some families (llama4_text) declare a prefix that belongs to another class, and keep this part in `model`.
    """
    body = module.base_model
    inner = getattr(module, "model", None)
    return inner if body is module and isinstance(inner, nn.Module) else body


def read_head(module: Any, *, dropout: bool = False) -> LMHead | ScalarHead:
    """Return the last layer of a transformers model as a head that shares its parameters.

    Args:
        module: the model.
        dropout: whether to keep the dropout of transformers before the head of a token classifier.

    Raises:
        ConfigError: no such layer is found. The message names the model family.
    """
    config = module.config.get_text_config()
    scalar: Any = getattr(module, "score", None) or getattr(module, "classifier", None)
    if isinstance(scalar, nn.Linear) and scalar.out_features == 1:
        before = getattr(module, "dropout", None)
        rate = before.p if dropout and isinstance(before, nn.Dropout) else 0.0
        return ScalarHead(scalar.weight, scalar.bias, rate)
    last: Any = module.get_output_embeddings()
    pair = is_encoder_decoder(module.config)
    # an encoder-decoder model such as T5 is its own body: encoder and decoder are parts of the model itself
    if not isinstance(last, nn.Linear) or (read_body(module) is module and not pair):
        raise ConfigError(f"model family {config.model_type!r} is not supported: it has no linear last layer")
    # Cohere multiplies logits by its constant, and Granite divides them by it
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    scale *= float(getattr(config, "lm_head_multiplier", None) or 1.0)  # Falcon-H1
    caps = (getattr(config, name, None) for name in _SOFT_CAPS)
    if pair and getattr(config, "scale_decoder_outputs", False):  # T5
        scale *= float(config.d_model) ** -0.5
    bias_1V: Tensor | None = getattr(module, "final_logits_bias", None) if pair else None  # BART
    bias_V = last.bias if bias_1V is None else bias_1V[0]
    return LMHead(last.weight, bias_V, scale, next((cap for cap in caps if cap), None))


def head_mapping(missing: Collection[str], unexpected: Collection[str]) -> dict[str, str] | None:
    """Return the renaming to load a scalar head whose name differs between critic and reward model.

    Args:
        missing: names of weights that the model has and its folder lacks.
        unexpected: names of weights that the folder has and the model lacks.

    Returns:
        The `key_mapping` of `from_pretrained`; None if no scalar head needs renaming.
    """
    for ours, theirs in (("score", "classifier"), ("classifier", "score")):
        if f"{ours}.weight" in missing and f"{theirs}.weight" in unexpected:
            return {rf"^{theirs}\.": f"{ours}."}
    return None


def head_layers(hidden: ValueHidden, hidden_size: int, outputs: int, *, seed: int) -> nn.Sequential:
    """Return the layers of a head on hidden states, initialized as torch initializes linear layers."""
    # layers are drawn on the CPU; without `devices=[]`, the generators of all GPUs would be saved as well
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner = [nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU()] if hidden is ValueHidden.mlp else []
        return nn.Sequential(*inner, nn.Linear(2 * hidden_size if inner else hidden_size, outputs))


@torch.no_grad()
def init_linear(weight_1H: torch.Tensor, bias_1: torch.Tensor | None, init: HeadInit, *, seed: int) -> None:
    """Initialize the last layer of a scalar head in place."""
    std = 0.0 if init is HeadInit.zero else (weight_1H.shape[1] + 1) ** -0.5
    # drawn on the CPU, so that a seed gives the same head on every device
    drawn_1H = torch.randn(weight_1H.shape, generator=torch.Generator().manual_seed(seed))
    weight_1H.copy_(std * drawn_1H)
    if bias_1 is not None:
        bias_1.zero_()
