"""`RPC`, `Sync` and `DataflowGraph`: calls of interface methods, connected by the keys that they read and write.

`rl_graph` builds the graph of an actor that samples responses and trains on their rewards.
"""

from __future__ import annotations

import difflib
import graphlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from realign.api.engine import HIDDEN
from realign.api.interface import METHODS, Keys, ModelInterface, implements
from realign.api.rewards import NAMED
from realign.api.router_experts import ROUTER_EXPERTS
from realign.api.sampling_mask import SAMPLING_MASK
from realign.errors import GraphError
from realign.settings import Count, Range, Settings


@dataclass(frozen=True)
class RPC:
    """One call per step of one interface method on one model.

    Attributes:
        name: name of the call, unique in the graph.
        model: role whose model and interface the call uses.
        method: "generate", "inference", "credit" or "train_step".
        inputs: keys that the call reads, by their names in the graph.
        outputs: keys that the call writes, by their names in the graph.
        rename: names in the graph of keys with another name in the interface. With `{"logprobs": "ref_logprobs"}`,
            the interface's `logprobs` is the graph's `ref_logprobs`, both as an output and as an input.
        after: names of calls that must run before this one, in addition to the producers of `inputs`.

    Raises:
        GraphError: the method is unknown, a train_step has outputs, or a rename uses an undeclared or duplicate name.
            The message names the RPC.
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
            names = getattr(self, name)
            if isinstance(names, str):
                raise GraphError(
                    f"RPC {self.name!r}: {name} must be a tuple of names, found {names!r}. Write ({names!r},)"
                )
            if twice := _find_repeated(names):
                raise GraphError(f"RPC {self.name!r}: {name} contains {twice!r} twice. List each name once")
        if self.method not in METHODS:
            raise GraphError(f"RPC {self.name!r}: unknown method {self.method!r}{nearest(self.method, METHODS)}")
        if self.method == "train_step" and self.outputs:
            raise GraphError(
                f"RPC {self.name!r}: a train_step returns metrics and no keys. Remove outputs {', '.join(self.outputs)}"
            )
        self._check_rename()

    @property
    def own_keys(self) -> frozenset[str]:
        """Return the names of its inputs and outputs in the interface."""
        own = {graph: interface for interface, graph in self.rename.items()}
        return frozenset(own.get(key, key) for key in (*self.inputs, *self.outputs))

    def _check_rename(self) -> None:
        """Check that the interface sees unique names, and one name for each key of the graph."""
        declared = (*self.outputs, *self.inputs)
        for key in self.rename.values():
            if key not in declared:
                raise GraphError(
                    f"RPC {self.name!r}: rename contains {key!r}, which is not one of its inputs or outputs"
                    f"{nearest(key, declared)}"
                )
        if twice := _find_repeated(self.rename.values()):
            raise GraphError(f"RPC {self.name!r}: rename maps two names to {twice!r}. Rename only one of them")
        ours = {graph: interface for interface, graph in self.rename.items()}
        for keys in (self.inputs, self.outputs):
            if twice := _find_repeated(ours.get(key, key) for key in keys):
                raise GraphError(
                    f"RPC {self.name!r}: rename={dict(self.rename)} gives two of the keys {', '.join(keys)} the same "
                    f"name {twice!r} in the interface. Rename both"
                )


@dataclass(frozen=True)
class Sync(Settings):
    """Weight update of an untrained role from a trained one, at the end of a step after all calls.

    The new weights are (1 - weight) * own + weight * those of `of`. TR-DPO (arXiv:2404.09656) and TRL's
    `sync_ref_model` update a reference policy this way; realhf calls it reallocation with an `eta`.

    Attributes:
        of: name of the trained role.
        weight: fraction of the trained role's weights in the mixture, in (0, 1]. 1 copies bitwise.
        every_steps: interval in steps; the first update is after this many steps.

    Raises:
        SettingsError: an attribute is out of range. The message names it.
    """

    of: str
    weight: Annotated[float, Range(gt=0, le=1)] = 1.0
    every_steps: Count = 1

    def describe(self) -> str:
        """Describe the new weights and the interval for the launch table."""
        weights = self.of if self.weight == 1 else f"{1 - self.weight:.12g} own + {self.weight:.12g} {self.of}"
        return weights if self.every_steps == 1 else f"{weights}, every {self.every_steps} steps"


@dataclass(frozen=True)
class DataflowGraph:
    """The RPCs of a step, validated on construction.

    Attributes:
        rpcs: calls, in any order.
        dataset_keys: keys of every batch of the dataset.
        results: keys that reports need, in addition to the keys that calls read.
        sync: for each role, the update of its weights at the end of a step.

    Raises:
        GraphError: a key has no producer or two, or the RPCs form a cycle. The message names the RPC and suggests the
            nearest key. Also raised if a sync updates a trained role, or uses a role that is not in the graph. The
            message then names the role.
    """

    rpcs: tuple[RPC, ...]
    dataset_keys: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    sync: Mapping[str, Sync] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [r.name for r in self.rpcs]
        if twice := _find_repeated(names):
            raise GraphError(f"Duplicate RPC name {twice!r}. Names must be unique")
        known = {*self.dataset_keys, *(k for r in self.rpcs for k in r.outputs)}
        for rpc in self.rpcs:
            self._check_rpc(rpc, names, known)
        for key in self.results:
            if key not in known:
                raise GraphError(f"results: no RPC or dataset produces key {key!r}{nearest(key, known)}")
        _ = self.order  # raises on a cycle
        self._check_sync()

    def _check_sync(self) -> None:
        trained = {rpc.model for rpc in self.rpcs if rpc.method == "train_step"}
        others = {rpc.model for rpc in self.rpcs} - trained
        for role, sync in self.sync.items():
            if role in trained:
                raise GraphError(
                    f"sync.{role}: role {role!r} is trained, and the sync would overwrite its weights. Remove it"
                )
            if role not in others:
                raise GraphError(f"sync.{role}: no RPC of the graph uses role {role!r}{nearest(role, others)}")
            if sync.of not in trained:
                raise GraphError(
                    f"sync.{role}.of={sync.of}: no RPC of the graph trains this role{nearest(sync.of, trained)}"
                )

    def _check_rpc(self, rpc: RPC, names: list[str], known: set[str]) -> None:
        for key in rpc.outputs:
            others = [f"RPC {r.name!r}" for r in self.rpcs if key in r.outputs and r.name != rpc.name]
            others += ["the dataset"] if key in self.dataset_keys else []
            if others:
                raise GraphError(
                    f"key {key!r} is produced twice: by RPC {rpc.name!r} and by {others[0]}. Rename one of them"
                )
        for key in rpc.inputs:
            if key not in known:
                raise GraphError(
                    f"RPC {rpc.name!r} reads key {key!r}, which no RPC or dataset produces{nearest(key, known)}"
                )
        for name in rpc.after:
            if name not in names:
                raise GraphError(
                    f"RPC {rpc.name!r}: after contains {name!r}, which is not an RPC{nearest(name, names)}"
                )

    @cached_property
    def producers(self) -> dict[str, str]:
        """Name of the RPC that writes each key, except dataset keys."""
        return {key: rpc.name for rpc in self.rpcs for key in rpc.outputs}

    @cached_property
    def edges(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """For each RPC, the RPCs that it depends on, with the keys that it reads from them.

        An ordering constraint is an edge without keys: a model's other calls run before its train_step.
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
        """The RPCs in topological order, in the order of declaration as far as the edges allow."""
        sorter = graphlib.TopologicalSorter({name: list(before) for name, before in self.edges.items()})
        try:
            sorter.prepare()
        except graphlib.CycleError as error:
            raise GraphError(
                f"The RPCs form a cycle: {' -> '.join(error.args[1])}. Remove one of these dependencies"
            ) from None
        rank = {rpc.name: i for i, rpc in enumerate(self.rpcs)}
        ready: list[str] = []
        out: list[RPC] = []
        while sorter.is_active():
            ready = sorted([*ready, *sorter.get_ready()], key=rank.__getitem__)
            out.append(self.rpcs[rank[ready[0]]])
            sorter.done(ready.pop(0))
        return tuple(out)

    def leading_to(self, key: str) -> tuple[RPC, ...]:
        """Return the calls that `key` depends on, in execution order; none if the dataset provides it."""
        waiting, needed = [self.producers[key]] if key in self.producers else [], set[str]()
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting += self.edges[name]
        return tuple(rpc for rpc in self.order if rpc.name in needed)

    def unread(self) -> list[str]:
        """Return the keys that an RPC writes and no RPC reads, except `results`. Most are misspelled names."""
        read = {key for rpc in self.rpcs for key in rpc.inputs} | set(self.results)
        return sorted(key for key in self.producers if key not in read)

    def check_roles(self, interfaces: Mapping[str, type[ModelInterface]], models: Iterable[str]) -> None:
        """Check that every role implements the methods that the graph calls. Run it before loading models.

        Args:
            interfaces: interface class of each role.
            models: roles that have a model.

        Raises:
            GraphError: a role has no interface or model, or does not implement a method. The message names the RPC.
        """
        models = set(models)
        for rpc in self.rpcs:
            if rpc.model not in interfaces:
                hint, why = nearest(rpc.model, interfaces), self._why(rpc)
                raise GraphError(f"RPC {rpc.name!r} uses role {rpc.model!r}, which has no interface{hint}{why}")
            interface = interfaces[rpc.model]
            if not implements(interface, rpc.method):
                has = [m for m in METHODS if implements(interface, m)]
                raise GraphError(
                    f"RPC {rpc.name!r} calls {rpc.method}, which {interface.__name__} does not implement. It "
                    f"implements {has}"
                )
            if interface.needs_engine and rpc.model not in models:
                hint = nearest(rpc.model, models)
                raise GraphError(f"RPC {rpc.name!r} uses role {rpc.model!r}, which has no model{hint}")
        for role in self.sync:
            if role not in models:
                raise GraphError(f"sync.{role}: role {role!r} has no model{nearest(role, models)}")

    def _why(self, rpc: RPC) -> str:
        """Format who needs the outputs of a call whose role is missing, and what to set; empty if no call does."""
        reads = [(reader.name, key) for reader in self.order for key in rpc.outputs if key in reader.inputs]
        if not reads:
            return ""
        reader, key = reads[0]
        such = ", such as realign.interfaces.rule_reward.RuleRewardInterface" if key == "rewards" else ""
        target = f"interfaces.{rpc.model}._target_"
        return f". RPC {reader!r} needs its {key}: set {target} to a class that writes them{such}"


