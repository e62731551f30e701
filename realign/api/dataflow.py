"""`RPC`, `Sync` and `DataflowGraph`: calls of interface methods, wired by the names of what they read and write."""

from __future__ import annotations

import difflib
import graphlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from realign.api.interface import METHODS, ModelInterface, implements


@dataclass(frozen=True)
class RPC:
    """One call of one interface method on one model, once per step.

    Attributes:
        name: of the call, unique in the graph.
        model: the role whose model and interface are used.
        method: "generate", "inference", "credit" or "train_step".
        inputs: keys that the call reads, by their names in the graph.
        outputs: keys that it writes, by their names in the graph.
        rename: the graph's name of a key that the interface knows by another: with `{"logprobs": "ref_logprobs"}` the
            interface's `logprobs` is the graph's `ref_logprobs`, as an output and as an input.
        after: names of calls that must come first although no key says so.

    Raises:
        ValueError: names the RPC, for an unknown method, an output of a train_step, or a rename of what it does not
            declare or to a name that is taken.
    """

    name: str
    model: str
    method: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "after"):
            found = getattr(self, name)
            if isinstance(found, str):
                raise ValueError(f"RPC {self.name!r}: {name} must be a tuple of names, found the text {found!r}")
            if twice := _repeated(found):
                raise ValueError(f"RPC {self.name!r}: {name} hold {twice!r} twice")
        if self.method not in METHODS:
            raise ValueError(f"RPC {self.name!r}: unknown method {self.method!r}{nearest(self.method, METHODS)}")
        if self.method == "train_step" and self.outputs:
            raise ValueError(f"RPC {self.name!r}: a train_step gives metrics, no keys; found {', '.join(self.outputs)}")
        self._check_rename()

    def _check_rename(self) -> None:
        """The interface must see distinct names, and know each key of the graph by one."""
        declared = (*self.outputs, *self.inputs)
        for key in self.rename.values():
            if key not in declared:
                raise ValueError(
                    f"RPC {self.name!r} renames to {key!r}, which it does not declare{nearest(key, declared)}"
                )
        if twice := _repeated(self.rename.values()):
            raise ValueError(f"RPC {self.name!r} renames two names to {twice!r}")
        ours = {graph: interface for interface, graph in self.rename.items()}
        for keys in (self.inputs, self.outputs):
            if twice := _repeated(ours.get(key, key) for key in keys):
                raise ValueError(
                    f"RPC {self.name!r}: after the rename {dict(self.rename)} the interface would know two of "
                    f"{', '.join(keys)} as {twice!r}"
                )


@dataclass(frozen=True)
class Sync:
    """What a role that is not trained takes from one that is, at the end of a step, when all calls are made.

    Its weights become (1 - weight) * own + weight * those of `of`. A reference that follows the policy in this way is
    that of TR-DPO (arXiv:2404.09656) and of TRL's `sync_ref_model`; realhf calls it reallocation with an `eta`.

    Attributes:
        of: the role that is trained.
        weight: its part of the mixture, above 0 and at most 1; 1 copies bit by bit.
        every_steps: steps between two; the first one comes after so many.

    Raises:
        ValueError: names the attribute.
    """

    of: str
    weight: float = 1.0
    every_steps: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight must be above 0 and at most 1, found {self.weight}")
        if self.every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, found {self.every_steps}")

    def describe(self) -> str:
        """What the weights become, and when, for people."""
        made = self.of if self.weight == 1 else f"{1 - self.weight:.12g} own + {self.weight:.12g} {self.of}"
        return made if self.every_steps == 1 else f"{made}, every {self.every_steps} steps"


