"""Agents that call the policy over an OpenAI-compatible endpoint, usable with any actor.

A role with this interface (`agent`) shares the actor's model, as with `EnvironmentInterface`. In the graph
(`realign.api.rl_graph`) it replaces the actor's sampling and the role `reward`. Reads `prompt_ids` and `row`. Writes
the keys of sampling, `rewards` [S] and `turns` [S].

An agent is any program that uses an OpenAI client. `generate` serves the policy on a local port, and runs an agent for
each episode. Every episode has its own base URL and key, by which its calls are captured as tokens. Calls that continue
each other become one sequence, and an episode has one or more sequences, all with its reward. With `role_names`, each
role of an episode has its own sequences and its own reward, as in self-play. If the agent of an episode fails, the
reward is NaN, and the sequences are excluded from the loss and from their group's statistics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from realign.api import (
    GenerationConfig,
    Keys,
    MicroBatchSpec,
    Model,
    ModelInterface,
    Plan,
    SequenceSample,
    Weights,
    derive_seed,
)
from realign.api.environment import Environment, EpisodeFailure
from realign.api.rewards import NAMED
from realign.api.sample import EPISODE, with_response_index
from realign.api.sampling_mask import SAMPLING_MASK, SamplingMask, with_masks
from realign.endpoint.capture import CapturedSequence
from realign.endpoint.limits import EndpointLimits
from realign.endpoint.renderer import Renderer
from realign.endpoint.server import Endpoint, check_installed
from realign.endpoint.sessions import ServedPolicy, Session, Sessions
from realign.environments import Answer, EnvironmentPool, Failures, Limits, SharedLoop, TurnWriter
from realign.environments.agents import START, load_agent, load_command, read_outcome, task
from realign.environments.calls import Step
from realign.environments.tools import load_tools
from realign.errors import SettingsError
from realign.interfaces.environment import failure_codes, keys_written
from realign.settings import Count, Finite, Fraction, Positive

logger = logging.getLogger(__name__)


@dataclass
class AgentInterface(ModelInterface):
    """A policy that agents call over HTTP: `generation.n` episodes per prompt, all concurrent."""

    OUTPUTS = frozenset({"logprobs"})

    agent: str = ""
    """Function `agent(base_url, api_key, row)` that returns a reward, or a list with one for each of its calls,
    `package.module:function` or `path/to/file.py:function`. Set either this or `command`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments to call the function with."""
    command: list[str] = field(default_factory=list)
    """Program and arguments that run one episode. The program reads the row as JSON from stdin, and prints the reward
    as its last line."""
    tools: list[str] = field(default_factory=list)
    """Python functions with type hints and docstrings, `package.module:function` or `path/to/file.py:function`. The
    agent gets them as its parameter `tools` (`realign.environments.Toolbox`)."""
    mcp: list[str] = field(default_factory=list)
    """MCP servers whose tools are added to `tools`: URLs, or commands, which every episode starts for itself."""
    keep_environment: list[str] = field(default_factory=list)
    """Environment variables that look like secrets but are passed to `command`."""
    role_names: list[str] = field(default_factory=list)
    """Names of roles that the policy has in one episode, such as the players of a game. A request names its role as
    `model`, and the agent returns `{"rewards": {role: reward}}`."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling settings of a call (`${interfaces.actor.generation}`): `n` is the number of episodes per prompt,
    `max_new_tokens` the limit of one response in tokens. Requests cannot change `temperature`, `top_p` and `seed`."""
    max_calls: Count = 64
    """Maximum number of model calls per episode; the endpoint rejects more."""
    max_sequence_tokens: Count = 4096
    """Maximum number of tokens of a prompt with its response; the endpoint rejects prompts that leave no room."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template."""
    response_template: str = ""
    """Format of tool calls and reasoning in responses: `auto`, which finds it by the chat template, a family such as
    `qwen3`, or a JSON file with a response template of transformers. Empty: the tokenizer's own one."""
    same_seed: bool = False
    """Give all episodes of a prompt the same seed; false gives each its own. For functions with a parameter `seed`."""
    timeout_s: Positive = 600.0
    """Time limit of one episode in seconds."""
    timeout_reward: Finite | None = None
    """Reward of an episode that takes longer than `timeout_s`, or raises `TimeoutError`, after a model call: a policy
    can learn not to hang its tools. null: such an episode has no reward and doesn't train."""
    concurrency: Count = 256
    """Maximum number of concurrent episodes, also with `rollout=async`."""
    max_failed_fraction: Fraction = 0.5
    """Stop the run if the agent fails in a larger fraction of a batch's episodes."""
    limits: EndpointLimits = field(default_factory=lambda: EndpointLimits(max_concurrent=4096))
    """Limits of requests to the endpoint."""

    @override
    def ineffective(self) -> dict[str, str]:
        of_functions = dict.fromkeys(("arguments", "tools", "mcp"), "with command. Set agent instead")
        return of_functions if self.command else {"keep_environment": "without command. Set command"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.agent) == bool(self.command):
            raise SettingsError("agent: set either agent, a function, or command, a program")
        if self.max_sequence_tokens <= self.generation.max_new_tokens:
            raise SettingsError(
                f"max_sequence_tokens={self.max_sequence_tokens}: must be greater than generation.max_new_tokens="
                f"{self.generation.max_new_tokens}, the length of one response"
            )
        if len(set(self.role_names)) < len(self.role_names) or not all(self.role_names):
            raise SettingsError(f"role_names={self.role_names}: must be different names")
        self._make: Callable[[], Environment] | None = None
        self._loop = SharedLoop(self.name, Limits(self.timeout_s, self.concurrency))
        self._failures = Failures(self.name, self.max_failed_fraction)
        self._lock = threading.Lock()  # guards the attributes below
        self._endpoint: Endpoint | None = None
        self._renderer: Renderer | None = None
        self._warned = False

    @property
    def name(self) -> str:
        """Name of the agent, for messages."""
        return self.agent or self.command[0]

    def open(self) -> None:
        """Load the agent, and check that the packages of the endpoint are installed.

        Raises:
            ConfigError: the function or a tool does not exist, or an extra is missing.
        """
        check_installed()
        self._load_agent()

    def close(self) -> None:
        """Stop the endpoint."""
        with self._lock:
            endpoint, self._endpoint, self._renderer = self._endpoint, None, None
        if endpoint is not None:
            endpoint.close()

    def _load_agent(self) -> Callable[[], Environment]:
        if self._make is None:
            if self.command:
                self._make = load_command(self.command, self.keep_environment)
            else:
                tools = load_tools(self.tools, self.mcp) if self.tools or self.mcp else None
                self._make = load_agent(self.agent, self.arguments, tools)
        return self._make

    @override
    def keys(self, method: str) -> Keys:
        if method != "generate":
            return Keys()
        reports = frozenset(f"{NAMED}{role}" for role in self.role_names)
        writes = {*keys_written(dense=False), *([SAMPLING_MASK] if self.generation.sampling_replay else [])}
        return Keys(needs={"prompt_ids": "", "row": ""}, writes=frozenset(writes), reports=reports)

    @override
    def plan(self) -> Plan:
        return Plan(
            responses_per_prompt=self.generation.n,
            longest_response=self.max_sequence_tokens,
            length_setting="max_sequence_tokens",
            counts_prompt=True,
            temperature=self.generation.temperature,
            generation=self.generation,
            sampler=self.generation.describe(),
            exact_sampling=self.generation.exact,
            weights=Weights.live,
            single_requests=True,
        )

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Return the rows of the launch table."""
        tokens = f"{self.generation.max_new_tokens:,} tokens each, {self.max_sequence_tokens:,} tokens with the prompt"
        return {"agent": self.name, "episode": f"up to {self.max_calls} calls of up to {tokens}"}

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Run `generation.n` episodes for each prompt.

        Raises:
            EnvironmentFailure: the agent failed in too many episodes.
        """
        n, rows = self.generation.n, data.metadata["row"]
        endpoint, renderer = self._start_endpoint(model)
        backend = ServedPolicy(model.sampler, renderer, self.generation, self.max_sequence_tokens, fixed_sampling=True)
        seed = model.call_seed("generate")
        names = [f"{i}/{j}" for i in data.ids for j in range(n)]
        sessions = [Session(backend, name, seed, self.max_calls, roles=tuple(self.role_names)) for name in names]
        for session in sessions:
            endpoint.sessions.open(session)
        try:
            tasks = [task(endpoint.base_url(s), s.key, rows[k // n]) for k, s in enumerate(sessions)]
            seeds = [self._seed(model, i, j) for i in data.ids for j in range(n)]
            answers = self._run(model, list(zip(tasks, seeds, strict=True)))
        finally:
            for session in sessions:
                endpoint.sessions.close(session)
        if (error := next((s.error for s in sessions if s.error is not None), None)) is not None:
            raise error
        played = [self._episode_of(session, answer) for session, answer in zip(sessions, answers, strict=True)]
        self._failures.check([roles[0].failure for roles in played if roles[0].failure], len(played))
        groups = [[role for roles in played[k : k + n] for role in roles] for k in range(0, len(played), n)]
        return pack_episodes(data, groups, self.role_names, masks=self.generation.sampling_replay)

    def _run(self, model: Model, starts: Sequence[tuple[Mapping[str, Any], int]]) -> list[Answer]:
        """Run the agents of all episodes, and return their rewards or failures."""
        writer = TurnWriter(model.tokenizer)  # an agent has no observations
        with EnvironmentPool(
            self.name, self._load_agent(), writer, self._loop, partial(read_outcome, self.role_names)
        ) as pool:
            started = pool.reset(starts)
            able = {k: START for k, answer in enumerate(started) if answer.step is not None}
            ended = dict(zip(able, pool.step(able), strict=True))
        return [ended.get(k, answer) for k, answer in enumerate(started)]

    def _episode_of(self, session: Session, answer: Answer) -> list[Played]:
        """Return the episode of a session, once for each role that made a call."""
        self._warn(session)
        captures, failure, step = session.captures or {"": session.capture}, answer.failure, answer.step
        by_role = {role: sequences for role, capture in captures.items() if (sequences := capture.sequences())}
        timed_out = answer.kind is EpisodeFailure.timeout and self.timeout_reward is not None and bool(by_role)
        if step is None and timed_out:
            failure, step = "", Step(reward=self.timeout_reward or 0.0)
        if step is not None and not by_role:
            failure = "the agent made no call of the endpoint. Pass base_url and api_key to its OpenAI client"
        played = []
        for role, sequences in (by_role or {"": []}).items():
            calls, given = sum(s.calls for s in sequences), None if step is None else step.call_rewards.get(role)
            if given is not None and len(given) != calls and not failure:
                failure = f"the agent returned {len(given)} rewards for {calls} calls. Return one for each call"
            reward = float("nan") if step is None or failure else step.role_rewards.get(role, step.reward)
            kind = EpisodeFailure.exception if failure and answer.kind is None else answer.kind
            # one reward is that of the last call
            rewards = given if given and not failure else [*[0.0] * (calls - 1), reward]
            truncated = step is not None and step.truncated
            played.append(Played(sequences, reward, truncated, failure, role, kind, tuple(rewards)))
        return played

    def _warn(self, session: Session) -> None:
        """Log the first request with parameters that have no effect."""
        if session.ignored and not self._warned:
            self._warned = True
            logger.warning(
                "agent %s: %s of its requests are ignored, since training needs samples of the policy itself; the "
                "settings of `generation` apply. Logged once.",
                self.name,
                ", ".join(session.ignored),
            )

    def _seed(self, model: Model, prompt: Any, episode: int) -> int:
        """Return the seed of an agent."""
        seed = model.call_seed("environments")
        return derive_seed(seed, str(prompt)) if self.same_seed else derive_seed(seed, str(prompt), episode)

    def _start_endpoint(self, model: Model) -> tuple[Endpoint, Renderer]:
        """Return the endpoint, which the first call starts."""
        with self._lock:
            if self._endpoint is None or self._renderer is None:
                self._renderer = Renderer(model.tokenizer, self.template_options, self.response_template)
                self._endpoint = Endpoint(Sessions(), self.limits, model=model.name)
                self._endpoint.start()
            return self._endpoint, self._renderer


@dataclass(frozen=True)
class Played:
    """An episode that has ended, or one role of it."""

    sequences: Sequence[CapturedSequence]
    reward: float
    """NaN if the agent failed."""
    truncated: bool
    failure: str
    """Reason why the episode has no reward; empty if it has one."""
    role: str = ""
    kind: EpisodeFailure | None = None
    """Kind of the failure, also of one that has a reward (`timeout_reward`)."""
    call_rewards: Sequence[float] = ()
    """Reward of each call."""

    def turn_rewards(self, sequence: CapturedSequence) -> torch.Tensor:
        """Return [T] fp32: the reward of each call at its last token in a sequence, 0 elsewhere."""
        reward_T, turns = torch.zeros(len(sequence.ids)), sequence.turn.tolist()
        for place in (t for t, turn in enumerate(turns) if turn >= 0 and turns[t + 1 : t + 2] != [turn]):
            reward_T[place] = self.call_rewards[turns[place]]
        return reward_T


def pack_episodes(
    data: SequenceSample, episodes: Sequence[Sequence[Played]], roles: Sequence[str] = (), *, masks: bool = False
) -> SequenceSample:
    """Pack episodes as sequences of their prompts. An episode without a call becomes its prompt, without a response.

    Args:
        data: the prompts; the result is on the same device.
        episodes: the episodes of each prompt. Each role of an episode is one of its own, with its own reward.
        roles: roles whose rewards are also written as named rewards, NaN in the sequences of other roles.
        masks: whether to write `sampling_mask`.
    """
    groups, numbers = [], list[int]()
    for prompt, group in zip(data.sequences("prompt_ids"), episodes, strict=True):
        parts = [episode.sequences or [_without_calls(prompt.cpu())] for episode in group]
        groups.append([(s, episode) for episode, sequences in zip(group, parts, strict=True) for s in sequences])
        numbers += [number for number, sequences in enumerate(parts) for _ in sequences]
    flat = [pair for group in groups for pair in group]
    sampled_T = torch.cat([s.sampled for s, _ in flat])
    out = SequenceSample.from_sequences(data.ids, {"input_ids": [[s.ids for s, _ in group] for group in groups]})
    out = with_response_index(out).with_sequences(**{EPISODE: torch.tensor(numbers)})
    out = out.with_tokens(
        prompt_mask=~sampled_T,
        loss_mask=sampled_T,
        logprobs=torch.cat([s.logprobs for s, _ in flat]),
        versions=torch.cat([s.versions for s, _ in flat]),
        turn_index=torch.cat([s.turn for s, _ in flat]),
        turn_rewards=torch.cat([episode.turn_rewards(s) for s, episode in flat]),
    ).with_sequences(
        rewards=torch.tensor([episode.reward for _, episode in flat]),
        truncated=torch.tensor([s.truncated or episode.truncated for s, episode in flat]),
        turns=torch.tensor([s.calls for s, _ in flat]),
        failure=failure_codes([episode.kind for _, episode in flat]),
        **{
            f"{NAMED}{role}": torch.tensor([e.reward if e.role == role else float("nan") for _, e in flat])
            for role in roles
        },
    )
    out = with_masks(out, [s.mask for s, _ in flat]) if masks else out
    return out.to(data["prompt_ids"].device)


def _without_calls(prompt_ids: torch.Tensor) -> CapturedSequence:
    total = len(prompt_ids)
    none_T = torch.zeros(total, dtype=torch.bool)
    return CapturedSequence(
        prompt_ids,
        none_T,
        torch.zeros(total),
        torch.full((total,), -1, dtype=torch.int32),
        SamplingMask.none(total),
        calls=0,
        truncated=False,
        turn=torch.full((total,), -1, dtype=torch.int32),
    )


__all__ = ["AgentInterface", "pack_episodes"]
