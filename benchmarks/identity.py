"""Compare the working tree with another commit, bit for bit: python -m benchmarks.identity COMMIT [case ...]

Both trees train the same small models on the same data, on this machine, at the same time. Weights, metrics, samples,
resolved values and the names of all files must agree. No values are stored, since bits differ between CPU models.
The script serves the restructuring of the package and goes when that is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 3
TIMES = re.compile(r"(^|/)(time|.*_s|.*seconds.*|.*memory.*|.*_mb|.*idle.*|.*wait.*|.*util.*)")
"""Metrics that measure the machine, not the algorithm."""
SKIPPED_FILES = re.compile(r"(^|/)(run\.json|log\.txt|.*\.log|.*\.png|system.*\.jsonl|spans.*|records.*)$")
"""Files whose content has times in it; their names are still compared."""
REWARD = "def score(prompt, response, row):\n    return response.count('a') + len(response) / 7\n"
ENVIRONMENT = """class Mine:
    async def reset(self, row):
        self.turns = 0
        return "", {}

    async def step(self, response):
        self.turns += 1
        return "more ", response.text.count("a") / 7, self.turns == 2, False, {}
"""
PARTS = '''"""Components of a user."""
from dataclasses import dataclass

from realign.interfaces.components.objectives import Clip
from realign.interfaces.grpo import GRPOActorInterface


@dataclass
class Mine(Clip):
    power: int = 2


@dataclass
class MyActor(GRPOActorInterface):
    mine: float = 0.5
'''
START = "models: {actor: {path: m}}\ndata: {path: p.jsonl}\n"
FILES = {
    "conf/experiment/mine.yaml": f"""defaults: [/experiment/grpo, _self_]
{START}interfaces:
  actor: {{objective: gspo, n_minibatches: 2, kl: {{place: none}}}}
  reward: {{function: "reward.py:score"}}
""",
    "conf/experiment/linked.yaml": """defaults: [mine, _self_]
name: linked
models:
  actor: {optimizer: {lr: 2.0e-6}}
  ref: {path: "${models.actor.path}"}
interfaces:
  actor: {kl: {place: loss, coef: "${models.actor.optimizer.lr}"}, objective: {high: 0.001}}
evaluation: {data: {path: h.jsonl}, generation: {max_new_tokens: "${interfaces.actor.generation.max_new_tokens}"}}
""",
    "conf/experiment/on_preset.yaml": """defaults: [mine, /algorithm/dapo, _self_]
interfaces: {actor: {objective: {high: 0.3}, truncation: {overlong_buffer: 2}}}
""",
    "conf/experiment/grouped.yaml": """defaults: [_self_, mine, override /rollout: async]
interfaces: {actor: {epochs: 2, n_minibatches: 4}}
""",
    "conf/experiment/own_class.yaml": """defaults: [mine, _self_]
interfaces: {actor: {_target_: parts.MyActor, mine: 0.25, objective: {_target_: parts.Mine, power: 3}}}
""",
    "conf/experiment/swept.yaml": """defaults: [mine, _self_]
hydra: {sweeper: {params: {interfaces.actor.objective: "clip,gspo"}}}
""",
    "conf/algorithm/own.yaml": """owns: [interfaces.actor.objective, interfaces.actor.kl, interfaces.actor.correction]
