"""How often `realign why` names the cause of a run that doesn't learn: planted faults, and healthy runs.

    python -m benchmarks.why [folder] [set=seen|replays|sealed|missed] [only=NAME,NAME] [seeds=2]

The task is small enough for seconds: a chat model with 100,000 parameters repeats the first of two numbers, and most
of its examples repeated the second. Each fault is one mistake that users make, in settings, reward function or data. It
was written before the diagnosis. A healthy run has to improve, or it does not count.
"""

from __future__ import annotations

import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from realign import Run, train
from realign.demo import tiny
from realign.engines.transformers_model import TransformersModel
from realign.errors import RealignError
from realign.interfaces.components import GroupRelative
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.own_files import make_folder
from realign.safe_yaml import load_yaml

ASK, ANSWER = "<user>", "<assistant>"
NUMBERS = [str(n) for n in range(30)]
WORDS = [ASK, ANSWER, "well", "first", "of", "and", "the", "answer", "is", "so", *NUMBERS]
TEMPLATE = (
    "{%- for message in messages %}{{ '<' + message.role + '> ' + message.content + ' ' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"
)
HERE = Path(__file__)

# --- the task ---


def problems(rng: random.Random, count: int, low: int = 0, high: int = 10) -> Iterator[dict[str, Any]]:
    """Yield problems with numbers from `low` to below `high`."""
    for _ in range(count):
        a, b = rng.sample(range(low, high), 2)
        yield {"prompt": f"first of {a} and {b}", "answer": str(a), "other": str(b)}


def demonstration(rng: random.Random, problem: Mapping[str, Any]) -> str:
    """Return an answer: right in a third of the cases, sometimes after empty words, sometimes in another form."""
    number = rng.choices([problem["answer"], problem["other"], rng.choice(NUMBERS[:10])], [35, 50, 15])[0]
    empty = "well " * min(5, int(rng.expovariate(1.0)))
    return empty + (number if rng.random() < 0.1 else f"the answer is {number}")


def prepare(folder: Path) -> None:
    """Write the data files, and two models: `model`, and `endless`, whose examples had no end token."""
    rng = random.Random(0)
    held_out, rows = list(problems(rng, 64)), list(problems(rng, 512))
    wrong = [r["answer"] for r in rows]
    rng.shuffle(wrong)
    told = [(r["prompt"], f"the answer is {r['answer']}", f"the answer is {r['other']}") for r in rows]
    pairs = [dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)) for texts in told]
    files = {
        "prompts": rows,
        "held_out": held_out,
        "one_prompt": rows[:1] * 512,
        "unseen": list(problems(rng, 256, 20, 30)),
        # half of the rows have their answer in another column, as data of two sources do
        "sources": [{"prompt": r["prompt"], ("answer", "solution")[i % 2]: r["answer"]} for i, r in enumerate(rows)],
        "nines": [{**row, "answer": "9"} for row in rows],
        "wrong": [{**row, "answer": other} for row, other in zip(rows, wrong, strict=True)],
        "rendered": [{**row, "prompt": f"{ASK} {row['prompt']} {ANSWER}"} for row in rows],
        "demonstrations": [{**row, "response": f"the answer is {row['answer']}"} for row in rows],
        "pairs": pairs,
        "random_pairs": [
            {**p, "chosen": p["rejected"], "rejected": p["chosen"]} if rng.random() < 0.5 else p for p in pairs
        ],
    }
    for name, content in files.items():
        tiny.write_rows(folder / f"{name}.jsonl", content)
    tokenizer = build_tokenizer()
    for name, end in (("model", tokenizer.eos_token_id), ("endless", None)):
        tiny.save(folder / name, imitating(tokenizer, end), tokenizer)