def nearest(word: str, known: Iterable[str]) -> str:
    """Format the end of an error message: the nearest valid name, and all valid names."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{hint} (valid: {', '.join(known) or 'none'})"


def _find_repeated(names: Iterable[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)


SAMPLED = ("input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated")
"""Keys that sampling writes."""

_REPLAYED = (ROUTER_EXPERTS, SAMPLING_MASK)
"""Keys that sampling writes if the settings ask for it, and training replays."""


def rl_graph(interfaces: Mapping[str, ModelInterface]) -> DataflowGraph:
    """Build the graph of an actor that samples responses and trains on their rewards, from the interfaces.

    The keys that the actor needs (`ModelInterface.keys`) determine the calls:

    | needed key | call |
    |---|---|
    | `ref_logprobs`, `teacher_logprobs`, ... | the role `ref`, `teacher`, ... computes log-probs of the responses |
    | `ref_hidden` | the role `ref` also returns its hidden states |
    | `rewards` | the role `reward` scores the responses; also if the actor only uses them and the role exists |
    | `prox_logprobs` | the actor recomputes log-probs of its responses before training |
    | `values` | the role `critic` estimates values |
    | `router_experts` | sampling also writes the chosen experts, which the actor and views of its model replay |
    | `sampling_mask` | sampling also writes the tokens that it drew from, over which all log-probs are normalized |
    | `advantages` | `credit` of the actor is a separate call, and the critic trains on its returns |
    | `baseline_rewards` | the role `baseline` samples a greedy response, and the role `reward` scores it |
    | `ptx_...` | the dataset provides pretraining text |
    | any other key that the `inference` of a role declares | that role scores the responses |

    A call writes all keys that its role declares, and the actor gets each of them that it needs or uses. It may also
    read the dataset's `row`.

    A role other than `actor` whose `generate` writes `rewards` (a conversation with an environment) replaces the
    actor's sampling and the role `reward`. The graph uses `dense_rewards` if the rewarding role writes them, and
    contains its named rewards (`rewards/<name>`) as results.

    Raises:
        GraphError: there is no actor, or it needs a greedy baseline although a role rewards whole conversations.
    """
    if "actor" not in interfaces:
        raise GraphError(
            f"interfaces.actor is missing: the graph trains the role 'actor'{nearest('actor', interfaces)}"
        )
    train = interfaces["actor"].keys("train_step")
    needs = dict(train.needs)
    if "advantages" in needs:  # then `credit` is a separate call with its own needs
        needs = {**interfaces["actor"].keys("credit").needs, **needs}
    rpcs, rewards = _sampling_calls(interfaces, scored="rewards" in needs or "reward" in interfaces)
    replayed = [key for key in _REPLAYED if key in needs and key in rpcs[0].outputs]
    masks = [key for key in replayed if key == SAMPLING_MASK]
    experts = [key for key in replayed if key == ROUTER_EXPERTS]
    named = [key for rpc in rpcs for key in rpc.outputs if key.startswith(NAMED)]
    scored = ("input_ids", "loss_mask")
    keys = [*scored, "logprobs", "truncated", *rewards]
    if "baseline_rewards" in needs:
        if rpcs[0].model != "actor":
            raise GraphError(
                f"interfaces.actor.{needs['baseline_rewards']}: role {rpcs[0].model!r} rewards whole conversations, so "
                "greedy responses have no reward. Set interfaces.actor.reward.baseline=none"
            )
        rpcs += _baseline_calls()
        keys.append("baseline_rewards")
    scorers = {key.removesuffix("_logprobs"): key for key in needs if key.endswith("_logprobs")}
    scorers = {"actor" if role == "prox" else role: key for role, key in scorers.items()}
    for role, key in sorted(scorers.items(), key=lambda item: item[0] == "actor"):
        names = {"logprobs": key} | ({"hidden": hidden} if (hidden := f"{role}{HIDDEN}") in needs else {})
        inputs = (*scored, *(replayed if role == "actor" else masks), *prompt_keys_of(interfaces, role))
        rpcs.append(_scoring_call(role, interfaces, inputs, names.values(), names))
        keys += names.values()
    if "values" in needs:
        inputs = scored if "advantages" in needs else (*scored, *experts)  # a view of the actor's model replays too
        rpcs.append(_scoring_call("critic", interfaces, inputs, ("values", "bootstrap_values")))
        keys += ["values", "bootstrap_values"]
    rpcs += [*_declared_calls(rpcs, needs, interfaces)]
    training, masked = keys, {}
    if "advantages" in needs:
        # `credit` narrows the mask. It writes it under another name, since a key of the graph has one producer.
        masked = {"loss_mask": "train_mask"}
        credited = ("advantages", "returns", "train_mask")
        inputs = (*keys, *_further(interfaces["actor"].keys("credit"), keys, rpcs))
        rpcs.append(RPC("actor_credit", "actor", "credit", inputs, credited, rename=masked))
        training = [key for key in keys if key != "loss_mask"] + [*credited]
        learned = ("input_ids", "train_mask", "values", "returns")
        rpcs.append(RPC("critic_train", "critic", "train_step", learned, rename=masked))
    text = [key for key in needs if key.startswith("ptx_")]
    training = [*training, *text, *_further(train, {*training, *masked}, rpcs)]
    rpcs.append(RPC("actor_train", "actor", "train_step", tuple(training), rename=masked))
    read = {key for rpc in rpcs for key in rpc.inputs}
    results = dict.fromkeys(["versions", "truncated", *(key for key in (*rpcs[0].outputs, *named) if key not in read)])
    rows = ["row"] if "row" in read else []
    return DataflowGraph(tuple(rpcs), dataset_keys=("prompt_ids", *rows, *text), results=tuple(results))


def _scoring_call(
    role: str,
    interfaces: Mapping[str, ModelInterface],
    inputs: Iterable[str],
    outputs: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
) -> RPC:
    """Return the call of a role's `inference`, whose outputs are the given ones and all that the role declares."""
    declared = interfaces[role].keys("inference") if role in interfaces else Keys()
    written = (*sorted(declared.writes or ()), *sorted(declared.reports))
    names = [key for key in written if key not in (rename or {})]
    return RPC(f"{role}_inf", role, "inference", tuple(inputs), tuple(dict.fromkeys([*outputs, *names])), rename or {})