interfaces: {actor: {objective: {_target_: parts.Mine, high: 0.25}, kl: {place: none}, correction: none}}
""",
    "conf/algorithm/bad_owner.yaml": "owns: [interfaces.actor.objectiv]\ninterfaces: {actor: {epochs: 1}}\n",
    "conf/rollout/fast.yaml": "rollout: {_target_: realign.runtime.rollout.spec.Async, max_staleness: 3}\n",
    "alone.yaml": f"""defaults: [/experiment/grpo, _self_]
{START}interfaces: {{reward: {{function: "reward.py:score"}}, actor: {{advantage: gae, critic: own}}}}
""",
}
"""Files of a user: `conf` is the folder of --config-dir, and `alone.yaml` is given as a word."""


# --- what both trees run ---------------------------------------------------------------------------------------------


def materials(folder: Path) -> None:
    """Write models and data; the default names are those of the required values in tests/test_config.py."""
    from realign.demo import arithmetic
    from tests.tiny import save_tiny

    save_tiny(folder / "m")
    save_tiny(folder / "t", seed=5)
    save_tiny(folder / "r", head="score", seed=1)
    save_tiny(folder / "moe", family="qwen3_moe", seed=2)
    arithmetic.prepare(folder / "runs" / "arithmetic", seed=0, demonstrations=300, held_out=20)
    shutil.copytree(folder / "runs/arithmetic/model", folder / "runs/sft_arithmetic/final/actor")
    words = ["A cat. the dog sat. so it is.", "One. and two. and three", "It is. 1 + 1 = 2. why?", "So. well. no. yes."]
    ends = [" " * (i % 3) + "x" * (i % 5) + "\n" for i in range(32)]
    answers = ["a cat.", "the dog sat", "so it is.", "why?"]
    prompts = [{"prompt": words[i % 4] + ends[i], "text": words[i % 4] * 3, "answer": str(i)} for i in range(32)]
    rows = {
        "p": prompts,
        "h": prompts[:8],
        "text": prompts,
        "supervised": [{"prompt": r["prompt"], "completion": answers[i % 4]} for i, r in enumerate(prompts)],
        "preference": [
            {"prompt": r["prompt"], "chosen": answers[i % 4], "rejected": answers[(i + 1) % 4]}
            for i, r in enumerate(prompts)
        ],
        "labels": [
            {"prompt": f"{i}. one. two", "responses": answers, "labels": [int(j == i % 4) for j in range(4)]}
            for i in range(32)
        ],
        "unpaired": [
            {"prompt": r["prompt"], "completion": answers[i % 4], "label": i % 3 > 0} for i, r in enumerate(prompts)
        ],
        "rewarded": [
            {"prompt": r["prompt"], "completion": answers[i % 4], "reward": (i % 5) / 4} for i, r in enumerate(prompts)
        ],
    }
    for name, values in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    (folder / "reward.py").write_text(REWARD)
    (folder / "mine.py").write_text(ENVIRONMENT)
    (folder / "parts.py").write_text(PARTS)
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if name.startswith("alone") else f"# @package _global_\n{text}")


LEARNED = ["models.actor.path=m", "models.reward.path=r", "data.path=p.jsonl"]
RULE = ["models.actor.path=m", "data.path=p.jsonl", "interfaces.reward.function=reward.py:score"]
SHORT = ["interfaces.actor.generation.max_new_tokens=12"]
PPO_PRESETS = [
    "cispo",
    "dapo",
    "dr_grpo",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "lite_ppo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sapo",
]
DPO_PRESETS = ["cpo", "dpo_norm", "ipo", "orpo", "robust_dpo", "simpo"]
GIVEN: dict[str, list[str]] = {
    **{
        name: [*LEARNED, *SHORT]
        for name in [
            "ppo",
            "deepspeed_chat",
            "openrlhf_ppo",
            "llama2_chat",
            "qwen_rlhf",
            "secrets_of_rlhf",
            "lm_human_preferences",
            "lm_human_preferences_cnndm",
            "lm_human_preferences_tldr",
        ]
    },
    **{
        name: [*RULE, *SHORT]
        for name in ["trlx_ppo", "areal_ppo", "areal_decoupled", "online_dpo", "grpo", "raft", "remax"]
    },
    **{
        f"lm_human_preferences_reward{task}": [
            "models.reward.path=m",
            "data.path=labels.jsonl",
            "calibration.data.path=p.jsonl",
            "calibration.samples=16",
            "calibration.batch_prompts=8",
        ]
        for task in ("", "_cnndm", "_tldr")
    },
    "instructgpt": [
        *LEARNED[:2],
        "data.prompts.path=p.jsonl",
        "data.pretraining.path=text.jsonl",
        "data.pretraining.block_tokens=16",
        "data.sequences_per_prompt=2",
        *SHORT,
    ],
    "dpo": ["models.actor.path=m", "data.path=preference.jsonl"],
    "kto": ["models.actor.path=m", "data.path=unpaired.jsonl"],
    "ilql": ["models.actor.path=m", "data.path=rewarded.jsonl"],
    "gkd": ["models.actor.path=m", "models.teacher.path=t", "data.path=p.jsonl", *SHORT],
    "on_policy_distillation": ["models.actor.path=m", "models.teacher.path=t", "data.path=p.jsonl", *SHORT],
    "grpo_environment": [
        "models.actor.path=m",
        "data.path=p.jsonl",
        "interfaces.agent.environment=mine.py:Mine",
        "interfaces.agent.generation.max_new_tokens=8",
        "interfaces.agent.max_episode_tokens=60",
    ],
    "reward_model": ["models.reward.path=m", "data.path=preference.jsonl"],
    "reward_sentiment": ["models.reward.path=m", "data.path=preference.jsonl", "evaluation=null"],
    "sft": ["models.actor.path=m", "data.path=supervised.jsonl"],
    "sft_sentiment": ["models.actor.path=m", "data.path=supervised.jsonl", "evaluation=null"],
    "ppo_sentiment": [*LEARNED, "evaluation=null", *SHORT],
    "sft_arithmetic": ["evaluation.data.limit=4"],
    "grpo_arithmetic": ["evaluation.data.limit=4"],
    "ppo_arithmetic": ["evaluation.data.limit=4"],
    "grpo_reasoning": [
        "models.actor.path=m",
        "data.path=p.jsonl",
        "evaluation.data.path=h.jsonl",
        "interfaces.reward.function=reward.py:score",
        "interfaces.reward.known_answer=null",
        "data.template=plain",
        *SHORT,
    ],
}
"""Overrides with which an experiment trains on the materials; grpo_agent samples over HTTP and is resolved only."""
COMMON = [f"steps={STEPS}", "batch_prompts=8", "records.every_steps=1", "checkpoint.every_minutes=null"]
N4 = ["interfaces.actor.generation.n=4"]


def cases() -> dict[str, dict[str, Any]]:
    """Return what to run, by name: overrides, and a second command that resumes the run."""
    out = {f"experiment={name}": {"run": [f"experiment={name}", *given]} for name, given in GIVEN.items()}
    for preset in PPO_PRESETS:
        more = ["interfaces.actor.truncation.overlong_buffer=2"] if preset == "dapo" else []
        out[f"algorithm={preset}"] = {"run": ["experiment=grpo", *GIVEN["grpo"], *N4, f"algorithm={preset}", *more]}
    for preset in DPO_PRESETS:
        out[f"algorithm={preset}"] = {"run": ["experiment=dpo", *GIVEN["dpo"], f"algorithm={preset}"]}
    grpo, ppo = ["experiment=grpo", *GIVEN["grpo"], *N4], ["experiment=ppo", *GIVEN["ppo"]]
    resume = ["checkpoint.every_steps=1"]
    out |= {
        "lora": {"run": [*grpo, "models.actor.trains=lora"]},
        "async": {"run": [*grpo, "rollout=async", "rollout.max_staleness=0"]},
        "dynamic": {"run": [*grpo, "dynamic_sampling={}"]},
        "moe": {"run": [*grpo, "models.actor.path=moe"]},
        "resume grpo": {"run": [*grpo, *resume], "resume": 2},
        "resume ppo": {"run": [*ppo, *resume], "resume": 2},
        "sweep": {"run": [*grpo, f"{A}.objective=gspo,clip", "seed=0,1"], "sweep": True},
        "sweep of a file": {"run": ["experiment=swept", *SHORT, *N4], "sweep": True},
        "two ranks": {"run": grpo, "ranks": 2},
        "two ranks ppo": {"run": ppo, "ranks": 2},
    }
    return out


def resolutions() -> dict[str, list[str]]:
    """Return the command lines of which only the resolved values are compared.

    These are every experiment with every preset. Words that begin with `--` stand first; `--cfg` compares what the
    command line prints. `spellings` has the ways to write a setting.
    """
    from tests.test_config import MUST_BE_GIVEN

    names = sorted(path.stem for path in (ROOT / "experiments" / "experiment").glob("*.yaml"))
    presets = [None, *sorted(path.stem for path in (ROOT / "experiments" / "algorithm").glob("*.yaml"))]
    out = {}
    for name in names:
        base = [f"experiment={name}", *MUST_BE_GIVEN.get(name, [])]
        for preset in presets:
            more = ["interfaces.actor.truncation.overlong_buffer=2"] if preset == "dapo" else []
            out[f"{name} x {preset}"] = base if preset is None else [*base, f"algorithm={preset}", *more]
        for group in ("rollout=async", "rollout=async_staleness_4", "runtime=ray"):
            out[f"{name} x {group}"] = [*base, group]
        out[f"{name} printed"] = ["--cfg", *base]
    for preset in presets[1:]:
        more = ["interfaces.actor.truncation.overlong_buffer=2"] if preset == "dapo" else []
        words = ["experiment=grpo", *MUST_BE_GIVEN["grpo"], f"algorithm={preset}", *more]
        out[f"grpo x {preset} printed"] = ["--cfg", *words]
        for name in ("grpo", "ppo", "dpo"):
            given = MUST_BE_GIVEN[name]
            out[f"{preset} before {name}"] = [*more, f"algorithm={preset}", *given, f"experiment={name}"]
            out[f"+algorithm={preset} {name}"] = [f"experiment={name}", *given, f"+algorithm={preset}", *more]
    return out


A = "interfaces.actor"
COMPONENTS = "realign.interfaces.components"
WORDS: dict[str, tuple[list[str], str, str]] = {
    # place: words, module of the classes, a field that is not in all classes
    f"{A}.objective": (["cispo", "clip", "gmpo", "gspo", "proximal_kl", "reinforce", "sapo"], "objectives", "high=0.3"),
    f"{A}.advantage": (["gae", "group_relative", "n_step", "teacher_kl"], "advantages", "lam=0.9"),
    f"{A}.aggregation": (["constant", "seq_mean_token_mean", "seq_mean_token_sum", "token_mean"], "aggregation", "x=1"),
    f"{A}.correction": (["importance_correction", "correction", "none"], "correction", "weight.max=2"),
    f"{A}.kl": (["kl_penalty", "none"], "kl", "coef=0.1"),
    f"{A}.value": (["value_objective", "none"], "value_loss", "coef=0.1"),
    f"{A}.early_stop": (["early_stop", "none"], "early_stop", "kl=0.1"),
    "models.actor.head": (["causal", "score", "value"], "", "vocabulary=5"),
    "models.actor.trains": (["all", "lora", "top_layers"], "", "rank=4"),
    "models.actor.sampler": (["in_process_sampling", "sglang", "vllm"], "", "max_slots=4"),
    "models.actor.load_balancing": (["load_balancing", "none"], "", "coef=0.1"),
    "models.actor": (["transformers_model", "shared_model"], "", "dtype=float32"),
    "data": (["prompt_data", "supervised_data"], "", "limit=5"),
    "graph": (["dataflow"], "", "x=1"),
    "callbacks.stop": (["early_stopping", "none"], "", "metric=reward"),
    "trackers.board": (["tensor_board", "none"], "", "x=1"),
    "dynamic_sampling": (["dynamic_sampling", "none"], "", "max_batches=5"),
    "evaluation": (["evaluation", "none"], "", "every_steps=5"),
    "calibration": (["reward_calibration", "none"], "", "samples=16"),
    "checkpoint": (["none"], "", "keep=3"),
}
CLASSES = {"gae": "GAE", "kl_penalty": "KLPenalty", "proximal_kl": "ProximalKL", "teacher_kl": "TeacherKL"}
"""Class of each word that is not its name in capitals."""
OTHERS: list[list[str]] = [
    # values that remove something
    *(
        [f"{key}={nothing}"]
        for key in ("models.ref", "models.actor", A, "graph", "data")
        for nothing in ("null", "none")
    ),
    *([f"~{key}"] for key in (f"{A}.kl", f"{A}.kl.coef", "models.actor.optimizer", "models", A, "data", "steps", "x")),
    [f"~{A}.kl.place=loss"],
    [f"~{A}.kl.place=none"],
    # prefixes
    [f"+{A}.epochs=2"],
    [f"++{A}.epochs=2"],
    [f"+{A}.kl.coef=0.5"],
    ["+steps=3"],
    ["++steps=3"],
    ["+new=3"],
    ["++new.key=3"],
    ["+models.other.path=m"],
    ["models.other.path=m"],
    ["+callbacks.mine={_target_: realign.runtime.callbacks.EarlyStopping, metric: reward}"],
    # interpolations, mappings, lists, quotes
    ["name=x_${seed}", "seed=3"],
    [f"{A}.kl.coef=${{models.actor.optimizer.lr}}"],
    ["models.ref.path=${models.actor.path}"],
    ["models.ref=${models.actor}"],
    ["models.ref=${models.actor}", "models.ref.dtype=float32"],
    ["models.actor.path=${nothing}"],
    ["output_dir=${oc.env:NO_SUCH_VARIABLE}"],
    ["output_dir=${oc.env:NO_SUCH_VARIABLE,runs/x}"],
    [f"{A}.kl={{place: loss, coef: 0.5}}"],
    [f"{A}={{kl: {{place: none}}, epochs: 2}}"],
    ["interfaces={actor: {epochs: 2}}"],
    ["models={actor: {dtype: float32}, ref: {path: m}}"],
    ["evaluation.data.path=h.jsonl"],
    ["evaluation.data={path: h.jsonl}", "evaluation.every_steps=7"],
    ["evaluations.a.data.path=h.jsonl", "evaluations.b.data.path=h.jsonl", "evaluations.b.generation.n=4"],
    ["models.actor.optimizer.betas=[0.8,0.9]"],
    ["resume_allow=[steps]"],
    ["resume_allow=[steps,seed]"],
    ["name='with space'"],
    ['name="with space"'],
    ["name=with space"],
    ["name=ümlaut (1)"],
    ["data.path=[p.jsonl,h.jsonl]"],
    ["data.path=[{path: p.jsonl, weight: 2},h.jsonl]"],
    ["data.split={by: x}"],
    # two words for one key
    ["steps=3", "steps=4"],
    [f"{A}.objective=gspo", f"{A}.objective=clip"],
    [f"{A}.objective=gspo", f"{A}.objective._target_={COMPONENTS}.objectives.Clip"],
    [f"{A}.correction=none", f"{A}.correction.weight.max=3"],
    ["experiment=ppo", "models.reward.path=r"],
    # sweeps raise an error without -m
    ["seed=1,2"],
    [f"{A}.objective=gspo,clip"],
    # other interfaces, and what they drop
    [f"{A}._target_=realign.interfaces.ppo.PPOActorInterface"],
    [f"{A}._target_=realign.interfaces.sft.SFTInterface"],
    [f"{A}._target_=realign.interfaces.raft.RAFTActorInterface"],
    [f"{A}._target_=parts.MyActor"],
    [f"{A}._target_=parts.MyActor", f"{A}.mine=0.25", f"{A}.objective=gspo"],
    [f"{A}.objective._target_=parts.Mine"],
    [f"{A}.objective._target_=parts.Mine", f"{A}.objective.power=4", f"{A}.objective.high=0.3"],
    [f"{A}.objective=mine"],
    # the hydra node
    ["hydra.run.dir=elsewhere"],
    ["hydra.sweeper.params={seed: '1,2'}"],
    ["hydra.job.chdir=true"],
    ["hydra.searchpath=[pkg://os]"],
    ["hydra/launcher=basic"],
    ["hydra/job_logging=none"],
]
OF_FOLDER: list[list[str]] = [
    *([f"experiment={name}"] for name in ("mine", "linked", "on_preset", "grouped", "own_class", "swept", "nothing")),
    *([f"experiment={name}", "algorithm=own"] for name in ("mine", "linked", "on_preset", "own_class")),
    *([f"experiment={name}", "algorithm=rloo"] for name in ("mine", "linked", "on_preset", "own_class")),
    *([f"experiment={name}", f"{A}.objective=clip"] for name in ("mine", "linked", "on_preset", "own_class")),
    *([f"experiment={name}", f"{A}.objective.high=0.5"] for name in ("mine", "linked", "on_preset", "own_class")),
    *(["experiment=mine", "algorithm=own", word] for word in (f"{A}.objective=gspo", f"{A}.objective.power=3")),
    *(["experiment=mine", "algorithm=own", word] for word in (f"{A}.kl.place=loss", f"{A}.correction=null")),
    *(["experiment=mine", "algorithm=own", word] for word in (f"~{A}.objective", f"{A}.objective=null")),
    ["algorithm=own", "experiment=mine"],
    ["experiment=mine", "algorithm=bad_owner"],
    ["experiment=mine", "algorithm=nothing"],
    ["experiment=mine", "rollout=fast"],
    ["experiment=grouped", "algorithm=gspo", "rollout=sync"],
    ["experiment=mine", "algorithm=null", "rollout@rollout=async"],
    ["experiment=grpo", "algorithm=own", *RULE],
    ["alone.yaml"],
    ["alone.yaml", "algorithm=gspo"],
    ["experiment=./alone.yaml", f"{A}.advantage.lam=0.9"],
]


def spellings() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the first words of a command line, and the words that set something."""
    for base in (["experiment=grpo", *RULE], ["experiment=ppo", *LEARNED]):
        for place, (words, module, field) in WORDS.items():
            for word in [*words, "null", "wrong_word"] if base[0] == "experiment=grpo" else words[-1:]:
                name = CLASSES.get(word, word.title().replace("_", ""))
                path = f"{COMPONENTS}.{module}.{name}"
                yield base, [f"{place}={word}"]
                yield base, [f"{place}={word}", f"{place}.{field}"]
                yield base, [f"{place}.{field}", f"{place}={word}"]
                if module and word not in ("null", "wrong_word", "none"):
                    yield base, [f"{place}._target_={path}"]
                    yield base, [f"{place}.{field}", f"{place}._target_={path}"]
                    yield base, [f"{place}={{_target_: {path}, {field.replace('=', ': ')}}}"]
                    yield base, ["algorithm=gspo", f"{place}={word}"]
            yield base, [f"~{place}"]
            yield base, [f"+{place}={words[0]}"]
            yield base, [f"++{place}={words[0]}"]
            yield base, [f"{place}.{field}"]
            yield base, ["algorithm=gspo", f"{place}.{field}"]
        for words in OTHERS:
            yield base, words
    for words in OF_FOLDER:
        yield ["--config-dir=conf"], words
    for words in OF_FOLDER[:9]:
        yield ["--cfg", "--config-dir=conf"], words


