"""Fuzz budgets and graphs of calls. Graphs are checked by a separate search over names only."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from realign.api import RPC, DataflowGraph, MicroBatchSpec
from realign.draw import FORMATS
from tests.fuzz.refusals import BOUNDED, JUNK, NUMBERS, Refused, attempt

WHOLE = st.one_of(st.integers(-1, 40), NUMBERS, JUNK)


@BOUNDED
@given(WHOLE, WHOLE)
def test_a_budget_is_a_whole_number_or_refused(tokens, parts):
    outcome = attempt(lambda: MicroBatchSpec(tokens, parts), "max_tokens_per_microbatch", "n_microbatches")
    possible = (tokens is None or (type(tokens) is int and tokens >= 1)) and type(parts) is int and parts >= 1
    assert isinstance(outcome, Refused) != possible, getattr(outcome, "message", (tokens, parts))


KEYS = st.sampled_from(["tokens", "rewards", "logprobs", "values", "<b>", "a&b", 'x"y'])
CALLS = st.sampled_from(["gen", "score", "train", "credit_it", "]]>", "[red]"])
ROLES = st.sampled_from(["actor", "critic", "ref"])
METHODS = ("generate", "inference", "credit", "train_step")


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """Draw arguments of an `RPC`, which are usually valid."""
    method = draw(st.sampled_from([*METHODS, *METHODS, "infer", ""]))
    outputs = () if method == "train_step" and draw(st.integers(0, 3)) else draw(st.lists(KEYS, max_size=2))
    return {
        "name": draw(CALLS),
        "model": draw(ROLES),
        "method": method,
        "inputs": tuple(draw(st.lists(KEYS, max_size=2))),
        "outputs": tuple(outputs),
        "rename": draw(st.one_of(st.just({}), st.just({}), st.dictionaries(KEYS, KEYS, max_size=2))),
        "after": tuple(draw(st.one_of(st.just([]), st.lists(CALLS, max_size=1)))),
    }


def call_is_right(call: dict[str, Any]) -> bool:
    """Return whether a single call is valid."""
    own = {graph: name for name, graph in call["rename"].items()}
    seen = [[own.get(key, key) for key in call[side]] for side in ("inputs", "outputs")]
    return (
        call["method"] in METHODS
        and not (call["method"] == "train_step" and call["outputs"])
        and all(len(set(call[side])) == len(call[side]) for side in ("inputs", "outputs", "after"))
        and all(key in (*call["inputs"], *call["outputs"]) for key in call["rename"].values())
        and len(own) == len(call["rename"])
        and all(len(set(names)) == len(names) for names in seen)
    )


def waits_for(call: dict[str, Any], given_: list[dict[str, Any]]) -> set[str]:
    """Return the names of the calls that must come first."""
    before = {other["name"] for other in given_ if set(other["outputs"]) & set(call["inputs"])} | set(call["after"])
    if call["method"] == "train_step":
        before |= {o["name"] for o in given_ if o["model"] == call["model"] and o["method"] != "train_step"}
    return before


def can_be_ordered(given_: list[dict[str, Any]]) -> bool:
    """Return whether an order exists in which each call follows its predecessors."""
    done: set[str] = set()
    for _ in given_:
        done |= {call["name"] for call in given_ if waits_for(call, given_) <= done}
    return len(done) == len(given_)


@BOUNDED
@given(st.lists(calls(), max_size=4), st.lists(KEYS, max_size=2), st.lists(KEYS, max_size=1))
def test_a_graph_can_run_or_is_refused(given_, dataset, results):
    def build() -> DataflowGraph:
        return DataflowGraph(tuple(RPC(**call) for call in given_), tuple(dataset), tuple(results))

    graph = attempt(build, "RPC", "key")
    produced = [key for call in given_ for key in call["outputs"]]
    names = [call["name"] for call in given_]
    possible = (
        all(map(call_is_right, given_))
        and len(set(names)) == len(names)
        and len(set(produced)) == len(produced)
        and not set(produced) & set(dataset)
        and all(key in {*produced, *dataset} for call in given_ for key in (*call["inputs"],))
        and set(results) <= {*produced, *dataset}
        and all(name in names for call in given_ for name in call["after"])
        and can_be_ordered(given_)
    )
    assert isinstance(graph, Refused) != possible, getattr(graph, "message", given_)
    if not possible:
        return
    order = [rpc.name for rpc in graph.order]
    for call in given_:
        assert waits_for(call, given_) <= set(order[: order.index(call["name"])])
    FORMATS["text"](graph, {})
    FORMATS["mermaid"](graph, {})
    shown = {element.text for element in ElementTree.fromstring(FORMATS["svg"](graph, {})).iter() if element.text}
    assert {*names, *produced} <= shown
