"""Record settings, messages and runs of realign, and compare them with a recording. Temporary.

    python scripts/frozen.py write OUT_DIR [--only PART]
    python scripts/frozen.py compare OUT_DIR [--only PART] [--quick] [--ignore REGEX]

Parts: `settings` (all experiments, presets, overrides and user files), `messages` (wrong command lines, help and
completion), `runs` (weights, metrics and samples of small runs). `write` also saves its inputs, which are tiny models,
data and the rows of tests/config_mistakes.yaml, in OUT_DIR/inputs; `compare` uses these. The exit code of `compare` is
1 if anything differs. Where classes live (`realign.a.b.Name`) does not count, but is told.

Calls the command line only, in process. The one exception is `resolved`.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "120",
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PYTHONHASHSEED": "0",
    "SECRET_TOKEN": "hush",
    "MY_STEPS": "7",
}
LEFT_OUT = (
    "runs with Ray, torchrun, servers, and rollout=async, whose numbers depend on time: areal_decoupled runs with sync",
    "curves.png, system.jsonl, spans.jsonl, logs, checkpoints, records of calls",
    "time and speed: metrics that match TIMED",
)
MOVED: dict[str, str] = {}
"""Import paths in the words and files below, and where they are now. Add to it when a public name moves."""
TIMED = re.compile(
    r"^seconds$|^time/|_per_s$|_s$|(^|[/_])(memory|bytes|gib|mib|rss)(_|$)|idle_fraction|^system/|overlap"
)
"""Metrics that depend on the machine."""
Entry = dict[str, Any]
Recorder = Callable[[], Entry]

# --- inputs ---

SCORE = "realign.rewards.arithmetic:exact_answer"
ACTOR = ["models.actor.path=m", "data.path=prompts.jsonl"]
RULE = [*ACTOR, "interfaces.reward.function=lab.py:score"]
LEARNED = [*ACTOR, "models.reward.path=r"]
PAIRS = ["models.actor.path=m", "data.path=pairs.jsonl"]
LABELS = ["models.reward.path=m", "data.path=labels.jsonl", "calibration.data.path=prompts.jsonl"]
WITH_REWARD_MODEL = ["ppo", "deepspeed_chat", "openrlhf_ppo", "llama2_chat", "qwen_rlhf", "secrets_of_rlhf"]
WITH_REWARD_MODEL += ["lm_human_preferences", "lm_human_preferences_cnndm", "lm_human_preferences_tldr"]
GIVEN: dict[str, list[str]] = {
    **dict.fromkeys(WITH_REWARD_MODEL, LEARNED),
    **{f"lm_human_preferences_reward{task}": LABELS for task in ("", "_cnndm", "_tldr")},
    **dict.fromkeys(["grpo", "trlx_ppo", "areal_decoupled", "areal_ppo", "online_dpo", "raft", "remax"], RULE),
    "instructgpt": [
        *("models.actor.path=m", "models.reward.path=r"),
        *("data.prompts.path=prompts.jsonl", "data.pretraining.path=text.jsonl"),
    ],
    "dpo": PAIRS,
    "ilql": ["models.actor.path=m", "data.path=rewarded.jsonl"],
    "kto": ["models.actor.path=m", "data.path=unpaired.jsonl"],
    "grpo_reasoning": ["models.actor.path=chat", "data.path=prompts.jsonl", "evaluation.data.path=prompts.jsonl"],
    "grpo_agent": [*ACTOR, "interfaces.agent.agent=lab.py:agent"],
    "grpo_environment": [*ACTOR, "interfaces.agent.environment=lab.py:World"],
    "gkd": [*ACTOR, "models.teacher.path=t"],
    "on_policy_distillation": [*ACTOR, "models.teacher.path=t"],
    "self_distillation": ACTOR,
    "reward_model": ["models.reward.path=m", "data.path=pairs.jsonl"],
    "sft": ["models.actor.path=m", "data.path=demonstrations.jsonl"],
}
"""Required values (`???`) of the shipped experiments."""
NEEDS = {"dapo": ["interfaces.actor.truncation.overlong_buffer=2"]}
PREFERENCE = ("cpo", "dpo_norm", "ipo", "orpo", "robust_dpo", "simpo")
"""Presets for experiment=dpo."""

FILES = {
    "lab.py": '''\
from dataclasses import dataclass, field

import torch
from realign.api import Mean
from realign.interfaces.components import AdvantageEstimator, GroupRelative, KLPenalty, Objective, RewardShaping
from realign.interfaces.grpo import GRPOActorInterface
from realign.settings import Finite, NonNegative, Positive


@dataclass
class SoftClip(Objective):
    """The importance-weighted policy gradient with a soft clip."""

    width: Positive = 0.2
    """Width of the clip."""
    shape: str = "tanh"

    def loss(self, tokens):
        return -self.width * torch.tanh((tokens.ratio_T - 1) / self.width) * tokens.advantages_T


@dataclass
class Passed(GroupRelative):
    """1 for a reward of at least `threshold`, else 0."""

    threshold: Finite = 0.5

    def estimate(self, rewards, data, reduce):
        return (rewards.per_sequence >= self.threshold).float()


@dataclass
class HingeKL(KLPenalty):
    """Only log-ratios above `free` nats cost."""

    free: NonNegative = 0.1

    def estimate(self, logprobs_T, ref_logprobs_T):
        return (logprobs_T - ref_logprobs_T - self.free).clamp(min=0)


@dataclass
class Squashed(RewardShaping):
    """Scores between -limit and limit."""

    limit: Positive = 1.0

    def shape(self, moments, rewards_S):
        return self.limit * torch.tanh(super().shape(moments, rewards_S) / self.limit)


@dataclass
class PassedActor(GRPOActorInterface):
    """GRPO on successes, with a soft clip."""

    advantage: AdvantageEstimator = field(default_factory=Passed)
    objective: Objective = field(default_factory=SoftClip)


@dataclass
class LikelihoodActor(GRPOActorInterface):
    """Likelihood of the responses that are better than their group."""

    strength: Positive = 1.0

    def loss(self, output, minibatch):
        mask_T, better_T = minibatch["loss_mask"], minibatch["advantages"] > 0
        logprobs_T = output.logprobs(temperature=self.generation.temperature, where_T=mask_T)
        loss_T = torch.where(mask_T & better_T, -logprobs_T, 0) * self.strength
        return self.aggregation.total(loss_T, mask_T, minibatch.cu_seqlens()), {}


class Plain:
    """No component."""


def score(prompt, response, row):
    return response.count("a") + len(response) / 7 + (response[:1] in "13579")


def other(prompt, response, row):
    return float(len(response) % 3)


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: First factor.
        b: Second factor.
    """
    return a * b


class World:
    async def reset(self, row, *, seed):
        self.turns = 0
        return "", {}

    async def step(self, response):
        self.turns += 1
        return "more ", len(response.text) / 7 + response.text.count("a"), self.turns == 2, False, {}


