"""Read the module of a model from a folder or the hub, with transformers; merge an adapter; read a value head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realign.api.seeds import derive_seed
from realign.engines.files.adapters import AdapterFolder
from realign.engines.files.folders import check_path
from realign.engines.files.inspection import no_trained_head
from realign.engines.files.pretrained import quiet_transformers, readable
from realign.engines.network.heads import Head, ValueHead, head_mapping, is_encoder_decoder, read_head
from realign.engines.network.passed_context import pass_context_on
from realign.engines.network.recurrence import segment_recurrent_layers
from realign.engines.network.trains import merge_adapter
from realign.engines.network.value_head import ValueNetwork
from realign.errors import DataError


@dataclass(frozen=True)
class ModuleReader:
    """Reads the module of one role.

    Attributes:
        role: the role, for messages.
        path: folder or hub name in the config.
        adapter: the adapter in `path`; None if `path` contains a full model.
        head: output of the model.
        trains: whether the role has an optimizer, so that a new head is allowed.
        trust_remote_code: whether to run code in the folder or hub repository.
        seed: seed of weights that the folder lacks.
        settings: further arguments of `from_pretrained`, such as a quantization.
    """

    role: str
    path: str
    adapter: AdapterFolder | None
    head: Head
    trains: bool
    trust_remote_code: bool
    seed: int
    settings: Mapping[str, Any]

    def read(self, *, merge: bool) -> Any:
        """Return the module; `merge` adds the adapter to its weights, otherwise they are those of the base model.

        Raises:
            ConfigError: the model family is not supported with this head.
            DataError: the folder cannot be read, or lacks weights.
        """
        from transformers import AutoConfig

        path = self.path if self.adapter is None else self.adapter.base
        path = check_path(f"models.{self.role}.path", path)
        hub = "" if Path(path).is_dir() else " from the hub (if offline, set HF_HUB_OFFLINE=1)"
        with readable(f"models.{self.role}: cannot load {path!r}{hub}"):
            config = AutoConfig.from_pretrained(path, trust_remote_code=self.trust_remote_code)
        family = config.model_type
        what = f"models.{self.role}: model family {family!r} cannot be loaded from {path!r} with head={self.head}"
        with readable(what):
            module, info = self._loaded(path, config)
        supplied = frozenset() if self.adapter is None else self.adapter.head_names()
        missing = sorted(set(info["missing_keys"]) - supplied)
        self._check_complete(module.base_model_prefix, missing)
        if self.adapter is not None and merge:
            with readable(f"models.{self.role}.path={self.path!r}"):
                module = merge_adapter(module, self.adapter.path)
        return module

    def _loaded(self, path: str, config: Any) -> tuple[Any, dict[str, Any]]:
        from realign.engines.network.attention import ATTENTION

        kind = self.head.auto_class(config)
        labels = {"num_labels": 1} if self.head.is_scalar else {}

        def load(attention: str | None, **more: Any) -> tuple[Any, dict[str, Any]]:
            with torch.random.fork_rng(), quiet_transformers():
                torch.manual_seed(self.seed)
                return kind.from_pretrained(
                    path,
                    dtype=torch.float32,
                    attn_implementation=attention,
                    trust_remote_code=self.trust_remote_code,
                    use_safetensors=True,  # the alternative format is a pickle
                    output_loading_info=True,
                    **labels,
                    **self.settings,
                    **more,
                )

        attention = None if is_encoder_decoder(config) else ATTENTION
        try:
            module, info = load(attention)
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            attention = None  # the family selects its attention class itself, so the model will run unpacked
            module, info = load(attention)
        if mapping := head_mapping(info["missing_keys"], info["unexpected_keys"]):
            module, info = load(attention, key_mapping=mapping)
        return module, info

    def _check_complete(self, body: str, missing: Sequence[str]) -> None:
        """Raise DataError for weights that are randomly initialized but never train; transformers only warns."""
        inside = [key for key in missing if key.startswith(f"{body}.")]
        heads = [key for key in missing if key not in inside and key.endswith(".weight")]
        if absent := inside or ([] if self.head.is_scalar else heads):
            raise DataError(
                f"models.{self.role}.path={self.path!r}: the folder lacks weights for head={self.head}: {absent[0]}"
                + (f" and {len(absent) - 1} more" if absent[1:] else "")
            )
        if heads and not self.trains and not self.head.replaces:
            raise no_trained_head(f"models.{self.role}", self.path, self.head, heads[0])


def read_value_head(
    name: str, module: Any, spec: ValueHead, path: str, seed: int, vocabulary: int | None
) -> ValueNetwork:
    """Return the value head in a model folder, or a new one.

    Args:
        name: the role, for messages and seeds.
        module: the model, on its device.
        spec: the value head.
        path: the model folder.
        seed: root seed of the run.
        vocabulary: number of tokens that Q heads have a value for; None means all.

    Raises:
        ConfigError: the model has fewer layers than the value head, or the saved head has another shape.
        DataError: the saved weights do not fit the model.
    """
    from realign.engines.network.probe import probe_branch

    what = f"models.{name}.head.value_head"
    head: Any = read_head(module)
    segment_recurrent_layers(module)  # before the branch copies layers
    pass_context_on(module)
    rows, hidden_size = head.weight_VH.shape
    words = vocabulary or rows
    network = ValueNetwork(spec, module, hidden_size, words, seed=derive_seed(seed, name, "value_head"), what=what)
    network.to(module.device).eval()
    if network.branch is not None:
        probe_branch(module, network.branch)
    network.load(path, what)
    return network
