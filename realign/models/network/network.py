"""`Network`: the weights of a role, its forward pass over packed sequences, and saving to a folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from realign.api.generation import GenerationConfig
from realign.api.microbatch import MicroBatchSpec
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sample import PIXELS, TOKENS, SequenceSample
from realign.api.sampling_mask import support_of
from realign.errors import ConfigError
from realign.functional.logprobs import LMHead
from realign.models.host import Host
from realign.models.network.abilities import Abilities
from realign.models.network.attention import layout_inputs
from realign.models.network.branches import ReferenceBranch, TrunkInputs, check_layers, layers_that_train, read_stack
from realign.models.network.encoder_decoder import EncoderDecoder
from realign.models.network.heads import read_body, read_head
from realign.models.network.images import NO_IMAGES
from realign.models.network.output import PackedOutput, RowsOfRank, ScalarBranch, ScalarHead
from realign.models.network.passes import Layout, Passes, most_lanes, most_rows
from realign.models.network.probe import probe_branch
from realign.models.network.routers import Routers
from realign.models.network.settings import NetworkSettings
from realign.models.network.value_head import GuidedHead, ValueNetwork

logger = logging.getLogger(__name__)

Run: TypeAlias = Callable[[SequenceSample, SequenceSample, Layout], PackedOutput]
"""A forward pass. The arguments are a micro-batch on its current device, the same micro-batch on the model's device,
and the layout of its rows."""


class _ExactPasses(Protocol):
    """Computes passes with the bits of rollouts; see `realign.samplers.in_process.compiled.exact`."""

    def read(self, length: int) -> object:
        """Copy the current weights of the layers, for texts of up to `length` tokens."""
        ...

    def hidden(self, ids_R: Tensor, layout: Layout) -> Tensor:
        """Return the last hidden states [R, H] of a pass, with the weights of the last `read`; thread-safe."""
        ...

    def head(self, head: LMHead) -> LMHead:
        """Return the head with `LMHead.exact`."""
        ...


class _Valued(torch.autograd.Function):
    """The second argument, with the gradient of the first, which differs from it by rounding only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exact: Tensor) -> Tensor:
        return exact

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Network(nn.Module):
    """A transformers model in eval mode, with an optional value head."""

    def __init__(
        self,
        name: str,
        module: Any,
        settings: NetworkSettings,
        abilities: Abilities,
        value_head: ValueNetwork | None = None,
        host: Host | None = None,
    ) -> None:
        """Compose a network of a module and a value head that `prepare_module` has prepared.

        Args:
            name: role of the model, for messages.
            module: a transformers model.
            settings: how passes are computed.
            abilities: what the module can do.
            value_head: its value head.
            host: asks the other processes that have a part of the model.
        """
        super().__init__()
        self.name = name
        self.host = host or Host()
        self.module = module
        self.value_head = value_head
        self.abilities = abilities
        self.trains = settings.trains
        self.heads: Mapping[str, LMHead] = {}
        """Language-model heads of other roles, for losses over the whole vocabulary."""
        self.exact: _ExactPasses | None = None
        """Computes the values of all passes as rollouts compute them; None: the modules compute them."""
        self.device: torch.device = next(module.parameters()).device
        self.autocast = abilities.autocast
        self._attention = settings.attention
        self._vocabulary = settings.vocabulary
        self._dropout = settings.dropout > 0
        # ranks gather the weights for each pass, and need as many passes as the others
        self._alone = self.device.type == "cpu" and not settings.divided
        rounded, weights = abilities.rounded is not None, sum(p.numel() for p in self.parameters())
        self._most_rows = most_rows(weights, rounded=rounded) if self._alone else None
        self.draws = self._dropout or bool(self.trains.dropouts(module))
        """Whether training passes have dropout."""

    @property
    def head(self) -> LMHead | ScalarHead:
        """The last layer with its current parameters; a sharded network has other parameters while it runs."""
        return read_head(self.module)

    def read_head(self, *, dropout: bool) -> LMHead | ScalarHead:
        """Return the last layer for a pass that has run, see `heads.read_head`."""
        return read_head(self.module, dropout=dropout)

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that an optimizer of this process may change in place."""
        return list(self.parameters())

    def forward(self, **inputs: Any) -> Tensor:
        """Return the last hidden states [1, R, H], given the keywords of `layout_inputs`."""
        hidden: Tensor = read_body(self.module)(**inputs).last_hidden_state
        return hidden

    def passes(
        self, data: SequenceSample, mb_spec: MicroBatchSpec, *, parallel: bool = False, training: bool = False
    ) -> Passes:
        """Return the micro-batches of a batch, the layout of each, and how many of them run concurrently.

        A training pass with dropout neither shares prompts nor runs concurrently. Its random numbers differ for each
        sequence and come from one generator for all threads.

        Args:
            data: the batch.
            mb_spec: the token budget.
            parallel: whether the passes may run concurrently.
            training: whether the passes are differentiated.
        """
        self.forget_rounded()
        if self.exact is not None:
            self.exact.read(int(data.lengths[TOKENS].flat.max(initial=1)))
        draws = training and self.draws
        share = self.abilities.shares and data[TOKENS].device.type == "cpu" and not draws
        replays = ROUTER_EXPERTS in data
        if replays:
            self.check_replay()
        # routers cannot tell concurrent passes apart
        together = parallel and self.abilities.parallel and not draws and not replays
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        threads = min(torch.get_num_threads(), most_lanes(trained)) if together else 1
        # On an accelerator the host would wait for the loss, ranks run their backward passes together, and what a pass
        # without gradient draws or records must not be repeated.
        if not self._alone or not training or draws or self.abilities.replay is not None:
            mb_spec = replace(mb_spec, zero_key=None)
        return Passes.of(data, mb_spec, share=share, threads=threads, most=self._most_rows)

    def forget_rounded(self) -> None:
        """Free the rounded copies of the weights, which only passes and rollouts need."""
        if self.abilities.rounded is not None:
            self.abilities.rounded.forget()

    def check_replay(self) -> None:
        """Raise ConfigError if the model cannot replay choices of experts."""
        if self.abilities.replay is None:
            raise ConfigError(f"models.{self.name}: choices of experts cannot be replayed: {self.abilities.no_replay}")

    def recorded_routers(self, config: GenerationConfig, module: Any) -> Routers | None:
        """Return the routers of `module`, this model or a copy of it, whose choices a rollout records, if any.

        Raises:
            ConfigError: the config asks for choices that the model cannot replay.
        """
        if not config.router_replay:
            return None
        self.check_replay()
        assert self.abilities.replay is not None
        routers = self.abilities.replay.routers
        return routers if module is self.module else routers.of_copy(module)

    def replaying(self) -> AbstractContextManager[None]:
        """Return a context of passes with gradients, see `RouterReplay.active`."""
        replay = self.abilities.replay
        return nullcontext() if replay is None else replay.active()

    def run(
        self,
        part: SequenceSample,
        moved: SequenceSample,
        layout: Layout | None = None,
        *,
        training: bool = False,
        with_values: bool = True,
        through_layers: bool = True,
    ) -> PackedOutput:
        """Run the packed forward pass of a micro-batch.

        Args:
            part: the micro-batch on its current device; on the host, reading its lengths needs no device sync.
            moved: the same micro-batch on the network's device.
            layout: the layout of its rows; None means one row per token.
            training: whether to apply the dropout before a scalar head.
            with_values: whether the output includes the value head, if the network has one.
            through_layers: whether gradients pass through the layers. Otherwise they end at `hidden_RH`, which those of
                log-probs reach only if they are not 0.
        """
        value = self.value_head if with_values else None
        layout = layout or Layout.plain(part.lengths[TOKENS])
        listening: AbstractContextManager[TrunkInputs] = nullcontext([]) if value is None else value.listening()
        replay = self.abilities.replay
        routing = nullcontext() if replay is None else replay.of(moved, layout, counts=training)
        with listening as recorded, routing, nullcontext() if through_layers else torch.no_grad():
            hidden_RH = self._hidden(moved, layout) if self.exact is None else self._exact(self.exact, moved, layout)
        if not through_layers:
            hidden_RH.requires_grad_()
        branch = None
        if value is not None:
            # nothing is heard if the head has no branch, or if the micro-batch has no tokens
            read = partial(value.hidden, hidden_RH, recorded) if recorded else lambda: hidden_RH
            branch = ScalarBranch(read, value, None if value.q_heads is None else value.q_heads.at)
        head = self.read_head(dropout=training and self._dropout)
        limited = self.limit_head(head) if isinstance(head, LMHead) else head
        if self.exact is not None and isinstance(limited, LMHead):
            limited = self.exact.head(limited)
        if not through_layers and isinstance(limited, LMHead):
            limited = replace(limited, ends_backward=True)
        row_T = layout.rows_on(self.device)
        cu_seqlens = part.cu_seqlens()
        unpacked = self.abilities.unpacked
        predicted_T = unpacked.mask_predicted(moved, layout.pieces) if isinstance(unpacked, EncoderDecoder) else None
        masks = [(moved[key], x) for key, x in part.data.items() if x.dtype == torch.bool]
        return PackedOutput(
            hidden_RH,
            limited,
            moved[TOKENS],
            cu_seqlens,
            self.autocast,
            branch,
            row_T,
            self.heads,
            predicted_T,
            masks,
            self.host,
            support_of(part, self.device),
            self._rows_of_rank(layout),
        )

    def reference(self, layers: int | None = None) -> Run:
        """Return a `run` of the current policy that later training does not change. It computes no values.

        With LoRA the reference is the base model. Otherwise it is a frozen copy of the top `layers` layers over the
        shared lower layers, which must be frozen. By default all layers that train are copied. Each call also runs
        the trained layers.

        Raises:
            ConfigError: the model has a scalar head, or `layers` does not include all layers that train.
        """
        if not isinstance(self.head, LMHead):
            raise ConfigError(f"branch=reference requires a language model, but models.{self.name} has a scalar head")
        unpacked = self.abilities.unpacked
        if unpacked is not None and not self.trains.only_adds:
            raise ConfigError(f"branch=reference requires a model that can run packed. {unpacked.reason}")
        if self.trains.only_adds:
            if layers is not None:
                raise ConfigError(f"layers={layers}: with LoRA, the reference is the base model. Remove layers.")
            return self._run_base
        needed = layers_that_train(self.module)
        if needed is None:
            raise ConfigError(
                f"models.{self.name}.trains=all: branch=reference requires layers that do not train. Set "
                f"models.{self.name}.trains=top_layers or lora."
            )
        if layers is not None:
            check_layers("layers", layers, read_stack(self.module))
            if layers < needed:
                raise ConfigError(f"layers={layers}: must be at least {needed}, the number of top layers that train")
        frozen = ReferenceBranch(self.module, layers or needed)
        probe_branch(self.module, frozen.branch)
        return partial(self._run_branch, reference=frozen)

    def _run_base(self, part: SequenceSample, moved: SequenceSample, layout: Layout) -> PackedOutput:
        with self.trains.without(self.module):
            return self.run(part, moved, layout, with_values=False)

    def _run_branch(
        self, part: SequenceSample, moved: SequenceSample, layout: Layout, *, reference: ReferenceBranch
    ) -> PackedOutput:
        with reference.branch.listening() as recorded:
            hidden_RH = self._hidden(moved, layout)
        if recorded:  # a micro-batch without tokens skips the model
            with self.autocast():
                hidden_RH = reference.branch(recorded)
        head = self.limit_head(reference.head)
        row_T = layout.rows_on(self.device)
        support = support_of(part, self.device)
        cu_seqlens = part.cu_seqlens()
        return PackedOutput(hidden_RH, head, moved[TOKENS], cu_seqlens, self.autocast, row_T=row_T, support=support)

    @property
    def words(self) -> int:
        """Number of tokens of a language model's distribution; 0 with a scalar head."""
        head = self.head
        if not isinstance(head, LMHead):
            return 0
        return len(head.weight_VH) if self._vocabulary is None else min(self._vocabulary, len(head.weight_VH))

    def limit_head(self, head: LMHead) -> LMHead:
        """Return the head restricted to the tokens of `head.vocabulary`."""
        return head if self._vocabulary is None else head.first(self._vocabulary)

    @property
    def rollout_module(self) -> Any:
        """The transformers model that rollouts run, which is complete on every rank while they run."""
        return self.module

    @property
    def rollout_value_head(self) -> ValueNetwork | None:
        """The value head that rollouts run, which is complete on every rank."""
        return self.value_head

    def sampling_head(self, head: LMHead, config: GenerationConfig) -> LMHead:
        """Return the head whose logits are sampled, see `GenerationConfig.advantage_scale`.

        Args:
            head: the language-model head of this model or of a copy.
            config: the sampling settings.

        Raises:
            ConfigError: `config.advantage_scale` is not 0, but the model has no Q heads.
        """
        limited = self.limit_head(head)
        if not config.advantage_scale:
            return limited
        value_head = self.rollout_value_head
        if value_head is None or value_head.q_heads is None:
            raise ConfigError(
                f"generation.advantage_scale={config.advantage_scale:g}: models.{self.name} has no Q heads. Set "
                f"models.{self.name}.head.value_head.q_heads, or advantage_scale=0."
            )
        return GuidedHead(**vars(limited), q_heads=value_head.q_heads, advantage_scale=config.advantage_scale)

    def _hidden(self, moved: SequenceSample, layout: Layout) -> Tensor:
        """Return the last hidden states [R, H] of this process's rows; skip the model if the layout has no tokens."""
        if not layout.pieces.any():
            head = self.head
            weight = head.weight_VH if isinstance(head, LMHead) else head.weight_1H
            return weight.new_zeros(0, weight.shape[1])
        with self.autocast():
            images = self._image_rows(moved, layout)
            if isinstance(unpacked := self.abilities.unpacked, EncoderDecoder):
                return unpacked.hidden(moved, layout.pieces)
            if unpacked is not None:
                return unpacked.hidden(moved[TOKENS], layout.pieces)
            # a call, not `forward`: FSDP2 shards this module, and its hooks gather the weights
            hidden: Tensor = self(**self._inputs(moved[TOKENS], layout) | images)
        return hidden[0]

    def _inputs(self, tokens_T: Tensor, layout: Layout) -> dict[str, Any]:
        return layout_inputs(tokens_T, layout, self._attention)

    def _rows_of_rank(self, layout: Layout) -> RowsOfRank | None:
        """Return the rows of the layout that this process computes; None means all."""
        return None

    def _exact(self, exact: _ExactPasses, moved: SequenceSample, layout: Layout) -> Tensor:
        """Return the last hidden states [R, H] with the values of `exact`, and the gradient of the modules."""
        if not layout.pieces.any():
            return self._hidden(moved, layout)
        ids_T = moved[TOKENS]
        values_RH = exact.hidden(ids_T if layout.token_R is None else ids_T[layout.token_R], layout)
        return _Valued.apply(self._hidden(moved, layout), values_RH) if torch.is_grad_enabled() else values_RH

    def _image_rows(self, moved: SequenceSample, layout: Layout) -> dict[str, Any]:
        """Return the inputs of a pass that depend on images; none for text."""
        if PIXELS not in moved or not len(moved[PIXELS]):
            return {}
        if (images := self.abilities.images) is None:
            raise ConfigError(f"models.{self.name}: {NO_IMAGES}")
        return {"input_ids": None, **images.rows(moved, layout)}  # transformers takes ids or embeddings, not both

    def counts(self) -> tuple[int, int]:
        """Return the number of weights of the model without its value head, and how many of them are only looked up."""
        embedding, output = self.module.get_input_embeddings().weight, self.module.get_output_embeddings()
        looked_up = 0 if output is not None and output.weight is embedding else embedding.numel()
        return sum(p.numel() for p in self.module.parameters()), looked_up

    def embedding_and_head_ids(self) -> set[int]:
        """Return the ids of the weights outside of the layers: embeddings, heads and the value head."""
        ids = {id(p) for part in self.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
        head = self.head
        ids.add(id(head.weight_VH if isinstance(head, LMHead) else head.weight_1H))
        return ids | {id(p) for p in (() if self.value_head is None else self.value_head.parameters())}

    def fixed_names(self) -> set[str]:
        """Return the names, in the module's state dict, of the weights that do not train."""
        # with duplicates, since a tied weight is in the state dict under each of its names
        return {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}

    def module_state(self, *, fixed: bool) -> dict[str, Tensor]:
        """Return the module's frozen weights (`fixed`), or its trained weights and buffers."""
        names = self.fixed_names()

        def is_fixed(name: str) -> bool:  # Linear4bit of bitsandbytes keeps the scales of `weight` as `weight.absmax`
            return name in names or name.partition(".weight.")[0] + ".weight" in names

        return {name: x for name, x in self.module.state_dict().items() if is_fixed(name) == fixed}

    def value_head_state(self) -> dict[str, Tensor]:
        """Return the weights of the value head; empty without one."""
        return {} if self.value_head is None else self.value_head.state_dict()

    def load_module_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `module_state(fixed=False)`.

        Raises:
            ValueError: the state belongs to a module with other trained weights.
        """
        result = self.module.load_state_dict(state, strict=False)
        # exactly the weights that do not train may be missing, since a state does not repeat them
        if wrong := [*result.unexpected_keys, *sorted(set(result.missing_keys) ^ self.fixed_names())]:
            raise ValueError(
                f"models.{self.name}: the saved state has different trained weights: {wrong[0]!r}"
                + (f" and {len(wrong) - 1} more" if wrong[1:] else "")
            )

    def nonfinite_weight(self) -> str | None:
        """Return the name of a non-finite weight of the model or its value head, or None."""
        for network in (self.module, *([] if self.value_head is None else [self.value_head])):
            for name, x in network.state_dict().items():
                if x.is_floating_point() and not bool(x.isfinite().all()):
                    return str(name)
        return None
