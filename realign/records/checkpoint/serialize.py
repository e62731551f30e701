"""Serialize trees of plain values and tensors as JSON and safetensors, bit-exact and without pickle.

JSON has no tensors, tuples, numeric keys or non-finite numbers. They are stored as objects with one key:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$dict": [[key, value], ...]}` and `{"$float": "nan"}`. Text that UTF-8
cannot encode (a lone surrogate) is stored as `{"$text": hex}`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from realign.models.files.weight_files import DTYPES, Header
from realign.models.parts import is_part, memory_of, whole

Tree: TypeAlias = Mapping[str, Any]
"""Dicts (keys: str or int), lists and tuples of None, bool, int, float, str and tensors."""

DEPTH = 50
"""Maximum number of nested levels, so that no recursive function meets the limit of Python."""

CHUNK = 1 << 22
"""Bytes per write call."""


class Packed(NamedTuple):
    """A tree, split into JSON and tensors."""

    state: dict[str, Any]
    """JSON-compatible content, with the names of the tensors."""
    tensors: dict[str, torch.Tensor]
    """Contiguous tensors on the CPU by name. Tensors with the same memory are stored once."""
    parts: dict[str, torch.Tensor]
    """This rank's shards of sharded tensors by name; never copied."""


def pack(tree: Tree, *, copy: bool) -> Packed:
    """Split a tree into JSON and tensors.

    Args:
        tree: Tree to serialize.
        copy: Copy the tensors, so that `tree` may be modified afterward.

    Raises:
        ValueError: The tree contains a value or key of an unsupported type. The message includes its path.
    """
    if not isinstance(tree, Mapping):
        raise ValueError(f"a checkpoint must be a mapping, found {type(tree).__name__}")
    packer = _Packer(copy)
    state = packer.pack({**tree}, ())
    return Packed({"tree": state}, packer.tensors, packer.parts)


def unpack(state: Any, tensors: Mapping[str, Any]) -> Any:
    """Rebuild a tree from the result of `pack`.

    Args:
        state: `Packed.state`.
        tensors: `Packed.tensors` and `Packed.parts` in one mapping, or placeholders for them.

    Raises:
        ValueError: `pack` cannot have produced `state`.
    """
    if not isinstance(state, dict) or set(state) != {"tree"}:
        raise ValueError("the state must be an object whose only key is 'tree'")
    tree = _unpack(state["tree"], tensors)
    if not isinstance(tree, dict):
        raise ValueError(f"the tree must be a dict, found {type(tree).__name__}")
    return tree


