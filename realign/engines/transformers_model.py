"""Load a transformers model from a local folder or the hub, and reject models that would compute wrong results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from typing_extensions import override

from realign.api.memory import MemoryChoice, MemoryWork, RoleMemory
from realign.api.model import Compute, Model, ModelFacts, ModelSpec, TokenizerSource
from realign.api.sampler import Sampler, SamplerSpec
from realign.api.seeds import derive_seed
from realign.engines.distributed.sharding import Sharding, check_reference
from realign.engines.shared_model import Share, SharedModel
from realign.engines.training.load_balancing import LoadBalancing
from realign.engines.training.optimizer import OptimizerSpec, ScheduleKind, usual_rate
from realign.errors import ConfigError, SettingsError
from realign.functional.rounding import multiplies_bf16
from realign.models.device import DType, disable_tf32, pick_device, products_dtype, use_deterministic_algorithms
from realign.models.files.adapters import AdapterFolder, AdapterStart, check_continues, find_adapter, is_adapter
from realign.models.files.folders import read_states
from realign.models.files.model_folder import (
    check_hub,
    check_path,
    config_folder,
    hash_of_folders,
    readable,
    weight_names,
)
from realign.models.files.tokenizers import align_end_tokens, check_inherited, check_source, has_tokenizer, read_source
from realign.models.files.unread import has_unread
from realign.models.module_reader import (
    ModuleReader,
    check_4bit,
    check_head,
    keep_layout,
    read_value_head,
    settings_4bit,
)
from realign.models.network.heads import Causal, Head, Value, ValueHead, is_encoder_decoder
from realign.models.network.kernels import Backend, missing_package, preferred_kernel
from realign.models.network.passes import ParallelPasses, SharedPrompts
from realign.models.network.settings import NetworkSettings, TorchCompile
from realign.models.network.trains import All, Lora, TopLayers, Trained, load_adapters, require_peft
from realign.ranks import current
from realign.samplers.in_process.compiled.library import CompiledDecode
from realign.samplers.in_process.settings import InProcessSampling
from realign.settings import Auto, Range, Settings

if TYPE_CHECKING:
    from realign.engines.distributed.divisions import Divisions
    from realign.engines.memory import MemoryModel
    from realign.engines.training.transformers_engine import TransformersEngine
    from realign.models.model_shape import ModelShape


@dataclass
class TransformersModel(Settings, ModelSpec):
    """A transformers model as a role of an experiment.

    Attributes:
        path: Hub name or local folder of the model. The folder may also hold a peft adapter (adapter_config.json).
        head: What the model outputs: causal (a language model) | score (a reward model, one number per sequence) |
            value (a critic, one number per token). See `Causal`, `Score`, `Value`.
        tokenizer: Hub name or folder of the tokenizer. null: the actor's tokenizer, and for the actor the one in
            `path`.
        dtype: Precision of matrix products: auto | float32 | bfloat16 (autocast over fp32 weights; on a CPU only
            weights are rounded). auto picks bfloat16 on CUDA devices that support it, and float32 elsewhere. See
            `DType`.
        device: auto | cpu | cuda | cuda:0 ...; auto uses CUDA if available.
        attention: Attention kernel: auto (the fastest that is installed and supports device and layer) | sdpa (always
            works) | flash (flash-attn 2) | flash3 (flash-attn 3) | varlen (of torch) | hub. The last one downloads and
            runs flash-attn from the hub.
        deterministic: Use deterministic kernels, also in flash-attn, so that a run repeats bit by bit on the same
            GPU. Slower, and applies to all models in the process. CPU runs are deterministic without it.
        gradient_checkpointing: true | false | auto. Recompute each layer in the backward pass: saves memory, takes
            about a third longer. auto does so on CUDA if training wouldn't fit otherwise, and never on a CPU; the
            launch table says which and why.
        dropout: Rate of all dropouts of the model during training, such as 0.1. Off by default, also if the model's
            config has rates, because importance ratios compare two passes over the same text.
        optimizer: How to train the model; null freezes it.
        trains: Which weights to train: all | top_layers | lora. See `All`, `TopLayers`, `Lora`.
        adapter: What to do with an adapter folder in `path`: auto (continue if trains=lora with merge_on_save=false,
            otherwise merge) | merge (into the base model) | continue (train it further, with its rank and alpha).
        load_in_4bit: Load linear layers in 4 bits with bitsandbytes (QLoRA). Needs trains=lora,
            trains.merge_on_save=false and the extra `quantization`.
        trust_remote_code: Run model code from the folder or hub repository. It can do anything on your machine.
        shared_prompts: auto | off. auto computes a group's prompt once, in training and scoring, if that saves at
            least 5% of the group's tokens. The same for the first tokens of all prompts, such as a system message, also
            when a CPU samples. Same results. Not in training passes with dropout.
        fused_rollout: Sample faster with fused layers over concatenated copies of the weights, if the model family is
            known and a comparison with its modules shows no difference. Otherwise sampling calls the modules.
        parallel_passes: auto | off. auto computes micro-batches concurrently on CPU, in up to as many threads as
            torch uses, which share the token budget. Same results. Micro-batches run one after another with
            torch_compile, and in training passes with dropout or load_balancing.
        torch_compile: off | inductor | aot_eager | eager. Backend of `torch.compile` for the decoder layers in training
            and scoring, not for attention and rollouts. Not with load_balancing or load_in_4bit. See `TorchCompile`.
        load_balancing: Balance the experts of a mixture-of-experts model; null: off. See `LoadBalancing`.
        sharding: How to shard the model over several processes (torchrun); ignored with one process.
        sampler: Where responses are sampled: in this process (`InProcessSampling`), or on a server such as vllm.
    """

    path: str
    head: Head = field(default_factory=Causal)
    tokenizer: str | None = None
    dtype: DType = DType.auto
    device: str = "auto"
    attention: Backend = Backend.auto
    deterministic: bool = False
    gradient_checkpointing: bool | Auto = Auto.auto
    dropout: Annotated[float, Range(ge=0, lt=1)] = 0.0
    optimizer: OptimizerSpec | None = None
    trains: Trained = field(default_factory=All)
    adapter: AdapterStart = AdapterStart.auto
    load_in_4bit: bool = False
    trust_remote_code: bool = False
    shared_prompts: SharedPrompts = SharedPrompts.auto
    fused_rollout: bool = True
    parallel_passes: ParallelPasses = ParallelPasses.auto
    torch_compile: TorchCompile = TorchCompile.off
    load_balancing: LoadBalancing | None = None
    sharding: Sharding = field(default_factory=Sharding)
    sampler: SamplerSpec = field(default_factory=InProcessSampling)
    inherited: TokenizerSource | None = field(default=None, init=False, repr=False, compare=False)

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "without an optimizer. Set optimizer.lr"
        return {} if self.optimizer is not None else {"trains": unused, "load_balancing": unused}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.load_balancing is not None and self.load_balancing.bias_rate and self.trains != All():
            raise SettingsError(
                f"load_balancing.bias_rate={self.load_balancing.bias_rate:g}: it changes all layers, but "
                f"trains={self.trains}. Remove bias_rate."
            )
        if self.torch_compile.compiles and (self.load_balancing is not None or self.load_in_4bit):
            key = "load_in_4bit=true" if self.load_in_4bit else "load_balancing"
            raise SettingsError(
                f"torch_compile={self.torch_compile.value}: incompatible with {key}. Set torch_compile=off."
            )
        if self.head.is_scalar and self.sampler != InProcessSampling():
            raise SettingsError(
                f"sampler={type(self.sampler).__name__}: a model with head={self.head} cannot sample. Remove sampler."
            )
        if isinstance(self.head, Causal) and self.head.vocabulary is not None and self.sampler.external:
            raise SettingsError(
                f"head.vocabulary={self.head.vocabulary}: sampler={type(self.sampler).__name__} samples all tokens. "
                "Remove one of them."
            )

        if self._sampling.compiled_decode is CompiledDecode.on and (self.load_in_4bit or not self.fused_rollout):
            key = "load_in_4bit=true" if self.load_in_4bit else "fused_rollout=false"
            raise SettingsError(f"{key}: incompatible with sampler.compiled_decode=on. Set compiled_decode=auto.")

    @override
    def facts(self) -> ModelFacts:
        facts = ModelFacts(
            path=self.path,
            device=self.device,
            outputs=self.head.outputs,
            trainable=self.optimizer is not None,
            branches=self.trains.keeps_start and not self._continues,
            compute=self._compute,
        )
        schedule = None if self.optimizer is None else self.optimizer.schedule
        # A rate that stays above 0 has no end.
        if schedule is None or schedule.kind is ScheduleKind.constant or schedule.min_ratio:
            return facts
        return replace(facts, rate_ends=schedule.total, rate_unit=schedule.unit.value)

    def memory(self, name: str, work: MemoryWork) -> RoleMemory:
        """Estimate the memory from the config of the model.

        Raises:
            ConfigError: the config cannot be read.
        """
        return self.memory_model(name, pick_device(self.device), work.ranks).estimate(work)

    def memory_model(self, name: str, device: torch.device, ranks: int) -> MemoryModel:
        """Return the formula of the memory of the role `name` on each of several ranks; see `memory`."""
        from realign.engines.memory import MemoryModel

        shape = self._shape(name, self._base_path(name))
        value_head = self._value_head
        settings = self._settings(device).restrict(load_balancing=self.load_balancing is not None)
        # As in the engine: passes run one after another on several ranks, and with a value head that has layers (ADR
        # 12).
        together = settings.parallel_passes is ParallelPasses.auto and device.type == "cpu" and ranks == 1
        rounded = settings.rounds_weights(device) and ranks == 1
        return MemoryModel(
            shape,
            device,
            torch.float32 if rounded else settings.dtype,
            rounded=rounded,
            optimizer=self.optimizer,
            value_head=value_head,
            gradient_checkpointing=self.checkpoints,
            keep_rollout=self.sharding.keeps_rollout,
            load_in_4bit=self.load_in_4bit,
            lanes=torch.get_num_threads() if together and not (value_head and value_head.layers) else 1,
            fused_rollout=self.fused_rollout,
            sampling=self._sampling,
            offload=self.sharding.offload,
            reshard=self.sharding.reshard,
            pipeline=self.sharding.pipeline if ranks > 1 else 1,
            replicate=self.sharding.replicate if ranks > 1 else 1,
            context=self.sharding.context if ranks > 1 else 1,
            tensor=self.sharding.tensor if ranks > 1 else 1,
            expert=self.sharding.expert if ranks > 1 else 1,
        )

    def _shape(self, name: str, path: str) -> ModelShape:
        """Read the sizes of the model of the role `name` from the config in `path`; ConfigError if it is unreadable."""
        from realign.models.model_shape import read_shape

        with readable(f"models.{name}: cannot read the config in {path!r}"):
            return read_shape(
                path,
                self.head,
                trust_remote_code=self.trust_remote_code,
                trains=self.trains,
                trainable=self.optimizer is not None,
            )

    @override
    def rate_by_size(self, name: str) -> tuple[float, int] | None:
        if self.optimizer is None or self.optimizer.lr is not None:
            return None
        # A launch table asks before the model is downloaded, and must not wait for a hub that may be out of reach.
        if (folder := config_folder(self._base_path(name))) is None:
            return None
        weights = self._shape(name, str(folder)).parameters
        return usual_rate(weights, adapters=isinstance(self.trains, Lora), critic=isinstance(self.head, Value)), weights

    def divisions(self, name: str, *, replays: bool) -> Divisions:
        """Return what decides whether ranks can divide the model, from its config.

        Args:
            name: the role, for messages.
            replays: whether the role replays choices of experts.

        Raises:
            ConfigError: the config cannot be read.
        """
        from realign.engines.distributed.divisions import Divisions
        from realign.models.model_shape import without_memory

        path = self._base_path(name)
        with readable(f"models.{name}: cannot read the config in {path!r}"):
            module = without_memory(path, self.head, trust_remote_code=self.trust_remote_code, trains=self.trains)
        value_layers = 0 if self._value_head is None else self._value_head.layers
        return Divisions(name, module, self.trains, value_layers, self.torch_compile.compiles, replays, self.optimizer)

    def mesh_checks(self, name: str, *, replays: bool, referenced: bool) -> Callable[[Sharding, int], None]:
        """Return a check of meshes for this model, which reads the config once; see `check_ranks`."""
        divisions = cache(partial(self.divisions, name, replays=replays))

        def check(sharding: Sharding, ranks: int) -> None:
            if ranks == 1:  # a single one can do everything
                return
            if self.load_in_4bit:
                check_4bit(f"models.{name}", self.trains, self.head, ranks)
            if referenced:
                check_reference(name, self.trains)
            divisions().check(sharding, ranks)

        return check

    @override
    def check_ranks(self, name: str, ranks: int, *, replays: bool, referenced: bool) -> None:
        self.mesh_checks(name, replays=replays, referenced=referenced)(self.sharding, ranks)

    @override
    def describe_ranks(self, name: str, ranks: int) -> str:
        """Return the dimensions of the mesh; see `Sharding.describe`."""
        return self.sharding.describe(name, ranks)

    @override
    def memory_choices(self) -> frozenset[MemoryChoice]:
        if self.optimizer is None:
            return frozenset()
        values = {
            MemoryChoice.checkpointing: self.gradient_checkpointing,
            MemoryChoice.sampling_copy: self.sharding.keep_rollout,
        }
        return frozenset(choice for choice, value in values.items() if value is Auto.auto)

    @override
    def with_memory_choice(self, choice: MemoryChoice, on: bool) -> ModelSpec:
        if choice is MemoryChoice.checkpointing:
            return self._replace(gradient_checkpointing=on)
        return self._replace(sharding=replace(self.sharding, keep_rollout=on))

    @override
    def hash_of_weights(self, name: str) -> str | None:
        """Return a hash of the files with the weights, and of an adapter's base; None if they are not here."""
        adapter = find_adapter(f"models.{name}.path={self.path!r}", self.path)
        return hash_of_folders([self.path] if adapter is None else [self.path, adapter.base])

    def _replace(self, **changes: Any) -> TransformersModel:
        copy = replace(self, **changes)
        # `replace` calls the constructor, and `inherited` is no argument of it.
        return copy if self.inherited is None else copy.with_tokenizer(self.inherited)

    def _base_path(self, name: str) -> str:
        """Return the folder or hub name of the model, which is another one than `path` for an adapter."""
        adapter = self._find_adapter(name)
        return self.path if adapter is None else adapter.base

    @property
    def checkpoints(self) -> bool:
        """Whether training recomputes layers; false while `auto` is undecided."""
        return self.gradient_checkpointing is True

    @property
    def _value_head(self) -> ValueHead | None:
        """The value head that a language model has in addition to its own."""
        return self.head.value_head if isinstance(self.head, Causal) else None

    @property
    def _continues(self) -> bool:
        """Whether the adapter in `path` is trained further, so that the start of the run is not the base model."""
        if self.adapter is AdapterStart.auto:
            return self.trains.saves_adapters and is_adapter(self.path)
        return self.adapter is AdapterStart.continue_

    def _find_adapter(self, name: str) -> AdapterFolder | None:
        """Return the adapter in `path`, if any, after a check of its files and of the settings that concern it.

        Args:
            name: the role, for messages.

        Raises:
            ConfigError: the settings do not fit the folder, or peft is missing.
            DataError: the folder is invalid.
        """
        what = f"models.{name}.path={self.path!r}"
        adapter = find_adapter(what, self.path)
        if adapter is None and self.adapter is not AdapterStart.auto:
            raise ConfigError(
                f"models.{name}.adapter={self.adapter.value}: models.{name}.path={self.path!r} is not an adapter "
                "folder (it has no adapter_config.json). Remove this key."
            )
        if adapter is None:
            return None
        require_peft(f"{str(adapter.path)!r} is an adapter folder, but")
        adapter.check(what)
        if self._continues:
            if not isinstance(self.trains, Lora):
                raise ConfigError(f"models.{name}.adapter=continue: requires models.{name}.trains=lora.")
            try:
                check_continues(adapter, rank=self.trains.rank, alpha=self.trains.alpha)
            except ConfigError as error:
                raise ConfigError(f"{what}: {error}") from error
        elif self.trains.saves_adapters:
            raise ConfigError(
                f"models.{name}.adapter=merge: with trains.merge_on_save=false, the saved adapter would need the "
                f"merged model, which is not saved. Set models.{name}.adapter=continue, or merge_on_save=true."
            )
        return adapter

    def _settings(self, device: torch.device) -> NetworkSettings:
        """Return the settings of the network on this device."""
        return NetworkSettings(
            dtype=products_dtype(self.dtype, device),
            attention=self.attention,
            dropout=self.dropout,
            trains=self.trains,
            vocabulary=self.head.vocabulary if isinstance(self.head, Causal) else None,
            shared_prompts=self.shared_prompts,
            fused_rollout=self.fused_rollout and not self.load_in_4bit,
            parallel_passes=self.parallel_passes,
            torch_compile=self.torch_compile,
        )

    @property
    def _sampling(self) -> InProcessSampling:
        """Settings of the engine's own sampler; defaults if another sampler samples."""
        return self.sampler if isinstance(self.sampler, InProcessSampling) else InProcessSampling()

    @property
    def _compute(self) -> Compute | None:
        """How this machine would compute the model; None if it lacks the device."""
        try:
            device = pick_device(self.device)
        except ConfigError:
            return None
        dtype, rounded = products_dtype(self.dtype, device), ""
        if self._settings(device).rounds_weights(device) and current().size == 1:
            backward = "bfloat16" if multiplies_bf16() else "float32, since this CPU cannot multiply bfloat16"
            dtype, rounded = torch.float32, f"weights in bfloat16, backward products in {backward}"
        kernel = preferred_kernel(self.attention, device, dtype)
        return Compute(device.type, str(dtype).removeprefix("torch."), kernel, rounded)

    @override
    def frozen_start(self, role: str) -> ModelSpec:
        """Return the model before training; with LoRA or `TopLayers` it shares the weights of the trained model."""
        if self.optimizer is not None and self.trains.keeps_start and not self._continues:
            return SharedModel(role, Share.reference)
        if self.load_in_4bit:
            raise ConfigError(
                f"models.{role}.load_in_4bit=true: a continued adapter has no reference in 4 bits. Merge it with "
                f"realign export --merge, and set models.{role}.path to the merged model."
            )
        head = replace(self.head, value_head=None) if isinstance(self.head, Causal) else self.head
        adapter = AdapterStart.auto if self.adapter is AdapterStart.continue_ else self.adapter
        plain = replace(self, load_balancing=None, gradient_checkpointing=Auto.auto)
        return replace(plain, optimizer=None, trains=All(), head=head, adapter=adapter)

    @override
    def for_sampling(self) -> ModelSpec:
        """Return a copy that keeps no moving average of the weights."""
        if self.optimizer is None:
            return self
        return self._replace(optimizer=replace(self.optimizer, ema_decay=None))

    @override
    def for_evaluation(self) -> ModelSpec:
        """Return a frozen copy that merges adapters and does not quantize."""
        adapter = AdapterStart.auto if self.adapter is AdapterStart.continue_ else self.adapter
        plain = self._replace(load_balancing=None, gradient_checkpointing=Auto.auto, load_in_4bit=False)
        return plain._replace(optimizer=None, trains=All(), adapter=adapter)

    @override
    def tokenizer_source(self, role: str) -> TokenizerSource:
        """Return the tokenizer of this role, which may be inherited."""
        if self.tokenizer is not None:
            return TokenizerSource(self.tokenizer, f"models.{role}.tokenizer", role, self.trust_remote_code)
        return self.inherited or TokenizerSource(
            self._own_tokenizer(role), f"models.{role}.path", role, self.trust_remote_code
        )

    def _own_tokenizer(self, role: str) -> str:
        """Return `path`, or the base model of an adapter folder without a tokenizer."""
        adapter = None if has_tokenizer(self.path) else find_adapter(f"models.{role}.path={self.path!r}", self.path)
        return self.path if adapter is None else adapter.base

    @override
    def with_tokenizer(self, source: TokenizerSource) -> TransformersModel:
        if self.tokenizer is not None:
            return self
        copy = replace(self)
        copy.inherited = source
        return copy

    def check(self, name: str) -> None:
        """Check the settings before any weights are read.

        Raises:
            ConfigError: a path or device is invalid, or a package is missing. The message names the key.
            DataError: a model folder is invalid, or the head does not match its weights.
        """
        what = f"models.{name}"
        self.sampler.check(f"{what}.sampler")
        self.trains.check(f"{what}.trains")
        if self.load_in_4bit:
            check_4bit(what, self.trains, self.head, current().size)
        if (why := missing_package(self.attention)) is not None:
            raise ConfigError(f"{what}.attention={self.attention.value}: {why}. Or set {what}.attention=auto.")
        try:
            pick_device(self.device)
        except ConfigError as error:
            raise ConfigError(f"{what}.{error}") from error
        adapter = self._find_adapter(name)
        path = check_path(f"{what}.path", self.path if adapter is None else adapter.base)
        check_source(self.tokenizer_source(name), self.path)
        if not Path(path).is_dir():
            check_hub(f"{what}.path", path)
        else:
            names = weight_names(Path(path))
            names |= adapter.head_names() if adapter is not None else frozenset()
            random_head = self.optimizer is not None or self.head.replaces
            check_head(what, self.path, names, self.head, random_head=random_head)

    def load(self, name: str, *, seed: int) -> Model:
        """Read weights and tokenizer, probe the model, and build its engine.

        Args:
            name: the role, for messages and seeds.
            seed: the run's root seed; initializes weights that the folder lacks (a new scalar head).

        Raises:
            ConfigError: the settings do not fit the model. The message names the role.
            DataError: the folder or tokenizer cannot be used. The message names the role and the path.
        """
        self.check(name)
        adapter, device = self._find_adapter(name), pick_device(self.device)
        settings = self._settings(device)
        disable_tf32(device)
        if self.deterministic:
            use_deterministic_algorithms()
        reader = ModuleReader(
            name,
            f"models.{name}.path={self.path!r}",
            self.path,
            adapter,
            self.head,
            self.optimizer is not None,
            self.trust_remote_code,
            derive_seed(seed, name, "init"),
            settings_4bit(device, settings.dtype) if self.load_in_4bit else {},
            unread_on=device if self._reads_slices else None,
        )
        module = reader.read(merge=not self._continues)
        if is_encoder_decoder(module.config):
            self._check_encoder_decoder(name)
        self.head.start(module, seed=derive_seed(seed, name, "head"))
        words = module.get_input_embeddings().weight.shape[0]
        tokenizer = self._read_tokenizer(name, words)
        align_end_tokens(module, tokenizer)
        if settings.vocabulary is not None and settings.vocabulary > words:
            raise ConfigError(f"models.{name}.head.vocabulary={settings.vocabulary}: must be at most {words}")
        keep_layout(module)
        # bitsandbytes has quantized the weights on their device; see `settings_4bit`.
        module = (module if self.load_in_4bit else module.to(device)).eval()
        probed = value_head = None
        if has_unread(module):
            from realign.models.network.probe import small_model

            top = 0 if self._value_head is None else self._value_head.layers
            kind = self.head.auto_class(module.config)
            probed = small_model(module, kind, device, layers=top, trust_remote_code=self.trust_remote_code)
        # Before `trains` adds adapters and freezes weights: a value head with layers of its own copies the plain ones.
        if self._value_head is not None:
            value_head = read_value_head(name, module, self._value_head, self.path, seed, settings.vocabulary, probed)
        with readable(f"models.{name}.trains", ConfigError):
            base = self.path if adapter is None else adapter.base
            self.trains.prepare(module, path=base, seed=derive_seed(seed, name, "lora"))
        if adapter is not None and self._continues:
            with readable(f"models.{name}.path={self.path!r}"):
                load_adapters(module, adapter.path)
        optimizer = self.optimizer
        if optimizer is not None and (by_size := self.rate_by_size(name)) is not None:
            optimizer = replace(optimizer, lr=by_size[0])
        engine = self.make_engine(
            name,
            module,
            tokenizer,
            settings,
            seed=seed,
            sampling=self._sampling,
            value_head=value_head,
            optimizer=optimizer,
            gradient_checkpointing=self.checkpoints,
            load_balancing=self.load_balancing,
            probed=probed,
        )
        saved, saved_views = read_states(self.path)
        return Model(name, engine, tokenizer, seed, saved=saved, saved_views=saved_views)

    @property
    def _reads_slices(self) -> bool:
        """Whether the engine itself reads the weights, only those of its rank."""
        return current().size > 1

    def make_engine(self, *arguments: Any, **further: Any) -> TransformersEngine:
        """Build the engine over a loaded module; see `TransformersEngine` for the arguments."""
        if current().size > 1:
            from realign.engines.distributed.sharded_engine import ShardedEngine

            return ShardedEngine(*arguments, sharding=self.sharding, **further)
        from realign.engines.training.transformers_engine import TransformersEngine

        return TransformersEngine(*arguments, **further)

    def _check_encoder_decoder(self, name: str) -> None:
        """Raise ConfigError if a setting is not supported by encoder-decoder models; the message names its cure."""
        layers = 0 if self._value_head is None else self._value_head.layers
        own = isinstance(self.sampler, InProcessSampling)
        compiled = isinstance(self.sampler, InProcessSampling) and self.sampler.compiled_decode is CompiledDecode.on
        wrong = {
            f"trains={self.trains}": ("trains=all or lora", isinstance(self.trains, TopLayers)),
            f"head.value_head.layers={layers}": ("head.value_head.layers=0", layers > 0),
            "load_in_4bit=true": ("load_in_4bit=false", self.load_in_4bit),
            "sampler": ("sampler to the in-process sampler", not own),
            "sampler.compiled_decode=on": ("sampler.compiled_decode=auto", compiled),
        }
        for key, (cure, is_set) in wrong.items():
            if is_set:
                raise ConfigError(f"models.{name}.{key}: not supported by encoder-decoder models. Set {cure}.")

    def _read_tokenizer(self, name: str, words: int) -> Any:
        """Read the tokenizer, and check that it fits a model of `words` tokens and the tokenizer in `path`."""
        source = self.tokenizer_source(name)
        tokenizer = read_source(name, source, words)
        if self.inherited is source:
            own = self._own_tokenizer(name)
            check_inherited(name, source, tokenizer, own, trust_remote_code=self.trust_remote_code)
        return tokenizer

    @override
    def background_sampler(self, name: str, *, seed: int, recompute: bool) -> Sampler:
        """Sample many calls together, from a copy of the model without its moving average."""
        from realign.samplers.in_process.background import StreamingEngine

        engine = self.for_sampling().load(name, seed=seed).engine
        return StreamingEngine(name, engine, recompute=recompute)
