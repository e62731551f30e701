"""Multi-turn rollouts: conversations with an environment, usable with any actor.

A role with this interface (`agent`) shares the actor's model. In the graph (`realign.api.rl_graph`) it replaces the
actor's sampling and the role `reward`. Reads `prompt_ids` and `row`. Writes the keys of sampling, one sequence per
episode, `rewards` [S] (with `dense` also `dense_rewards` [T]), `turns` [S], and the keys `TURNS` [T].

A sequence is the prompt, followed by alternating sampled tokens and observations. No token is decoded and encoded
again. `prompt_mask` marks the prompt and the observations, `loss_mask` the sampled tokens. `logprobs` is 0 and
`versions` is -1 for all tokens that were not sampled. Advantage estimation skips observations. If the environment of an
episode fails, its reward is NaN, and the episode is excluded from the loss and from its group's statistics.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from realign.api import (
    SAMPLED,
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
from realign.api.environment import Environment, EpisodeFailure, Response
from realign.api.rewards import NAMED, Verifier, total_rewards
from realign.api.router_experts import ROUTER_EXPERTS, with_experts
from realign.api.sample import EPISODE, RESPONSE_INDEX, with_response_index
from realign.api.sampling_mask import SAMPLING_MASK, masks_of, with_masks
from realign.endpoint.renderer import Renderer
from realign.endpoint.response_parsing import ParsedResponse, can_parse
from realign.environments import (
    Answer,
    EnvironmentPool,
    Episode,
    Failures,
    Limits,
    SharedLoop,
    TurnWriter,
    load_environment,
)
from realign.environments.loading import load_with_tools
from realign.environments.tools import load_tools
from realign.errors import SettingsError
from realign.settings import Count, Finite, Fraction, Positive
from realign.tokenization import Tokens

TURNS = ("turn_index", "turn_rewards")
"""Keys [T] of conversations: the turn of each sampled token, from 0 in each episode, and -1 for given tokens; and the
reward of each turn, at its last sampled token."""
_OF_ENVIRONMENT = f"{NAMED}environment"
"""Key [S] of the environment's own rewards, if further functions score the episodes."""


