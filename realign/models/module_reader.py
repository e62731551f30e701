"""Read the module of a model with transformers, also in 4 bits (arXiv:2305.14314), merge an adapter, and read heads."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from realign.api.seeds import derive_seed
from realign.errors import ConfigError, DataError
from realign.models.files.adapters import AdapterFolder
from realign.models.files.model_folder import GENERATION_CONFIG, check_path, quiet_transformers, readable
from realign.models.files.unread import Unread, is_finite, not_finite, read_buffers, read_now, weights_in
from realign.models.network.branches import Branch
from realign.models.network.heads import Causal, Head, ValueHead, head_mapping, is_encoder_decoder, read_head
from realign.models.network.merge import merge_adapter
from realign.models.network.passed_context import pass_context_on
from realign.models.network.recurrence import segment_recurrent_layers
from realign.models.network.trains import Lora, Trained
from realign.models.network.value_head import ValueNetwork

SCALAR_HEADS = ("score.", "classifier.")
_LANGUAGE_HEADS = ("lm_head.", "embed_out.")

# Parts beside a language model: prediction of several tokens, other modalities, and the value head of TRL.
_PARTS = frozenset({"mtp", "visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "v_head"})
# Buffers of old folders, which a model computes.
_RECOMPUTED = re.compile(r"(inv_freq|position_ids|(attn|attention)\.(masked_)?bias)$")

_NOT_QUANTIZED = ("lm_head", "embed_out", "score", "classifier")
"""Layers that stay in fp32."""

# Attribute of a linear layer of bitsandbytes, which may repack its weights for the CPU; see `keep_layout`.
_REPACKS = "support_avx512bf16_for_cpu"


@dataclass(frozen=True)
class ModuleReader:
    """Reads the module of one role.

    Attributes:
        role: the role, for messages.
        setting: key and value of the path, for messages.
        path: folder or hub name in the config.
        adapter: the adapter in `path`; None if `path` contains a full model.
        head: output of the model.
        trains: whether the role has an optimizer, so that a new head is allowed.
        trust_remote_code: whether to run code in the folder or hub repository.
        seed: seed of weights that the folder lacks.
        settings: further arguments of `from_pretrained`, such as a quantization.
        unread_on: leave the weights in their files, for this device (see `Unread`); None reads them.
    """

    role: str
    setting: str
    path: str
    adapter: AdapterFolder | None
    head: Head
    trains: bool = False
    trust_remote_code: bool = False
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    unread_on: torch.device | None = None

    def read(self, *, merge: bool) -> Any:
        """Return the module; `merge` adds the adapter to its weights, otherwise they are those of the base model.

        Raises:
            ConfigError: the model family is not supported with this head.
            DataError: the folder cannot be read, or lacks weights.
        """
        from transformers import AutoConfig

        labels = {"num_labels": 1} if self.head.is_scalar else {}
        path = self.path if self.adapter is None else self.adapter.base
        path = check_path(f"models.{self.role}.path", path)
        hub = "" if Path(path).is_dir() else " from the hub (if offline, set HF_HUB_OFFLINE=1)"
        with readable(f"{self.setting}: cannot load {path!r}{hub}"):
            config = AutoConfig.from_pretrained(path, trust_remote_code=self.trust_remote_code, **labels)
        family = config.model_type
        with readable(f"{self.setting}: model family {family!r} cannot be loaded from {path!r} with head={self.head}"):
            module, info = self._load(path, config)
        # The adapter brings weights that its base model lacks, such as a scalar head.
        supplied = frozenset() if self.adapter is None else self.adapter.head_names()
        missing = sorted(set(info["missing_keys"]) - supplied)
        self._check_complete(module.base_model_prefix, missing)
        self._check_shapes(info["mismatched_keys"])
        self._check_leftovers(module, info["unexpected_keys"])
        for name, x in module.named_parameters():
            if not isinstance(x, Unread) and x.is_floating_point() and not is_finite(x):
                raise DataError(not_finite(self.setting, name))
        if self.adapter is not None and merge:
            with readable(self.setting):
                module = merge_adapter(module, self.adapter.path)
        return module

    def _load(self, path: str, config: Any) -> tuple[Any, dict[str, Any]]:
        from realign.models.network.attention import ATTENTION

        kind = self.head.auto_class(config)
        unread = None if self.unread_on is None else weights_in(path, self.unread_on)

        def load(attention: str | None, **more: Any) -> tuple[Any, dict[str, Any]]:
            settings = {"dtype": torch.float32, "attn_implementation": attention, "output_loading_info": True, **more}
            settings["ignore_mismatched_sizes"] = True  # `_check_shapes` names them
            # A head that the folder lacks depends on the seed of its role alone, not on what was drawn before.
            with torch.random.fork_rng(), quiet_transformers():
                torch.manual_seed(self.seed)
                if unread is not None:
                    return self._convert(path, kind, config, dict(unread), settings)
                return kind.from_pretrained(
                    path,
                    trust_remote_code=self.trust_remote_code,
                    use_safetensors=True,  # the alternative format is a pickle
                    config=config,
                    **self.settings,
                    **settings,
                )

        attention = None if is_encoder_decoder(config) else ATTENTION
        try:
            module, info = load(attention)
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            attention = None  # the family selects its attention class itself, so the model will run unpacked
            module, info = load(attention)
        # The folder has the head under another name. Only the first attempt tells which names are missing and left
        # over.
        if mapping := head_mapping(info["missing_keys"], info["unexpected_keys"]):
            module, info = load(attention, key_mapping=mapping)
        return module, info

    def _convert(
        self, path: str, kind: Any, config: Any, unread: dict[str, Any], settings: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return a module that has the unread weights of the folder, and what transformers says about them."""
        from transformers import GenerationConfig

        with torch.device("meta"):  # only a class, not an Auto class, accepts weights instead of a folder
            family = type(kind.from_config(copy.deepcopy(config), trust_remote_code=self.trust_remote_code))
        module, info = family.from_pretrained(None, config=config, state_dict=unread, **settings)
        if module.can_generate() and Path(path, GENERATION_CONFIG).is_file():
            module.generation_config = GenerationConfig.from_pretrained(path)
        read_buffers(module)
        for name in SCALAR_HEADS:
            if isinstance(head := getattr(module, name.rstrip("."), None), nn.Module):
                read_now(head)
        return module, info

    def _check_shapes(self, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Raise DataError for a weight of another shape than the config says; transformers would draw a new one."""
        for name, saved, wanted in sorted(mismatched):
            scalar = self.head.is_scalar and name.startswith(SCALAR_HEADS)
            if scalar and self.head.replaces:
                continue
            cause = (
                f"A model with head={self.head} has one label. Set head.init to replace the head."
                if scalar
                else "Its config.json is that of another model, or was changed. Correct it, or download it again."
            )
            raise DataError(
                f"{self.setting}: the weight {name!r} has the shape {list(saved)}, expected {list(wanted)}. {cause}"
            )

    def _check_leftovers(self, module: Any, names: Collection[str]) -> None:
        """Raise DataError for weights that no layer takes; transformers only warns.

        Heads that `head` replaces are left over by intent. Separate parts, such as an image encoder, are named once.
        """
        if getattr(module.config, "quantization_config", None) is not None:  # scales, for example
            return
        heads = _LANGUAGE_HEADS + SCALAR_HEADS if self.head.is_scalar else ()
        left = sorted(name for name in names if not name.startswith(heads) and not _RECOMPUTED.search(name))
        inside = {name for name, _ in (*module.named_children(), *module.base_model.named_children())}
        apart = [name for name in left if name.split(".")[0] not in inside or _PARTS & set(name.split("."))]
        if lost := [name for name in left if name not in apart]:
            layers = getattr(module.config.get_text_config(), "num_hidden_layers", None)
            raise DataError(
                f"{self.setting}: no layer of the model takes the weight {lost[0]!r}"
                + (f" and {len(lost) - 1} more" if lost[1:] else "")
                + f" (model family {module.config.model_type!r}, {layers} layers). Its config.json is that of another "
                "model, or was changed. Correct it, or download it again."
            )
        if apart:
            warnings.warn(
                f"{self.setting}: {len(apart)} weights are not used, such as {apart[0]!r}.",
                stacklevel=2,
            )

    def _check_complete(self, body: str, missing: Sequence[str]) -> None:
        """Raise DataError for weights that are randomly initialized but never train; transformers only warns."""
        inside = [key for key in missing if key.startswith(f"{body}.")]
        heads = [key for key in missing if key not in inside and key.endswith(".weight")]
        if absent := inside or ([] if self.head.is_scalar else heads):
            raise DataError(
                f"{self.setting}: the folder lacks weights for head={self.head}: {absent[0]}"
                + (f" and {len(absent) - 1} more" if absent[1:] else "")
            )
        if heads and not self.trains and not self.head.replaces:
            raise _no_trained_head(f"models.{self.role}", self.path, self.head, heads[0])


def read_value_head(
    name: str, module: Any, spec: ValueHead, path: str, seed: int, vocabulary: int | None, probed: Any = None
) -> ValueNetwork:
    """Return the value head in a model folder, or a new one.

    Args:
        name: the role, for messages and seeds.
        module: the model, on its device.
        spec: the value head.
        path: the model folder.
        seed: root seed of the run.
        vocabulary: number of tokens that Q heads have a value for; None means all.
        probed: a small model to probe instead of one whose weights are unread.

    Raises:
        ConfigError: the model has fewer layers than the value head, or the saved head has another shape.
        DataError: the saved weights do not fit the model.
    """
    from realign.models.network.probe import probe_branch

    what = f"models.{name}.head.value_head"
    head: Any = read_head(module)
    segment_recurrent_layers(module)  # before the branch copies layers
    pass_context_on(module)
    rows, hidden_size = head.weight_VH.shape
    words = vocabulary or rows
    network = ValueNetwork(spec, module, hidden_size, words, seed=derive_seed(seed, name, "value_head"), what=what)
    network.to(module.device).eval()
    if network.branch is not None and probed is None:
        probe_branch(module, network.branch)
    elif network.branch is not None:
        probe_branch(probed, Branch(probed, spec.layers).eval())
    network.load(path, what)
    return network


def check_head(what: str, path: str, names: Collection[str], head: Head, *, random_head: bool) -> None:
    """Check that the configured head matches the weights in a folder.

    Args:
        what: key of the model, for messages.
        path: path of the folder, for messages.
        names: names of its weights.
        head: the configured head.
        random_head: whether a new scalar head is allowed, because the model trains or `Head.replaces` is true.

    Raises:
        DataError: `head` is causal but the folder contains a reward model or critic, or the folder lacks the scalar
            head.
    """
    scalar = sorted(name for name in names if name.startswith(SCALAR_HEADS))
    if head.is_scalar and not scalar and not random_head:
        raise _no_trained_head(what, path, head, "score.weight")
    if not head.is_scalar and scalar and not any(name.startswith(_LANGUAGE_HEADS) for name in names):
        raise DataError(
            f"{what}.head=causal: {path!r} contains a reward model or critic ({scalar[0]} and no language head). Set "
            f"{what}.path to a language model, or set {what}.head=score."
        )


def _no_trained_head(what: str, path: str, head: Head, lacks: str) -> DataError:
    """Return the error for a scalar head that is randomly initialized and never trained."""
    return DataError(
        f"{what}.head={head}: {path!r} has no such head ({lacks} is missing), and the role does not train, so its "
        f"output would be random. Set {what}.path to a folder with that head, such as final/reward of "
        f"experiment=reward_model, or set {what}.head.init."
    )


def check_4bit(what: str, trains: Trained, head: Head, processes: int) -> None:
    """Check that a model can be loaded in 4 bits and trained.

    Args:
        what: key of the model, for messages.
        trains: weights that train.
        head: output of the model.
        processes: number of processes that share the model.

    Raises:
        ConfigError: bitsandbytes is missing, or a setting needs unquantized weights.
    """
    key = f"{what}.load_in_4bit=true"
    if not isinstance(trains, Lora):
        raise ConfigError(f"{key}: weights in 4 bits cannot train. Set {what}.trains=lora.")
    if trains.merge_on_save:
        raise ConfigError(
            f"{key}: adapters cannot be merged into weights in 4 bits. Set {what}.trains.merge_on_save=false, and "
            "merge the saved adapter with realign export --merge."
        )
    if isinstance(head, Causal) and head.value_head is not None and head.value_head.layers:
        raise ConfigError(f"{key}: {what}.head.value_head.layers would copy and train these layers. Set it to 0.")
    if processes > 1:
        raise ConfigError(f"{key}: weights in 4 bits cannot be sharded. Start one process.")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{key}: bitsandbytes is not installed. Run pip install 'realign-rl[quantization]'.")


def settings_4bit(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that load linear layers as 4-bit NormalFloat, double-quantized.

    Args:
        device: device of the model; bitsandbytes quantizes while it loads.
        dtype: dtype of matrix products.
    """
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=list(_NOT_QUANTIZED),
    )
    return {"quantization_config": config, "device_map": {"": device}}


def keep_layout(module: nn.Module) -> None:
    """Keep the layout of quantized weights. On some CPUs, bitsandbytes would change it in the first scoring pass."""
    for layer in module.modules():
        if hasattr(layer, _REPACKS):
            setattr(layer, _REPACKS, False)
