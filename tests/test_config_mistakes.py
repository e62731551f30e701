"""Test configuration errors on shipped experiments: the line that a user reads from `check` and at launch.

All `MISTAKES` are found before a model or a dataset is loaded. `MISTAKES_IN_DATA` need the tokenizer, for example for
the length of the longest row. They are found with the data, before the first rollout.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realign.cli import commands as cli
from realign.config.folders import experiments_dir
from realign.data import PreferenceData, PromptData, SupervisedData
from realign.engines import TransformersModel
from realign.engines.training.transformers_engine import TransformersEngine
from tests.tiny import save_tiny

REWARD = "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"
GRPO = ["experiment=grpo", "models.actor.path=m", "data.path=prompts.jsonl", REWARD]
PPO = ["experiment=ppo", "models.actor.path=m", "models.reward.path=r", "data.path=prompts.jsonl"]
REMAX = ["experiment=remax", "models.actor.path=m", "data.path=prompts.jsonl", REWARD]
SFT = ["experiment=sft", "models.actor.path=m", "data.path=demonstrations.jsonl"]
DPO = ["experiment=dpo", "models.actor.path=m", "data.path=pairs.jsonl"]
PROMPTS = "{_target_: realign.data.PromptData, path: prompts.jsonl}"
REFERENCE = "realign.interfaces.reference.ReferenceInterface"
JUDGE = (
    "{_target_: realign.interfaces.rule_reward.RuleRewardInterface, "
    'function: "realign.rewards.arithmetic:exact_answer"}'
)
EVALUATION = [f"evaluation.data={PROMPTS}", f"evaluation.reward={JUDGE}"]
SHORT = ["interfaces.actor.generation.max_new_tokens=8", "models.actor.device=cpu"]

NO_LIMIT = "~data.max_prompt_tokens"

MISTAKES: list[tuple[list[str], str]] = [
    (
        [*GRPO, "stps=10"],
        "unknown key 'stps'; did you mean 'steps'?",
    ),
    (
        [*GRPO, "place=loss"],
        "unknown key 'place'; did you mean interfaces.actor.kl.place?",
    ),
    (
        [*GRPO, "batch_prompt=64"],
        "unknown key 'batch_prompt'; did you mean 'batch_prompts'?",
    ),
    (
        [*GRPO, "stps=10", "foo=1", "data.pth=x"],
        "unknown key 'stps'; did you mean 'steps'? Also: unknown key 'foo'. `realign help` lists the keys, and "
        "docs/migration.md names of TRL, verl, OpenRLHF, AReaL and realhf. Also: unknown key 'data.pth'; did you mean "
        "'path'? (valid: ...",
    ),
    (
        ["experiment=grpo", "data.pth=x"],  # before the missing values
        "unknown key 'data.pth'; did you mean 'path'? (valid: ...",
    ),
    (
        ["algorithm=gspo"],
        "algorithm=gspo changes an experiment, so choose one too, such as experiment=grpo algorithm=gspo.",
    ),
    (
        ["algorithm=ipo"],
        "algorithm=ipo changes an experiment, so choose one too, such as experiment=dpo algorithm=ipo.",
    ),
    (
        [*GRPO, "experiment.foo=1"],
        "experiment=NAME chooses a file, and there are no keys below experiment",
    ),
    (
        [*GRPO, "interfaces.actor.objective.hgh=0.3", "data.pth=x"],
        "unknown key 'interfaces.actor.objective.hgh'; did you mean 'high'? (valid: dual, high, low). Also: unknown "
        "key 'data.pth'; did you mean 'path'? (valid: ...",
    ),
    (
        [*GRPO, "interfaces.actor.objective=lab.SoftClip"],
        "interfaces.actor.objective: expected Objective, found 'lab.SoftClip'; to choose your own class, set "
        "interfaces.actor.objective._target_=lab.SoftClip",
    ),
    (
        [*GRPO, "interfaces.actor.kl=lab.Hinge"],
        "interfaces.actor.kl: expected KLPenalty, found 'lab.Hinge'; to choose your own class, set "
        "interfaces.actor.kl._target_=lab.Hinge",
    ),
    (
        [*GRPO, "interfaces.actor=lab.Actor"],
        "interfaces.actor: expected a component, found 'lab.Actor'; to choose your own class, set "
        "interfaces.actor._target_=lab.Actor",
    ),
    (
        [*GRPO, "batch_size=64"],
        "batch_size: set batch_prompts, the number of prompts per step over all devices. "
        "interfaces.actor.n_minibatches divides it into optimizer steps, and "
        "microbatch.max_tokens_per_microbatch limits memory, in tokens.",
    ),
    (
        [*GRPO, "interfaces.actor.objective.hgh=0.3"],
        "unknown key 'interfaces.actor.objective.hgh'; did you mean 'high'? (valid: dual, high, low)",
    ),
    (
        [*GRPO, "interfaces.actr.epochs=2"],
        ("interfaces.actr._target_ is missing: no role is called 'actr'; did you mean 'actor'? (valid: actor, reward)"),
    ),
    (
        [*GRPO, "models.actr.optimizer.lr=1e-5"],
        "models.actr: no interface plays 'actr'; did you mean 'actor'? (valid: actor, reward)",
    ),
    (
        ["experiment=grpoo"],
        "unknown experiment 'grpoo'; did you mean 'grpo'?",
    ),
    (
        [*GRPO, "algorithm=gspoo"],
        "unknown algorithm 'gspoo'; did you mean 'gspo'? (valid: ...",
    ),
    (
        [*GRPO, "interfaces.actor.adv_norm.std=grup"],
        (
            "interfaces.actor.adv_norm.std: unknown choice 'grup'; did you mean 'group'? (valid: batch, group, "
            "none): The elements over which a statistic is computed"
        ),
    ),
    (
        [*GRPO, "models.actor.dtype=bf16"],
        (
            "models.actor.dtype: unknown choice 'bf16'; did you mean 'bfloat16'? (valid: auto, bfloat16, float32): "
            "Precision of matrix products"
        ),
    ),
    (
        [*GRPO, "steps=ten"],
        "steps: expected int, found 'ten'; give a whole number",
    ),
    (
        [*GRPO, "steps=10k"],
        "steps: expected int, found '10k'; did you mean 10000?",
    ),
    (
        [*GRPO, "interfaces.actor.objective.high=", "0.3"],
        "'0.3' is not an override. Write key=value. Remove the space after =: interfaces.actor.objective.high=0.3.",
    ),
    (
        [*GRPO, "interfaces.reward.timeout_s=30s"],
        "interfaces.reward.timeout_s: expected float, found '30s'; did you mean 30?",
    ),
    (
        [*GRPO, "microbatch.max_tokens_per_microbatch=16k"],
        "microbatch.max_tokens_per_microbatch: expected int, found '16k'; did you mean 16000?",
    ),
    (
        [*GRPO, "microbatch=4096"],
        (
            "microbatch: expected MicroBatchConfig, found 4096; it has fields: set them one by one, such as "
            "microbatch.max_tokens_per_microbatch=VALUE (valid: max_tokens_per_microbatch, n_microbatches)"
        ),
    ),
    (
        [*GRPO, "models.actor.optimizer=1e-6"],
        (
            "models.actor.optimizer: expected OptimizerSpec, found 1e-06; it has fields: set them one by one, "
            "such as models.actor.optimizer.lr=VALUE (valid: lr, betas, eps, weight_decay, eps_hat, grad_clip, "
            "schedule, ema_decay, max_nonfinite_in_a_row)"
        ),
    ),
    (
        [*GRPO, "models.actor.optimizer.betas=0.9"],
        (
            "models.actor.optimizer.betas: expected a list, found 0.9; write it in brackets, such as "
            "models.actor.optimizer.betas=[0.9]"
        ),
    ),
    (
        [*GRPO, "data=prompts.jsonl"],
        "data: expected a component, found a text; set its fields one by one, such as data.path=FILE",
    ),
    (
        [*GRPO, "evaluation=false"],
        (
            "evaluation: expected a component, found a bool; set its fields one by one, such as "
            "evaluation.every_steps=20, or switch it off by evaluation=null"
        ),
    ),
    (
        ["experiment=grpo"],
        (
            "missing values: data.path, interfaces.reward.function, models.actor.path. Set a value, such as "
            "data.path=VALUE."
        ),
    ),
    (
        ["models.actor.path=m"],
        "missing values: batch_prompts, steps. Start from experiment=NAME; `realign --help` lists the experiments.",
    ),
    (
        [*GRPO, "~data"],
        ("data._target_ is missing: give the import path of a class that is DataSpec, such as realign.data.PromptData"),
    ),
    (
        [*GRPO, "models.actor.optimizer.lr=-1e-6"],
        "models.actor.optimizer.lr=-1e-06: must be at least 0 and finite",
    ),
    (
        [*GRPO, "interfaces.actor.generation.temperature=0"],
        "interfaces.actor.generation.temperature=0.0: must be at least 0.01 and finite",
    ),
    (
        [*GRPO, "batch_prompts=0"],
        "batch_prompts=0: must be at least 1",
    ),
    (
        [*GRPO, "microbatch.max_tokens_per_microbatch=-1"],
        "microbatch.max_tokens_per_microbatch=-1: must be at least 1, or null",
    ),
    (
        [*GRPO, "data.max_prompt_tokens=0"],
        "data.max_prompt_tokens=0: must be at least 1, or null",
    ),
    (
        [*GRPO, "interfaces.actor.kl.place=both"],
        (
            "interfaces.actor.kl.place: unknown choice 'both' (valid: loss, none, reward): "
            "Where the KL penalty is applied: in the reward or in the loss, not in both"
        ),
    ),
    (
        [*GRPO, "interfaces.actor.kl.place=[reward,loss]"],
        (
            "interfaces.actor.kl.place takes one choice, found ['reward', 'loss'] (valid: loss, none, reward): "
            "Where the KL penalty is applied: in the reward or in the loss, not in both"
        ),
    ),
    (
        [*GRPO, "graph.kl=false"],
        ("graph.kl no longer exists: a KL penalty brings its reference: set interfaces.actor.kl.place=loss or reward"),
    ),
    (
        [*GRPO, "interfaces.actor.generation.top_p=0.9"],
        (
            "interfaces.actor.generation.top_p=0.9: changes the sampled distribution, so ratios in the loss would be "
            "wrong. Use neutral settings for training (evaluation may use any)"
        ),
    ),
    (
        [*GRPO, "interfaces.actor.generation.n=1"],
        (
            "interfaces.actor.generation.n=1: adv_norm compares the responses to a prompt, so every advantage would "
            "be 0. Set generation.n to 2 or more, or adv_norm.mean=batch and adv_norm.std=batch with "
            "advantage.min_group_size=1"
        ),
    ),
    (
        [*PPO, "interfaces.actor.advantage.reward_norm.mean=group"],
        (
            "interfaces.actor.generation.n=1: advantage.reward_norm compares the responses to a prompt, so every "
            "advantage would be 0. Set generation.n to 2 or more, or advantage.reward_norm.mean=batch and "
            "advantage.reward_norm.std=batch"
        ),
    ),
    (
        [*GRPO, "batch_prompts=30", "interfaces.actor.n_minibatches=4"],
        (
            "interfaces.actor.n_minibatches=4: batch_prompts=30 is not a multiple of it. Set batch_prompts=28 or "
            "32, or n_minibatches=3."
        ),
    ),
    (
        [*GRPO, "microbatch.max_tokens_per_microbatch=512"],
        (
            "microbatch.max_tokens_per_microbatch=512: this budget is too small for a prompt and its response of "
            "up to 512 tokens (interfaces.actor.generation.max_new_tokens). Set it above 512, or lower "
            "interfaces.actor.generation.max_new_tokens."
        ),
    ),
    (
        [*GRPO, f"interfaces.ref={{_target_: {REFERENCE}, temperature: 0.7}}"],
        (
            "interfaces.ref.temperature=0.7: it differs from interfaces.actor.generation.temperature=1, so the "
            "log-probs of these roles cannot be compared. Set one temperature for all roles of the graph."
        ),
    ),
    (
        [*PPO, "interfaces.actor.value.coef=0.1"],
        "interfaces.actor.value: has no effect with critic=own. Set critic=shared",
    ),
    (
        [
            *PPO,
            "interfaces.actor.critic=shared",
            "interfaces.actor.value.coef=0.1",
            "~models.critic.optimizer",
            "models.actor.head.value_head={}",
        ],
        (
            "models.critic.path='r': this model is not trained, but the loss of models.actor trains the values of "
            "the value_head of models.actor. Share its weights: ~models.critic '+models.critic={_target_: "
            "realign.engines.SharedModel, of: actor}'."
        ),
    ),
    (
        [
            *PPO,
            "interfaces.actor.critic=shared",
            "interfaces.actor.value.coef=0.1",
            "~models.critic",
            "+models.critic={_target_: realign.engines.SharedModel, of: actor}",
        ],
        (
            "interfaces.actor (PPOActorInterface) needs values of models.actor, whose head has logprobs. Set "
            "models.actor.head.value_head, with head=causal."
        ),
    ),
    (
        [*REMAX, "models.baseline.path=m"],
        (
            "models.baseline.path='m': baseline must sample with the weights of models.actor, which is trained, "
            "but this copy is never updated. Share its weights: ~models.baseline '+models.baseline={_target_: "
            "realign.engines.SharedModel, of: actor}'. Or copy them after each step: sync.baseline.of=actor."
        ),
    ),
    (
        [*GRPO, "models.ref={_target_: realign.engines.SharedModel, of: actor}"],
        (
            "models.ref.branch=whole: ref needs frozen weights, but would change with models.actor, which is "
            "trained. Set models.ref.branch=reference, or models.ref.path."
        ),
    ),
    (
        [*GRPO, "models.ref={_target_: realign.engines.SharedModel, of: actor, branch: reference}"],
        (
            "models.ref.branch=reference: models.actor trains all of its weights, so it keeps no frozen branch. "
            "Set models.actor.trains=top_layers or lora, or models.ref.path. An adapter that models.actor.path "
            "contains must be merged (adapter=merge)."
        ),
    ),
    (
        [*GRPO, "save_best=eval/reward"],
        "save_best=eval/reward: the run has no evaluation that measures this metric. Configure an evaluation, "
        "or choose another metric.",
    ),
    (
        [*GRPO, "save_best=eval/rewrd", *EVALUATION],
        (
            "save_best=eval/rewrd: the evaluation does not measure 'eval/rewrd'; did you mean 'eval/reward'? "
            "(valid: eval/missing_rewards, eval/response_tokens, eval/reward, eval/truncated_fraction)"
        ),
    ),
    (
        [*SFT, "save_best=reward"],
        (
            "save_best=reward: no RPC of the graph writes rewards, so the run has no such metric. Choose another "
            "metric, such as -loss (lowest)."
        ),
    ),
    (
        [*GRPO, "evaluation.every_steps=5"],
        "evaluation.data.path is missing: give it the held-out rows",
    ),
    (
        [*GRPO, "evaluation.every_steps=null", "evaluation.data.path=prompts.jsonl"],
        "evaluation.every_steps must not be null; expected int; evaluation=null disables the evaluation",
    ),
    (
        [*GRPO, "evaluations.math.data.path=prompts.jsonl", "save_best=eval/maths/reward"],
        (
            "save_best=eval/maths/reward: the evaluation does not measure 'eval/maths/reward'; did you mean "
            "'eval/math/reward'? (valid: eval/math/missing_rewards, eval/math/response_tokens, eval/math/reward, "
            "eval/math/truncated_fraction)"
        ),
    ),
    (
        [*GRPO, "interfaces.reward.functions={a: 'x:y'}"],
        "interfaces.reward.function: function and functions are both set. Set function=null to use functions",
    ),
    (
        [*GRPO, "resume=auto", "resume_skip=data"],
        "resume_skip takes a list: write 'resume_skip=[VALUE]', with commas between several",
    ),
    (
        [*GRPO, "keep_saves=2", "save_every_steps=null"],
        "keep_saves=2: it has no effect without save_every_steps. Set save_every_steps, or remove keep_saves.",
    ),
    (
        [*GRPO, "interfaces.actor._target_=realign.interfaces.grpo.GRPOActor"],
        (
            "interfaces.actor._target_: there is no 'GRPOActor' in realign.interfaces.grpo; did you mean "
            "'GRPOActorInterface'? (valid: GRPOActorInterface)"
        ),
    ),
    (
        [*GRPO, "interfaces.actor._target_=realign.interfaces.ppo.GRPOActorInterface"],
        (
            "interfaces.actor._target_: there is no 'GRPOActorInterface' in realign.interfaces.ppo; did you mean "
            "realign.interfaces.grpo.GRPOActorInterface?"
        ),
    ),
    (
        [*GRPO, "interfaces.actor._target_=GRPOActorInterface"],
        (
            "interfaces.actor._target_: there is no 'GRPOActorInterface' in the current directory and the "
            "installed packages; did you mean realign.interfaces.grpo.GRPOActorInterface?"
        ),
    ),
    (
        [*GRPO, "graph._target_=realign.interfaces.grpo.GRPOActorInterface"],
        (
            "graph._target_: realign.interfaces.grpo.GRPOActorInterface is not a function annotated -> "
            "DataflowGraph; nothing was called (dataflow of realign.interfaces.grpo would fit)"
        ),
    ),
    (
        [*GRPO, "data._target_=realign.data.PromtData"],
        "data._target_: there is no 'PromtData' in realign.data; did you mean 'PromptData'?",
    ),
    (
        [*GRPO, "output_dir=file/run"],
        "output_dir='file/run': '{here}/file' is not a folder. Choose another output_dir.",
    ),
    (
        [*GRPO, "name=a/b"],
        (
            "name 'a/b' is not a valid file name. Use up to 100 characters without / \\ or control characters. "
            "Do not start with a dot, dash or blank."
        ),
    ),
    (
        [*GRPO, "models.actor.path=run"],
        "models.actor.path='run': the folder has no config.json. Did you mean 'run/final/actor'?",
    ),
    (
        [*GRPO, "models.actor.path=run/finl/actor"],
        (
            "models.actor.path='run/finl/actor': neither a model folder nor a hub name (owner/name). "
            "Did you mean 'run/final/actor'?"
        ),
    ),
    (
        [*GRPO, "models.actor.path=some-owner/some-model"],
        (
            "models.actor.path='some-owner/some-model': no such folder, and not in the cache of the hub, which "
            "HF_HUB_OFFLINE=1 disables. Set models.actor.path to a folder, or unset HF_HUB_OFFLINE."
        ),
    ),
    (
        [*GRPO, "models.actor.path=r"],
        (
            "models.actor.head=causal: 'r' contains a reward model or critic (score.weight and no language head). Set "
            "models.actor.path to a language model, or set models.actor.head=score."
        ),
    ),
    (
        [*PPO, "models.reward.path=m"],
        (
            "models.reward.head=score: 'm' has no such head (score.weight is missing), and the role does not train, so "
            "its output would be random. Set models.reward.path to a folder with that head, such as final/reward of "
            "experiment=reward_model, or set models.reward.head.init."
        ),
    ),
    (
        [*PPO, "models.reward.head._target_=realign.engines.Causal"],
        (
            "interfaces.reward (RewardModelInterface) needs scores of models.reward, whose head has logprobs. Set "
            "models.reward.head=score or value, or head=causal with a head.value_head."
        ),
    ),
    (
        [*PPO, "models.critic.head._target_=realign.engines.Causal"],
        (
            "interfaces.critic (PPOCriticInterface) needs scores and values of models.critic, whose head has "
            "logprobs. Set models.critic.head=score or value, or head=causal with a head.value_head."
        ),
    ),
    (
        [*GRPO, "~models.actor.optimizer"],
        "models.actor: RPC 'actor_train' trains this model, which has no optimizer. Set models.actor.optimizer.lr.",
    ),
    (
        [*GRPO, "models.ref.path=m", "models.ref.optimizer.lr=1e-6"],
        (
            "models.ref.optimizer: it has no effect, since no RPC of the graph trains models.ref. Remove it: "
            "~models.ref.optimizer."
        ),
    ),
    (
        [*GRPO, "models.actor.device=cuda"],
        "models.actor.device='cuda': torch finds no CUDA device. Use cpu or auto.",
    ),
    (
        [*GRPO, "data.prompt_column=question"],
        "data.prompt_column: prompts.jsonl, line 1: no column 'question'; found ['answer', 'prompt']",
    ),
    (
        [*DPO, "data.path=prompts.jsonl"],
        "data.chosen_column: prompts.jsonl, line 1: no column 'chosen'; found ['answer', 'prompt']",
    ),
    (
        [*SFT, "data.response_column=answer"],
        "data.response_column: demonstrations.jsonl, line 1: no column 'answer'; found ['prompt', 'response']",
    ),
    (
        [*GRPO, "models.actor.trains.layers=2"],
        "unknown key 'models.actor.trains.layers': it is a setting of TopLayers, not of All",
    ),
    (
        [*GRPO, "models.actor.trains._target_=realign.engines.Lora", "models.actor.trains.rank=0"],
        "models.actor.trains.rank=0: must be at least 1",
    ),
    (
        [*GRPO, "models.ref.path=m", "models.ref.trains._target_=realign.engines.Lora"],
        "models.ref.trains=lora: it is ignored without an optimizer. Set optimizer.lr.",
    ),
    (
        [*GRPO, "models.actor.head.init=zero"],
        "unknown key 'models.actor.head.init': it is a setting of Score and Value, not of Causal",
    ),
    (
        [*GRPO, "dynamic_sampling.min_mean_reward=0.8", "dynamic_sampling.max_mean_reward=0.2"],
        "dynamic_sampling.min_mean_reward=0.8: must be below max_mean_reward=0.2",
    ),
    (
        [*GRPO, "interfaces.actor.lam=0.9"],
        "interfaces.actor.lam was renamed to interfaces.actor.advantage.lam",
    ),
    (
        [*GRPO, "interfaces.actor.advantage.lam=0.9"],
        "unknown key 'interfaces.actor.advantage.lam': it is a setting of GAE, not of GroupRelative",
    ),
    (
        [*GRPO, "interfaces.reward.function=reward.py:score"],
        "interfaces.reward: reward function 'reward.py:score': no file '{here}/reward.py'; found nothing",
    ),
    (
        [*GRPO, "interfaces.reward.workers=-1"],
        "interfaces.reward.workers=-1: must be at least 0",
    ),
    (
        [*PPO, "~interfaces.critic"],
        (
            "RPC 'critic_inf' uses role 'critic', which has no interface (valid: actor, ref, reward). RPC "
            "'actor_credit' needs its values: set interfaces.critic._target_ to a class that writes them"
        ),
    ),
    (
        [*GRPO, "interfaces.actor.critic=own"],
        (
            "interfaces.actor.critic=own: GroupRelative computes no returns to train a critic. Set "
            "advantage=gae or critic=none"
        ),
    ),
    (
        [*GRPO, "ratio_tolerance=-1"],
        "ratio_tolerance=-1.0: must be at least 0, or null",
    ),
    (
        [*GRPO, "~interfaces.reward"],
        (
            "RPC 'reward_inf' uses role 'reward', which has no interface (valid: actor, ref). RPC 'actor_train' needs "
            "its rewards: set interfaces.reward._target_ to a class that writes them, such as "
            "realign.interfaces.rule_reward.RuleRewardInterface"
        ),
    ),
    (
        [*GRPO, "interfaces.reward.timeout_s=5m"],
        "interfaces.reward.timeout_s: expected float, found '5m'; did you mean 300?",
    ),
    (
        [*GRPO, "resume=nowhere"],
        "resume='nowhere': this folder does not exist. Set auto, the path of a checkpoint, or the folder of a run.",
    ),
    (
        [*GRPO, "output_dir="],
        "output_dir is empty: the run would write into the current folder. Name a folder.",
    ),
    (
        [*GRPO, "models.actor.head.vocabulary=0"],
        "models.actor.head.vocabulary=0: must be at least 1, or null",
    ),
    (
        [*GRPO, "=1"],
        "'=1' is not an override: its key is missing. Write key=value.",
    ),
    (
        [*GRPO, "interfaces.actor.generation=null"],
        "interfaces.actor.generation must not be null; expected GenerationConfig",
    ),
]
"""Pairs of arguments of the program and the message after `error: `. `...` matches the rest of a list."""

MISTAKES_IN_DATA: list[tuple[list[str], str]] = [
    (
        [*GRPO, *SHORT, "microbatch.max_tokens_per_microbatch=12"],
        "microbatch.max_tokens_per_microbatch=12: the longest row has 7 tokens and its response up to 8. Set "
        "it to at least 15, or limit the lengths.",
    ),
    (
        [*GRPO, *SHORT, "data.max_prompt_tokens=2"],
        "no row is left of prompts.jsonl: 0 of 8 rows, 0 tokens, longest 0; 8 dropped (longer than "
        "max_prompt_tokens=2)",
    ),
    (
        [*GRPO, *SHORT, "dynamic_sampling.max_batches=2"],
        "batch_prompts=32: the dataset has 8 rows, and dynamic_sampling uses each row at most once per step. "
        "Set batch_prompts=8 or less.",
    ),
    (
        [*GRPO, *SHORT, "data._target_=realign.data.SupervisedData", "data.path=demonstrations.jsonl", NO_LIMIT],
        "data: the graph reads the key 'prompt_ids', but the dataset has input_ids, loss_mask, prompt_mask. "
        "Choose a data class that has this key.",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with valid models and data."""
    folder = tmp_path_factory.mktemp("mistakes")
    save_tiny(folder / "m")
    save_tiny(folder / "r", head="score")
    rows = {
        "prompts": '{"prompt": "1+1=", "answer": "2"}\n' * 7 + '{"prompt": "1234+1=", "answer": "1235"}\n',
        "demonstrations": '{"prompt": "1+1=", "response": "2"}\n' * 8,
        "pairs": '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n' * 8,
    }
    for name, text in rows.items():
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "file").write_text("no folder")
    save_tiny(folder / "run" / "final" / "actor")
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter the folder of models and data, without network and GPU."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(experiments_dir().parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return folder


