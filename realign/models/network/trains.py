"""Which weights of a model train (config node `models.ROLE.trains`): all, the top layers, or LoRA adapters.

A model without an optimizer is frozen, regardless of this node. LoRA (arXiv:2106.09685) uses peft: low-rank updates of
the linear layers of a frozen model. The functions below the choices add, merge, save and load adapters.
"""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from realign.errors import ConfigError, DataError, SettingsError
from realign.models.files.adapters import PREFIX, WEIGHTS, absolute
from realign.models.files.model_folder import quiet_transformers
from realign.models.network.branches import check_layers, read_stack, train_top
from realign.models.network.heads import is_encoder_decoder, read_head
from realign.models.network.output import ScalarHead
from realign.settings import Count, Range, Settings

ADAPTER = "default"
SCALAR_HEADS = ("score", "classifier")
"""Names of scalar heads in model families of transformers. All weights of a scalar head train with the adapters."""


class Trained(Settings, ABC):
    """Weights of a model that its optimizer changes: `All`, `TopLayers` or `Lora`."""

    keeps_start: ClassVar[bool]
    """Whether the lower layers stay unchanged, as a `SharedModel` with branch=reference requires."""
    only_adds: ClassVar[bool] = False
    """Whether training changes no loaded weight and only adds new weights."""

    def __str__(self) -> str:
        """Return the name of this choice in a config."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @abstractmethod
    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """Set `requires_grad` of a transformers model in place, so that only these weights train.

        Args:
            module: the model, on its device.
            path: folder or hub name of the model.
            seed: seed of new weights.

        Raises:
            ConfigError: the model lacks the required layers.
        """

    def check(self, what: str) -> None:
        """Raise ConfigError with the key `what` of this node, if a required package is missing."""

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the LoRA adapters that train; None if there are none."""
        return None

    @property
    def saves_adapters(self) -> bool:
        """Whether a saved folder contains only adapters."""
        return False

    def without(self, module: Any) -> AbstractContextManager[None]:
        """Return a context in which `module` runs without the weights that `prepare` added."""
        return nullcontext()

    def dropouts(self, module: nn.Module) -> list[nn.Module]:
        """Return the dropout layers that `prepare` added; they are active only in training."""
        return []

    def base_weights(self, module: Any) -> dict[str, Tensor]:
        """Return the weights that the model has without those that `prepare` added, by name."""
        state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        return state

    def updates(self, module: Any) -> dict[str, Callable[[], Tensor]]:
        """Return, by name, functions that compute what a saved weight has in addition to the weight of the base."""
        return {}

    @torch.no_grad()
    def save(self, module: Any, folder: Path, *, base: bool = False) -> None:
        """Write the full model, or its base without what `prepare` added, as a Hugging Face folder."""
        updates = {} if base else self.updates(module)
        state = {
            name: x.detach() + updates[name]() if name in updates else x.detach()
            for name, x in self.base_weights(module).items()
        }
        with quiet_transformers():
            module.save_pretrained(folder, state_dict=state)


@dataclass
class All(Trained):
    """All weights train."""

    keeps_start: ClassVar[bool] = False

    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """Do nothing, since all parameters of a loaded model require gradients."""


@dataclass
class TopLayers(Trained):
    """The top layers, the final norm and the head train. A head tied to the embeddings does not train.

    A `SharedModel` with branch=reference then copies only these layers.
    """

    keeps_start: ClassVar[bool] = True  # the layers below do not train

    layers: Count
    """Train this many of the top layers."""

    @override
    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        check_layers("layers", self.layers, read_stack(module))
        train_top(module, self.layers)


@dataclass
class Lora(Trained):
    """LoRA (arXiv:2106.09685): low-rank updates W + alpha / rank * B A of linear layers and the scalar head train.

    B is initialized to 0, so the initial model equals the loaded model. Requires the extra `peft`.
    """

    keeps_start: ClassVar[bool] = True
    only_adds: ClassVar[bool] = True

    rank: Count = 16
    """Rank of the updates: more is more capacity and memory."""
    alpha: Count = 32
    """Updates are multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Which layers to adapt, by name or end of the name. all-linear adapts every linear layer and the experts of a
    mixture-of-experts model, but not the head."""
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Dropout probability on the input of A, only in training."""
    merge_on_save: bool = True
    """Whether to save a full model folder with merged weights W + alpha / rank * B A. With false, the folder contains
    only the adapters and the scalar head, and peft loads it on top of the base model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_modules:
            raise SettingsError(f"target_modules={self.target_modules!r}: must be all-linear or names of layers")

    @override
    def check(self, what: str) -> None:
        require_peft(f"{what}=lora:")

    @override
    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        from peft import LoraConfig, inject_adapter_in_model
        from transformers.pytorch_utils import Conv1D

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=self.target_modules,
            exclude_modules=_scalar_heads(module) or None,  # all of their weights train
            lora_dropout=self.dropout,
            fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in module.modules()),  # GPT-2: [inputs, outputs]
            base_model_name_or_path=absolute(path),
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            inject_adapter_in_model(config, module, adapter_name=ADAPTER)
        adapted = {id(getattr(part, name)) for _, part, name in adapted_weights(module)}
        ends = {"embeddings": module.get_input_embeddings(), "head": module.get_output_embeddings()}
        # by weight, since tied weights belong to both, and those of an encoder-decoder model to further layers
        if shared := [name for name, layer in ends.items() if layer is not None and id(layer.weight) in adapted]:
            raise ConfigError(
                f"target_modules={self.target_modules}: LoRA cannot adapt the {' and '.join(shared)}. Remove the layer "
                "from the list."
            )
        head = read_head(module)
        if isinstance(head, ScalarHead):
            for x in (head.weight_1H, head.bias_1):
                if x is not None:
                    x.requires_grad_(True)

    @property
    @override
    def adapter_rank(self) -> int | None:
        return self.rank

    @override
    @contextmanager
    def without(self, module: Any) -> Iterator[None]:
        layers = list(adapted_layers(module).values())
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    @override
    def dropouts(self, module: nn.Module) -> list[nn.Module]:
        layers = adapted_layers(module).values() if self.dropout else ()
        return [dropout for layer in layers for dropout in layer.lora_dropout.values()]

    @property
    @override
    def saves_adapters(self) -> bool:
        return not self.merge_on_save

    @override
    def base_weights(self, module: Any) -> dict[str, Tensor]:
        parts = (
            getattr(layer, name) for layer in adapted_layers(module).values() for name in layer.adapter_layer_names
        )
        added = {id(p) for part in parts for p in part.parameters()}
        # the parameters themselves, which are recognized by identity; a plain state dict has detached tensors
        state = module.state_dict(keep_vars=True)
        return {key.replace(".base_layer", ""): x for key, x in state.items() if id(x) not in added}

    @override
    def updates(self, module: Any) -> dict[str, Callable[[], Tensor]]:
        names = {id(x): name for name, x in self.base_weights(module).items()}
        computed: dict[str, Callable[[], Tensor]] = {}
        for layer, base, name in adapted_weights(module):
            computed[names[id(getattr(base, name))]] = partial(layer.get_delta_weight, ADAPTER)
        return computed