@dataclass(frozen=True)
class DataflowGraph:
    """The RPCs of a step, checked when built.

    Attributes:
        rpcs: the calls, in any order.
        dataset_keys: keys that every batch of the dataset has.
        results: keys that are kept for reports although no call reads them.
        sync: by role, what becomes of its weights at the end of a step.

    Raises:
        ValueError: names the RPC and suggests the nearest key, for a key that nobody produces, a key produced twice, or
            a cycle; names the role, for a sync of one that is trained, or of or from one that takes no part.
    """

    rpcs: tuple[RPC, ...]
    dataset_keys: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    sync: Mapping[str, Sync] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [r.name for r in self.rpcs]
        if twice := _repeated(names):
            raise ValueError(f"two RPCs are named {twice!r}; names must be distinct")
        known = {*self.dataset_keys, *(k for r in self.rpcs for k in r.outputs)}
        for rpc in self.rpcs:
            self._check_rpc(rpc, names, known)
        for key in self.results:
            if key not in known:
                raise ValueError(f"results keep key {key!r}, which nothing produces{nearest(key, known)}")
        _ = self.order  # fails on a cycle
        self._check_sync()

    def _check_sync(self) -> None:
        trained = {rpc.model for rpc in self.rpcs if rpc.method == "train_step"}
        others = {rpc.model for rpc in self.rpcs} - trained
        for role, sync in self.sync.items():
            if role in trained:
                raise ValueError(f"sync.{role}: role {role!r} is trained, and would lose what it learned")
            if role not in others:
                raise ValueError(f"sync.{role}: no call of the graph uses role {role!r}{nearest(role, others)}")
            if sync.of not in trained:
                raise ValueError(f"sync.{role}.of: no call of the graph trains {sync.of!r}{nearest(sync.of, trained)}")

    def _check_rpc(self, rpc: RPC, names: list[str], known: set[str]) -> None:
        for key in rpc.outputs:
            others = [f"RPC {r.name!r}" for r in self.rpcs if key in r.outputs and r.name != rpc.name]
            others += ["the dataset"] if key in self.dataset_keys else []
            if others:
                raise ValueError(f"key {key!r} is produced twice: by RPC {rpc.name!r} and by {others[0]}")
        for key in rpc.inputs:
            if key not in known:
                raise ValueError(f"RPC {rpc.name!r} reads key {key!r}, which nothing produces{nearest(key, known)}")
        for name in rpc.after:
            if name not in names:
                raise ValueError(f"RPC {rpc.name!r} comes after {name!r}, which is not an RPC{nearest(name, names)}")

    @cached_property
    def producers(self) -> dict[str, str]:
        """Name of the RPC that writes each key (dataset keys are absent)."""
        return {key: rpc.name for rpc in self.rpcs for key in rpc.outputs}

    @cached_property
    def edges(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """For each RPC the RPCs that it waits for, with the keys (none for a pure order).

        Order among equals is an edge too: a model's other calls come before its train_step.
        """
        edges: dict[str, dict[str, tuple[str, ...]]] = {}
        for rpc in self.rpcs:
            before: dict[str, tuple[str, ...]] = {}
            for key in rpc.inputs:
                if (producer := self.producers.get(key)) is not None:
                    before[producer] = (*before.get(producer, ()), key)
            for name in rpc.after:
                before.setdefault(name, ())
            if rpc.method == "train_step":
                for other in self.rpcs:
                    if other.model == rpc.model and other.method != "train_step":
                        before.setdefault(other.name, ())
            edges[rpc.name] = before
        return edges

    @cached_property
    def order(self) -> tuple[RPC, ...]:
        """The RPCs in an order in which each finds what it reads; as declared, as far as the edges allow."""
        sorter = graphlib.TopologicalSorter({name: list(before) for name, before in self.edges.items()})
        try:
            sorter.prepare()
        except graphlib.CycleError as error:
            raise ValueError(f"the RPCs wait for each other in a circle: {' -> '.join(error.args[1])}") from None
        rank = {rpc.name: i for i, rpc in enumerate(self.rpcs)}
        ready: list[str] = []
        out: list[RPC] = []
        while sorter.is_active():
            ready = sorted([*ready, *sorter.get_ready()], key=rank.__getitem__)
            out.append(self.rpcs[rank[ready[0]]])
            sorter.done(ready.pop(0))
        return tuple(out)

    def leading_to(self, key: str) -> tuple[RPC, ...]:
        """The calls that must be made to have `key`, in their order; none if the dataset gives it."""
        waiting, found = [self.producers[key]] if key in self.producers else [], set[str]()
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += self.edges[name]
        return tuple(rpc for rpc in self.order if rpc.name in found)

    def unread(self) -> list[str]:
        """Keys that an RPC writes and nobody reads: most often a misspelt name. `results` are not among them."""
        read = {key for rpc in self.rpcs for key in rpc.inputs} | set(self.results)
        return sorted(key for key in self.producers if key not in read)

    def check_roles(self, interfaces: Mapping[str, type[ModelInterface]], models: Iterable[str]) -> None:
        """Check, before any model is loaded, that every role can do what the graph asks of it.

        Args:
            interfaces: the interface class of each role.
            models: roles that have a network.

        Raises:
            ValueError: names the RPC, for a role without an interface or a model, or a method that is not implemented.
        """
        models = set(models)
        for rpc in self.rpcs:
            if rpc.model not in interfaces:
                hint = nearest(rpc.model, interfaces)
                raise ValueError(f"RPC {rpc.name!r} uses role {rpc.model!r}, which has no interface{hint}")
            interface = interfaces[rpc.model]
            if not implements(interface, rpc.method):
                has = [m for m in METHODS if implements(interface, m)]
                raise ValueError(
                    f"RPC {rpc.name!r} calls {rpc.method}, which {interface.__name__} does not implement; it has {has}"
                )
            if interface.needs_engine and rpc.model not in models:
                hint = nearest(rpc.model, models)
                raise ValueError(f"RPC {rpc.name!r} uses role {rpc.model!r}, which has no model{hint}")
        for role in self.sync:
            if role not in models:
                raise ValueError(f"sync.{role}: role {role!r} has no model{nearest(role, models)}")


SAMPLED = ("input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated")
"""Keys that sampling writes."""


def rl_graph(interfaces: Mapping[str, ModelInterface]) -> DataflowGraph:
    """The graph of an actor that samples responses, has them rewarded, and trains on them, as the interfaces declare.

    Calls follow from the keys that the actor needs (`ModelInterface.keys`):

    | needed key | call |
    |---|---|
    | `ref_logprobs`, `teacher_logprobs`, ... | the role `ref`, `teacher`, ... scores the responses |
    | `prox_logprobs` | the actor scores its responses again before training |
    | `values` | the role `critic` estimates values |
    | `advantages` | `credit` of the actor is a call of its own, and the critic learns from it |
    | `baseline_rewards` | the role `baseline` responds greedily, and the role `reward` rewards that response |
    | `ptx_...` | the dataset provides pretraining text |

    A role other than `actor` whose `generate` writes `rewards` (a conversation with an environment) takes the place of
    sampling by the actor and of the role `reward`. `dense_rewards` are used if the role that rewards writes them.

    Raises:
        ValueError: there is no actor, or it needs a greedy baseline of a role that rewards whole conversations.
    """
    if "actor" not in interfaces:
        raise ValueError(
            f"interfaces.actor is missing: the graph trains the role 'actor'{nearest('actor', interfaces)}"
        )
    train = interfaces["actor"].keys("train_step")
    needs = dict(train.needs)
    if "advantages" in needs:  # then `credit` is a call that needs keys of its own
        needs = {**interfaces["actor"].keys("credit").needs, **needs}
    rpcs, rewards = _sampling_calls(interfaces)
    scored = ("input_ids", "loss_mask")
    keys = [*scored, "logprobs", "truncated", *rewards]
    if "baseline_rewards" in needs:
        if rpcs[0].model != "actor":
            raise ValueError(
                f"interfaces.actor.{needs['baseline_rewards']}: role {rpcs[0].model!r} rewards whole "
                "conversations, so there is no reward of a greedy response. Set reward.baseline=none"
            )
        rpcs += _baseline_calls()
        keys.append("baseline_rewards")
    scorers = {key.removesuffix("_logprobs"): key for key in needs if key.endswith("_logprobs")}
    scorers = {"actor" if role == "prox" else role: key for role, key in scorers.items()}
    for role, key in sorted(scorers.items(), key=lambda item: item[0] == "actor"):
        rpcs.append(RPC(f"{role}_inf", role, "inference", scored, (key,), rename={"logprobs": key}))
        keys.append(key)
    if "values" in needs:
        rpcs.append(RPC("critic_inf", "critic", "inference", scored, outputs=("values", "bootstrap_values")))
        keys += ["values", "bootstrap_values"]
    training, masked = keys, {}
    if "advantages" in needs:
        masked = {"loss_mask": "train_mask"}
        credited = ("advantages", "returns", "train_mask")
        rpcs.append(RPC("actor_credit", "actor", "credit", tuple(keys), credited, rename=masked))
        training = [key for key in keys if key != "loss_mask"] + [*credited]
        learned = ("input_ids", "train_mask", "values", "returns")
        rpcs.append(RPC("critic_train", "critic", "train_step", learned, rename=masked))
    text = [key for key in needs if key.startswith("ptx_")]
    training = [*training, *text, *(key for key in ("versions",) if key in train.uses)]
    rpcs.append(RPC("actor_train", "actor", "train_step", tuple(training), rename=masked))
    read = {key for rpc in rpcs for key in rpc.inputs}
    results = dict.fromkeys(["versions", "truncated", *(key for key in rpcs[0].outputs if key not in read)])
    return DataflowGraph(tuple(rpcs), dataset_keys=("prompt_ids", "row", *text), results=tuple(results))


def _sampling_calls(interfaces: Mapping[str, ModelInterface]) -> tuple[list[RPC], list[str]]:
    """The calls that sample and reward, and the keys of the rewards."""
    for role, interface in interfaces.items():
        samples = role != "actor" and implements(type(interface), "generate")
        written = interface.keys("generate").writes or frozenset() if samples else frozenset()
        if "rewards" in written:
            outputs = (*SAMPLED, *sorted(written - set(SAMPLED)))
            rewards: list[str] = [key for key in ("rewards", "dense_rewards") if key in written]
            return [RPC(f"{role}_gen", role, "generate", ("prompt_ids", "row"), outputs)], rewards
    dense = "reward" in interfaces and "dense_rewards" in (interfaces["reward"].keys("inference").writes or ())
    rewards = ["rewards", "dense_rewards"] if dense else ["rewards"]
    return [
        RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=SAMPLED),
        RPC("reward_inf", "reward", "inference", inputs=("input_ids", "prompt_mask", "row"), outputs=tuple(rewards)),
    ], rewards


def _baseline_calls() -> list[RPC]:
    greedy = {"input_ids": "greedy_input_ids", "prompt_mask": "greedy_prompt_mask"}
    response, rename = tuple(greedy.values()), greedy | {"rewards": "baseline_rewards"}
    return [
        RPC("baseline_gen", "baseline", "generate", ("prompt_ids",), response, rename=greedy),
        RPC("baseline_inf", "reward", "inference", (*response, "row"), ("baseline_rewards",), rename=rename),
    ]


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest valid name, and all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{hint} (valid: {', '.join(known) or 'none'})"


def _repeated(names: Iterable[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)