def agent(base_url, api_key, row):
    import json
    from urllib.request import Request, urlopen

    message = {"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}], "max_tokens": 6}
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    url = f"{base_url}/chat/completions"
    with urlopen(Request(url, json.dumps(message).encode(), head), timeout=600) as answer:
        text = json.loads(answer.read())["choices"][0]["message"]["content"]
    return len(text) / 7
''',
    "raises.py": "raise RuntimeError('no such luck')\n",
    "syntax.py": "def score(:\n",
    "conf/experiment/mine.yaml": """\
# @package _global_
# My own experiment.
defaults:
  - /experiment/grpo
name: mine
models: {actor: {path: m}}
data: {path: prompts.jsonl}
interfaces:
  actor: {objective: soft_clip_is_no_word, epochs: 2}
  reward: {function: "lab.py:score"}
""",
    "conf/experiment/targets.yaml": """\
# @package _global_
# My own classes, by import path.
defaults:
  - /experiment/grpo
  - /algorithm/rloo
  - _self_
name: targets
models: {actor: {path: m, trains: {_target_: lora, rank: 4}}}
data: {path: prompts.jsonl}
interfaces:
  actor:
    _target_: lab.PassedActor
    objective: {_target_: lab.SoftClip, width: 0.5}
    kl: {_target_: lab.HingeKL, place: loss, free: 0.2}
  reward: {function: "lab.py:score"}
""",
    "conf/experiment/whole.yaml": """\
# @package _global_
# Written from nothing.
name: whole
steps: 3
batch_prompts: 4
models:
  actor: {_target_: transformers, path: m, optimizer: {lr: "${rate}"}}
interfaces:
  actor: {_target_: ppo, advantage: group_relative, generation: {n: 4, max_new_tokens: 6}}
  reward: {_target_: realign.interfaces.rule_reward.RuleRewardInterface, function: "lab.py:score"}
data: {_target_: realign.data.PromptData, path: prompts.jsonl}
""",
    "conf/experiment/words.yaml": """\
# @package _global_
# A child that changes classes and fields of its base.
defaults:
  - ppo
  - override /rollout: async
name: words
models: {actor: {path: m}, reward: {path: r}}
data: {path: prompts.jsonl}
interfaces:
  actor:
    advantage: {_target_: gae, lam: 0.9}
    objective: {low: 0.1}
    kl: none
    generation: {n: 2}
""",
    "conf/experiment/null.yaml": """\
# @package _global_
# Removes parts of its base.
defaults:
  - /experiment/grpo_arithmetic
name: "null"
evaluation: null
models: {actor: {optimizer: {schedule: null}}}
interfaces: {actor: {kl: null, adv_norm: null}}
""",
    "conf/experiment/typo.yaml": """\
# @package _global_
defaults:
  - /experiment/grpo
interfaces: {actor: {objektive: clip, generation: {nn: 2}}}
stepz: 4
""",
    "conf/experiment/cycle.yaml": "# @package _global_\ndefaults:\n  - cycle\nname: cycle\n",
    "conf/experiment/lost.yaml": "# @package _global_\ndefaults:\n  - /experiment/nowhere\nname: lost\n",
    "conf/experiment/twice.yaml": "# @package _global_\nname: twice\nsteps: 1\nsteps: 2\n",
    "conf/experiment/broken.yaml": "# @package _global_\nname: [broken\n",
    "conf/experiment/list.yaml": "- steps\n- 3\n",
    "conf/experiment/empty.yaml": "",
    "conf/experiment/tag.yaml": "# @package _global_\nname: !!python/object/apply:os.getcwd []\n",
    "conf/experiment/group.yaml": "# @package _global_\ndefaults:\n  - /experiment/grpo\n  - override /model: big\n",
    "conf/experiment/rloo.yaml": "# @package _global_\n# Preset.\ndefaults: [/experiment/grpo, /algorithm/gspo]\n",
    "conf/algorithm/mine.yaml": """\
# @package _global_
# My own preset.
defaults: [rloo, _self_]
interfaces: {actor: {epochs: 2, objective: {_target_: clip, low: 0.15}}}
""",
    "conf/algorithm/targets.yaml": """\
# @package _global_
# My own classes.
interfaces:
  actor:
    objective: {_target_: lab.SoftClip, width: 0.4}
    advantage: {_target_: lab.Passed, threshold: 0.25}
    reward: {_target_: lab.Squashed, limit: 3.0}
""",
    "conf/algorithm/leaves.yaml": """\
# @package _global_
# Fields only.
interfaces: {actor: {objective: {low: 0.05}, kl: {coef: 0.5}, adv_norm: {std: none}}}
steps: 11
""",
    "conf/algorithm/typo.yaml": "# @package _global_\ninterfaces: {actor: {objective: {lo: 0.05}}}\n",
    "conf/algorithm/wrong.yaml": "# @package _global_\ninterfaces: {actor: {objective: clipp}}\n",
    "conf/algorithm/range.yaml": "# @package _global_\ninterfaces: {actor: {epochs: 0}}\n",
    "conf/algorithm/grpo.yaml": "# @package _global_\n# Shadows a shipped one.\ninterfaces: {actor: {epochs: 3}}\n",
    "my.yaml": """\
defaults:
  - /experiment/grpo
  - /algorithm/dapo
name: my
steps: 5
models: {actor: {path: m}}
data: {path: prompts.jsonl}
interfaces:
  actor: {truncation: {overlong_buffer: 2}}
  reward: {function: "lab.py:score"}
""",
    "chain.yaml": "defaults:\n  - my\n  - override /algorithm: gspo\nname: chain\n",
    "below.yaml": "defaults:\n  - my\n  - _self_\nname: below\nsteps: ${batch_prompts}\nbatch_prompts: 4\n",
    "sweeps.yaml": "defaults:\n  - my\nhydra: {sweeper: {params: {seed: '0,1'}}}\n",
    "bad.yaml": "defaults: 3\n",
    "scalar.yaml": "steps\n",
    "pipeline.txt": "steps: 3\n",
    "trl.yaml": "loss_type: dr_grpo\nbeta: 0.1\nnum_generations: 4\nlearning_rate: 1e-6\nnonsense: 3\n",
    "verl.yaml": "actor_rollout_ref: {actor: {clip_ratio: 0.2, optim: {lr: 1e-6}}}\nalgorithm: {adv_estimator: grpo}\n",
    "empty.jsonl": "",
    "broken.jsonl": '{"prompt": "1"}\n{"prompt": \n',
    "numbers.jsonl": '{"prompt": 3}\n',
}
"""User files of all parts."""

# Overrides are combined with experiments and presets. `{role}` is `actor`, or `reward` where there is no actor.
OVERRIDES = [
    # words, fields, both in either order, and classes by path
    "interfaces.actor.objective=clip",
    "interfaces.actor.objective=clip interfaces.actor.objective.low=0.1",
    "interfaces.actor.objective.low=0.1 interfaces.actor.objective=clip",
    "interfaces.actor.objective=gspo",
    "interfaces.actor.objective.low=0.1",
    "interfaces.actor.objective.tau_pos=2 interfaces.actor.objective=sapo",
    "interfaces.actor.objective={_target_: clip, dual: 3.0}",
    "interfaces.actor.objective._target_=lab.SoftClip",
    "interfaces.actor.objective._target_=lab.SoftClip interfaces.actor.objective.width=0.3",
    "interfaces.actor.objective.width=0.3 interfaces.actor.objective._target_=lab.SoftClip",
    "interfaces.actor.objective._target_=lab.SoftClip interfaces.actor.objective.low=0.3",
    "interfaces.actor.objective=lab.SoftClip",
    "interfaces.actor.objective=soft_clip",
    "interfaces.actor.objective._target_=lab.Plain",
    "interfaces.actor.objective._target_=lab.Missing",
    "interfaces.actor.objective=null",
    "~interfaces.actor.objective",
    "interfaces.actor.objective=clipp",
    "interfaces.actor.objective.lo=0.1",
    "interfaces.actor.advantage=gae",
    "interfaces.actor.advantage.lam=0.9 interfaces.actor.advantage=gae",
    "interfaces.actor.advantage.lam=0.9",
    "interfaces.actor.advantage._target_=lab.Passed interfaces.actor.advantage.threshold=1",
    "interfaces.actor.adv_norm.std=none",
    "interfaces.actor.adv_norm={mean: group, std: group}",
    "interfaces.actor.adv_norm=null",
    "interfaces.actor.adv_norm.std=grup",
    "interfaces.actor.kl={place: loss, coef: 0.1}",
    "interfaces.actor.kl.place=reward",
    "interfaces.actor.kl._target_=lab.HingeKL interfaces.actor.kl.free=0.2 interfaces.actor.kl.place=loss",
    "interfaces.actor.kl.place=none interfaces.actor.kl.coef=0.2",
    "~interfaces.actor.kl",
    "interfaces.actor.aggregation=seq_mean_token_sum",
    "interfaces.actor.aggregation.tokens=100 interfaces.actor.aggregation=constant",
    "interfaces.actor.critic=shared",
    "interfaces.actor.critic=none",
    "interfaces.actor.value.coef=0.1",
    "interfaces.actor.credit_per_minibatch=true",
    "interfaces.{role}.epochs=2 interfaces.{role}.n_minibatches=2",
    "interfaces.{role}.epochs=0",
    "interfaces.actor=ppo",
    "interfaces.actor=grpo interfaces.actor.epochs=2",
    "interfaces.actor._target_=lab.PassedActor",
    "interfaces.actor._target_=lab.LikelihoodActor interfaces.actor.strength=0.5",
    "interfaces.actor.strength=0.5 interfaces.actor._target_=lab.LikelihoodActor",
    "interfaces.actor={_target_: grpo, generation: {n: 2}}",
    "interfaces.actor=null",
    "interfaces.actr.epochs=2",
    "interfaces.actor.generation.n=4",
    "interfaces.actor.generation={n: 4, max_new_tokens: 8}",
    "interfaces.actor.generation.stop_token_ids=[1,2]",
    "interfaces.actor.generation.temperature=0",
    "interfaces.actor.beta=0.5",
    "interfaces.actor.kind=ipo",
    "interfaces.actor.reward.baseline=greedy",
    "interfaces.actor.reward._target_=lab.Squashed interfaces.actor.reward.limit=2",
    "interfaces.actor.truncation.mask=true",
    "interfaces.reward.function=lab.py:other",
    "interfaces.reward=reward_model",
    "interfaces.reward.workers=-1",
    # models, data, and the run
    "models.{role}.trains=lora",
    "models.{role}.trains.rank=4 models.{role}.trains=lora",
    "models.{role}.trains.rank=4",
    "models.{role}.optimizer.lr=${models.{role}.optimizer.eps}",
    "models.{role}.optimizer.lr=-1",
    "models.{role}.optimizer.betas=[0.9,0.99]",
    "models.{role}.optimizer=null",
    "models.{role}.dtype=bf16",
    "models.ref.path=other",
    "models.{role}=null",
    "data.path=[a.jsonl,{path: b.jsonl, weight: 2}]",
    "data=prompts",
    "~data",
    "evaluation.every_steps=5 evaluation.data.path=prompts.jsonl",
    "evaluation=null",
    "evaluations.math.data.path=prompts.jsonl",
    "curriculum=pass_rate",
    "dynamic_sampling.max_batches=2",
    "rollout=async rollout.max_staleness=2",
    "rollout.max_staleness=2",
    "runtime=ray",
    "trackers.tb=tensorboard callbacks.stop=early_stopping",
    "callbacks.mine._target_=lab.Plain",
    "sync.ref={of: actor, weight: 0.1}",
    "steps=3 seed=1 name=mine",
    "steps=ten",
    "stps=3",
    "steps=${batch_prompts}",
    "steps=${nope}",
    "steps=${oc.env:MY_STEPS}",
    "steps=1,2",
    "++steps=4 +foo=1",
    "microbatch=4096",
    "checkpoint.keep=0",
    "save_best=eval/reward",
    "resume_allow=[seed]",
    # names of other tools
    "lr=1e-5",
    "num_generations=4",
    "kl_coef=0.1",
    "loss_type=dr_grpo",
    "batch_size=4",
    "actor_rollout_ref.actor.clip_ratio=0.2",
    # presets of the user
    "algorithm=mine --config-dir conf",
    "algorithm=targets --config-dir conf",
    "algorithm=leaves --config-dir conf",
    "algorithm=grpo --config-dir conf",
    "algorithm=typo --config-dir conf",
    "algorithm=rloo interfaces.actor.kl.coef=0.3",
    "algorithm=gspo interfaces.actor._target_=lab.PassedActor",
    "algorithm=gspo interfaces.actor.objective.low=0.001 interfaces.actor.adv_norm.std=none",
    "algorithm=simpo interfaces.actor.beta=3",
]
ALWAYS = ["grpo", "ppo", "online_dpo", "areal_decoupled", "dpo", "sft", "reward_model", "trlx_ppo", "grpo_environment"]
ALWAYS += ["grpo algorithm=rloo", "grpo algorithm=dapo", "ppo algorithm=gspo", "dpo algorithm=simpo"]
ALWAYS += ["areal_decoupled algorithm=cispo"]
"""Experiments and presets that are combined with all overrides. The others are combined with one in SHARE."""
SHARE = 5

USER_EXPERIMENTS = [
    "mine",
    "targets",
    "words",
    "null",
    "typo",
    "cycle",
    "lost",
    "twice",
    "broken",
    "list",
    "empty",
    "tag",
]
USER_EXPERIMENTS += ["group", "rloo", "absent", "whole"]
USER_LINES = [
    *(f"experiment={name} --config-dir conf" for name in USER_EXPERIMENTS),
    *(f"experiment=grpo algorithm={name} --config-dir conf {{rule}}" for name in ("wrong", "range", "absent")),
    "experiment=mine interfaces.actor.objective=clip --config-dir conf",
    "experiment=mine interfaces.actor.objective._target_=lab.SoftClip --config-dir conf",
    "experiment=mine interfaces.actor.objective._target_=lab.SoftClip algorithm=rloo --config-dir conf",
    "experiment=mine interfaces.actor.objective=clip algorithm=rloo --config-dir conf",
    "experiment=whole +rate=0.1 --config-dir conf",
    "experiment=whole models.actor.optimizer.lr=0.1 --config-dir conf",
    "experiment=whole models.actor.optimizer.lr=0.1 algorithm=dr_grpo --config-dir conf",
    *(
        f"experiment=targets algorithm={name} --config-dir conf"
        for name in ("gspo", "remax", "simpo", "mine", "leaves", "targets")
    ),
    "experiment=targets interfaces.actor.objective=clip --config-dir conf",
    "experiment=targets interfaces.actor.objective.width=0.1 --config-dir conf",
    "experiment=targets interfaces.actor=grpo --config-dir conf",
    "experiment=targets models.actor.trains.rank=8 --config-dir conf",
    "experiment=targets models.actor.trains=all --config-dir conf",
    "experiment=words interfaces.actor.advantage.lam=0.8 --config-dir conf",
    "experiment=words interfaces.actor.kl.place=reward --config-dir conf",
    "experiment=words algorithm=rloo --config-dir conf",
    "experiment=words rollout=sync --config-dir conf",
    *(f"./{name}" for name in ["my.yaml", "chain.yaml", "below.yaml", "sweeps.yaml", "bad.yaml", "scalar.yaml"]),
    *(f"./my.yaml {words}" for words in ["steps=7", "algorithm=rloo", "interfaces.actor.objective.high=0.3"]),
    *("./absent.yaml", "./pipeline.txt", "experiment=./my.yaml", "./my.yaml ./below.yaml", "./my.yaml experiment=ppo"),
    "./my.yaml interfaces.actor._target_=lab.PassedActor algorithm=gspo",
    "./my.yaml interfaces.actor._target_=lab.PassedActor interfaces.actor.objective._target_=lab.SoftClip",
    *("experiment=grpo --config-dir nowhere", "experiment=grpo --config-dir my.yaml", "./my.yaml --config-dir conf"),
    "--steps 3 --experiment grpo {rule}",
    "--overwrite experiment=grpo {rule}",
    "experiment=grpo {rule} -- steps=3",
    *("experiment=grpo algorithm=rloo algorithm=gspo {rule}", "algorithm=rloo experiment=grpo {rule}"),
    *("experiment=grpo experiment=ppo", "algorithm=rloo", "algorithm=[rloo,gspo] experiment=grpo {rule}"),
    *("experiment=grpo algorithm=null {rule}", "experiment=grpo ~algorithm {rule}", "experiment=null"),
    "experiment=grpo data={path: prompts.jsonl} models.actor={path: m} interfaces.reward={function: 'lab.py:score'}",
    "experiment=grpo models.actor.path=m data.path=prompts.jsonl interfaces.reward.functions={a: 'lab.py:score'} "
    "interfaces.reward.function=null",
    "experiment=grpo {rule} models.actor.path=${oc.env:SECRET_TOKEN}",
    "experiment=grpo {rule} name=${oc.env:NOPE,x} steps=${oc.env:NOPE}",
    "experiment=grpo {rule} models.actor.optimizer.lr=${models.actor.optimizer.lr}",
    "experiment=grpo {rule} interfaces.actor.epochs=${interfaces.actor.n_minibatches} interfaces.actor.n_minibatches=2",
    "experiment=grpo {rule} name='a b' output_dir=\"x y\"",
    "experiment=grpo {rule} name=größe",
    "experiment=grpo {rule} hydra.run.dir=elsewhere",
    "experiment=grpo {rule} hydra.verbose=true",
    "experiment=grpo {rule} hydra.nonsense=1",
]
"""Command lines with files of the user."""

STARTS = {
    "grpo": [
        "experiment=grpo",
        "models.actor.path=m",
        "data.path=prompts.jsonl",
        f"interfaces.reward.function={SCORE}",
    ],
    "ppo": ["experiment=ppo", *LEARNED],
    "dpo": ["experiment=dpo", *PAIRS],
    "sft": ["experiment=sft", *GIVEN["sft"]],
    "rm": ["experiment=reward_model", *GIVEN["reward_model"]],
    "env": ["experiment=grpo_environment", *GIVEN["grpo_environment"]],
    "agent": ["experiment=grpo_agent", *GIVEN["grpo_agent"]],
    "gkd": ["experiment=gkd", *GIVEN["gkd"]],
    "ilql": ["experiment=ilql", *GIVEN["ilql"]],
    "kto": ["experiment=kto", *GIVEN["kto"]],
    "lmhp": ["experiment=lm_human_preferences_reward", *LABELS],
    "mine": ["experiment=grpo", *RULE, "interfaces.actor.generation.max_new_tokens=8"],
}
MISTAKES = {
    "grpo": """\
steps=0
steps=-3
steps=1.5
steps=
steps=true
steps=null
batch_prompts=1.0
batch_prompts=[4]
seed=-1
seed=x
name=
name=null
save_every_steps=0
keep_saves=0
sample_prompts=-1
threads=0
threads=x
ratio_tolerance=x
ratio_tolerance=nan
shuffle=maybe
strict_ratio=1
overwrite=2
output_dir=null
resume=none
resume_skip=[nothing]
resume_allow=3
checkpoint.every_minutes=0
checkpoint.every_minutes=-1
checkpoint.keep=x
checkpoint.evry_steps=3
records.every_steps=0
records.token_limit=-1
records.system_seconds=0
microbatch.max_tokens_per_microbatch=0
microbatch.n_microbatches=0
microbatch.tokens=3
models.actor.optimizer.lr=0
models.actor.optimizer.lr=nan
models.actor.optimizer.lr=inf
models.actor.optimizer.lr=fast
models.actor.optimizer.betas=[0.9,1.0]
models.actor.optimizer.betas=[0.9,0.9,0.9]
models.actor.optimizer.eps=-1e-8
models.actor.optimizer.weight_decay=-1
models.actor.optimizer.grad_clip=0
models.actor.optimizer.ema_decay=1.5
models.actor.optimizer.schedule.kind=linaer
models.actor.optimizer.schedule.warmup=-1
models.actor.optimizer.schedule.kind=cosine
models.actor.optimizer.schedule.min_ratio=2
models.actor.optimizer.learning_rate=1
models.actor.optimizer._target_=lab.Plain
models.actor.device=gpu
models.actor.device=cuda:9
models.actor.dtype=float8
models.actor.attention=flash
models.actor.gradient_checkpointing=yes!
models.actor.path=
models.actor.path=nowhere
models.actor.path=file
models.actor.path=null
models.actor.pth=m
models.actor.head=score
models.actor.head=valu
models.actor.trains=lorra
models.actor.trains=lora models.actor.trains.rank=0
models.actor.trains=lora models.actor.trains.dropout=2
models.actor.trains=top_layers models.actor.trains.layers=99
models.actor.sampler.max_slots=0
models.actor.sampler._target_=lab.Plain
models.reward.path=r
models.extra.path=m
models=m
interfaces=3
interfaces.actor=3
interfaces.actor=[grpo]
interfaces.actor=gproo
interfaces.reward=rule
interfaces.reward.function=lab.py:scor
interfaces.reward.function=absent.py:score
interfaces.reward.function=lab:score
interfaces.reward.function=lab.py
interfaces.reward.function=raises.py:score
interfaces.reward.function=syntax.py:score
interfaces.reward.function=lab.py:World
interfaces.reward.timeout_s=0
interfaces.reward.function=null
interfaces.actor.generation.n=0
interfaces.actor.generation.n=two
interfaces.actor.generation.max_new_tokens=0
interfaces.actor.generation.temperature=-1
interfaces.actor.generation.top_p=0
interfaces.actor.generation.top_p=1.1
interfaces.actor.generation.top_k=-1
interfaces.actor.generation.min_p=2
interfaces.actor.generation.stop_token_ids=[x]
interfaces.actor.generation.stop=1
interfaces.actor.generation.beams=2
interfaces.actor.epochs=0
interfaces.actor.n_minibatches=0
interfaces.actor.n_minibatches=3
interfaces.actor.objective.low=-0.1
interfaces.actor.objective.low=1
interfaces.actor.objective.high=x
interfaces.actor.objective.dual=1
interfaces.actor.objective.dual=0.5
interfaces.actor.objective=gae
interfaces.actor.objective={low: 0.1, high: [1]}
interfaces.actor.objective=sapo interfaces.actor.objective.low=0.1
interfaces.actor.advantage=clip
interfaces.actor.advantage.min_group_size=0
interfaces.actor.advantage=gae interfaces.actor.advantage.lam=1.5
interfaces.actor.advantage=gae interfaces.actor.advantage.gamma=-1
interfaces.actor.adv_norm.eps=0
interfaces.actor.adv_norm.mean=none interfaces.actor.adv_norm.leave_one_out=true
interfaces.actor.kl.coef=-1
interfaces.actor.kl.place=none interfaces.actor.kl.coef=0.1
interfaces.actor.kl.estimator=k4
interfaces.actor.kl.target=6
interfaces.actor.kl.horizon=0
interfaces.actor.entropy.coef=x
interfaces.actor.aggregation=mean
interfaces.actor.aggregation=constant
interfaces.actor.aggregation.tokens=3
interfaces.actor.correction=importance_correction
interfaces.actor.correction.weight.cap=0
interfaces.actor.early_stop.ratio=0.5
interfaces.actor.truncation.overlong_buffer=0
interfaces.actor.truncation.overlong_penalty=1
interfaces.actor.truncation.reward=zer
interfaces.actor.reward.clip=-1
interfaces.actor.reward.scale=runing
interfaces.actor.critic=shared
interfaces.actor.value={clip: 0.2}
interfaces.actor._target_=PPOActorInterface
interfaces.actor._target_=lab
interfaces.actor._target_=nowhere.Actor
interfaces.actor._target_=raises.Actor
interfaces.actor._target_=lab.Plain
interfaces.actor._target_=lab.score
interfaces.actor._target_=realign.data.PromptData
interfaces.actor._target_=3
interfaces.actor._targt_=lab.PassedActor
interfaces.critic=critic
interfaces.ref.temperature=0.5
interfaces.judge._target_=rule_reward
graph._target_=lab.score
graph=none
graph.nonsense=1
data.path=nowhere.jsonl
data.path=[]
data.path=
data.path=empty.jsonl
data.path=broken.jsonl
data.path=numbers.jsonl
data.path=m
data.path={path: prompts.jsonl, weight: -1}
data.path=[{path: prompts.jsonl, wieght: 1}]
data.split=x
data.split={part: 3, weights: [1, 1]}
data.max_prompt_tokens=x
data.template=chatt
data.columns.prompt=absent
data=supervised
data=promts
data._target_=lab.Plain
shuffle=false curriculum=pass_rate curriculum.nonsense=1
curriculum=pas_rate
dynamic_sampling.max_batches=0
dynamic_sampling=true
evaluation.every_steps=5 evaluation.data.path=nowhere.jsonl
evaluation.every_steps=0 evaluation.data.path=prompts.jsonl
evaluation.data.path=prompts.jsonl evaluation.generation.n=0
evaluation.role=ref evaluation.data.path=prompts.jsonl
evaluations.a=3
evaluations.a/b.data.path=prompts.jsonl
calibration.samples=3
sync.ref.of=nobody
sync.ref.of=actor
sync.nobody={of: actor}
rollout=asink
rollout=async rollout.max_staleness=-1
rollout=async rollout.nonsense=1
rollout.max_staleness=1
runtime=slurm
runtime.placement.actor=1
runtime=ray runtime.nonsense=1
runtime.call_minutes=0
trackers.x=wandbb
trackers=wandb
trackers.tb=tensorboard trackers.tb.nonsense=1
callbacks.x=early_stoping
callbacks.stop=early_stopping callbacks.stop.patience=0
callbacks.x._target_=lab.Plain
cache_reference=2
skip_together=x
save_best=
foo.bar=1
experiment.name=x
algorithm=
algorithm=simpo
algorithm=dapo
algorithm=rloo interfaces.actor.objective=clip
algorithm=rloo interfaces.actor.kl.place=loss
algorithm=gspo interfaces.actor.objective.dual=3
algorithm=remax interfaces.actor.generation.n=1 interfaces.actor.reward.baseline=none
steps=(3
steps=3 steps
=3
steps = 3
steps:3
interfaces.actor.objective={low: 0.1
[steps=3]
interfaces..actor=1
.steps=3
+steps=3 steps=4
~nothing
~steps
~interfaces.actor.epochs
~interfaces.actor.epochs=1
steps=${batch_prompts
steps=${batch_promts}
name=${oc.env:ABSENT_VARIABLE}
steps=${oc.nonsense:3}
trl_loss=1
per_device_train_batch_size=4
gradient_accumulation_steps=4
learning_rate=1e-6
beta=0.1
use_vllm=true
epsilon=0.2
loss_type=bnpo
max_prompt_length=10
trainer.total_epochs=3
algorithm.adv_estimator=grpo
data.train_batch_size=8
actor_rollout_ref.rollout.n=4
kl_loss_coef=0.1
ppo_mini_batch_size=4
train_batch_size=4
fsdp=true
lora_r=8
wandb=true""",
    "ppo": """\
interfaces.critic.objective.clip=0
interfaces.critic.n_minibatches=3
interfaces.critic.epochs=0
interfaces.actor.critic=none
interfaces.actor.critic=shared
interfaces.actor.critic_warmup_steps=-1
interfaces.actor.critic_warmup_steps=1000
interfaces.actor.ptx_coef=1
interfaces.actor.value.clip=0
interfaces.actor.advantage.whiten_rewards=2
interfaces.actor.kl={place: reward, target: 6, horizon: 0}
models.critic.head=score
~models.critic
~models.reward
models.critic=null
models.critic.optimizer=null
lr=1e-5
interfaces.reward.cut={texts: []}
interfaces.reward.cut.penalty=x
algorithm=ipo
algorithm=rloo interfaces.actor.critic=own
interfaces.actor.advantage.bootstrap=true interfaces.actor.truncation.mask=true""",
    "dpo": """\
interfaces.actor.beta=0
interfaces.actor.beta=-1
interfaces.actor.kind=sigmod
interfaces.actor.label_smoothing=0.5
interfaces.actor.label_smoothing=1
interfaces.actor.reference_free=true interfaces.actor.label_smoothing=-0.1
interfaces.actor.generation.n=2
interfaces.actor.objective=clip
data.path=prompts.jsonl
data.chosen_column=absent
data.max_tokens=1
algorithm=rloo
algorithm=simpo interfaces.actor.reference_free=false
algorithm=ipo interfaces.actor.kind=sigmoid
models.ref.path=nowhere
rollout=async
num_generations=4""",
    "sft": """\
data.path=pairs.jsonl
data.prompt_column=absent
data.max_tokens=1
interfaces.actor=sfft
interfaces.actor.beta=0.1
algorithm=grpo
models.actor.optimizer.schedule.total=0
models.actor.optimizer.schedule.total=null
models.actor.head=value
packing=true
max_seq_length=100
neftune_noise_alpha=5""",
    "rm": """\
models.reward.head=causal
models.reward.head.init=ones
interfaces.reward.from_divergence=true
interfaces.reward.epochs=0
interfaces.actor=grpo
interfaces.actor.epochs=2
algorithm=grpo
data.path=prompts.jsonl
evaluation.role=actor evaluation.data.path=pairs.jsonl""",
    "env": """\
interfaces.agent.environment=lab.py:Absent
interfaces.agent.environment=lab.py:score
interfaces.agent.environment=null
interfaces.agent.max_turns=0
interfaces.agent.max_episode_tokens=1
interfaces.agent.timeout_s=0
interfaces.agent.tools=[lab.py:multiply]
interfaces.agent.concurrency=0
interfaces.agent.chat=true
interfaces.agent.max_failed_fraction=2
interfaces.reward.function=lab.py:score
models.agent.of=nobody
models.agent=null
algorithm=remax""",
    "agent": """\
interfaces.agent.agent=lab.py:absent
interfaces.agent.agent=lab.py:multiply
interfaces.agent.agent=null
interfaces.agent.command=[python]
interfaces.agent.max_calls=0
interfaces.agent.arguments={x: 1}
interfaces.agent.tools=[lab.py:absent]
interfaces.agent.response_template=nonsense
algorithm=remax""",
    "gkd": """\
interfaces.actor.on_policy_fraction=2
interfaces.actor.divergence=kl
interfaces.actor.divergence=jsd interfaces.actor.jsd_beta=2
models.teacher.path=nowhere
~models.teacher
algorithm=grpo""",
    "ilql": """\
models.actor.head=causal
interfaces.actor.gamma=2
interfaces.actor.tau=-1
data.reward_column=absent""",
    "kto": """\
interfaces.actor.beta=0
data.label_column=absent
algorithm=simpo""",
    "lmhp": """\
calibration.samples=0
calibration.policy=nobody
calibration.data.path=nowhere.jsonl
calibration=null
data.path=prompts.jsonl""",
    "mine": """\
interfaces.actor.objective._target_=lab.SoftClip interfaces.actor.objective.width=0
interfaces.actor.objective._target_=lab.SoftClip interfaces.actor.objective.widht=1
interfaces.actor.objective._target_=lab.SoftClip interfaces.actor.objective.shape=[1]
interfaces.actor.objective._target_=lab.softclip
interfaces.actor.kl._target_=lab.HingeKL interfaces.actor.kl.free=-1
interfaces.actor.advantage._target_=lab.SoftClip
interfaces.actor._target_=lab.LikelihoodActor interfaces.actor.strength=0
interfaces.actor._target_=lab.LikelihoodActor interfaces.actor.strenght=1
interfaces.actor._target_=lab.PassedActor interfaces.actor.objective.low=0.1
interfaces.actor._target_=lab.PassedActor interfaces.actor.advantage.threshold=nan
interfaces.actor.reward._target_=lab.Squashed interfaces.actor.reward.limit=x""",
}
"""Wrong words, one command line of `check` each, by the words before them in `STARTS`."""
COMMANDS = [
    *("", "chek experiment=grpo", "trian experiment=grpo", "grpo", "trl grpo", "check", "graph", "plan", "profile"),
    *(
        "check grpo",
        "check experiment=",
        "check experiment",
        "evaluate m",
        "finetune",
        "check --nonsense experiment=grpo",
    ),
    *(
        "--nonsense",
        "--stepz 3 experiment=grpo",
        "-x",
        "check --out x experiment=grpo",
        "--cfg nonsense experiment=grpo",
    ),
    *("--cfg job --package nowhere experiment=grpo", "--info experiment=grpo", "--cfg job", "--config-dir", "--debugg"),
    *("chat", "chat nowhere", "chat file", "chat m nonsense=1", "chat m generation.temperature=-1", "chat r"),
    *("eval", "eval nowhere", "eval m", "eval m evaluation.data.path=nowhere.jsonl", "eval m nonsense=1"),
    *("eval m eval.sets=[absent]", "eval m evaluation.reward=rule", "eval m evaluation.data.path=prompts.jsonl --out"),
    *("serve", "serve nowhere", "serve m port=0x", "serve m port=99999", "serve m nonsense=1", "serve r port=8000"),
    *("export", "export nowhere", "export m", "export m --to m", "export m --to file", "export m --merge --to x"),
    *("report", "report nowhere", "report m", "view nowhere", "view . view.port=x", "compare", "compare nowhere"),
    *("compare m m", "replay", "replay nowhere 1", "replay nowhere x", "fork", "fork nowhere 1", "fork m", "bisect"),
    *("bisect nowhere nowhere", "bisect nowhere", "bisect nowhere --tolerance x", "import", "import trl"),
    *("import nonsense trl.yaml", "import trl nowhere.yaml", "import trl trl.yaml", "import verl verl.yaml"),
    *("import verl my.yaml", "import trl beta=0.1 loss_type=bnpo", "import openrlhf --nonsense 1"),
    *("graph experiment=grpo", "graph experiment=grpo --format pdf {rule}", "graph experiment=sft {sft}"),
    *("graph experiment=grpo {rule} --format mermaid", "graph experiment=ppo {learned}"),
    *("profile experiment=grpo {rule} profile.start=0", "profile experiment=grpo {rule} profile.nonsense=1"),
    *("plan experiment=grpo {rule} plan.devices=0", "plan experiment=grpo {rule} plan.nonsense=1"),
    *(
        "plan experiment=grpo {rule} plan.device=h1000",
        "-m experiment=grpo {rule} steps=1",
        "-m experiment=grpo stps=1,2",
    ),
    *("-m experiment=grpo {rule} steps=0,x", "-m", "-m experiment=grpo,grpoo {rule}", "--trials x experiment=grpo"),
    *("--trials 0 experiment=grpo {rule}", "--trials 2 experiment=grpo {rule}", "check -m experiment=grpo steps=1,2"),
    *("--trials 2 experiment=grpo {rule} save_best=x seed=0,1", "--shell-completion tcsh", "--help", "check --help"),
    *("help --help", "replay --help", "eval --help", "--shell-completion bash", "resume=auto experiment=grpo"),
    *(
        "experiment=grpo {rule} resume=m",
        "experiment=grpo {rule} output_dir=file",
        "experiment=grpo {rule} output_dir=m",
    ),
    *(
        f"experiment={name}"
        for name in ("grpo", "ppo", "sft", "dpo", "instructgpt", "grpo_arithmetic", "sft_arithmetic")
    ),
    *(
        "check experiment=grpo_arithmetic",
        "check experiment=ppo_sentiment",
        "check experiment=grpo_environment {actor}",
    ),
]
HELPED = [
    *(
        "",
        "interfaces",
        "interfaces.actor",
        "interfaces.actor.kl",
        "interfaces.actor.kl.coef",
        "interfaces.actor.objective",
    ),
    *(
        "interfaces.actor.objective.low",
        "interfaces.actor.adv_norm",
        "interfaces.actor.adv_norm.std",
        "kl",
        "coef",
        "low",
    ),
    *("interfaces.actor.advantage", "interfaces.actor.generation", "interfaces.actor.truncation", "interfaces.critic"),
    *("interfaces.reward", "interfaces.reward.function", "models", "models.actor", "models.actor.optimizer", "lr"),
    *(
        "models.actor.trains",
        "models.actor.trains.rank",
        "models.actor.head",
        "models.actor.sampler",
        "data",
        "data.path",
    ),
    *("evaluation", "evaluations", "curriculum", "rollout", "runtime", "trackers", "callbacks", "steps", "checkpoint"),
    *("num_generations", "actor_rollout_ref.actor.clip_ratio", "epsilon_high", "algorithm", "experiment", "nonsense"),
    *("interfaces.actor.nonsense", "interfaces.actor.objectve", "stps", "experiment=ppo interfaces.actor.value"),
    *("experiment=ppo interfaces.critic.objective", "experiment=dpo interfaces.actor", "experiment=sft data"),
    *("experiment=grpo algorithm=gspo interfaces.actor.objective", "interfaces.actor.objective=sapo"),
    *("interfaces.actor.objective=sapo interfaces.actor.objective.tau_pos", "./my.yaml interfaces.actor.objective"),
    *("interfaces.actor.objective._target_=lab.SoftClip interfaces.actor.objective", "experiment=grpoo interfaces"),
    *(
        "interfaces.actor._target_=lab.LikelihoodActor interfaces.actor",
        "dynamic_sampling",
        "microbatch",
        "sync",
        "graph",
    ),
    *(
        "experiment=mine --config-dir conf interfaces.actor",
        "runtime=ray runtime",
        "rollout=async rollout",
        "calibration",
    ),
]
COMPLETED = [
    *(
        "",
        "ch",
        "check ",
        "experiment=",
        "experiment=gr",
        "experiment=grpo ",
        "experiment=grpo algorithm=",
        "--",
        "--cf",
    ),
    *("experiment=grpo interfaces.", "experiment=grpo interfaces.actor.", "experiment=grpo interfaces.actor.obj"),
    *(
        "experiment=grpo interfaces.actor.objective=",
        "experiment=grpo interfaces.actor.objective.",
        "experiment=grpo kl",
    ),
    *("experiment=grpo interfaces.actor.objective=sapo interfaces.actor.objective.", "experiment=grpo models.actor."),
    *(
        "experiment=grpo interfaces.actor.adv_norm.std=",
        "experiment=grpo interfaces.actor.kl.place=",
        "experiment=ppo i",
    ),
    *("experiment=ppo interfaces.critic.", "experiment=dpo interfaces.actor.", "experiment=dpo algorithm=s", "help "),
    *("experiment=grpo models.actor.trains=", "experiment=grpo models.actor.trains=lora models.actor.trains.", "eval "),
    *("experiment=grpo rollout=", "experiment=grpo rollout=async rollout.", "experiment=grpo runtime=", "help inter"),
    *(
        "experiment=grpo interfaces.actor=",
        "experiment=grpo interfaces.actor._target_=",
        "experiment=grpo data.",
        "graph -",
    ),
    *(
        "experiment=grpo interfaces.actor._target_=lab.LikelihoodActor interfaces.actor.s",
        "experiment=grpo callbacks.x=",
    ),
    *(
        "experiment=grpo interfaces.actor.objective._target_=lab.SoftClip interfaces.actor.objective.",
        "./my.yaml inter",
    ),
    *("--config-dir conf experiment=", "--config-dir conf algorithm=", "experiment=grpo shuffle=", "plan plan."),
    *("experiment=grpo algorithm=gspo interfaces.actor.objective.", "experiment=nonsense interfaces.", "nonsense"),
]

SMALL = ["steps=2", "batch_prompts=4", "threads=1", "sample_prompts=4", "seed=3"]
TOKENS = "interfaces.actor.generation.max_new_tokens=8"
GROUP = [TOKENS, "interfaces.actor.generation.n=4", "interfaces.reward.workers=0"]
OWN_EVALUATION = ["evaluation.data.path=prompts.jsonl", "evaluation.batch_prompts=4", "evaluation.every_steps=1"]
EPISODES = [TOKENS, "interfaces.actor.generation.n=2"]
SENTIMENT = ["evaluation.reward.workers=0", *OWN_EVALUATION]
TASK = [*ACTOR, *OWN_EVALUATION, "interfaces.reward.workers=0", "evaluation.reward.workers=0", "batch_prompts=8"]
RUNS: dict[str, list[str]] = {
    **{name: [TOKENS] for name in WITH_REWARD_MODEL if name == "ppo" or name.startswith("lm_")},
    **{
        name: [TOKENS, "batch_prompts=8"]
        for name in ("deepspeed_chat", "openrlhf_ppo", "llama2_chat", "secrets_of_rlhf")
    },
    "qwen_rlhf": [TOKENS, "batch_prompts=8", "interfaces.actor.critic_warmup_steps=1"],
    "instructgpt": [
        *(TOKENS, "batch_prompts=8", "data.pretraining.block_tokens=16", "data.sequences_per_prompt=2"),
    ],
    "trlx_ppo": [TOKENS, "interfaces.reward.workers=0"],
    "areal_ppo": GROUP,
    "areal_decoupled": [*GROUP, "rollout=sync"],
    "grpo": GROUP,
    "raft": [*GROUP, "batch_prompts=8"],
    "remax": [TOKENS, "interfaces.reward.workers=0"],
    "online_dpo": [TOKENS, "interfaces.reward.workers=0"],
    **{
        f"lm_human_preferences_reward{task}": [
            *("calibration.samples=8", "calibration.batch_prompts=4", "calibration.verify=true"),
            "calibration.generation.max_new_tokens=8",
        ]
        for task in ("", "_cnndm", "_tldr")
    },
    "dpo": [],
    "ilql": [],
    "kto": [],
    "sft": [],
    "reward_model": [],
    "gkd": [TOKENS],
    "on_policy_distillation": [TOKENS],
    "self_distillation": [TOKENS],
    "grpo_reasoning": [
        *(*GROUP, *OWN_EVALUATION, "evaluation.reward.workers=0"),
        *("interfaces.reward.function=lab.py:score", "evaluation.reward.function=lab.py:score"),
        "interfaces.reward.known_answer=null",
    ],
    "grpo_agent": [
        *EPISODES,
        "models.actor.path=chat",
        "data.template=chat",
        "interfaces.agent.max_sequence_tokens=120",
    ],
    "grpo_environment": [*EPISODES, "interfaces.agent.max_episode_tokens=90"],
    "grpo_arithmetic": [*TASK, "interfaces.actor.generation.n=4", "interfaces.reward.function=lab.py:score"],
    "ppo_arithmetic": [*TASK, "interfaces.reward.function=lab.py:score"],
    "sft_arithmetic": [*GIVEN["sft"], *OWN_EVALUATION, "evaluation.reward.workers=0"],
    "sft_sentiment": [*GIVEN["sft"], *SENTIMENT, "evaluation.generation.max_new_tokens=8", "evaluation.generation.n=2"],
    "reward_sentiment": [
        *("models.reward.path=m", "data.path=pairs.jsonl", "evaluation.data.path=pairs.jsonl"),
        *("calibration.samples=8", "calibration.generation.max_new_tokens=8", "calibration.data.path=prompts.jsonl"),
        *("evaluation.every_steps=1",),
    ],
    "ppo_sentiment": [*LEARNED, TOKENS, *SENTIMENT],
}
"""Further words of the small run of each experiment."""
LORA = ["models.actor.trains=lora", "models.actor.trains.rank=2", "models.actor.optimizer.lr=1e-2"]
VARIANTS = {
    "grpo interfaces.actor.kl.place=reward": [*GROUP],
    "grpo lora": [*GROUP, *LORA],
    "grpo own classes": [
        *(*GROUP, "interfaces.actor._target_=lab.PassedActor", "interfaces.actor.kl._target_=lab.HingeKL"),
        "interfaces.actor.advantage.threshold=1.5",
    ],
    "grpo own loss": [*GROUP, "interfaces.actor._target_=lab.LikelihoodActor"],
    "grpo minibatches and micro-batches": [
        *(*GROUP, "interfaces.actor.n_minibatches=2", "interfaces.actor.epochs=2"),
        "microbatch.max_tokens_per_microbatch=64",
    ],
    "grpo evaluation": [
        *GROUP,
        *OWN_EVALUATION,
        "evaluations.b.data.path=demonstrations.jsonl",
        "save_best=eval/reward",
    ],
    "grpo dynamic sampling": [*GROUP, "dynamic_sampling.max_batches=3", "interfaces.reward.function=lab.py:other"],
    "grpo curriculum": [*GROUP, "curriculum=pass_rate", "steps=4"],
    "grpo several rewards": [
        *(TOKENS, "interfaces.actor.generation.n=4", "interfaces.reward.function=null"),
        "interfaces.reward.functions={a: 'lab.py:score', b: {function: 'lab.py:other', weight: 0.5}}",
    ],
    "ppo shared critic": [
        *(TOKENS, "interfaces.actor.critic=shared", "interfaces.actor.value.coef=0.1", "~models.critic"),
        *("+models.critic={_target_: shared_model, of: actor}", "models.actor.head={_target_: causal, value_head: {}}"),
    ],
    "dpo cached reference": ["cache_reference=true", "data.path=few_pairs.jsonl", "steps=4"],
    "sft averaged": ["models.actor.optimizer.ema_decay=0.9", "microbatch.max_tokens_per_microbatch=64"],
}
"""Small runs of other features. The first word of a name is the experiment."""
OVER_OTHERS = [
    "ppo rloo",
    "ppo gspo",
    "areal_decoupled dapo",
    "areal_decoupled dr_grpo",
    "online_dpo simpo",
    "gkd none",
]
QUICK = ["grpo", "ppo", "dpo", "sft", "reward_model", "lm_human_preferences", "areal_decoupled", "online_dpo simpo"]
QUICK += ["grpo rloo", "grpo gspo"]


def experiments(group: str = "experiment") -> list[str]:
    """Return the shipped files of a group."""
    return sorted(path.stem for path in (REPOSITORY / "experiments" / group).glob("*.yaml"))


def write_inputs(folder: Path) -> None:
    """Write tiny models, data and the table of mistakes."""
    from tests.tiny import save_tiny, tiny_tokenizer

    save_tiny(folder / "m")
    save_tiny(folder / "t", seed=2)
    save_tiny(folder / "r", head="score", seed=1)
    save_tiny(folder / "chat", seed=4)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer.save_pretrained(folder / "chat")
    save_tiny(folder / "run" / "final" / "actor")
    words = ["A cat. the dog sat. so it is.", "One. and two. and three", "It is. 1 + 1 = 2. why?", "So. well. no. yes."]
    ends = [" " * (i % 3) + "x" * (i % 5) + "\n" for i in range(24)]  # the queries of cnndm end with a line break
    texts = [words[i % 4] + ends[i] for i in range(24)]
    rows: dict[str, list[dict[str, Any]]] = {
        "prompts": [{"prompt": x, "answer": str(i), "teacher_prompt": f"{i}: {x}"} for i, x in enumerate(texts)],
        "demonstrations": [{"prompt": x, "response": f"yes {i}", "answer": str(i)} for i, x in enumerate(texts)],
        "pairs": [{"prompt": x, "chosen": f"good {i}", "rejected": "bad" + "d" * (i % 5)} for i, x in enumerate(texts)],
        "unpaired": [{"prompt": x, "completion": f"some {i}", "label": i % 3 > 0} for i, x in enumerate(texts)],
        "rewarded": [{"prompt": x, "completion": f"some {i}", "reward": i % 3 / 2} for i, x in enumerate(texts)],
        "text": [{"text": x * 3} for x in texts],
        "labels": [
            {
                "prompt": f"{i}. one. two",
                "responses": ["a cat.", "the dog sat", "so it is.", "why?"],
                "labels": [int(j == i % 4) for j in range(4)],
            }
            for i in range(12)
        ],
    }
    for name, lines in {**rows, "few_pairs": rows["pairs"][:6]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "file").write_text("no folder")
    write_table(folder / "table", folder)


def write_table(table: Path, folder: Path) -> None:
    """Write the table of mistakes, with the data and models of its test."""
    table.mkdir()
    shutil.copy(REPOSITORY / "tests" / "config_mistakes.yaml", table)
    for name in ("m", "r", "run"):
        shutil.copytree(folder / name, table / name)
    rows = {
        "prompts": '{"prompt": "1+1=", "answer": "2"}\n' * 7 + '{"prompt": "1234+1=", "answer": "1235"}\n',
        "demonstrations": '{"prompt": "1+1=", "response": "2"}\n' * 8,
        "pairs": '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 8,
    }
    for name, text in rows.items():
        (table / f"{name}.jsonl").write_text(text)
    (table / "file").write_text("no folder")


# --- calls ---


def resolved(words: Sequence[str], config_dir: str | None) -> dict[str, Any]:
    """Return all values of the experiment of a command line: the only place that needs the inside of realign.

    A run writes the same values to config.yaml in its folder.
    """
    try:
        from realign.cli.train import build_experiment_of
    except ImportError:
        from realign.config import build_experiment, compose

        return dict(build_experiment(compose(list(words), config_dir)).resolved)
    return dict(build_experiment_of(list(words), config_dir).resolved)


def call(words: Sequence[str], folder: str = ".") -> Entry:
    """Run a command line in this process and a folder, and return its exit code, output and errors."""
    from realign.cli.commands import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder):
        try:
            code: Any = main([*map(moved, words)])
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            code = f"{type(error).__name__}: {error}"
    return {"code": code, "out": normal(out.getvalue()), "err": normal(err.getvalue())}


def moved(text: str) -> str:
    """Return a text with the present import paths."""
    for before, after in MOVED.items():
        text = text.replace(before, after)
    return text


def normal(text: str) -> str:
    """Return a text without what differs between two calls: folders, addresses and times."""
    for path, name in ((os.getcwd(), "<here>"), (sys.prefix, "<python>"), (str(REPOSITORY), "<realign>")):
        text = text.replace(path, name)
    text = "\n".join(line for line in text.split("\n") if "real_accelerator" not in line and "shards:" not in line)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
    text = re.sub(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\]", "[TIME]", text)
    text = re.sub(r"sweep_[\d-]+_[\d-]+", "sweep_TIME", text)
    text = re.sub(r"\b(in|after) [\d.,]+ (ms|s|min)\b", r"\1 TIME", text)
    return re.sub(r"[\d.,]+ (GiB|GB|TB|TiB) (free|of|available)\b", r"N \1 \2", text)


def leaves(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a tree without nested mappings, with their values."""
    if isinstance(node, dict) and node:
        for name, value in node.items():
            yield from leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node


def split(line: str) -> list[str]:
    """Return the words of a line. A space in brackets, quotes or a placeholder is no border."""
    words = re.findall(r"(?:\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\]]*\]|'[^']*'|\"[^\"]*\"|\S)+", line)
    named = {"{rule}": RULE, "{learned}": LEARNED, "{sft}": GIVEN["sft"], "{actor}": ACTOR}
    return [part for word in words for part in named.get(word, [word])]


# --- parts ---


def settings() -> Iterator[tuple[str, Recorder]]:
    """Yield the settings of experiments, presets, overrides and user files."""
    import yaml

    load = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    def entry(words: Sequence[str], printed: bool) -> Entry:
        made: Entry = {}
        if printed:
            shown = call([*words, "--cfg", "job", "--resolve"])
            if not shown["code"]:
                shown["out"] = dict(leaves(yaml.load(shown["out"], load)))
            made["cfg"] = shown
        given, folder = list(words), None
        if "--config-dir" in given:
            at = given.index("--config-dir")
            folder, given = [*given, ""][at + 1], given[:at] + given[at + 2 :]
        notes = io.StringIO()
        try:
            if any(word.startswith("--") for word in given):
                printed = True
                raise ValueError("read by the command line")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(notes):
                values = resolved([*map(moved, given)], folder)
        except Exception as error:
            if printed:
                made["error"] = call(["graph", *words])
            else:  # the same message in half the time
                made["error"] = {"class": type(error).__name__, "err": normal(str(error))}
        else:
            plain = json.loads(json.dumps(values, default=str))
            made["values"], made["notes"] = dict(leaves(plain)), normal(notes.getvalue())
        return made

    def base(name: str) -> list[str]:
        experiment, _, preset = name.partition(" algorithm=")
        more = [f"algorithm={preset}", *NEEDS.get(preset, [])] if preset else []
        return [f"experiment={experiment}", *GIVEN.get(experiment, []), *more]

    call(["graph", *base("grpo")])  # imports everything, and puts this folder on the import path
    presets = experiments("algorithm")
    natural = [f"{'dpo' if preset in PREFERENCE else 'grpo'} algorithm={preset}" for preset in presets]
    for experiment, preset in itertools.product(experiments(), ["", *presets]):
        name = f"{experiment} algorithm={preset}" if preset else experiment
        several = [] if not preset or preset in PREFERENCE else ["interfaces.actor.generation.n=4"]
        words = [*base(name), *several]
        yield " ".join([name, *several]), partial(entry, words, not preset or name in natural)
    for i, name in enumerate(dict.fromkeys([*ALWAYS, *experiments(), *natural])):
        with_actor = "reward" if name.startswith(("reward_", "lm_human_preferences_reward")) else "actor"
        for j, line in enumerate(OVERRIDES):
            if name in ALWAYS or (i + j) % SHARE == 0:
                words = [*base(name), *split(line.replace("{role}", with_actor))]
                yield f"{name} + {line}", partial(entry, words, name in ALWAYS[:4])
    for line in USER_LINES:
        yield line, partial(entry, split(line), True)


def messages() -> Iterator[tuple[str, Recorder]]:
    """Yield the output of wrong command lines, and of help and completion."""
    import yaml

    table = yaml.safe_load(Path("table/config_mistakes.yaml").read_text(encoding="utf-8"))
    for row in table["mistakes"]:
        words = [*table["starts"].get(row.get("over"), []), *row["words"]]
        name = " ".join([row.get("over", ""), *row["words"]])
        more = ["output_dir=out"] if "data" in row else []
        yield f"table: check {name}", partial(call, ["check", *words, *more], "table")
        if "data" not in row:
            yield f"table: {name}", partial(call, words, "table")
    for start, lines in MISTAKES.items():
        for line in lines.split("\n"):
            yield f"check {start} {line}", partial(call, ["check", *STARTS[start], *split(line)])
    for line in COMMANDS:
        yield f"realign {line}", partial(call, split(line))
    for line in HELPED:
        yield f"realign help {line}", partial(call, ["help", *split(line)])
    for line in COMPLETED:
        yield f"realign --complete {line!r}", partial(call, ["--complete", f"realign {line}"])


def runs() -> Iterator[tuple[str, Recorder]]:
    """Yield weights, metrics and samples of small runs."""
    lines: dict[str, list[str]] = {}
    for name in experiments():
        lines[name] = RUNS[name]
    for preset in experiments("algorithm"):
        name = "dpo" if preset in PREFERENCE else "grpo"
        lines[f"{name} {preset}"] = [*RUNS[name], f"algorithm={preset}", *NEEDS.get(preset, [])]
    for pair in OVER_OTHERS:
        name, preset = pair.split()
        if preset != "none":
            group = [] if preset in PREFERENCE else ["interfaces.actor.generation.n=4"]
            lines[pair] = [*RUNS[name], f"algorithm={preset}", *NEEDS.get(preset, []), *group]
    lines |= VARIANTS
    for name, words in lines.items():
        experiment = name.split()[0]
        out = Path("runs_of_frozen") / name.replace(" ", "_").replace("=", "_")
        first = [f"experiment={experiment}", *GIVEN.get(experiment, []), *SMALL]
        yield name, partial(run_entry, out, [*first, *words, f"output_dir={out}"])


def run_entry(out: Path, words: Sequence[str]) -> Entry:
    """Return what a run wrote, or why it failed."""
    called = call(words)
    if called["code"]:
        return {"code": called["code"], "err": called["err"]}
    from safetensors.torch import load_file

    made: Entry = {"code": 0, "weights": {}, "metrics": {}, "samples": {}, "state": {}}
    for path in sorted((out / "final").rglob("*.safetensors")):
        for key, value in load_file(path).items():
            data = value.contiguous().float().numpy()
            digest = hashlib.sha256(data.tobytes()).hexdigest()[:16]
            made["weights"][f"{path.relative_to(out)}:{key}"] = (
                f"{digest} norm {float((data.astype('f8') ** 2).sum()):.9g}"
            )
    for path in sorted((out / "final").rglob("interface_state.json")):
        made["state"][str(path.relative_to(out))] = json.loads(path.read_text())
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        made["metrics"] |= {f"{step}: {key}": value for key, value in record.items() if not TIMED.search(key)}
    for file in ("samples.jsonl", "eval_samples.jsonl"):
        if (out / file).exists():
            for i, line in enumerate((out / file).read_text().splitlines()):
                row = json.loads(line)
                made["samples"] |= {f"{file}:{i}: {key}": normal(json.dumps(value)) for key, value in row.items()}
    shutil.rmtree(out)
    return made


PARTS: dict[str, Callable[[], Iterator[tuple[str, Recorder]]]] = {
    "settings": settings,
    "messages": messages,
    "runs": runs,
}


def is_quick(part: str, name: str) -> bool:
    """Return whether an entry is recorded with --quick: ten runs, and every eighth of the others."""
    return name in QUICK if part == "runs" else zlib.crc32(name.encode()) % 8 == 0


def record(part: str, inputs: Path, quick: bool) -> dict[str, Entry]:
    """Record a part in a temporary folder with the inputs."""
    started, cpu, back = time.perf_counter(), time.process_time(), os.getcwd()
    with tempfile.TemporaryDirectory(prefix="frozen_") as work:
        folder = Path(work).resolve() / "work"
        shutil.copytree(inputs, folder)
        for name, text in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(moved(text), encoding="utf-8")
        os.chdir(folder)
        try:
            entries: dict[str, Entry] = {}
            for name, entry_of in PARTS[part]():
                if name in entries:
                    raise SystemExit(f"{part}: {name!r} is recorded twice")
                if not quick or is_quick(part, name):
                    entries[name] = json.loads(json.dumps(entry_of()))
        finally:
            os.chdir(back)
    spent = f"{time.perf_counter() - started:.0f} s, {time.process_time() - cpu:.0f} CPU s"
    print(f"{part}: recorded {len(entries)} entries in {spent}", flush=True)
    return entries


# --- comparison ---


def without_homes(text: str) -> str:
    """Return a text with the names of classes and functions of realign instead of their import paths."""
    return re.sub(r"\brealign(?:\.[a-z_][a-z_0-9]*)+\.([A-Za-z_]\w*)", r"\1", text)


def lines_of(entry: Entry) -> dict[str, str]:
    """Return an entry as lines by key; a text of several lines has a key per line."""
    made: dict[str, str] = {}
    for key, value in leaves(entry):
        if isinstance(value, str) and "\n" in value:
            seen: Counter[str] = Counter()
            for line in value.split("\n"):
                seen[line] += 1
                made[f"{key}| {line}" + (f" (again {seen[line]})" if seen[line] > 1 else "")] = ""
        else:
            made[key] = json.dumps(value, ensure_ascii=False)
    return made


def difference(before: Entry, after: Entry, ignored: re.Pattern[str] | None) -> list[str]:
    """Return what differs between two entries, as lines."""
    old, new = lines_of(before), lines_of(after)
    made = []
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) == new.get(key):
            continue
        if "|" in key and (old.get(key), new.get(key)) in (("", None), (None, "")):
            line = f"{'-' if key in old else '+'} {key}"
        else:
            line = f"{key}: {old.get(key, '(none)')} -> {new.get(key, '(gone)')}"
        if ignored is None or not ignored.search(line):
            made.append(line)
    return made


def compare(part: str, before: dict[str, Entry], after: dict[str, Entry], ignored: re.Pattern[str] | None) -> bool:
    """Print how two recordings of a part differ, and return whether they do. Equal differences are told once."""
    both = [name for name in before if name in after]
    gone, new = [n for n in before if n not in after], [n for n in after if n not in before]
    changed: defaultdict[str, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    for name in both:
        old, now = json.dumps(before[name], sort_keys=True), json.dumps(after[name], sort_keys=True)
        if old == now:
            counts["equal"] += 1
            continue
        if without_homes(old) == without_homes(now):
            counts["moved"] += 1
            continue
        lines = difference(json.loads(without_homes(old)), json.loads(without_homes(now)), ignored)
        counts["different" if lines else "ignored"] += 1
        for line in lines:
            changed[line].append(name)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in ("equal", "moved", "ignored", "different"))
    print(f"\n== {part}: {told}, {len(new)} new, {len(gone)} gone")
    blocks: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for line, names in changed.items():
        blocks[tuple(names)].append(line)
    for entries, lines in sorted(blocks.items(), key=lambda block: -len(block[0])):
        print(f"\n-- {len(entries)} entries, such as")
        for name in entries[:3]:
            print(f"     {name}")
        for line in lines[:60]:
            print(f"   {line[:600]}")
        if len(lines) > 60:
            print(f"   ... and {len(lines) - 60} more lines")
    for kind, some in (("new", new), ("gone", gone)):
        for name in some[:40]:
            print(f"   {kind}: {name}")
    return bool(changed or new or gone)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["write", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="only ten runs, and every eighth of the other entries")
    parser.add_argument("--ignore", help="leave out lines of differences that match this pattern")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    parts = [args.only] if args.only else list(PARTS)
    print("left out: " + "\n          ".join(LEFT_OUT), flush=True)
    if args.command == "write":
        if not (folder / "inputs").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_inputs(folder / "inputs")
        for part in parts:
            text = json.dumps(record(part, folder / "inputs", False), ensure_ascii=False, indent=0)
            (folder / f"{part}.json.gz").write_bytes(gzip.compress(text.encode(), 6, mtime=0))
        return 0
    ignored = re.compile(args.ignore) if args.ignore else None
    differs = False
    for part in parts:
        before = json.loads(gzip.decompress((folder / f"{part}.json.gz").read_bytes()))
        after = record(part, folder / "inputs", args.quick)
        if args.quick:
            before = {name: entry for name, entry in before.items() if is_quick(part, name)}
        differs |= compare(part, before, after, ignored)
    return int(differs)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    sys.path.append(str(REPOSITORY))
    sys.exit(main())