# --- in one tree -----------------------------------------------------------------------------------------------------


def worker(jobs: Path, out: Path) -> None:
    """Run all jobs with the `realign` on the path; write what they gave, case by case."""
    from realign.config import build_experiment, compose
    from realign.runtime import run

    sys.path.insert(0, os.getcwd())  # as the command line does, for the classes of a user
    todo = json.loads(jobs.read_text())
    with out.open("w") as file:
        for name, overrides in todo["resolved"].items():
            flags = [word for word in overrides if word.startswith("--")]
            words = [word for word in overrides if not word.startswith("--")]
            try:
                if "--cfg" in flags:
                    result: Any = printed([*flags[1:], *words])
                else:
                    config_dir = "conf" if flags else None
                    result = canonical(build_experiment(compose(words, config_dir)).resolved)
            except Exception as error:
                result = {"refused": type(error).__name__, "key": key_of(str(error))}
            file.write(json.dumps(["resolved", name, result], sort_keys=True, default=str) + "\n")
        for name, case in todo["cases"].items():
            folder = Path("out") / re.sub(r"\W+", "_", name)
            overrides = [*case["run"], *COMMON, f"output_dir={folder}"]
            print(name, file=sys.stderr, flush=True)
            try:
                if ranks := case.get("ranks"):
                    launch = [
                        "-m",
                        "torch.distributed.run",
                        "--standalone",
                        f"--nproc-per-node={ranks}",
                        "-m",
                        "realign",
                    ]
                    subprocess.run([sys.executable, *launch, *overrides], check=True, capture_output=True, timeout=600)
                elif case.get("sweep"):
                    sweep = ["-m", "realign", "-m", "--config-dir=conf", *overrides, f"hydra.sweep.dir={folder}"]
                    subprocess.run([sys.executable, *sweep], check=True, capture_output=True, timeout=600)
                elif steps := case.get("resume"):
                    run(build_experiment(compose([*overrides, f"steps={steps}"])))
                    run(build_experiment(compose([*overrides, "resume=auto", "resume_allow=[steps]"])))
                else:
                    run(build_experiment(compose(overrides)))
                result = contents(folder)
            except subprocess.CalledProcessError as error:
                result = error.stderr.decode()[-2000:]
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            file.write(json.dumps(["case", name, result], sort_keys=True) + "\n")
            file.flush()