def _declared_calls(
    rpcs: Iterable[RPC], needs: Iterable[str], interfaces: Mapping[str, ModelInterface]
) -> Iterator[RPC]:
    """Yield a call of each further role whose `inference` writes a needed key that no call writes."""
    offered, called = {key for rpc in rpcs for key in rpc.outputs}, {rpc.model for rpc in rpcs}
    for role, interface in interfaces.items():
        declared = interface.keys("inference") if implements(type(interface), "inference") else Keys()
        missing = set(needs) - offered
        if role not in called and missing & {*(declared.writes or ()), *declared.reports}:
            call = _scoring_call(role, interfaces, declared.needs)
            offered |= set(call.outputs)
            yield call


def _further(keys: Keys, given: Collection[str], rpcs: Iterable[RPC]) -> list[str]:
    """Return the keys that a method reads beyond the given ones, and a call or the dataset's row provides."""
    offered = {"row", *(key for rpc in rpcs for key in rpc.outputs)}
    read = dict.fromkeys([*keys.needs, *sorted(keys.uses)])
    return [key for key in read if key in offered and key not in given]


def prompt_keys_of(interfaces: Mapping[str, ModelInterface], role: str) -> tuple[str, ...]:
    """Return the keys that a role reads in `inference` if it scores responses after other prompts."""
    needs = interfaces[role].keys("inference").needs if role in interfaces else {}
    return tuple(key for key in ("prompt_mask", "row") if key in needs)