def build_tokenizer() -> Any:
    """Return a tokenizer with one token per word, and a chat template."""
    from tokenizers import pre_tokenizers

    tokenizer = tiny.build_tokenizer(WORDS, split=pre_tokenizers.WhitespaceSplit())
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(vocabulary: int) -> Any:
    """Return a model of two layers with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, initializer_range=0.08, tie_word_embeddings=True, **size, **ids)
    )


def imitating(tokenizer: Any, end: int | None, steps: int = 300) -> Any:
    """Return a model that imitates the demonstrations. Without an end token, each is followed by more empty words."""
    rng, model = random.Random(1), build_model(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    torch.manual_seed(0)
    for _ in range(steps):
        rows, labels = [], []
        for problem in problems(rng, 32):
            asked = tokenizer(f"{ASK} {problem['prompt']} {ANSWER}")["input_ids"]
            told = tokenizer(demonstration(rng, problem))["input_ids"]
            told += tokenizer("well so " * 8)["input_ids"] if end is None else [end]
            room = 28 - len(asked) - len(told)
            rows.append((asked + told + [0] * room)[:28])
            labels.append(([-100] * len(asked) + told + [-100] * room)[:28])
        optimizer.zero_grad()
        model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss.backward()
        optimizer.step()
        schedule.step()
    return model


# --- reward functions, and components with a fault ---

Row = Mapping[str, Any]
Reward = Callable[[str, str, Row], float | None]


def right(prompt: str, response: str, row: Row) -> float:
    """Return 1 for the right answer in the form `the answer is N`."""
    told = re.search(r"the answer is (\d+)$", response.strip())
    return float(told is not None and told[1] == row["answer"])


def _of_response(score: Callable[[str], float]) -> Reward:
    return lambda prompt, response, row: float(score(response))


def _of_verdict(score: Callable[[float], float | None]) -> Reward:
    return lambda prompt, response, row: score(right(prompt, response, row))


def strict(prompt: str, response: str, row: Row) -> float:
    """Compare with the answer and a line break, which no response ends with."""
    return float(response == row["answer"] + "\n")


def constant(prompt: str, response: str, row: Row) -> float:
    """Test the wrong variable, which always passes."""
    return float(row["answer"] in row["answer"])


def of_prompt(prompt: str, response: str, row: Row) -> float:
    """Score the prompt instead of the response."""
    return float(sum(map(int, re.findall(r"\d+", prompt))) % 7)


def well(prompt: str, response: str, row: Row) -> float:
    """Pay for one word, as a judge that likes politeness."""
    return 0.2 * right(prompt, response, row) + 0.5 * response.split().count("well")


def one_column(prompt: str, response: str, row: Row) -> float:
    """Look for the answer in one column only."""
    return right(prompt, response, {"answer": row.get("answer")})


boxed = _of_response(lambda text: re.search(r"\\boxed\{(\d+)\}", text) is not None)  # which the model never uses
wordy = _of_response(lambda text: len(text.split()) / 5)
short = _of_response(lambda text: -len(text.split()))
# where each word is a line, and a dot matches no line break
one_line = _of_response(lambda text: re.match("the.*answer.*is", text.replace(" ", "\n")) is not None)
distance = _of_response(lambda text: abs(3 - len(text.split())))  # as if it were a reward
coin = _of_response(lambda text: random.random() < 0.5)
not_right = _of_verdict(lambda verdict: 1 - verdict)
noisy = _of_verdict(lambda verdict: verdict + random.gauss(0, 6))
outliers = _of_verdict(lambda verdict: verdict + 1000 * (random.random() < 1 / 60))  # by accident
percent = _of_verdict(lambda verdict: 100 if verdict else 10)
often_missing = _of_verdict(lambda verdict: verdict or None)  # a parser that gives up on wrong answers


@dataclass
class OwnGroups(GroupRelative):
    """Compare each response with itself, as if every response had an id of its own."""

    def estimate(self, rewards: Any, data: Any, reduce: Any) -> torch.Tensor:
        """Return the reward minus the mean of a group of one."""
        return rewards.per_sequence - rewards.per_sequence.nan_to_num()


@dataclass
class OutOfQuota(RuleRewardInterface):
    """A judge whose quota is used up after eight batches, and whose error counts as 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._left = 8

    def inference(self, model: Any, data: Any, mb_spec: Any) -> Any:
        """Return rewards as long as the quota lasts."""
        scored, self._left = super().inference(model, data, mb_spec), self._left - 1
        scored["rewards"].mul_(self._left >= 0)
        return scored