@dataclass
class EnvironmentInterface(ModelInterface):
    """A policy in conversations with an environment: `generation.n` episodes per prompt, all concurrent."""

    OUTPUTS = frozenset({"logprobs"})

    environment: str
    """Environment class, `package.module:Class` or `path/to/file.py:Class` (`realign.api.environment.Environment`). One
    instance is created per episode."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments to create the environment with."""
    tools: list[str] = field(default_factory=list)
    """Python functions with type hints and docstrings, `package.module:function` or `path/to/file.py:function`. The
    environment gets them as the parameter `tools` of `reset` (`realign.environments.Toolbox`)."""
    mcp: list[str] = field(default_factory=list)
    """MCP servers whose tools are added to `tools`: URLs, or commands, which every episode starts for itself."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling settings of a turn (`${interfaces.actor.generation}`): `n` is the number of episodes per prompt,
    `max_new_tokens` the limit of one turn in tokens."""
    max_turns: Count = 8
    """End an episode after this many turns of the policy, and mark it as truncated if it isn't finished."""
    max_episode_tokens: Count = 1024
    """Maximum number of sampled and observation tokens of an episode. If a turn of `max_new_tokens` would exceed it,
    the episode is truncated before the turn."""
    dense: bool = False
    """Store the reward of each turn at its last sampled token (`dense_rewards`) instead of the sum over turns."""
    chat: bool = False
    """Encode observations with the tokenizer's chat template; false: encode plain text."""
    role: str = "tool"
    """Role of the chat message for a plain-text observation, with `chat=true`."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, as in the data settings."""
    response_template: str = ""
    """Format of tool calls and reasoning in a turn, from which `Response.tool_calls` follows: `auto`, a family such as
    `qwen3`, or a JSON file, as in `AgentInterface`. Empty: the tokenizer's own one."""
    same_seed: bool = False
    """Give all episodes of a prompt the same seed, so that a group is compared from the same initial state; false gives
    each its own."""
    timeout_s: Positive = 30.0
    """Time limit of one environment call in seconds. A coroutine that blocks its event loop for 5 s more fails all
    episodes in progress."""
    timeout_reward: Finite | None = None
    """Reward of a turn whose `step` takes longer than `timeout_s` or raises `TimeoutError`, which ends the episode: a
    policy can learn not to hang its tools. null: such an episode has no reward and doesn't train."""
    concurrency: Count = 64
    """Maximum number of concurrent environment calls, also with `rollout=async`."""
    max_failed_fraction: Fraction = 0.5
    """Stop the run if the environment fails in a larger fraction of a batch's episodes."""
    reward: ModelInterface | None = None
    """Interface that also scores finished episodes, such as `RuleRewardInterface`. Its rewards are added to those of
    the environment, which are then reported as `rewards/environment`. null: only the environment rewards."""

    @override
    def ineffective(self) -> dict[str, str]:
        unused = "with chat=false. Set chat=true"
        return {} if self.chat else {"role": unused, "template_options": unused}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_episode_tokens < (turn := self.generation.max_new_tokens):
            raise SettingsError(
                f"max_episode_tokens={self.max_episode_tokens}: must be at least generation.max_new_tokens={turn}, the "
                "length of one turn"
            )
        if self.reward is not None and self.reward.needs_engine:
            raise SettingsError(f"reward: {type(self.reward).__name__} needs a model, so it cannot score episodes here")
        if isinstance(self.reward, Verifier) and self.reward.known_answer is not None:
            raise SettingsError(
                f"reward.known_answer={self.reward.known_answer}: cannot be checked on episodes. Remove it"
            )
        self._make: Callable[[], Environment] | None = None
        self._loop = SharedLoop(self.environment, Limits(self.timeout_s, self.concurrency))
        self._failures = Failures(self.environment, self.max_failed_fraction)
        self._renderer: Renderer | None = None

    def open(self) -> None:
        """Load the environment class and the reward functions.

        Raises:
            ConfigError: the class does not exist, is no environment, or cannot call tools, a function does not exist,
                or an extra is missing.
        """
        self._load_environment()
        if self.reward is not None:
            self.reward.open()

    def close(self) -> None:
        """Stop the workers of the reward functions."""
        if self.reward is not None:
            self.reward.close()

    def _load_environment(self) -> Callable[[], Environment]:
        if self._make is None:
            if self.tools or self.mcp:
                sources = load_tools(self.tools, self.mcp)
                self._make = load_with_tools(self.environment, self.arguments, sources)
            else:
                self._make = load_environment(self.environment, self.arguments)
        return self._make

    @override
    def keys(self, method: str) -> Keys:
        if method != "generate":
            return Keys()
        reports = frozenset() if self.reward is None else self.reward.keys("inference").reports | {_OF_ENVIRONMENT}
        writes = {*keys_written(self.dense), *([ROUTER_EXPERTS] if self.generation.router_replay else [])}
        writes |= {SAMPLING_MASK} if self.generation.sampling_replay else set()
        return Keys(needs={"prompt_ids": "", "row": ""}, writes=frozenset(writes), reports=reports)

    @override
    def plan(self) -> Plan:
        return Plan(
            responses_per_prompt=self.generation.n,
            longest_response=self.max_episode_tokens,
            length_setting="max_episode_tokens",
            temperature=self.generation.temperature,
            generation=self.generation,
            sampler=self.generation.describe(),
            exact_sampling=self.generation.exact,
            weights=Weights.live,
            whole_batch=self.reward is not None and self.reward.plan().whole_batch,
        )

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """Run `generation.n` episodes for each prompt.

        Raises:
            EnvironmentFailure: the environment failed in too many episodes.
        """
        n, rows = self.generation.n, data.metadata["row"]
        prompts = list(zip(data.ids, data.sequences("prompt_ids"), rows, strict=True))
        episodes = [Episode(f"{i}/{j}", ids.cpu()) for i, ids, _ in prompts for j in range(n)]
        starts = [(row, self._seed(model, str(i), j)) for i, _, row in prompts for j in range(n)]
        writer = TurnWriter(model.tokenizer, self.chat, self.role, self.template_options)
        seed = model.call_seed("generate")
        with EnvironmentPool(self.environment, self._load_environment(), writer, self._loop) as pool:
            # One rank calls the environments for all: observations must be identical on every rank.
            self._take(episodes, model.lead(partial(pool.reset, starts)))
            for turn in range(self.max_turns):
                live = {place: episode for place, episode in enumerate(episodes) if not episode.over}
                if not live:
                    break
                responses = self._speak(model, live, turn, derive_seed(seed, "turn", turn), [row for row, _ in starts])
                self._take(live.values(), model.lead(partial(pool.step, responses)))
        self._failures.check([e.failure for e in episodes if e.failure], len(episodes))
        if not any(e.turn_ends or e.failure for e in episodes):
            warnings.warn(
                f"max_episode_tokens={self.max_episode_tokens}: no episode of environment {self.environment} had a "
                f"turn, since a first observation and generation.max_new_tokens={self.generation.max_new_tokens} "
                "exceed it. Training continues without these episodes. Raise max_episode_tokens",
                stacklevel=2,
            )
        played = pack_episodes(data, episodes, dense=self.dense)
        if self.generation.sampling_replay:
            played = with_masks(played, [episode.mask for episode in episodes])
        if self.generation.router_replay:
            played = with_experts(played, [episode.all_experts() for episode in episodes])
        return self._score(model, played.with_metadata(row=rows))

    def _score(self, model: Model, played: SequenceSample) -> SequenceSample:
        """Return the episodes, with the rewards of `reward` added."""
        result = played.select(played.keys - {"row"})
        if self.reward is None:
            return result
        # No engine: `__post_init__` accepts only rewards that need none.
        judge = Model(model.name, None, model.tokenizer, model.seed, model.version)
        scored = model.lead(partial(self.reward.inference, judge, played, MicroBatchSpec()))
        own_S = played["rewards"]
        if self.dense:  # then `rewards` only marks failed episodes
            own_S = torch.where(own_S.isnan(), own_S, total_rewards(played))
        scored = scored.to(own_S.device)
        named = {_OF_ENVIRONMENT: own_S} | {key: scored[key] for key in scored.keys - {"rewards"}}
        return result.with_sequences(rewards=played["rewards"] + scored["rewards"], **named)

    def _seed(self, model: Model, prompt: str, episode: int) -> int:
        """Return the seed of an environment."""
        seed = model.call_seed("environments")
        return derive_seed(seed, prompt) if self.same_seed else derive_seed(seed, prompt, episode)

    def _speak(
        self, model: Model, episodes: Mapping[int, Episode], turn: int, seed: int, rows: Sequence[Mapping[str, Any]]
    ) -> dict[int, Response]:
        """Sample one turn of each episode, in one call of the sampler."""
        contexts = SequenceSample.from_sequences(
            # Random numbers follow from ids, so each turn of an episode needs its own.
            [f"{e.name}/turn{turn}" for e in episodes.values()],
            {"prompt_ids": [[e.ids] for e in episodes.values()]},
        )
        out = model.sampler.generate(contexts, replace(self.generation, n=1), seed=seed).to("cpu")
        columns = zip(*(out.sequences(key) for key in ("input_ids", "logprobs", "versions")), strict=True)
        if self.generation.router_replay:
            for episode, experts in zip(episodes.values(), out.sequences(ROUTER_EXPERTS), strict=True):
                episode.record(experts)
        masks = masks_of(out) if self.generation.sampling_replay else [None] * len(episodes)
        responses = {}
        for (place, episode), column, cut, mask in zip(
            episodes.items(), columns, out["truncated"].tolist(), masks, strict=True
        ):
            before, (ids, logprobs, versions) = episode.ids.tolist(), (x[len(episode.ids) :] for x in column)
            episode.say(ids, logprobs, versions, None if mask is None else mask.last(len(ids)))
            text = Tokens(model.tokenizer).decode(ids.tolist(), before, special=False)
            parts = self._parts(model, text, ids.tolist(), before, rows[place].get("tools"))
            responses[place] = Response(
                text, tuple(ids.tolist()), turn, cut, parts.content, parts.tool_calls, parts.reasoning
            )
        return responses

    def _parts(self, model: Model, text: str, ids: Sequence[int], before: Sequence[int], tools: Any) -> ParsedResponse:
        """Parse a turn. The tools of the row determine the types of arguments."""
        if self._renderer is None:
            self._renderer = Renderer(model.tokenizer, self.template_options, self.response_template)
        if not can_parse(self._renderer.tokenizer):
            return ParsedResponse(text)
        return self._renderer.parse(ids, before=before, tools=tools if isinstance(tools, list) else None)

    def _take(self, episodes: Iterable[Episode], answers: Sequence[Answer]) -> None:
        """Add the environments' answers to the episodes, and end episodes in which no turn can follow."""
        # What may be used before a turn, so that a whole turn still fits.
        room = self.max_episode_tokens - self.generation.max_new_tokens
        for episode, answer in zip(episodes, answers, strict=True):
            step = answer.step
            if step is None:
                # the policy can cause a time-out of its turn, but not one of `reset`
                learns = answer.kind is EpisodeFailure.timeout and self.timeout_reward is not None and episode.turn_ends
                episode.rewards += [self.timeout_reward] if learns and self.timeout_reward is not None else []
                episode.end(failure="" if learns else answer.failure, kind=answer.kind)
                continue
            if episode.turn_ends:  # `reset` returns no reward
                episode.rewards.append(step.reward)
            if step.over:
                episode.end(truncated=step.truncated)
            elif len(episode.turn_ends) == self.max_turns or episode.response_tokens + len(step.tokens) > room:
                episode.end(truncated=True)
            else:
                episode.observe(step.tokens)

    def describe(self, batch_prompts: int) -> dict[str, str]:
        """Return the rows of the launch table."""
        tokens = f"{self.generation.max_new_tokens:,} tokens each, {self.max_episode_tokens:,} tokens in all"
        return {"environment": self.environment, "episode": f"up to {self.max_turns} turns of up to {tokens}"}


