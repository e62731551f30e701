"""Which weights of a model train (config node `models.ROLE.trains`): all, the top layers, or LoRA adapters.

A model without an optimizer is frozen, whatever this node says. `branches` and `lora` change the modules.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from torch import nn

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
    """The weights of a model that its optimizer changes; `All`, `TopLayers` and `Lora` are the choices."""

    def __str__(self) -> str:
        """Return the word for this choice in a config."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    @abstractmethod
    def keeps_start(self) -> bool:
        """Whether a `SharedModel` with branch=reference is possible: the lowest weights stay as they were loaded."""

    @abstractmethod
    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """Let only these weights of a transformers model require gradients, in place.

        Args:
            module: the model, on its device.
            path: of the model.
            seed: of new weights.

        Raises:
            ValueError: the model does not have such layers.
        """

    def check(self, what: str) -> None:
        """Raise ValueError, with the key `what` of this node, if a package is missing."""

    @property
    def only_adds(self) -> bool:
        """Whether training leaves all loaded weights as they were and only adds new ones."""
        return False

    def without(self, module: Any) -> AbstractContextManager[None]:
        """Return a context in which `module` runs without the weights that `prepare` added."""
        return nullcontext()

    def dropouts(self, module: nn.Module) -> list[nn.Module]:
        """Return the dropout layers that `prepare` added; they are active in training only."""
        return []

    def save(self, module: Any, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        module.save_pretrained(folder)


@dataclass
class All(Trained):
    """All weights train."""

    @property
    def keeps_start(self) -> bool:
        """No weight stays as it was loaded."""
        return False

    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """Change nothing: the parameters of a loaded model require gradients."""


@dataclass
class TopLayers(Trained):
    """The top layers, the final norm and the head train, unless the head is tied to the embeddings.

    A `SharedModel` with branch=reference then costs a copy of these layers only.
    """

    layers: Count
    """Number of layers that train."""

    @property
    def keeps_start(self) -> bool:
        """The layers below stay as they were loaded."""
        return True

    def prepare(self, module: Any, *, path: str, seed: int) -> None:
        """See `Trained.prepare`."""
        check_layers("layers", self.layers, read_stack(module))
        train_top(module, self.layers)


@dataclass
class Lora(Trained):
    """LoRA (arXiv:2106.09685): low-rank updates W + alpha / rank * B A of linear layers train, and a scalar head.

    B starts at 0, so the model starts as it was loaded. Requires the extra `peft`.
    """

    rank: Count = 16
    """Rank of the update."""
    alpha: Count = 32
    """Weight of the update, which is alpha / rank."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers, or ends of names; all-linear takes every linear layer and the experts of a mixture, but not
    the head."""
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    """Dropout probability on the input of A, in training only."""
    merge_on_save: bool = True
    """Save an ordinary model folder with W + alpha / rank * B A; false saves the adapters and a scalar head alone, as a
    folder that peft loads over the same base model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.target_modules:
            raise SettingsError(f"target_modules={self.target_modules!r}: must be all-linear, or names of layers")

    @property
    def keeps_start(self) -> bool:
        """The base model stays as it was loaded."""
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

    def without(self, module: Any) -> AbstractContextManager[None]:
        """See `Trained.without`."""
        return adapters_off(module)

    def dropouts(self, module: nn.Module) -> list[nn.Module]:
        """See `Trained.dropouts`."""
        return adapter_dropouts(module) if self.dropout else []

    def save(self, module: Any, folder: Path) -> None:
        """See `Trained.save`."""
        if self.merge_on_save:
            module.save_pretrained(folder, state_dict=merged_state(module))
        else:
            save_adapters(module, folder)