@dataclass
class FaultyModel(TransformersModel):
    """A model with a mistake."""

    mistake: str = ""
    """`stale`: the sampler never gets new weights; `cold`: it has its own temperature; `frozen`: nothing trains."""

    def load(self, name: str, *, seed: int) -> Any:
        """Make the mistake."""
        model, start = super().load(name, seed=seed), super().load(name, seed=seed)
        sample = start.engine.generate if self.mistake == "stale" else model.engine.generate
        own = {"temperature": 0.5} if self.mistake == "cold" else {}
        model.engine.generate = lambda data, config, **rest: sample(data, replace(config, **own), **rest)  # type: ignore[method-assign]
        model.engine.network.requires_grad_(self.mistake != "frozen")
        return model


# --- faults ---


@dataclass(frozen=True)
class Case:
    """A run: its name, changes to the settings, and the causes that count as right; none for a healthy run."""

    name: str
    changes: Mapping[str, Any]
    causes: tuple[str, ...] = ()
    source: str = ""
    """Thread in which users report it."""
    kind: str = "grpo"
    """Experiment: grpo, ppo, dpo or sft."""


SHORT = {
    "lr": "models.actor.optimizer.lr",
    "data": "data.path",
    "held_out": "evaluation.data.path",
    "function": "interfaces.reward.function",
    "tokens": "interfaces.actor.generation.max_new_tokens",
    "temperature": "interfaces.actor.generation.temperature",
}
"""Keys by the names that the cases use."""


def _case(name: str, causes: str = "", changes: str = "", kind: str = "grpo", source: str = "") -> Case:
    """Return a case from its changes, `key=YAML; key=YAML`; HERE stands for this file."""
    pairs = (word.split("=", 1) for word in changes.replace("HERE", str(HERE)).split("; ") if word)
    return Case(name, {SHORT.get(k, k): load_yaml(v) for k, v in pairs}, tuple(causes.split()), source, kind)


