from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realign.api import RPC, DataflowGraph, Sync
from realign.draw import DATASET, FORMATS, Flow, flows, to_svg

SVG = "{http://www.w3.org/2000/svg}"
SCORED = ("input_ids", "loss_mask")
SAMPLED = (*SCORED, "prompt_mask", "logprobs", "versions", "truncated")


def ppo() -> DataflowGraph:
    """Return the graph of PPO with a critic, a reference and recomputed log-probs, which has seven calls."""
    train = (*SCORED, "logprobs", "rewards", "ref_logprobs", "values")
    return DataflowGraph(
        (
            RPC("actor_gen", "actor", "generate", ("prompt_ids",), SAMPLED),
            RPC("reward_inf", "reward", "inference", ("input_ids", "prompt_mask", "row"), ("rewards",)),
            RPC("ref_inf", "ref", "inference", SCORED, ("ref_logprobs",), {"logprobs": "ref_logprobs"}),
            RPC("actor_inf", "actor", "inference", SCORED, ("prox_logprobs",), {"logprobs": "prox_logprobs"}),
            RPC("critic_inf", "critic", "inference", SCORED, ("values",)),
            RPC("actor_train", "actor", "train_step", (*train, "prox_logprobs")),
            RPC("critic_train", "critic", "train_step", train, after=("actor_train",)),
        ),
        dataset_keys=("prompt_ids", "row"),
        results=("versions",),
    )


def test_flows_bundle_keys_by_source_and_leave_out_an_order_that_data_imply():
    drawn = flows(ppo())
    assert Flow("actor_gen", SCORED, ("ref_inf", "actor_inf", "critic_inf")) in drawn
    assert Flow(DATASET, ("row",), ("reward_inf",)) in drawn
    assert Flow("actor_gen", ("versions",), note=("(kept for reports)",)) in drawn
    assert Flow("actor_gen", ("truncated",), note=("(unread)",)) in drawn
    assert [flow for flow in drawn if not flow.keys] == [Flow("actor_train", (), ("critic_train",))]


def sides(rect: ET.Element) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a rectangle."""
    x, y, width, height = (float(rect.get(name, "nan")) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def curve(path: ET.Element) -> list[tuple[float, float]]:
    """Return points on a line."""
    x0, y0, x1, y1, x2, y2, x3, y3, past = (float(n) for n in re.findall(r"-?[\d.]+", path.get("d", "")))
    parts = [((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3) for t in (k / 10 for k in range(11))]
    points = [(a * x0 + b * x1 + c * x2 + d * x3, a * y0 + b * y1 + c * y2 + d * y3) for a, b, c, d in parts]
    return [*points, (x3 + past, y3)]


ROUNDING = 1e-6


def is_apart(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


def assert_readable(graph: DataflowGraph) -> None:
    root = ET.fromstring(to_svg(graph))
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    groups = [[sides(rect) for rect in group.findall(f"{SVG}rect")] for group in root.findall(f"{SVG}g/{SVG}g")]
    boxes = [box for box, *_ in groups]
    for i, (box, *labels) in enumerate(groups):
        assert 0 <= box[0] < box[2] <= width
        assert 0 <= box[1] < box[3] <= height
        assert all(is_apart(box, other) for other in boxes[:i])
        for k, (left, top, right, bottom) in enumerate(labels):
            assert box[0] < left < right < box[2]
            assert box[1] < top < bottom < box[3]
            assert all(is_apart(labels[k], other) for other in labels[:k])
    for path in root.findall(f"{SVG}g/{SVG}path"):
        if path.get("fill") == "none":
            # A point on a side of a box, such as where a line begins, may be inside by the rounding of 877.2 + 154.4.
            inside = [
                (x, y, box)
                for x, y in curve(path)
                for box in boxes
                if box[0] + ROUNDING < x < box[2] - ROUNDING and box[1] + ROUNDING < y < box[3] - ROUNDING
            ]
            assert not inside, "a line crosses a box"


def test_svg_shows_every_call_and_key_with_nothing_on_top_of_another():
    svg = to_svg(ppo())
    texts = [t.text for t in ET.fromstring(svg).iter(f"{SVG}text")]
    assert {rpc.name for rpc in ppo().rpcs} <= set(texts)
    assert {key for rpc in ppo().rpcs for key in (*rpc.inputs, *rpc.outputs)} <= set(texts)
    assert_readable(ppo())


@st.composite
def graphs(draw) -> DataflowGraph:
    """Draw random graphs. Each call reads some keys of the dataset and of earlier calls."""
    known = ["seed_key", "a_rather_long_name_of_a_key"]
    rpcs = []
    for i in range(draw(st.integers(1, 7))):
        inputs = draw(st.lists(st.sampled_from(known), unique=True, max_size=5))
        outputs = [f"key_{i}_{k}" for k in range(draw(st.integers(0, 3)))]
        rpcs.append(RPC(f"call_{i}", f"role_{i % 4}", "inference", tuple(inputs), tuple(outputs)))
        known += outputs
    return DataflowGraph(tuple(rpcs), dataset_keys=("seed_key", "a_rather_long_name_of_a_key"))


@given(graphs())
def test_no_drawing_has_overlaps(graph):
    assert_readable(graph)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_names_with_special_characters_are_escaped(form):
    graph = DataflowGraph((RPC('a<b>"&', "r", "inference", ("<x>",)),), dataset_keys=("<x>",))
    drawn = FORMATS[form](graph)
    if form == "svg":
        assert 'a<b>"&' in [t.text for t in ET.fromstring(drawn).iter(f"{SVG}text")]
    if form == "mermaid":
        assert "a&lt;b&gt;#quot;&amp;" in drawn


@pytest.mark.parametrize("form", FORMATS)
def test_weights_that_one_role_takes_from_another_are_an_edge_of_their_own_kind(form):
    graph = replace(ppo(), sync={"ref": Sync("actor", weight=0.1, every_steps=10)})
    drawn = FORMATS[form](graph)
    if form == "text":
        before, after = drawn.split("weights ══▶ ref  (0.9 own + 0.1 actor, every 10 steps)")
        assert "6. actor_train" in before
        assert "7. critic_train" in after
    elif form == "mermaid":
        end = re.search(r'n6 == "0.9 own \+ 0.1 actor<br/>every 10 steps" ==> (\w+)\[\("weights of ref"\)\]', drawn)
        assert f"class n3,{end[1]} role" in drawn  # in the color of the role
    else:
        texts = [t.text for t in ET.fromstring(drawn).iter(f"{SVG}text")]
        assert {"weights of ref", "0.9 own + 0.1 actor", "every 10 steps"} <= set(texts)
        assert_readable(graph)
    assert drawn != FORMATS[form](ppo())
