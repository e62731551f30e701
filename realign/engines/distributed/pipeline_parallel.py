"""Pipeline parallelism: stages of ranks that each have some consecutive layers of a model.

The first stage also has the embeddings, the last one the final norm and the heads. A rank receives the hidden states of
a micro-batch from the stage before it, computes its layers, and sends the result to the next stage. Gradients travel
the other way. The ranks of a pipeline have the same prompts and micro-batches, so nothing else is sent in a pass.

The modules of other stages stay in the model, without weights: calling one returns what it was given. So every rank has
the names of all weights, and runs a pass of the model as one process does.

Shapes: R rows of a rank's pass, H hidden size.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from realign.models.network.branches import read_stack
from realign.models.network.heads import read_body
from realign.models.parts import whole


def one_forward_one_backward(passes: int, later: int) -> Iterator[bool]:
    """Yield True for each forward and False for each backward pass, in the order of a stage (1F1B).

    At most `later + 1` forward passes wait for their backward pass, where `later` is the number of stages after this
    one (arXiv:2104.04473).
    """
    ahead = min(later, passes)
    yield from [True] * ahead
    yield from [True, False] * (passes - ahead)
    yield from [False] * ahead


class Stage:
    """The place of this rank in a pipeline, and what it exchanges with the stages around it.

    Attributes:
        index: index of the stage.
        stages: number of stages.
    """

    def __init__(self, ranks: DeviceMesh, slices: DeviceMesh, width: int, device: torch.device) -> None:
        """Create the group in which gradients travel; collective over all ranks.

        Args:
            ranks: the ranks of this pipeline.
            slices: all ranks; the first dimension are the stages.
            width: hidden size.
            device: device of the hidden states.
        """
        self.index, self.stages = ranks.get_local_rank(), ranks.size()
        self.group = ranks.get_group()
        # Another group than that of the forward passes: on a GPU, the operations of a group run one after another, and
        # two stages that send to each other would wait forever.
        pipelines = slices.mesh.flatten(1).T.tolist()
        self._back: Any = dist.new_subgroups_by_enumeration(pipelines)[0]
        self._shape, self._device = (1, -1, width), device
        self.received: Tensor | None = None
        """Hidden states [1, R, H] from the stage before, in the current pass."""
        self._begun: deque[tuple[Tensor | None, Tensor]] = deque()
        """Hidden states before and after the layers of this stage, of passes that wait for their gradient."""
        self._sent: dict[bool, tuple[Any, Tensor]] = {}

    @property
    def first(self) -> bool:
        """Whether the stage has the embeddings."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the stage has the final norm and the heads."""
        return self.index == self.stages - 1

    def receive(self, rows: int) -> None:
        """Receive the hidden states of a pass."""
        if not self.first:
            self.received = self._receive(rows, self.index - 1, self.group)
            self.received.requires_grad_(torch.is_grad_enabled())

    def pass_on(self, hidden_RH: Tensor) -> None:
        """Send the hidden states of a pass to the next stage, and keep them if their gradient will return."""
        if torch.is_grad_enabled():
            self._begun.append((self.received, hidden_RH))
        self.received = None
        if not self.last:
            self._send(hidden_RH, forward=True)

    def oldest_pass(self) -> tuple[Tensor | None, Tensor]:
        """Return the hidden states [1, R, H] and [R, H] before and after the layers, of the oldest pass that waits."""
        return self._begun.popleft()

    def receive_gradient(self, hidden_RH: Tensor) -> Tensor:
        """Receive the gradient of hidden states that were sent."""
        return self._receive(len(hidden_RH), self.index + 1, self._back)[0]

    def return_gradient(self, received: Tensor | None) -> None:
        """Send the gradient of hidden states that were received."""
        if received is not None:
            self._send(torch.zeros_like(received) if received.grad is None else received.grad, forward=False)

    def settle(self) -> None:
        """Wait until everything that was sent has arrived."""
        for work, _ in self._sent.values():
            work.wait()
        self._sent.clear()

    def forget(self) -> None:
        """Forget passes of a step that failed."""
        self._begun.clear()

    def sum_of_both_ends(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors of the first and the last stage, which both call this."""
        other, theirs = self.stages - 1 - self.index, torch.empty_like(x)
        if self.first:  # one of them receives first: on a GPU, a send may wait for the receiver
            dist.send(x, group=self._back, group_dst=other)
            dist.recv(theirs, group=self._back, group_src=other)
        else:
            dist.recv(theirs, group=self._back, group_src=other)
            dist.send(x, group=self._back, group_dst=other)
        return x + theirs

    def _receive(self, rows: int, stage: int, group: Any) -> Tensor:
        x = torch.empty(1, rows, self._shape[2], device=self._device)
        dist.recv(x, group=group, group_src=stage)
        return x

    def _send(self, x: Tensor, *, forward: bool) -> None:
        # In fp32, as layers pass them on in one process. The next pass runs while these values travel.
        x = x.detach().float().contiguous()
        if forward in self._sent:
            self._sent[forward][0].wait()
        to, group = (self.index + 1, self.group) if forward else (self.index - 1, self._back)
        self._sent[forward] = (dist.isend(x, group=group, group_dst=to), x)


def first_rank(ranks: DeviceMesh, stage: int) -> int:
    """Return the first rank of a stage, given the ranks of any pipeline: those of a stage follow each other."""
    return stage * int(ranks.mesh[1] - ranks.mesh[0])


class PartOfStage(Tensor):
    """A tensor of a state that one stage has, as its ranks and those of other stages see it: the latter have nothing.

    It has the methods of `DTensor` that saving and gathering need.

    Attributes:
        part: this rank's shard; None on other stages.
        stage: the stage that has the tensor.
    """

    part: DTensor | None
    stage: int
    _ranks: DeviceMesh
    _nothing: Tensor

    @staticmethod
    def of(like: Tensor, part: DTensor | None, stage: int, ranks: DeviceMesh) -> PartOfStage:
        """Return the tensor as this rank sees it.

        Args:
            like: a tensor of its shape and dtype.
            part: this rank's shard; None on other stages.
            stage: the stage that has it.
            ranks: the ranks of this pipeline.
        """
        x: PartOfStage = torch.empty(like.shape, dtype=like.dtype, device="meta").as_subclass(PartOfStage)
        x.part, x.stage, x._ranks, x._nothing = part, stage, ranks, torch.empty(0, dtype=like.dtype)
        return x

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.detach:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def first_rank(self) -> int:
        """The first rank of the stage that has the tensor."""
        return first_rank(self._ranks, self.stage)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks that divide the tensor; on other stages, any."""
        return self._ranks if self.part is None else self.part.device_mesh

    @property
    def placements(self) -> Sequence[Any]:
        """How these ranks divide it."""
        return (Replicate(),) if self.part is None else self.part.placements

    def to_local(self) -> Tensor:
        """Return this rank's slice, which is empty on other stages."""
        return self._nothing if self.part is None else self.part.to_local()

    def full_tensor(self) -> Tensor:
        """Return the tensor on every rank; collective over all stages."""
        device = self._ranks.device_type
        x = torch.empty(self.shape, dtype=self.dtype, device=device) if self.part is None else whole(self.part)
        x = x.to(device).contiguous()
        dist.broadcast(x, group=self._ranks.get_group(), group_src=self.stage)
        return x


class Cut:
    """Which stage has which modules and weights of a model."""

    def __init__(self, root: nn.Module, module: Any, stages: Sequence[range]) -> None:
        """Divide a model.

        Args:
            root: the model and all further heads.
            module: the transformers model.
            stages: the layers of each stage.
        """
        stack, body = read_stack(module), read_body(module)
        last = len(stages) - 1
        of_parts = {id(part): 0 for part in body.modules()}
        for part in stack.after:
            of_parts |= {id(inner): last for inner in part.modules()}
        for stage, own in enumerate(stages):
            for layer in own:
                of_parts |= {id(inner): stage for inner in stack.layers[layer].modules()}
        self._parts = [(part, of_parts.get(id(part), last)) for part in root.modules()]
        in_layers = {id(part) for part in stack.layers.modules()}
        self._layers, self._stages = stack.layers, stages
        self._outer = [
            (part, of_parts[id(part)])
            for part in body.modules()
            if id(part) not in in_layers and any(True for _ in part.parameters(recurse=False))
        ]
        owners: dict[int, set[int]] = defaultdict(set)
        for part, stage in self._parts:
            for p in part.parameters(recurse=False):
                owners[id(p)].add(stage)
        self._owners = owners

    def owners(self, p: nn.Parameter) -> list[int]:
        """Return the stages that have a weight; tied embeddings are on two."""
        return sorted(self._owners[id(p)])

    def drop(self, stage: int) -> None:
        """Remove the weights that a stage does not have."""
        for part, _ in self._parts:
            for name, p in list(part.named_parameters(recurse=False)):
                if stage not in self._owners[id(p)]:
                    setattr(part, name, None)

    def pass_through(self, index: int, stage: Any) -> dict[nn.Module, Any]:
        """Let the modules of other stages return what they receive; `stage.received` takes the place of their results.

        Returns:
            The modules, and the `forward` that each of them had in its own attributes.
        """
        before: dict[nn.Module, Any] = {}

        def replace(part: nn.Module, forward: Any) -> None:
            before[part] = vars(part).get("forward")
            vars(part)["forward"] = forward

        def receive(*_: Any, **__: Any) -> Any:
            return stage.received

        own = self._stages[index]
        for number, layer in enumerate(self._layers):
            if number not in own:
                replace(layer, receive if number == own.start - 1 else _first)
        for part, of in self._outer:
            if of != index:
                replace(part, receive if isinstance(part, nn.Embedding) else _first)
        return before


def _first(*args: Any, **keywords: Any) -> Any:
    return args[0] if args else next(iter(keywords.values()))


class _Given:
    """Hidden states in place of those of another rank."""

    received: Tensor | None = None


@contextmanager
def _passing_through(cut: Cut, index: int, given: _Given) -> Iterator[None]:
    before = cut.pass_through(index, given)
    try:
        yield
    finally:
        for part, forward in before.items():
            if forward is None:
                del vars(part)["forward"]
            else:
                vars(part)["forward"] = forward


def in_stages(module: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Return the last hidden states [R, H] of a model, computed in two stages one after the other in this process."""
    layers = len(read_stack(module).layers)
    stages = (range(layers // 2), range(layers // 2, layers))
    cut, given = Cut(module, module, stages), _Given()
    for index in range(len(stages)):
        with _passing_through(cut, index, given):
            given.received = read_body(module)(**inputs).last_hidden_state
    assert given.received is not None
    return given.received[0]