def require_peft(subject: str) -> None:
    """Raise ConfigError that starts with `subject`, if peft is not installed."""
    if find_spec("peft") is None:
        raise ConfigError(f"{subject} peft is not installed. Run pip install 'realign-rl[peft]'.")


def save_adapters(module: Any, folder: Path) -> None:
    """Write adapters and scalar head to a folder for `peft.PeftModel.from_pretrained` with the same base model."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = get_peft_model_state_dict(module, adapter_name=ADAPTER)
    config = copy.copy(module.peft_config[ADAPTER])
    config.task_type = "SEQ_2_SEQ_LM" if is_encoder_decoder(module.config) else "CAUSAL_LM"  # for Auto classes of peft
    if heads := _scalar_heads(module):
        config.task_type, config.modules_to_save = None, heads
        state |= {k: x for k, x in module.state_dict().items() if k.startswith(tuple(f"{name}." for name in heads))}
    folder.mkdir()
    save_file({f"{PREFIX}{k}": x.contiguous() for k, x in state.items()}, folder / WEIGHTS)
    config.save_pretrained(folder)


def load_adapters(module: Any, folder: Path) -> None:
    """Load the adapters and scalar head in a folder into a module that `Lora.prepare` has prepared.

    Raises:
        DataError: the folder has other weights than the module.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state, head = read_adapter(folder, "")
    # peft would load what fits, and say nothing of the rest
    check_same(folder, state, get_peft_model_state_dict(module, adapter_name=ADAPTER))
    set_peft_model_state_dict(module, state, adapter_name=ADAPTER)
    load_head(module, folder, head)


def read_adapter(folder: Path, prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of the adapter, whose names start with `prefix`, and those of the scalar head, by name.

    Raises:
        DataError: a weight is not finite.
    """
    from safetensors.torch import load_file

    state = load_file(folder / WEIGHTS)
    if broken := sorted(name for name, x in state.items() if not x.isfinite().all()):
        raise DataError(f"the adapter in {str(folder)!r} has a weight {broken[0]!r} that is not finite")
    heads = tuple(f"{PREFIX}{name}." for name in SCALAR_HEADS)
    head = {name.removeprefix(PREFIX): x for name, x in state.items() if name.startswith(heads)}
    others = {name: x for name, x in state.items() if not name.startswith(heads)}
    return {
        prefix + name.removeprefix(PREFIX) if name.startswith(PREFIX) else name: x for name, x in others.items()
    }, head


def load_head(module: Any, folder: Path, head: Mapping[str, Tensor]) -> None:
    """Load a scalar head, whose name differs between reward models and critics of some families."""
    if not head:
        return
    own = next(iter(_scalar_heads(module)), None)
    if own is None:
        raise DataError(
            f"the adapter in {str(folder)!r} has a weight {min(head)!r}, which the model has no place for. Set "
            "head=score."
        )
    renamed = {f"{own}.{name.partition('.')[2]}": x for name, x in head.items()}
    check_same(folder, renamed, {k: x for k, x in module.state_dict().items() if k in renamed})
    module.load_state_dict(renamed, strict=False)


def check_same(folder: Path, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise DataError with the name of a weight that only the folder or only the module has, or of another shape."""
    if unknown := sorted(state.keys() - expected.keys()):
        raise DataError(f"the adapter in {str(folder)!r} has a weight {unknown[0]!r}, which the model has no place for")
    if missing := sorted(expected.keys() - state.keys()):
        raise DataError(f"the adapter in {str(folder)!r} lacks the weight {missing[0]!r}")
    for name, x in state.items():
        if x.shape != expected[name].shape:
            raise DataError(
                f"the adapter in {str(folder)!r} has a weight {name!r} of shape {list(x.shape)}, for which the model "
                f"has the shape {list(expected[name].shape)}. Set base_model_name_or_path to its base model."
            )


def _scalar_heads(module: Any) -> list[str]:
    return [name for name in SCALAR_HEADS if hasattr(module, name)]


def adapted_weights(module: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield the layers with an adapter, the layers of the base model that they adapt, and the names of the weights."""
    for layer in adapted_layers(module).values():
        yield layer, layer.get_base_layer(), getattr(layer, "parameter_name", "weight")  # experts: other names


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return the layers with LoRA adapters by name."""
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
