"""Execute one RPC of the graph: one call of an interface method on a batch."""

from __future__ import annotations

from functools import partial

from realign.api import RPC, MicroBatchSpec, Model, ModelInterface, SequenceSample, stat_values
from realign.api.interface import method_of
from realign.engines.distributed.ranks import current
from realign.runtime.out_of_memory import memory_limited


def call(
    rpc: RPC, model: Model, interface: ModelInterface, batch: SequenceSample, mb_spec: MicroBatchSpec
) -> tuple[SequenceSample, dict[str, float]]:
    """Execute one RPC: pass only the declared inputs and accept only the declared outputs.

    With several ranks, rank 0 alone calls an interface that needs no model, and broadcasts the result.

    Returns:
        The batch with the outputs merged in, and the metrics (of a train_step).

    Raises:
        ValueError: the interface returned other keys or other prompts than declared.
        RunError: a device is out of memory.
    """
    make = partial(method_of(interface, rpc.method), model, inputs_of(rpc, batch), mb_spec)
    with memory_limited(f"RPC {rpc.name!r}", _less_memory(rpc, mb_spec)):
        result = make() if interface.needs_engine else current().lead(make)
    if rpc.method == "train_step":
        model.advance()
        return batch, stat_values(result)
    declared = {*rpc.outputs, *(ours for ours, theirs in rpc.rename.items() if theirs in rpc.outputs)}
    result = result.select(result.keys - (interface.keys(rpc.method).reports - declared))
    result = result.rename({ours: theirs for ours, theirs in rpc.rename.items() if theirs in rpc.outputs})
    if result.keys != set(rpc.outputs):
        raise ValueError(f"RPC {rpc.name!r} returned keys {sorted(result.keys)}, but declares {sorted(rpc.outputs)}")
    return batch.merge(result), {}


def is_stale(batch: SequenceSample, version: int) -> bool:
    """Return whether any token of the batch was sampled by a policy older than `version`."""
    return "versions" in batch and bool(((batch["versions"] >= 0) & (batch["versions"] < version)).any())


def inputs_of(rpc: RPC, batch: SequenceSample) -> SequenceSample:
    """Return the inputs of an RPC: only the declared keys, under the interface's names."""
    known = {theirs: ours for ours, theirs in rpc.rename.items() if theirs in rpc.inputs}
    return batch.select(rpc.inputs).rename(known)


def _less_memory(rpc: RPC, mb_spec: MicroBatchSpec) -> str:
    if rpc.method == "generate":
        return f"Set models.{rpc.model}.sampler.max_slots to decode fewer sequences at once."
    return f"Lower microbatch.max_tokens_per_microbatch={mb_spec.max_tokens_per_microbatch}."


__all__ = ["call", "inputs_of", "is_stale"]