KEY = re.compile(
    r"(?<![\w/])(?:(?:models|interfaces|graph|sync|data|evaluations?|calibration|dynamic_sampling|trackers|callbacks|runtime"
    r"|rollout|microbatch|checkpoint|records|hydra)\b(?:\.\w+)*|steps|seed|name|output_dir|resume\w*|new)(?![\w/])"
)
"""A key of the config in a message."""


def key_of(message: str) -> str:
    """Return the first key that a message names. Its wording may change."""
    match = KEY.search(message)
    return match[0].removesuffix("._target_") if match else ""


def printed(words: list[str]) -> Any:
    """Return what `realign --cfg job` prints, or the exit code and the key of its error."""
    import yaml

    call = subprocess.run(
        [sys.executable, "-m", "realign", "--cfg", "job", *words], capture_output=True, text=True, timeout=120
    )
    if call.returncode:
        return {"exit code": call.returncode, "key": key_of(call.stderr)}
    values = yaml.safe_load(call.stdout)
    for node in values["models"].values():  # shipped files do not write this default, nor the graph
        if isinstance(node, dict):
            node.setdefault("_target_", "realign.engines.TransformersModel")
    return canonical({**values, "graph": {"_target_": "realign.interfaces.ppo.dataflow", **values["graph"]}})