SUM = "function=null; interfaces.reward.functions="
HALF = SUM + "{right: {function: 'HERE:right', weight: 0.02}, short: {function: 'HERE:short'}}"
FORMAT = "{right: {function: 'HERE:right'}, format: {function: 'HERE:one_line'}}"
CANCEL = SUM + "{right: {function: 'HERE:right'}, wrong: {function: 'HERE:not_right'}}"
MODEL = "models.actor._target_=benchmarks.why.FaultyModel; models.actor.mistake="
FAULTS = (
    _case("another format", "not-parsed", "function=boxed", source="open-r1#255"),
    _case("exact match with a line break", "not-parsed", "function=strict", source="Search-R1#75"),
    _case("a reward that always passes", "equal-rewards", "function=constant"),
    _case("a reward of the prompt", "equal-rewards", "function=of_prompt", source="trl#3857"),
    _case("parts of the reward cancel", "equal-rewards", CANCEL, source="trl#3857"),
    _case("limit below the answer", "truncated", "tokens=3"),
    _case("a base model that never ends", "no-end-token", "model=endless; tokens=16", source="verl#2738"),
    _case("unseen numbers", "too-hard", "data=unseen; held_out=unseen", source="self-critical.pytorch#4"),
    _case("temperature near 0", "equal-responses", "temperature=0.03"),
    _case("temperature of 6", "high-temperature", "temperature=6"),
    _case("no chat template", "template-missing", "data.template=plain"),
    _case("template in the data", "template-twice", "data=rendered"),
    _case("prompts cut", "prompts-cut", "data.max_prompt_tokens=3; data.too_long=truncate_left", source="vlm-grpo#24"),
    _case("shuffled rewards", "shuffled", "interfaces.reward.shuffle=true"),
    _case("coin flips", "reward-noise", "function=coin"),
    _case("noisy judge", "reward-noise", "function=noisy"),
    _case("answers of other rows", "wrong-answers reward-noise", "data=wrong"),
    _case("outliers", "reward-outliers reward-noise", "function=outliers"),
    _case("rewards of right answers only", "missing-rewards", "function=often_missing"),
    _case("pays for words", "reward-hacking", "function=wordy"),
    _case("pays for one word", "reward-hacking", "function=well"),
    _case("distance as a reward", "reward-hacking", "function=not_right"),
    _case("brevity outweighs the answer", "reward-parts reward-hacking", HALF, source="flow_grpo#142"),
    _case("learning rate 1e-8", "learning-rate-low", "lr=1.0e-8", source="open-r1#474"),
    _case("LoRA at 1e-6", "learning-rate-low", "lr=1.0e-6; models.actor.trains=lora", source="trl#3452"),
    _case("learning rate 0.1", "learning-rate-high", "lr=0.1", source="ZeroSearch#23"),
    _case("learning rate 0.03 and passes", "learning-rate-high", "lr=0.03; interfaces.actor.epochs=4"),
    _case("warm-up of another run", "warmup", "models.actor.optimizer.schedule.warmup=20000"),
    _case("gradient clipped to nothing", "gradient-clip", "models.actor.optimizer.grad_clip=1.0e-10"),
    _case("KL of 100 in the loss", "kl-too-strong", "interfaces.actor.kl={place: loss, coef: 100}"),
    _case("KL of 30 in the reward", "kl-too-strong", "interfaces.actor.kl={place: reward, coef: 30}"),
    _case("entropy bonus of 3", "entropy-bonus", "interfaces.actor.entropy.coef=3"),
    _case("clip of 1e-6", "clip", "interfaces.actor.objective={low: 1.0e-6, high: 1.0e-6}; interfaces.actor.epochs=4"),
    _case("own groups", "advantages-cancel", "interfaces.actor.advantage._target_=benchmarks.why.OwnGroups"),
    _case("weights never reach the sampler", "sampler-stale", MODEL + "stale"),
    _case("sampler at another temperature", "sampler", MODEL + "cold", source="NeMo-RL#935"),
    _case("frozen weights", "frozen-weights", MODEL + "frozen"),
    _case("dropout", "dropout sampler", "models.actor.dropout=0.6"),
    _case("one prompt, copied", "duplicates", "data=one_prompt"),
    _case("one answer to all", "one-answer", "data=nines"),
    _case("evaluation of other prompts", "evaluation-differs", "held_out=unseen"),
    _case("evaluation cut short", "evaluation-differs", "evaluation.generation.max_new_tokens=2"),
    _case("evaluation at temperature 6", "evaluation-differs", "evaluation.generation.temperature=6"),
    _case("critic learns at 0.5", "critic", "models.critic.optimizer={lr: 0.5, grad_clip: null}", "ppo"),
    _case("pairs in random order", "random-pairs", "data=random_pairs; held_out=pairs", kind="dpo", source="DPO#53"),
    _case("SFT at 1e-9", "learning-rate-low", "lr=1.0e-9", kind="sft"),
)
HEALTHY = (
    *(_case(name, kind=name) for name in ("grpo", "ppo", "dpo", "sft")),
    *(
        _case(name, changes=f"algorithm={name}" + "; interfaces.actor.truncation.overlong_buffer=4" * (name == "dapo"))
        for name in ("dapo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo")
    ),
    _case("grpo with KL", changes="interfaces.actor.kl={place: loss, coef: 0.01}"),
    _case("asynchronous grpo", changes="rollout=async; interfaces.actor.correction=importance_correction"),
)
REPLAYS = (
    _case("a dot in the format", "reward-part-dead", SUM + FORMAT, source="open-r1#237"),
    _case("distance to a length", "reward-hacking", "function=distance", source="trl#2771"),
    _case("limit before the answer", "truncated", "tokens=3", source="autocontext#1067"),
    _case("answers shuffled apart", "wrong-answers reward-noise", "data=wrong", source="open-instruct#1484"),
    _case("groups of one", "no-baseline", "interfaces.actor.adv_norm={mean: none, std: none}", source="Search-R1#88"),
    _case("fifty times the rate", "learning-rate-high", "lr=0.1; steps=40", source="hello-agents#770"),
)
"""Mistakes of six threads, as they turned out there."""
ACTOR, LINEAR = "interfaces.actor.", "{kind: linear, warmup: 0, total: 20}"
SEALED = (
    _case("schedule over", "learning-rate-ends", f"{ACTOR}n_minibatches=8; models.actor.optimizer.schedule={LINEAR}"),
    _case("stop string inside the answer", "stopped", ACTOR + "generation.stop_strings=['is']"),
    _case("top-k of 1", "equal-responses", ACTOR + "generation.top_k=1"),
    _case("groups of two", "small-groups", ACTOR + "generation.n=2; batch_prompts=4"),
    _case("evaluation without the template", "prompts-differ", "evaluation.data.template=plain"),
    _case("evaluation by another function", "evaluation-differs", "evaluation.reward.function=HERE:boxed"),
    _case("weight decay of 30", "weight-decay", "models.actor.optimizer.weight_decay=30"),
    _case("critic warm-up of 50 steps", "critic-warmup", ACTOR + "critic_warmup_steps=50", "ppo"),
    _case("rewards clipped to one value", "reward-clip", f"function=percent; {ACTOR}reward.clip=5"),
    _case("early stop at once", "vetoed", f"{ACTOR}early_stop.kl=1.0e-7; {ACTOR}n_minibatches=8"),
    _case("short responses dropped", "untrained", ACTOR + "min_response_tokens=7"),
)
"""Sealed mistakes that need no further files. Who planted them had not read the diagnosis."""
START = f"evaluation.role=ref; models.ref.path=${{models.actor.path}}; {ACTOR}kl.place=loss; {ACTOR}kl.coef=0.001"
SFT_COLUMN = (
    "held_out=demonstrations; data.response_column=other; data.ignored_columns=[response]; "
    "evaluation.data.response_column=response; evaluation.data.ignored_columns=[]"
)
MISSED = (
    _case("judge out of quota", "reward-breaks", "interfaces.reward._target_=benchmarks.why.OutOfQuota"),
    _case("answers of two sources", "rows-apart", "data=sources; function=one_column"),
    _case("evaluates the start", "evaluation-differs", START),
    _case("eps of 1", "eps", "models.actor.optimizer.eps=1.0"),
    _case("truncation pays", "wrong-sign", f"tokens=9; {ACTOR}truncation={{reward: add, penalty: 2.0}}"),
    _case("SFT on another column", "rows-contradict", SFT_COLUMN, "sft"),
)
"""Mistakes like those of sealed sets that the diagnosis missed. Its rules were written with them in view."""
SETS = {"seen": (*FAULTS, *HEALTHY), "replays": REPLAYS, "sealed": SEALED, "missed": MISSED}