def _sampling_calls(interfaces: Mapping[str, ModelInterface], *, scored: bool) -> tuple[list[RPC], list[str]]:
    """Return the calls that sample and (with `scored`) reward, and the keys of the rewards."""
    for role, interface in interfaces.items():
        samples = role != "actor" and implements(type(interface), "generate")
        written = interface.keys("generate").writes or frozenset() if samples else frozenset()
        if "rewards" in written:
            outputs = (*SAMPLED, *sorted(written - set(SAMPLED)), *named_reward_outputs(interface, "generate"))
            rewards: list[str] = [key for key in ("rewards", "dense_rewards") if key in written]
            return [RPC(f"{role}_gen", role, "generate", ("prompt_ids", "row"), outputs)], rewards
    writes = interfaces["actor"].keys("generate").writes or frozenset()
    outputs = (*SAMPLED, *sorted(writes - set(SAMPLED)))
    sample = RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=outputs)
    if not scored:
        return [sample], []
    reward = _scoring_call("reward", interfaces, ("input_ids", "prompt_mask", "row"), ("rewards",))
    return [sample, reward], [key for key in ("rewards", "dense_rewards") if key in reward.outputs]


def named_reward_outputs(interface: ModelInterface, method: str) -> tuple[str, ...]:
    """Return the named rewards that a method also writes (`Keys.reports`), as further outputs of its RPC."""
    return tuple(sorted(interface.keys(method).reports))


def _baseline_calls() -> list[RPC]:
    greedy = {"input_ids": "greedy_input_ids", "prompt_mask": "greedy_prompt_mask"}
    response, rename = tuple(greedy.values()), greedy | {"rewards": "baseline_rewards"}
    return [
        RPC("baseline_gen", "baseline", "generate", ("prompt_ids",), response, rename=greedy),
        RPC("baseline_inf", "reward", "inference", (*response, "row"), ("baseline_rewards",), rename=rename),
    ]
