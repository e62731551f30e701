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
        "two ranks": {"run": grpo, "ranks": 2},
        "two ranks ppo": {"run": ppo, "ranks": 2},
    }
    return out


def resolutions() -> dict[str, list[str]]:
    """Return the command lines of which only the resolved values are compared: every experiment with every preset."""
    from tests.test_config import MUST_BE_GIVEN

    names = sorted(path.stem for path in (ROOT / "experiments" / "experiment").glob("*.yaml"))
    presets = [None, *sorted(path.stem for path in (ROOT / "experiments" / "algorithm").glob("*.yaml"))]
    out = {}
    for name in names:
        for preset in presets:
            base = [f"experiment={name}", *MUST_BE_GIVEN.get(name, [])]
            more = ["interfaces.actor.truncation.overlong_buffer=2"] if preset == "dapo" else []
            out[f"{name} x {preset}"] = base if preset is None else [*base, f"algorithm={preset}", *more]
    return out


# --- in one tree -----------------------------------------------------------------------------------------------------


def worker(jobs: Path, out: Path) -> None:
    """Run all jobs with the `realign` on the path; write what they gave, case by case."""
    from realign.config import build_experiment, compose
    from realign.runtime import run

    todo = json.loads(jobs.read_text())
    with out.open("w") as file:
        for name, overrides in todo["resolved"].items():
            try:
                result: Any = canonical(build_experiment(compose(overrides)).resolved)
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
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


def canonical(value: Any) -> Any:
    """Return resolved values with the name of each class instead of its module, which the restructuring moves."""
    if isinstance(value, dict):
        target = value.get("_target_")
        if isinstance(target, str) and target.startswith("realign."):
            value = {**value, "_target_": target.rpartition(".")[2]}
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
        "only", nargs="*", help="cases to run, such as lora, experiment=ppo or resolved; all by default"
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
