"""`ModelSaver`: writes the folders of an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from realign.engines.files.folders import AVERAGED, save_folder
from realign.engines.files.image_processor import copy_image_processor
from realign.engines.files.tokenizers import save_tokenizer
from realign.engines.network.network import Network, nonfinite_weight
from realign.engines.network.trains import save_adapters, save_base
from realign.engines.network.value_head import ValueNetwork
from realign.engines.training.ema import WeightAverage
from realign.errors import RunError


class ModelSaver:
    """Writes the model, its averaged weights, its adapters and its base model as folders."""

    def __init__(self, name: str, network: Network, tokenizer: Any, average: WeightAverage | None) -> None:
        """Save the network of the role `name`; `average` are averaged weights, if the engine keeps them."""
        self._name = name
        self._network = network
        self._tokenizer = tokenizer
        self._average = average

    def save(self, path: Path) -> None:
        """See `TransformersEngine.save`."""
        self._check()
        path = Path(path)
        self._save(path)
        if self._average is not None:
            with self._average.in_place():
                self._save(path.with_name(f"{path.name}{AVERAGED}"))

    def save_adapter(self, path: Path) -> None:
        """See `TransformersEngine.save_adapter`."""
        self._check()
        self._write(path, save_adapters, with_value_head=False)

    def save_base(self, path: Path) -> None:
        """See `TransformersEngine.save_base`."""
        self._write(path, save_base, with_value_head=False)

    def _save(self, path: Path) -> None:
        self._write(path, self._network.trains.save, with_value_head=True)

    def _check(self) -> None:
        """Check the trained weights, once for all folders of a call."""
        check_finite(self._name, self._network.module, self._network.value_head)

    def _write(self, path: Path, write: Callable[[Any, Path], None], *, with_value_head: bool) -> None:
        """Write a folder atomically; `write` writes the module, see `Trained.save`."""
        value_head = self._network.value_head if with_value_head else None
        self._write_folder(path, self._network.module, value_head, write)

    def _write_folder(
        self, path: Path, module: Any, value_head: ValueNetwork | None, write: Callable[[Any, Path], None]
    ) -> None:
        def fill(folder: Path) -> None:
            write_network(folder, module, value_head, write)
            save_tokenizer(self._tokenizer, folder, path)
            if self._network.images is not None:
                copy_image_processor(self._tokenizer, folder)

        save_folder(path, fill)


def check_finite(role: str, module: nn.Module, value_head: nn.Module | None) -> None:
    """Raise RunError with the name of a non-finite weight, if the model of `role` has one."""
    if (name := nonfinite_weight(module, value_head)) is not None:
        raise RunError(f"models.{role} was not saved: weight {name!r} is not finite")


def write_network(
    folder: Path, module: Any, value_head: ValueNetwork | None, write: Callable[[Any, Path], None]
) -> None:
    """Write a model folder, including the value head; `write` writes the module, see `Trained.save`."""
    write(module, folder)
    if value_head is not None:
        value_head.save(folder)
