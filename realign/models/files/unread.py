"""Weights that stay in their files until a process reads its slice of them, so that no process holds a whole model.

A model folder does not contain the tensors of a model, but what transformers makes them from: it renames weights, and
stacks those of experts. `Unread` tensors go through that conversion instead of values. They have no memory, remember
the operations, and repeat them on a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from realign.errors import DataError
from realign.models.files.model_folder import INDEX, WEIGHTS, parse_object

Slices: TypeAlias = Sequence[slice]
"""A slice of each of the first dimensions of a tensor; later dimensions are complete."""

_DEVICE: Any = torch.Tensor.device


def is_finite(x: Tensor) -> bool:
    """Return whether all values are finite. A sum is faster than a comparison of each value, but can overflow."""
    return bool(x.sum(dtype=torch.float32).isfinite()) or bool(x.isfinite().all())


def not_finite(what: str, name: str) -> str:
    """Return the message about a weight with NaN or infinite values in a folder or file."""
    return (
        f"{what}: the weight {name!r} has values that are NaN or infinite. The training that saved it diverged, or the "
        "file is damaged. Choose an earlier checkpoint, or download the model again."
    )


class Stored(Protocol):
    """A tensor in a file, or one that takes little memory until it is needed."""

    def part(self, slices: Slices, opened: Callable[[Path], Any]) -> Tensor:
        """Return a slice of the tensor in fp32; `opened` opens a safetensors file, or returns it if it is open."""
        ...


@dataclass(frozen=True)
class InFile:
    """A tensor of a safetensors file."""

    file: Path
    name: str

    def part(self, slices: Slices, opened: Callable[[Path], Any]) -> Tensor:
        """See `Stored.part`.

        Raises:
            DataError: a value is not finite.
        """
        x = torch.as_tensor(opened(self.file).get_slice(self.name)[tuple(slices) or ...]).float()
        if not is_finite(x):
            raise DataError(not_finite(f"{str(self.file)!r}", self.name))
        return x


@dataclass(frozen=True, eq=False)
class Computed:
    """A tensor that a function computes from small ones, such as the product of an adapter's matrices."""

    function: Callable[[], Tensor]

    def part(self, slices: Slices, opened: Callable[[Path], Any]) -> Tensor:
        """See `Stored.part`."""
        return self.function().detach().cpu().float()[tuple(slices) or ...]


@dataclass(frozen=True)
class Made:
    """A result of an operation on other tensors: the result at place `at`, if it has several."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    at: int


class Unread(Tensor):
    """An fp32 tensor without memory, and how to compute it from files. It reports the device that it is meant for."""

    source: Stored | Made
    place: torch.device

    @staticmethod
    def of(source: Stored, shape: Sequence[int], place: torch.device) -> Unread:
        """Return the stored tensor of this shape, for this device."""
        x: Unread = torch.empty(tuple(shape), device="meta").as_subclass(Unread)
        x.source, x.place = source, place
        return x

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Unread))
        if func is torch.Tensor.to:  # a loader moves what it reads: that happens after reading
            return first
        if func == _DEVICE.__get__:
            return first.place
        out = super().__torch_function__(func, types, args, kwargs or {})
        # An operation such as `requires_grad_` returns a tensor that exists already, and it keeps its source.
        for at, x in enumerate(tree_leaves(out)):
            if isinstance(x, Unread) and not hasattr(x, "source"):
                x.source, x.place = Made(func, args, kwargs or {}, at), first.place
        return out

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:  # a copied module has the same weights
        copied = self.detach()
        memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        same: Tensor = memo[id(self)]
        return same

    def read(self, slices: Slices = ()) -> Tensor:
        """Return a slice of the tensor on the host, in fp32.

        Raises:
            DataError: a file was changed or removed since its header was read.
        """
        from safetensors import SafetensorError, safe_open

        parts = list(slices)
        while parts and parts[-1] == slice(0, self.shape[len(parts) - 1]):
            parts.pop()  # a complete dimension: without it, more operations know what they need
        with ExitStack() as stack:  # closes the files again, since pages of open files count as memory of the process
            opened = cache(lambda file: stack.enter_context(safe_open(file, framework="pt")))
            try:
                return _compute(self, parts, opened)
            except (SafetensorError, OSError) as error:
                raise DataError(f"the weights of the model folder cannot be read: {error}") from error


def _compute(x: Any, slices: list[slice], opened: Callable[[Path], Any]) -> Tensor:
    """Compute a slice of a tensor, reading as little as the operation allows."""
    source = x.source
    shape = [len(range(*part.indices(n))) for part, n in zip(slices, x.shape, strict=False)]
    if 0 in shape:  # more ranks than rows; safetensors refuses an empty slice
        return torch.empty([*shape, *x.shape[len(shape) :]])
    if not isinstance(source, Made):
        part: Tensor = source.part(slices, opened)
        return part
    rows, args, keywords = slices[:1], source.args, source.keywords
    dim = keywords.get("dim", args[1] if len(args) > 1 else 0)
    if source.function is torch.Tensor.detach:
        return _compute(args[0], slices, opened)
    if source.function is torch.Tensor.add:
        return _compute(args[0], slices, opened) + _compute(args[1], slices, opened)
    if source.function is torch.stack and dim == 0 and rows:  # one tensor for each expert: read those of the slice
        return torch.stack([_compute(part, slices[1:], opened) for part in args[0][rows[0]]])
    # Concatenated along another dimension, so a range of rows needs only the same rows of each part.
    if source.function is torch.cat and dim != 0 and len(slices) == 1:
        return torch.cat([_compute(part, rows, opened) for part in args[0]], dim)
    # Any other operation may mix all elements, so its arguments are read in full. The clone frees the full result,
    # which a view would keep.
    args, keywords = tree_map_only(Unread, lambda part: _compute(part, [], opened), (args, dict(keywords)))
    result: Tensor = tree_leaves(source.function(*args, **keywords))[source.at]
    return result[tuple(slices)].clone() if slices else result


def weights_in(path: str, place: torch.device) -> dict[str, Unread] | None:
    """Return the weights of a model folder or hub repository, without reading them; None without safetensors files."""
    from safetensors import safe_open
    from transformers.utils import cached_file

    def local(name: str) -> Path | None:
        cached = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        return None if cached is None else Path(cached)

    # as transformers, which reads a single file first
    index = None if local(WEIGHTS) is not None else local(INDEX)
    names = [WEIGHTS] if index is None else sorted(set(parse_object(index)["weight_map"].values()))
    weights = {}
    for name in names:
        file = local(name)
        if file is None:
            return None
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118  (not a mapping)
                weights[key] = Unread.of(InFile(file, key), opened.get_slice(key).get_shape(), place)
    return weights


def read_now(module: nn.Module) -> None:
    """Read the weights of a module on their device, such as those of a small part whose values are needed first."""
    read: dict[int, nn.Parameter] = {}  # tied weights stay one
    for part in module.modules():
        for name, x in part.named_parameters(recurse=False):
            if isinstance(x, Unread):
                if id(x) not in read:
                    read[id(x)] = nn.Parameter(x.read().to(x.place), x.requires_grad)
                setattr(part, name, read[id(x)])
    read_buffers(module)


def read_buffers(module: nn.Module) -> None:
    """Read the buffers of a module on their device: they are small, and no process shards them."""
    for part in module.modules():
        for name, x in part.named_buffers(recurse=False):
            if isinstance(x, Unread):
                setattr(part, name, x.read().to(x.place))


def has_unread(module: nn.Module) -> bool:
    """Return whether a weight of a module is still in its file."""
    return any(isinstance(p, Unread) for p in module.parameters())
