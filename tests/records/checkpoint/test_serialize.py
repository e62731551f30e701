import json
import math
import struct
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from realign.records.checkpoint.serialize import DTYPES, pack, read_tensors, unpack, write_tensors


def bits(value):
    """Convert a tree so that equality means the same types, order of keys and bits."""
    if isinstance(value, torch.Tensor):
        data = (
            b"" if value.numel() == 0 else value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
        return "tensor", value.dtype, tuple(value.shape), data
    if isinstance(value, dict):
        return "dict", tuple((type(key), key, bits(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(bits, value))
    if isinstance(value, float):
        return "float", "nan" if math.isnan(value) else struct.pack(">d", value)
    return type(value), value


def returned(tree, tmp_path):
    """Return the tree after writing it to a file and text, and reading it again."""
    packed = pack(tree, copy=True)
    with (tmp_path / "tensors").open("wb") as file:
        write_tensors(file.write, packed.tensors, {"format": "pt"})
    return unpack(json.loads(json.dumps(packed.state, allow_nan=False)), read_tensors(tmp_path / "tensors"))


def random_tensor(dtype, shape=(3, 5)):
    size = torch.empty(shape, dtype=dtype).nbytes
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return (data % 2 if dtype == torch.bool else data).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (1,), (0,), (2, 0, 3), (1, 1, 7)], ids=str)
def test_every_dtype_and_shape_comes_back_with_all_its_bits(tmp_path, dtype, shape):
    tree = {"x": random_tensor(dtype, shape), "odd": random_tensor(torch.uint8, (3,))}
    assert bits(returned(tree, tmp_path)) == bits(tree)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_no_number_keeps_its_bits(tmp_path, dtype):
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 1e-45], dtype=dtype)
    assert bits(returned({"x": special}, tmp_path)) == bits({"x": special})


def test_the_file_is_one_that_the_library_reads():
    parts = []
    tensors = {"b": random_tensor(torch.bool, (3,)), "w": random_tensor(torch.float64, (2, 2)), "s": torch.tensor(7)}
    write_tensors(lambda part: parts.append(bytes(part)), tensors, {"format": "pt"})
    assert bits(dict(sorted(load(b"".join(parts)).items()))) == bits(dict(sorted(tensors.items())))


def test_what_json_lacks_comes_back(tmp_path):
    tree = {
        "ints": {0: "a", -3: {1: 2**200}},
        "mixed": {1: "int", "1": "text"},
        "dollar": {"$tensor": "no tensor", "$": {}},
        "tuple": (1, (), [(None,)]),
        "floats": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1.0],
        "text": ["\ud800", "\ud800\udc00", "\U00010000", "", "\x00", {"\udfff": 1}],
        "flags": [True, 1, False, 0, None],
    }
    assert bits(returned(tree, tmp_path)) == bits(tree)


def test_names_of_tensors_that_look_alike_stay_apart(tmp_path):
    tree = {
        "a": {"b": torch.tensor(1), 1: torch.tensor(2), "1": torch.tensor(3)},
        "a/b": torch.tensor(4),
        "__metadata__": torch.tensor(5),
        "\ud800": torch.tensor(6),
        "?": torch.tensor(7),
    }
    assert bits(returned(tree, tmp_path)) == bits(tree)


def test_tied_weights_are_one_tensor_again(tmp_path):
    network = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    network["head"].weight = network["embed"].weight
    tree = {"weights": network.state_dict(), "again": network["head"].weight}
    assert len(pack(tree, copy=False).tensors) == 1
    back = returned(tree, tmp_path)
    assert bits(back["weights"]) == bits(dict(tree["weights"]))
    assert back["weights"]["embed.weight"].data_ptr() == back["again"].data_ptr()


def test_views_and_strides_come_back_by_value_and_apart(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    tree = {
        "whole": whole,
        "row": whole[1],
        "turned": whole.T,
        "as_int": whole.view(torch.int32),
        "wide": whole[:, :1].expand(3, 9),
    }
    back = returned(tree, tmp_path)
    assert bits(back) == bits(tree)
    assert len({x.data_ptr() for x in back.values()}) == len(tree)
    back["row"].zero_()
    assert torch.equal(back["whole"], whole)


def test_a_copy_does_not_change_with_its_tree():
    tree = {"x": torch.zeros(3), "list": [1], "turned": torch.zeros(2, 3).T}
    packed = pack(tree, copy=True)
    tree["x"] += 1
    tree["turned"] += 1
    tree["list"].append(2)
    assert bits(unpack(packed.state, packed.tensors)) == bits(
        {"x": torch.zeros(3), "list": [1], "turned": torch.zeros(3, 2)}
    )


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=8),
)
TENSORS = st.builds(
    lambda dtype, shape: random_tensor(dtype, tuple(shape)),
    st.sampled_from(list(DTYPES)),
    st.lists(st.integers(0, 3), max_size=3),
)
KEYS = st.one_of(st.text(max_size=6), st.integers(), st.sampled_from(["$tensor", "$dict", "a/b", "__metadata__"]))
TREES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.dictionaries(KEYS, TREES, max_size=5))
@settings(deadline=None)
def test_any_tree_comes_back_bit_for_bit(tmp_path_factory, tree):
    assert bits(returned(tree, tmp_path_factory.mktemp("tree"))) == bits(tree)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("x"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$tensor", "$tuple", "$dict", "$float", "$text", "$else", "tree", "a"]), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@given(JSON | JSON.map(lambda inner: {"tree": inner}))
def test_any_json_is_a_tree_or_a_value_error(state):
    with suppress(ValueError):
        assert isinstance(unpack(state, {"x": torch.zeros(1)}), dict)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [{"b": object()}]}, "a/0/b: type object cannot be saved in a checkpoint"),
        ({"a": b"bytes"}, "a: type bytes cannot be saved in a checkpoint"),
        ({"a": {1.5: 0}}, r"a: keys must be str or int, found 1\.5"),
        ({True: 0}, "the tree: keys must be str or int, found True"),
        ({"a": torch.zeros(2).to_sparse()}, "a: only plain dense tensors"),
        ({"a": torch.empty(2, device="meta")}, "a: only plain dense tensors"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "a: dtype torch.complex128 cannot be saved"),
        ([1], "must be a mapping, found list"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_place(tree, message):
    with pytest.raises(ValueError, match=message):
        pack(tree, copy=False)


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00nonsense")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_tensors(tmp_path / "x")
