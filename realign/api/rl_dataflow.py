"""`rl_graph`: the dataflow graph of an actor that samples responses and trains on their rewards."""

from __future__ import annotations

from collections.abc import Mapping

from realign.api.dataflow import RPC, DataflowGraph, nearest
from realign.api.engine import HIDDEN
from realign.api.interface import ModelInterface, implements
from realign.api.rewards import NAMED
from realign.api.router_experts import ROUTER_EXPERTS
from realign.errors import GraphError

SAMPLED = ("input_ids", "prompt_mask", "loss_mask", "logprobs", "versions", "truncated")
"""Keys that sampling writes."""


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
    | `advantages` | `credit` of the actor is a separate call, and the critic trains on its returns |
    | `baseline_rewards` | the role `baseline` samples a greedy response, and the role `reward` scores it |
    | `ptx_...` | the dataset provides pretraining text |

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
    replayed = [ROUTER_EXPERTS] if ROUTER_EXPERTS in needs and ROUTER_EXPERTS in rpcs[0].outputs else []
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
        inputs = (*scored, *replayed) if role == "actor" else scored
        rpcs.append(RPC(f"{role}_inf", role, "inference", inputs, tuple(names.values()), rename=names))
        keys += names.values()
    if "values" in needs:
        inputs = scored if "advantages" in needs else (*scored, *replayed)  # a view of the actor's model replays too
        rpcs.append(RPC("critic_inf", "critic", "inference", inputs, outputs=("values", "bootstrap_values")))
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
    training = [*training, *text, *replayed, *(key for key in ("versions",) if key in train.uses)]
    rpcs.append(RPC("actor_train", "actor", "train_step", tuple(training), rename=masked))
    read = {key for rpc in rpcs for key in rpc.inputs}
    results = dict.fromkeys(["versions", "truncated", *(key for key in (*rpcs[0].outputs, *named) if key not in read)])
    rows = ["row"] if "row" in read else []
    return DataflowGraph(tuple(rpcs), dataset_keys=("prompt_ids", *rows, *text), results=tuple(results))


def _sampling_calls(interfaces: Mapping[str, ModelInterface], *, scored: bool) -> tuple[list[RPC], list[str]]:
    """Return the calls that sample and (with `scored`) reward, and the keys of the rewards."""
    for role, interface in interfaces.items():
        samples = role != "actor" and implements(type(interface), "generate")
        written = interface.keys("generate").writes or frozenset() if samples else frozenset()
        if "rewards" in written:
            outputs = (*SAMPLED, *sorted(written - set(SAMPLED)), *reported(interface, "generate"))
            rewards: list[str] = [key for key in ("rewards", "dense_rewards") if key in written]
            return [RPC(f"{role}_gen", role, "generate", ("prompt_ids", "row"), outputs)], rewards
    dense = "reward" in interfaces and "dense_rewards" in (interfaces["reward"].keys("inference").writes or ())
    scores = ["rewards", "dense_rewards"] if dense else ["rewards"]
    named = reported(interfaces["reward"], "inference") if "reward" in interfaces else ()
    recorded = {ROUTER_EXPERTS} & (interfaces["actor"].keys("generate").writes or frozenset())
    sample = RPC("actor_gen", "actor", "generate", inputs=("prompt_ids",), outputs=(*SAMPLED, *recorded))
    if not scored:
        return [sample], []
    return [
        sample,
        RPC("reward_inf", "reward", "inference", inputs=("input_ids", "prompt_mask", "row"), outputs=(*scores, *named)),
    ], scores


def reported(interface: ModelInterface, method: str) -> tuple[str, ...]:
    """Return the named rewards that a method also writes (`Keys.reports`), as further outputs of its RPC."""
    return tuple(sorted(interface.keys(method).reports))


def _baseline_calls() -> list[RPC]:
    greedy = {"input_ids": "greedy_input_ids", "prompt_mask": "greedy_prompt_mask"}
    response, rename = tuple(greedy.values()), greedy | {"rewards": "baseline_rewards"}
    return [
        RPC("baseline_gen", "baseline", "generate", ("prompt_ids",), response, rename=greedy),
        RPC("baseline_inf", "reward", "inference", (*response, "row"), ("baseline_rewards",), rename=rename),
    ]


__all__ = ["SAMPLED", "reported", "rl_graph"]
