"""Execute one RPC of the graph: one call of an interface method on a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.profiler import record_function

from realign.api import RPC, DataflowGraph, MicroBatchSpec, Model, ModelInterface, SequenceSample, stat_values
from realign.api.interface import method_of
from realign.api.sample import INDEX_KEYS, TOKENS, MissingKeyError, with_own_metadata, with_response_index
from realign.api.stats import TracedSequence, iter_traced
from realign.runtime.out_of_memory import memory_limited

MARK = "RPC "
"""Prefix of the name of an RPC in traces of the torch profiler."""


def call(
    rpc: RPC,
    model: Model,
    interface: ModelInterface,
    batch: SequenceSample,
    mb_spec: MicroBatchSpec,
    graph: DataflowGraph | None = None,
    traces: list[TracedSequence] | None = None,
) -> tuple[SequenceSample, dict[str, float]]:
    """Execute one RPC: pass only the declared inputs and accept only the declared outputs.

    With several ranks, rank 0 alone calls an interface that needs no model, on the whole batch, and broadcasts the
    result.

    Args:
        rpc: the RPC.
        model: model of its role.
        interface: interface of its role.
        batch: batch with at least the inputs of the RPC.
        mb_spec: token budget of a forward pass.
        graph: graph of the RPC, for messages.
        traces: receives the per-token values of the prompts in `mb_spec.trace_ids` that a train_step returned.

    Returns:
        The batch with the outputs merged in, and the metrics (of a train_step).

    Raises:
        ValueError: the interface returned other keys or other prompts than declared, or reads a key that the RPC does
            not declare.
        RunError: a device is out of memory.
    """
    make = partial(method_of(interface, rpc.method), model, inputs_of(rpc, batch), mb_spec)
    limited = memory_limited(f"RPC {rpc.name!r}", _less_memory(rpc, mb_spec))
    with record_function(f"{MARK}{rpc.name}"), limited, _explaining_missing_keys(rpc, graph):
        result = make() if interface.needs_engine else model.lead(make)
        for pass_head in model.pass_heads.get(rpc.name, ()):
            pass_head()
    if rpc.method == "train_step":
        model.publish_weights()
        if traces is not None:
            traces.extend(iter_traced(result, mb_spec.trace_ids))
        return batch, stat_values(result)
    # `rename` maps keys of inputs too, so only the pairs that concern an output count here and below
    written = {*rpc.outputs, *(ours for ours, theirs in rpc.rename.items() if theirs in rpc.outputs)}
    # undeclared `reports` are dropped, since a graph may omit them; any other undeclared key fails the check below
    result = result.select(result.keys - (interface.keys(rpc.method).reports - written))
    result = result.rename({ours: theirs for ours, theirs in rpc.rename.items() if theirs in rpc.outputs})
    # the index keys belong to `input_ids`, and other tokens have none in the batch
    result = with_response_index(result) if TOKENS in rpc.outputs else result.select(result.keys - set(INDEX_KEYS))
    found, declared = (sorted({*keys} - {*INDEX_KEYS}) for keys in (result.keys, rpc.outputs))
    if found != declared:
        raise ValueError(f"RPC {rpc.name!r} returned keys {found}, but declares {declared}")
    return batch.merge(result), {}


@contextmanager
def _explaining_missing_keys(rpc: RPC, graph: DataflowGraph | None) -> Iterator[None]:
    """Add the RPC, its role and the cure to the message about a key that the RPC does not declare as an input."""
    own = {theirs: ours for ours, theirs in rpc.rename.items()}
    given = {own.get(key, key) for key in rpc.inputs}
    try:
        yield
    except MissingKeyError as error:
        if error.key not in given:  # else the interface removed the key
            cure = _cure(rpc, error.key, graph)
            error.args = (
                f"RPC {rpc.name!r} ({rpc.method} of role {rpc.model!r}) reads key {error.key!r}, which is not one of "
                f"its inputs ({', '.join(sorted(given)) or 'none'}). {cure}",
            )
        raise


def _cure(rpc: RPC, key: str, graph: DataflowGraph | None) -> str:
    add = f"Add {key!r} to the inputs of RPC {rpc.name!r}."
    if graph is None:
        return add
    if key in graph.producers:
        return f"RPC {graph.producers[key]!r} writes it. {add}"
    if key in graph.dataset_keys:
        return f"The dataset has it. {add}"
    known = sorted({*graph.producers, *graph.dataset_keys})
    return f"No RPC and no dataset provides it (keys of the graph: {', '.join(known) or 'none'})."


def is_stale(batch: SequenceSample, version: int) -> bool:
    """Return whether any token of the batch was sampled by a policy older than `version`."""
    return "versions" in batch and bool(((batch["versions"] >= 0) & (batch["versions"] < version)).any())


def inputs_of(rpc: RPC, batch: SequenceSample) -> SequenceSample:
    """Return the inputs of an RPC: only the declared keys, under the interface's names, with rows of its own.

    An interface may be a user's, and what it does to a row must not reach other calls or the dataset.
    """
    known = {theirs: ours for ours, theirs in rpc.rename.items() if theirs in rpc.inputs}
    return with_own_metadata(batch.select(rpc.inputs).rename(known))


def _less_memory(rpc: RPC, mb_spec: MicroBatchSpec) -> str:
    if rpc.method == "generate":
        return f"Set models.{rpc.model}.sampler.max_slots to decode fewer sequences at once."
    return f"Lower microbatch.max_tokens_per_microbatch={mb_spec.max_tokens_per_microbatch}."