def pack_episodes(data: SequenceSample, episodes: Sequence[Episode], *, dense: bool) -> SequenceSample:
    """Pack episodes as sequences of their prompts, the same number for each, with every key that a graph may read.

    Args:
        data: the prompts; the result is on the same device.
        episodes: episodes in the order of the prompts.
        dense: whether to write `dense_rewards`, the rewards of turns.
    """
    n = len(episodes) // len(data)

    def group(values: Sequence[Any]) -> list[list[Any]]:
        return [list(values[i : i + n]) for i in range(0, len(values), n)]

    out = SequenceSample.from_sequences(data.ids, {"input_ids": group([e.ids for e in episodes])})
    sampled_T = torch.cat([e.sampled for e in episodes])
    out = out.with_tokens(
        prompt_mask=~sampled_T,
        loss_mask=sampled_T,
        logprobs=torch.cat([e.logprobs for e in episodes]),
        versions=torch.cat([e.versions for e in episodes]),
    )
    rewards_S = torch.tensor([e.reward for e in episodes])
    turn_rewards_T = torch.cat([e.turn_rewards() for e in episodes])
    out = out.with_tokens(turn_index=torch.cat([e.turn_index() for e in episodes]), turn_rewards=turn_rewards_T)
    if dense:
        out = out.with_tokens(dense_rewards=turn_rewards_T)
        rewards_S = rewards_S.where(rewards_S.isnan(), 0)  # with dense rewards, it only marks missing rewards (NaN)
    out = out.with_sequences(
        rewards=rewards_S,
        truncated=torch.tensor([e.truncated for e in episodes]),
        turns=torch.tensor([len(e.turn_ends) for e in episodes]),
        failure=failure_codes([e.kind for e in episodes]),
    )
    out = with_response_index(out)  # an episode is one sequence
    return out.with_sequences(**{EPISODE: out[RESPONSE_INDEX]}).to(data["prompt_ids"].device)


def keys_written(dense: bool) -> tuple[str, ...]:
    """Return the keys that `generate` writes."""
    return (*SAMPLED, "rewards", *(("dense_rewards",) if dense else ()), "turns", *TURNS, "failure")


def failure_codes(kinds: Sequence[EpisodeFailure | None]) -> torch.Tensor:
    """Return the key `failure` [S] of episodes that failed in these ways, None for those that did not."""
    places = list(EpisodeFailure)
    return torch.tensor([0 if kind is None else 1 + places.index(kind) for kind in kinds], dtype=torch.int8)


__all__ = ["EnvironmentInterface"]