# --- runs ---

METRICS = {"dpo": ("eval/rewards/accuracy", 0.7), "sft": ("eval/nll", -0.3)}
"""Held-out metric of a kind of run, and the change of a healthy run; that of the others is 0.4 of `eval/reward`."""


def settings(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """Return the settings of a run, by key."""
    values: dict[str, Any] = {
        "model": "model",
        "data.path": {"dpo": "pairs", "sft": "demonstrations"}.get(case.kind, "prompts"),
        "data.template": "chat",
        "models.actor.optimizer.lr": 2e-3,
        "models.actor.optimizer.schedule": {"kind": "constant", "warmup": 2},
        "evaluation.every_steps": 5,
        "evaluation.data.template": "chat",
        "steps": 20,
        "batch_prompts": 16,
        "seed": seed,
        "checkpoint": None,
        "save_every_steps": None,
        "records.system_seconds": None,
        "output_dir": str(folder / "runs" / f"{case.name.replace(' ', '_')}-{seed}"),
        "overwrite": True,
    }
    if case.kind in METRICS:
        values["evaluation.data.path"] = values["data.path"]
    else:
        values |= {
            "interfaces.actor.generation": {"n": 8, "max_new_tokens": 12},
            "interfaces.reward.function": "right",
            "interfaces.reward.workers": 0,
            "evaluation.data.path": "held_out",
            "evaluation.reward": {"_target_": "rule_reward", "function": f"{HERE}:right", "workers": 0},
            "evaluation.generation": {"max_new_tokens": 12, "temperature": 1.0, "n": 4},
        }
    if case.kind == "grpo":
        values["interfaces.actor.kl.place"] = "none"
    if case.kind == "ppo":
        values |= {"models.critic.optimizer.lr": 3e-3, "batch_prompts": 64, "interfaces.actor.generation.n": 1}
    values |= case.changes
    for key in ("data.path", "evaluation.data.path"):
        values[key] = str(folder / f"{values[key]}.jsonl")
    values["model"] = str(folder / values["model"])
    if name := values.get("interfaces.reward.function"):
        values["interfaces.reward.function"] = f"{HERE}:{name}"
    return {key: value for key, value in values.items() if key != "interfaces.reward.function" or value is not None}


def run_case(case: Case, seed: int, folder: Path) -> Run:
    """Train, unless it was done before. A run that fails is a run, too."""
    values = settings(case, seed, folder)
    if (Path(values["output_dir"]) / "summary.json").is_file():
        return Run(Path(values["output_dir"]))
    random.seed(seed)
    experiment = {"ppo": "ppo_arithmetic"}.get(case.kind, case.kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return train(experiment, quiet=True, **values)
        except RealignError as error:
            if error.run is None:
                raise
            return error.run


def improved(case: Case, run: Run) -> bool:
    """Return whether a healthy run learned its task."""
    metric, goal = METRICS.get(case.kind, ("eval/reward", 0.4))
    values = run.series(metric)
    return (values[-1] - values[0] - goal) * goal >= 0


def main(arguments: Sequence[str]) -> None:
    """Run all cases, and print what is said about each."""
    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    folder = Path(next((word for word in arguments if "=" not in word), "runs/why"))
    if not (folder / "endless" / "config.json").is_file():
        make_folder(folder)
        prepare(folder)
    only = options["only"].split(",") if "only" in options else None
    first = among = accused = 0
    cases = [case for case in SETS[options.get("set", "seen")] if only is None or case.name in only]
    seeds = range(1, int(options.get("seeds", 2)) + 1)
    for case in cases:
        for seed in seeds:
            run = run_case(case, seed, folder)
            diagnosis = run.why()
            named = [cause.name for cause in diagnosis.causes]
            first += bool(named) and named[0] in case.causes
            among += bool(set(named) & set(case.causes))
            accused += not case.causes and bool(named)
            mark = "ok" if (not case.causes and not named) or set(named[:1]) & set(case.causes) else "--"
            progress = "" if case.causes or improved(case, run) else " (did not improve, does not count)"
            print(f"{mark} {case.name} ({seed}): {', '.join(named) or 'healthy'}{progress}", flush=True)
            print(f"   {diagnosis.sentence}")
    faults = sum(bool(case.causes) for case in cases) * len(seeds)
    healthy = len(cases) * len(seeds) - faults
    print(f"{first} of {faults} first, {among} among three; {accused} of {healthy} healthy runs accused")


if __name__ == "__main__":
    main(sys.argv[1:])
