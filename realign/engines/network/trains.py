"""Which weights of a model train (config node `models.ROLE.trains`): all, the top layers, or LoRA adapters.

A model without an optimizer is frozen, regardless of this node. `branches` and `lora` change the modules.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import nn

from realign.engines.files.model_folder import quiet_transformers
from realign.engines.network.branches import check_layers, read_stack, train_top
from realign.engines.network.lora import (
    adapter_dropouts,
    adapters_off,
    add_adapters,
    merged_state,
    require_peft,
    save_adapters,
)
from realign.errors import SettingsError
from realign.settings import Count, Range, Settings


class Trained(Settings, ABC):
    """Weights of a model that its optimizer changes: `All`, `TopLayers` or `Lora`."""

    def __str__(self) -> str:
        """Return the name of this choice in a config."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    @abstractmethod
    def keeps_start(self) -> bool:
        """Whether the lower layers stay unchanged, as a `SharedModel` with branch=reference requires."""

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
    def only_adds(self) -> bool:
        """Whether training changes no loaded weight and only adds new weights."""
        return False

    @property
    def adapter_rank(self) -> int | None:
        """Rank of the LoRA adapters that train; None if there are none."""
        return None

    def without(self, module: Any) -> AbstractContextManager[None]:
        """Return a context in which `module` runs without the weights that `prepare` added."""
        return nullcontext()

    def dropouts(self, module: nn.Module) -> list[nn.Module]:
        """Return the dropout layers that `prepare` added; they are active only in training."""
        return []

    def save(self, module: Any, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        with quiet_transformers():
            module.save_pretrained(folder)


@dataclass
class All(Trained):
    """All weights train."""

    @property
    def keeps_start(self) -> bool:
        """False, since training changes all weights."""
        return False

    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """Do nothing, since all parameters of a loaded model require gradients."""


@dataclass
class TopLayers(Trained):
    """The top layers, the final norm and the head train. A head tied to the embeddings does not train.

    A `SharedModel` with branch=reference then copies only these layers.
    """

    layers: Count
    """Number of top layers that train."""

    @property
    def keeps_start(self) -> bool:
        """True, since the layers below do not train."""
        return True

    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """See `Trained.prepare`."""
        check_layers("layers", self.layers, read_stack(module))
        train_top(module, self.layers)


@dataclass
class Lora(Trained):
    """LoRA (arXiv:2106.09685): low-rank updates W + alpha / rank * B A of linear layers and the scalar head train.

    B is initialized to 0, so the initial model equals the loaded model. Requires the extra `peft`.
    """

    rank: Count = 16
    """Rank of the low-rank update."""
    alpha: Count = 32
    """LoRA alpha; the update is multiplied by alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Names or name suffixes of the adapted layers. all-linear adapts every linear layer and the experts of a
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

    @property
    def keeps_start(self) -> bool:
        """True, since the base model does not train."""
        return True

    def check(self, what: str) -> None:
        """See `Trained.check`."""
        require_peft(what)

    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """See `Trained.prepare`; adds the adapters."""
        add_adapters(
            module,
            rank=self.rank,
            alpha=self.alpha,
            target_modules=self.target_modules,
            dropout=self.dropout,
            path=path,
            seed=seed,
        )

    @property
    def only_adds(self) -> bool:
        """See `Trained.only_adds`."""
        return True

    @property
    def adapter_rank(self) -> int | None:
        """See `Trained.adapter_rank`."""
        return self.rank

    def without(self, module: Any) -> AbstractContextManager[None]:
        """See `Trained.without`."""
        return adapters_off(module)

    def dropouts(self, module: nn.Module) -> list[nn.Module]:
        """See `Trained.dropouts`."""
        return adapter_dropouts(module) if self.dropout else []

    def save(self, module: Any, folder: Path) -> None:
        """See `Trained.save`."""
        if self.merge_on_save:
            with quiet_transformers():
                module.save_pretrained(folder, state_dict=merged_state(module))
        else:
            save_adapters(module, folder)