def told(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[str, str]:
    """Run a command line that fails. Return its stdout, and its one line on stderr."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return out, err.removeprefix("error: ").rstrip("\n")


def names(words: list[str]) -> str:
    return " ".join(word for word in words if word not in (REWARD, *GRPO[1:3], *PPO[1:4], *SFT[1:], *DPO[1:], *SHORT))


@pytest.mark.parametrize(("words", "message"), MISTAKES, ids=[names(words) for words, _ in MISTAKES])
def test_trap_g6_a_mistake_is_one_line_before_anything_is_loaded(here, capsys, monkeypatch, words, message):
    for loads in (TransformersModel, PromptData, SupervisedData, PreferenceData):
        monkeypatch.setattr(loads, "load", lambda *_, **__: pytest.fail("it was loaded"))
    before = sorted(os.listdir())
    for command in (["check"], []):
        out, line = told(capsys, [*command, *words])
        start, rest, _ = message.replace("{here}", str(here)).partition("...")
        assert line == start if not rest else line.startswith(start)
        # check prints its table before it reports a missing reward function
        assert not out or line.startswith("interfaces.reward: ")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(("words", "message"), MISTAKES_IN_DATA, ids=[names(words) for words, _ in MISTAKES_IN_DATA])
def test_a_mistake_that_the_data_shows_is_one_line_before_the_first_rollout(
    here, tmp_path, capsys, monkeypatch, words, message
):
    monkeypatch.setattr(TransformersEngine, "generate", lambda *_, **__: pytest.fail("it sampled"))
    for command in (["check"], []):
        _, line = told(capsys, [*command, *words, f"output_dir={tmp_path / 'run'}"])
        assert line == message


def test_rows_that_stand_in_a_batch_several_times_are_told_of(here, tmp_path, capsys):
    with pytest.warns(
        UserWarning, match=r"batch_prompts=32: the dataset has 8 rows\. .* each row is in a batch 4\.0 times"
    ):
        assert cli.main(["check", *GRPO, *SHORT, f"output_dir={tmp_path / 'run'}"]) == 0
    assert "Finished with 1 warning (see above)" in capsys.readouterr().out


def test_the_table_is_long_enough_and_says_what_to_do():
    assert len(MISTAKES) >= 40
    assert len({message for _, message in MISTAKES}) >= len(MISTAKES) - 2
