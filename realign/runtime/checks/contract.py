"""Compare the keys that interfaces declare (`ModelInterface.keys`) with the graph that calls them, before loading."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api import RPC, DataflowGraph, Keys, ModelInterface, is_component_key


def check_keys(graph: DataflowGraph, interfaces: Mapping[str, ModelInterface]) -> None:
    """Check that every key that a method needs is provided, and that every key written for one component is read.

    A method for which the interface declares no keys is not checked.

    Raises:
        ValueError: the message contains the RPC, the key and the setting.
    """
    declared = {rpc.name: _keys(rpc, interfaces[rpc.model]) for rpc in graph.rpcs}
    for rpc in graph.rpcs:
        _check_needs(rpc, declared[rpc.name], graph)
        _check_writes(rpc, declared[rpc.name])
    read = {key for rpc in graph.rpcs for key in _read(rpc, declared[rpc.name])}
    for rpc in graph.rpcs:
        for key in rpc.inputs:
            if is_component_key(key) and key not in read:
                raise ValueError(
                    f"interfaces.{rpc.model}: RPC {rpc.name!r} has input {key!r}, which is computed, but which no "
                    f"component of {type(interfaces[rpc.model]).__name__} reads under its settings. Remove it from the "
                    "graph, or set the component that reads it"
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
    try:
        return interface.keys(rpc.method)
    except ValueError as error:
        raise ValueError(f"interfaces.{rpc.model}: {error}") from error


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
        asks = f"interfaces.{rpc.model}.{setting}" if setting else f"interfaces.{rpc.model}"
        if key in graph.producers:
            cure = f"RPC {graph.producers[key]!r} writes it: add it to the inputs of {rpc.name!r}"
        elif key in graph.dataset_keys:
            cure = f"the dataset has it: add it to the inputs of {rpc.name!r}"
        else:
            cure = "no call of the graph writes it: add such a call to the graph"
            cure += f", or change {setting.partition('=')[0]}" if setting else ""
        raise ValueError(f"{asks} needs key {key!r} in {rpc.method}, but RPC {rpc.name!r} does not read it; {cure}")


def _check_writes(rpc: RPC, keys: Keys) -> None:
    own = _own_names(rpc)
    outputs = {own.get(key, key) for key in rpc.outputs}
    if keys.writes is None or keys.writes == outputs:
        return
    raise ValueError(
        f"interfaces.{rpc.model} writes {', '.join(sorted(keys.writes))} in {rpc.method} under its settings, but RPC "
        f"{rpc.name!r} declares {', '.join(sorted(outputs)) or 'no output'}. Declare in the graph what the interface "
        "writes, or use the `dataflow` of its algorithm, which follows from the settings"
    )


__all__ = ["check_keys", "unread_inputs"]