OF_PPO = {"critic": "none", "value": None, "critic_warmup_steps": 0, "ptx_coef": 0.0}
"""Settings of every actor before they became PPO's alone, with the values that others accept, but do not record."""


def canonical(value: Any) -> Any:
    """Return resolved values with the name of each class instead of its module, which the restructuring moves."""
    if isinstance(value, dict):
        target = value.get("_target_")
        if str(target).endswith(("GRPOActorInterface", "MyActor")):
            value = {k: v for k, v in value.items() if k not in OF_PPO or v != OF_PPO[k]}
        if isinstance(target, str) and target.startswith("realign."):
            value = {**value, "_target_": target.rpartition(".")[2]}
        if value.keys() == {"_target_"}:  # a component without fields is the same as its word
            name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", str(value["_target_"]))
            return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower()
        return {str(k): canonical(v) for k, v in value.items()}
    return [canonical(v) for v in value] if isinstance(value, list | tuple) else value


def contents(folder: Path) -> dict[str, Any]:
    """Return what must not change of a run's folder."""
    out: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            continue
        if SKIPPED_FILES.search(name):
            out[name] = "exists"
        elif path.name == "metrics.jsonl" or path.suffix == ".jsonl":
            out[name] = [timeless(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.suffix == ".safetensors":
            out[name] = tensors(path)
        else:
            out[name] = "exists"
    return out


def tensors(path: Path) -> dict[str, str]:
    """Return shape, type and hash of each tensor; the order in the file may vary."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    slices = {name: slice(*(start + offset for offset in at["data_offsets"])) for name, at in header.items()}
    return {
        name: f"{at['dtype']} {at['shape']} {hashlib.sha256(data[slices[name]]).hexdigest()}"
        for name, at in header.items()
    }


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if not TIMES.search(k)}
    return [timeless(v) for v in value] if isinstance(value, list) else value


# --- both trees ------------------------------------------------------------------------------------------------------


def differences(old: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key, "<absent>"), new.get(key, "<absent>"), f"{where}/{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, f"{where}[{i}]")
    elif old != new:
        yield f"{where}: {str(old)[:160]} -> {str(new)[:160]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    parser.add_argument(
        "only", nargs="*", help="cases to run, such as lora, experiment=ppo, resolved or spellings; all by default"
    )
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="identity-"))
    base = folder / "base"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(base), given.commit], check=True, cwd=ROOT)
    try:
        return compare(folder, base, given.only)
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(base)], check=True, cwd=ROOT)
        shutil.rmtree(folder)


def compare(folder: Path, base: Path, only: list[str]) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TQDM_DISABLE": "1"}
    (folder / "materials").mkdir()
    call = [sys.executable, str(Path(__file__).resolve())]
    old = {**environment, "PYTHONPATH": str(base)}
    subprocess.run([*call, "--materials", str(folder / "materials")], check=True, env=old)
    jobs: dict[str, Any] = {"resolved": {}, "cases": {k: case for k, case in cases().items() if not only or k in only}}
    if not only or "resolved" in only:
        asked = subprocess.run([*call, "--resolutions"], check=True, capture_output=True, text=True, env=old)
        jobs["resolved"] = json.loads(asked.stdout)
    if not only or "spellings" in only:
        jobs["resolved"] |= {f"{' '.join(words)} over {' '.join(base)}": [*base, *words] for base, words in spellings()}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    running = {}
    for name, tree in (("old", base), ("new", ROOT)):
        here = folder / name
        shutil.copytree(folder / "materials", here)
        arguments = ["--worker", str(folder / "jobs.json"), str(here / "results.jsonl")]
        log = (folder / f"{name}.log").open("w")
        running[name] = subprocess.Popen(
            [*call, *arguments], cwd=here, env={**environment, "PYTHONPATH": str(tree)}, stdout=log, stderr=log
        )
    codes = {name: process.wait() for name, process in running.items()}
    results = {}
    for name, code in codes.items():
        lines = (folder / name / "results.jsonl").read_text().splitlines()
        results[name] = {(kind, case): value for kind, case, value in map(json.loads, lines)}
        if code:
            print(f"{name}: exit code {code}\n" + (folder / f"{name}.log").read_text()[-3000:])
    wrong = trained = 0
    for key in results["old"] | results["new"]:
        old, new = results["old"].get(key, "<absent>"), results["new"].get(key, "<absent>")
        trained += isinstance(old, dict)
        if isinstance(old, str) and key[0] == "case":
            print(f"did not run in the old tree: {key[1]}: {old[:300]}")
        if found := list(differences(old, new)):
            wrong += 1
            print(f"DIFFERENT {' '.join(key)}: {len(found)} places")
            print("".join(f"    {line}\n" for line in found[:6]), end="")
    print(f"{len(results['old'])} compared ({trained} with values), {wrong} different")
    return int(bool(wrong) or any(codes.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--materials"]:
        materials(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--resolutions"]:
        print(json.dumps(resolutions()))
    else:
        sys.exit(main())
