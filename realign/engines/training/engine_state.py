"""What an engine writes and restores: model folders (`ModelSaver`) and its state in checkpoints (`EngineState`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from realign.engines.training.stepper import Stepper
from realign.engines.training.weights import WeightAverage
from realign.errors import RunError
from realign.models.files.folders import AVERAGED, save_folder
from realign.models.files.model_folder import is_other_file
from realign.models.files.tokenizers import save_tokenizer
from realign.models.network.network import Network
from realign.models.network.trains import save_adapters
from realign.models.network.value_head import ValueNetwork
from realign.own_files import copy_file
from realign.samplers.in_process.compiled.fusion import Fusion

_OPTIONAL_PARTS = {"value_head": "a value head", "optimizer": "an optimizer", "ema": "averaged weights"}
"""Optional parts of an engine's state, and their names in messages."""

_IMAGE_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of an image processor of transformers."""


class EngineState:
    """Weights, optimizer moments, step counts and averaged weights of an engine."""

    def __init__(
        self,
        name: str,
        network: Network,
        fusion: Fusion | None,
        stepper: Stepper | None,
        average: WeightAverage | None,
    ) -> None:
        """Collect the parts of the engine of role `name`; parts that the engine lacks are None."""
        self._name = name
        self._network = network
        self._fusion = fusion
        self._stepper = stepper
        self._average = average

    def state_dict(self) -> dict[str, Any]:
        """See `TransformersEngine.state_dict`."""
        state = {name: None if part is None else part.state_dict() for name, part in self._parts().items()}
        if state["value_head"] is not None:
            state["value_head"] = self._network.value_head_state()
        module, fusion = self._network.module_state(fixed=False), self._fusion
        decode = None if fusion is None else fusion.path.saved
        return {"module": module, **state, "fused": fusion is not None and fusion.known, "decode": decode}

    def fixed_weights(self) -> dict[str, Any]:
        """See `PipelinableEngine.fixed_weights`."""
        fixed = self._network.value_head_state() if self._stepper is None else {}
        return {"module": self._network.module_state(fixed=True), "value_head": fixed}

    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state: state of an engine over the same model.
            weights_only: keep the current optimizer moments and step counts, and restart the average from the loaded
                weights.

        Raises:
            ValueError: only one of state and engine has an optimizer, a value head or averaged weights; or a
                different set of weights is trained.
        """
        # Before the weights are loaded: the run decided about fused rollouts with its initial weights, and after a
        # resume it must decide the same, since both ways round differently.
        if self._fusion is not None:
            if state["fused"]:
                self._fusion.compare()
            self._fusion.path.resumed = state["decode"]
        # All mismatches are found before the first part changes.
        parts = self._parts()
        if weights_only:
            parts = {"value_head": parts["value_head"]}
        for name, part in parts.items():
            if (state[name] is None) != (part is None):
                lacks, has = ("saved state", "engine") if part is not None else ("engine", "saved state")
                raise ValueError(
                    f"models.{self._name}: the {has} has {_OPTIONAL_PARTS[name]}, but the {lacks} does not"
                )
        self._network.load_module_state(state["module"])
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(state[name])
        if weights_only and self._average is not None:
            self._average.restart()

    def resident(self) -> Iterator[Tensor]:
        """See `TransformersEngine.resident`."""
        yield from self._network.parameters()
        yield from self._network.buffers()
        if self._stepper is not None:
            yield from self._stepper.moments()
        if self._average is not None:
            yield from self._average.average

    def _parts(self) -> dict[str, Any]:
        return {"value_head": self._network.value_head, "optimizer": self._stepper, "ema": self._average}


class Content(Enum):
    """What a saved folder contains."""

    full = "the model, with adapters merged into its weights"
    base = "the model without its adapters"
    adapters = "the adapters and the scalar head"


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
        self._write(path, Content.adapters, with_value_head=False)

    def save_base(self, path: Path) -> None:
        """See `TransformersEngine.save_base`."""
        self._write(path, Content.base, with_value_head=False)

    def _save(self, path: Path) -> None:
        content = Content.adapters if self._network.trains.saves_adapters else Content.full
        self._write(path, content, with_value_head=True)

    def _check(self) -> None:
        """Check the trained weights, once for all folders of a call."""
        if (name := self._network.nonfinite_weight()) is not None:
            raise RunError(f"models.{self._name} was not saved: weight {name!r} is not finite")

    def _write(self, path: Path, content: Content, *, with_value_head: bool) -> None:
        """Write a folder atomically."""
        value_head = self._network.value_head if with_value_head else None
        save_folder(path, lambda new: self._fill(new, path, content, self._network.module, value_head))

    def _fill(self, new: Path, path: Path, content: Content, module: Any, value_head: ValueNetwork | None) -> None:
        """Write the files of a folder that becomes `path`."""
        write = save_adapters
        if content is not Content.adapters:
            write = partial(self._network.trains.save, base=content is Content.base)
        write_network(new, module, value_head, write)
        self._add_tokenizer(new, path)

    def _add_tokenizer(self, new: Path, path: Path) -> None:
        save_tokenizer(self._tokenizer, new, path)
        if self._network.abilities.images is not None:
            copy_image_processor(self._tokenizer, new)


def write_network(
    folder: Path, module: Any, value_head: ValueNetwork | None, write: Callable[[Any, Path], None]
) -> None:
    """Write a model folder, including the value head; `write` writes the module, see `Trained.save`."""
    write(module, folder)
    if value_head is not None:
        value_head.save(folder)


def copy_image_processor(tokenizer: Any, folder: Path) -> None:
    """Copy the image processor in the folder, or the cached hub repository, of a tokenizer to `folder`, if any."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    source = str(tokenizer.name_or_path)
    for name in _IMAGE_PROCESSOR_FILES:
        file: Any = Path(source, name)
        if not file.is_file() and not Path(source).is_dir():
            with suppress(HFValidationError):  # of a path, which is no repository
                file = try_to_load_from_cache(source, name)
        if not isinstance(file, str | Path) or not Path(file).is_file():
            continue
        if is_other_file(Path(file)):
            warnings.warn(
                f"{file} was not copied into {folder}: it is a link to a file of another name outside of its folder.",
                stacklevel=2,
            )
            continue
        copy_file(Path(file), folder / name)
