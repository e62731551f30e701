"""A value head on a language model, so that one forward pass of a shared trunk computes policy and values.

It may include Q heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from realign.api.seeds import derive_seed
from realign.engines.network.branches import Branch, Heard, check_layers, read_stack
from realign.engines.network.heads import ValueHead, head_layers, init_linear
from realign.engines.network.q_heads import QNetwork
from realign.errors import ConfigError, DataError

FILE = "value_head.safetensors"
"""File name of the value head in the model folder."""
METADATA = "value_head"
"""Metadata key of the settings of the value head, as JSON."""


class ValueNetwork(nn.Module):
    """The parameters of a value head. It computes in fp32 from the hidden states."""

    def __init__(
        self, spec: ValueHead, module: Any, hidden_size: int, words: int, *, seed: int, what: str = "value_head"
    ) -> None:
        """Build the value head, and the Q heads for `words` tokens, of the transformers model `module`.

        Raises:
            ConfigError: the model has fewer than `spec.layers` layers, or its layers are not found.
        """
        super().__init__()
        if spec.layers:
            check_layers(f"{what}.layers", spec.layers, read_stack(module))
        self.spec = spec
        self.branch = Branch(module, spec.layers).requires_grad_(True) if spec.layers else None
        self.head = head_layers(spec.hidden, hidden_size, 1, seed=seed)
        last: Any = self.head[-1]
        init_linear(last.weight, last.bias, spec.init, seed=derive_seed(seed, "last"))
        self.q_heads = (
            None if spec.q_heads is None else QNetwork(spec.q_heads, spec.hidden, hidden_size, words, seed=seed)
        )

    @contextmanager
    def listening(self) -> Iterator[Heard]:
        """Record the inputs of the branch while the trunk runs."""
        if self.branch is None:
            yield []
            return
        with self.branch.listening() as heard:
            yield heard

    def hidden(self, hidden_TH: Tensor, heard: Heard) -> Tensor:
        """Return the input [T, H] of the head: the hidden states of the branch, or of the trunk without a branch."""
        return hidden_TH if self.branch is None else self.branch(heard)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Return one value per hidden state, [N] fp32."""
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return self.head(hidden_NH.float())[:, 0]

    def save(self, folder: Path) -> None:
        """Write `value_head.safetensors`."""
        state = {name: x.contiguous() for name, x in self.state_dict().items()}
        # one key, because safetensors writes several in random order, and equal models must be equal files
        save_file(state, folder / FILE, metadata={METADATA: json.dumps(self._shape)})

    def load(self, path: str, what: str) -> None:
        """Load the weights from a local folder, if it contains a value head.

        Raises:
            ConfigError: the saved head has another shape. The message names the setting.
            DataError: the saved weights do not fit the model.
        """
        file = Path(path).expanduser() / FILE
        if not file.is_file():
            return
        with safe_open(file, framework="pt") as opened:
            found = opened.metadata() or {}
        found = json.loads(found[METADATA]) if METADATA in found else found  # earlier versions: one key per setting
        for name, wanted in self._shape.items():
            if found.get(name) != wanted:
                raise ConfigError(
                    f"{what}.{name}={wanted}: {str(file)!r} was saved with {name}={found.get(name)}. Use that value."
                )
        try:
            self.load_state_dict(load_file(file))
        except RuntimeError as error:
            raise DataError(f"{what}: the weights in {str(file)!r} do not fit the model: {error}") from error

    @property
    def _shape(self) -> dict[str, str]:
        q_heads = {} if self.spec.q_heads is None else {"q_heads.n": str(self.spec.q_heads.n)}
        return {"layers": str(self.spec.layers), "hidden": self.spec.hidden.value} | q_heads