class _Packer:
    def __init__(self, copy: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.parts: dict[str, torch.Tensor] = {}
        self._copy = copy
        self._names: dict[Hashable, str] = {}

    def pack(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) > DEPTH:
            raise ValueError(f"{_join(path)}: more than {DEPTH} nested levels")
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._name(value, path)}
        if isinstance(value, Mapping):
            return self._pack_mapping(value, path)
        if isinstance(value, list | tuple):
            items = [self.pack(item, (*path, str(i))) for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(float(value))}
        if isinstance(value, str):
            return {"$text": _bytes(value).hex()} if _has_surrogates(value) else value
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(
            f"{_join(path)}: type {type(value).__name__} cannot be saved in a checkpoint; valid: dict, list, tuple, "
            "None, bool, int, float, str, Tensor"
        )

    def _pack_mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise ValueError(f"{_join(path)}: keys must be str or int, found {key!r}")
        items = [(key, self.pack(inner, (*path, str(key)))) for key, inner in value.items()]
        # a key with `$` would be read as one of the tags above
        if all(isinstance(key, str) and not key.startswith("$") and not _has_surrogates(key) for key in value):
            return dict(items)
        return {"$dict": [[self.pack(key, path), inner] for key, inner in items]}

    def _name(self, value: torch.Tensor, path: tuple[str, ...]) -> str:
        if is_part(value):
            return self._name_tensor(memory_of(value), path, self.parts, value.detach)
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_meta:
            raise ValueError(f"{_join(path)}: only plain dense tensors can be saved, found {type(value).__name__}")
        if value.dtype not in DTYPES:
            raise ValueError(
                f"{_join(path)}: dtype {value.dtype} cannot be saved; valid: {', '.join(map(str, DTYPES))}"
            )
        # empty tensors can all have the address 0, so only the same object counts as the same tensor
        memory = (
            (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else id(value)
        )
        return self._name_tensor(memory, path, self.tensors, lambda: self._copy_to_cpu(value.detach()))

    def _name_tensor(
        self,
        memory: Hashable,
        path: tuple[str, ...],
        into: dict[str, torch.Tensor],
        take: Callable[[], torch.Tensor],
    ) -> str:
        """Return the name of the tensor in `memory`. On its first occurrence, choose a name and add it to `into`."""
        if memory not in self._names:
            name = "/".join(path).encode(errors="replace").decode()
            # `__metadata__` is the one name that the header of a safetensors file reserves
            while name in self.tensors or name in self.parts or name == "__metadata__":
                name += "'"
            into[name] = take()
            self._names[memory] = name
        return self._names[memory]

    def _copy_to_cpu(self, value: torch.Tensor) -> torch.Tensor:
        if self._copy:
            # not `clone`, which keeps device and strides: this is one copy, to the CPU and contiguous
            return torch.empty(value.shape, dtype=value.dtype).copy_(value)
        return value.cpu().contiguous()


def _unpack(value: Any, tensors: Mapping[str, Any], depth: int = 0) -> Any:
    if depth > DEPTH:
        raise ValueError(f"more than {DEPTH} nested levels")
    if isinstance(value, list):
        return [_unpack(item, tensors, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: _unpack(inner, tensors, depth + 1) for key, inner in value.items()}
    if len(value) > 1:
        raise ValueError(f"an object with {tags[0]!r} has other keys")
    inner = value[tags[0]]
    match tags[0], inner:
        case "$tensor", str() if inner in tensors:
            return tensors[inner]
        case "$tuple", list():
            return tuple(_unpack(item, tensors, depth + 1) for item in inner)
        case "$float", "nan" | "inf" | "-inf":
            return float(inner)
        case "$text", str():
            return bytes.fromhex(inner).decode(errors="surrogatepass")
        case "$dict", list():
            return dict(_items(inner, tensors, depth + 1))
    raise ValueError(f"unknown object {str(value)[:80]}")


def _items(pairs: list[Any], tensors: Mapping[str, Any], depth: int) -> Iterator[tuple[str | int, Any]]:
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("an item of a '$dict' must be a key and a value")
        key = _unpack(pair[0], tensors)
        if not isinstance(key, str | int):
            raise ValueError(f"a key of a '$dict' must be text or a whole number, found {type(key).__name__}")
        yield key, _unpack(pair[1], tensors, depth)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def _join(path: tuple[str, ...]) -> str:
    return "/".join(path) or "the tree"


def write_tensors(
    write: Callable[[bytes | memoryview], object], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Pass the content of a safetensors file to `write`, chunk by chunk; only one tensor at a time is on the host.

    The writer of the safetensors library does not expose its bytes for hashing, and hides the OSError of a full disk.
    """
    header = Header.of({name: (x.dtype, x.shape) for name, x in tensors.items()}, metadata)
    write(header.content)
    for name in header.offsets:
        if tensors[name].numel():
            data = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), CHUNK):
                write(data[start : start + CHUNK])


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, each in separate memory.

    Raises:
        ValueError: The file is not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from error


def hash_of(tree: Any) -> str:
    """Return the sha256 of the tensors of a tree and their paths, shapes and dtypes; a collective if sharded."""
    digest = hashlib.sha256()
    for path, x in tensors_of(tree):
        digest.update(f"{path} {x.dtype} {list(x.shape)}\n".encode())
        digest.update(whole(x.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and value of each tensor in mappings, lists and tuples."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, inner in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from tensors_of(inner, f"{path}/{key}")
