"""Compare the keys that interfaces declare (`ModelInterface.keys`) with the graph that calls them, before loading."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api import RPC, DataflowGraph, Keys, ModelInterface, is_component_key
from realign.errors import GraphError
from realign.runtime.checks.located import located


def check_keys(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface]) -> None:
    """Check that every key that a method needs is provided, and that every key written for one component is read.

    A method for which the interface declares no keys is not checked.

    Raises:
        GraphError: the message contains the RPC, the key and the setting.
    """
    declared = {rpc.name: _keys(rpc, interfaces[rpc.model]) for rpc in graph.rpcs}
    for rpc in graph.rpcs:
        _check_needs(rpc, declared[rpc.name], graph)
        _check_writes(rpc, declared[rpc.name])
    read = {key for rpc in graph.rpcs for key in _read(rpc, declared[rpc.name])}
    for rpc in graph.rpcs:
        for key in rpc.inputs:
            if is_component_key(key) and key not in read:
                raise GraphError(
                    f"interfaces.{rpc.model}: RPC {rpc.name!r} has input {key!r}, but no component of "
                    f"{type(interfaces[rpc.model]).__name__} reads it under its settings. Remove the input from the "
                    "graph, or set a component that reads it."
                )


def unread_inputs(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface]) -> dict[str, list[str]]:
    """Return the inputs of each RPC that its interface does not read, without RPCs that have none."""
    found = {}
    for rpc in graph.rpcs:
        read = _read(rpc, _keys(rpc, interfaces[rpc.model]))
        if unread := [key for key in rpc.inputs if key not in read]:
            found[rpc.name] = unread
    return found


def _keys(rpc: RPC, interface: ModelInterface) -> Keys:
    with located(f"interfaces.{rpc.model}"):
        return interface.keys(rpc.method)


def _own_names(rpc: RPC) -> dict[str, str]:
    """Map the graph's name of each renamed key of the RPC to the interface's name."""
    return {theirs: ours for ours, theirs in rpc.rename.items()}


def _read(rpc: RPC, keys: Keys) -> set[str]:
    """Return the inputs that the method reads, by their names in the graph; all inputs if it declares none."""
    if not keys.needs and not keys.uses:
        return set(rpc.inputs)
    own = _own_names(rpc)
    return {key for key in rpc.inputs if own.get(key, key) in {*keys.needs, *keys.uses}}


def _check_needs(rpc: RPC, keys: Keys, graph: DataflowGraph) -> None:
    own = _own_names(rpc)
    given = {own.get(key, key) for key in rpc.inputs}
    for key, setting in keys.needs.items():
        if key in given:
            continue
        reader = f"interfaces.{rpc.model}.{setting}" if setting else f"interfaces.{rpc.model}"
        if key in graph.producers:
            cure = f"RPC {graph.producers[key]!r} writes it. Add it to the inputs of {rpc.name!r}."
        elif key in graph.dataset_keys:
            cure = f"The dataset has it. Add it to the inputs of {rpc.name!r}."
        else:
            cure = "No RPC of the graph writes it. Add such an RPC to the graph"
            cure += f", or change {setting.partition('=')[0]}." if setting else "."
        raise GraphError(f"{reader} needs key {key!r} in {rpc.method}, but RPC {rpc.name!r} does not read it. {cure}")


def _check_writes(rpc: RPC, keys: Keys) -> None:
    own = _own_names(rpc)
    outputs = {own.get(key, key) for key in rpc.outputs}
    if keys.writes is None or keys.writes == outputs - keys.reports:
        return
    raise GraphError(
        f"interfaces.{rpc.model} writes {', '.join(sorted(keys.writes))} in {rpc.method} under its settings, but RPC "
        f"{rpc.name!r} declares {', '.join(sorted(outputs)) or 'no output'}. Declare the keys that the interface "
        "writes, or use the `dataflow` function of its algorithm."
    )


__all__ = ["check_keys", "unread_inputs"]
