"""Why a run doesn't learn: symptoms in its records, each a small function that returns a `Cause` or None.

`diagnose` asks all of them, and needs no model. The launch check, the loop, the summary, the report, the viewer and
`realign why` share it, and causes.yaml has the words, so each cause has one wording. A symptom of your own is any
callable `(RunRecords) -> Cause | None`.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from realign.records.evidence import GENERATION, RECENT, RunRecords, course_of, distinct, most_common, response_text
from realign.records.record_files import METRICS, json_lines, yaml_object
from realign.safe_yaml import load_yaml
from realign.text import shorten, visible

PAGE = "docs/guides/why.md"
MOST = 3
"""Number of causes that are shown."""
PROVEN, CERTAIN, LIKELY, POSSIBLE = 0.95, 0.9, 0.7, 0.4
"""How sure a cause is: a setting or a text proves it, numbers do, they fit hardly anything else, or just fit."""


@dataclass(frozen=True)
class Cause:
    """Something that keeps a run from learning."""

    name: str
    """Its heading on the page of causes."""
    sentence: str
    """What is wrong, in one sentence."""
    evidence: tuple[str, ...]
    """Numbers with their step, and samples."""
    advice: str
    """What to do."""
    sure: float
    """How sure it is, from 0 to 1."""
    settings: tuple[str, ...] = ()
    """Settings to try: `key=value`."""

    @property
    def surety(self) -> str:
        """How sure it is, in words."""
        return "certain" if self.sure >= CERTAIN else "likely" if self.sure >= LIKELY else "possible"

    def command(self, folder: Path) -> str:
        """Return a command that repeats the run in `folder` with other settings; empty if none would help."""
        if not self.settings:
            return ""
        return shlex.join(["realign", str(folder / "config.yaml"), *self.settings, f"output_dir={folder}-again"])

    def text(self) -> str:
        """Return the cause as one paragraph, as warnings have it."""
        facts = f" ({'; '.join(self.evidence)})" if self.evidence else ""
        return f"{self.sentence[:-1]}{facts}. {self.advice} More: {PAGE}#{self.name}"


@cache
def words_of_causes() -> Mapping[str, Any]:
    """Return what is said of each cause, by its name."""
    words: Mapping[str, Any] = load_yaml(Path(__file__).with_name("causes.yaml").read_text(encoding="utf-8"))
    return words


def _cause(name: str, sure: float, *facts: str, **values: Any) -> Cause:
    """Return a cause in the words of causes.yaml, with these values."""
    words = words_of_causes()[name]
    settings = tuple(text.format_map(values) for text in words.get("try", ()))
    return Cause(name, words["says"].format_map(values), tuple(filter(None, facts)), words["do"], sure, settings)


def numbers(run: RunRecords) -> Cause | None:
    """Compare metrics and settings with the limits that causes.yaml has, and return the surest cause."""
    causes = list[Cause]()
    for name, words in words_of_causes().items():
        key, sign, limit = words.get("when", "nothing > 0").split()
        value = run.recent(key) if run.values(key) else float(run.setting(key, math.nan))
        bound = float(run.setting(limit, limit if limit[0].isdecimal() else math.nan))
        beyond = {">": value > bound, ">=": value >= bound, "<": value < bound}[sign]
        if beyond and (words.get("always") or not run.learns):
            causes.append(_cause(name, words["sure"], f"{key}: {value:.4g}", value=value, bound=bound))
    return max(causes, key=lambda cause: cause.sure, default=None)


Symptom = Callable[[RunRecords], Cause | None]
_HEALTHY = "Nothing looks wrong"


@dataclass(frozen=True)
class Diagnosis:
    """What keeps a run from learning, or that nothing does."""

    sentence: str
    """The one sentence to read."""
    causes: tuple[Cause, ...]
    """At most `MOST` causes, the most likely first; none for a healthy run."""
    skipped: tuple[str, ...] = ()
    """Symptoms that failed on these records, each with its error."""

    @property
    def healthy(self) -> bool:
        """Whether nothing looks wrong."""
        return not self.causes and self.sentence.startswith(_HEALTHY)


def diagnose(run: RunRecords, further: Iterable[Symptom] = ()) -> Diagnosis:
    """Return what keeps a run from learning.

    Args:
        run: the records.
        further: symptoms of your own.
    """
    if run.last == 0:
        return Diagnosis("The run has no complete step.", ())
    found, skipped = list[Cause](), list[str]()
    for symptom in (*further, *SYMPTOMS):
        try:
            cause = symptom(run)
        except Exception as error:  # a folder may come from a stranger, and a value be of any kind
            name = getattr(symptom, "__name__", type(symptom).__name__)
            skipped.append(f"{name} was skipped: {type(error).__name__}: {shorten(str(error), 200)}")
        else:
            found += [] if cause is None else [cause]
    sentence, causes = _judge(run, found)
    return Diagnosis(sentence, causes, tuple(skipped))


def _judge(run: RunRecords, found: Sequence[Cause]) -> tuple[str, tuple[Cause, ...]]:
    """Return the one sentence, and the causes to show."""
    if found:
        # a sort that keeps the order of the symptoms, of which the earlier ones explain the later ones
        causes = tuple(sorted(found, key=lambda cause: -cause.sure)[:MOST])
        return causes[0].sentence, causes
    name, values = (run.held_out[0], run.evaluated)
    if len(values) < 2:
        name, values = run.goal[0], run.values(run.goal[0])
    course = f"{name} {values[0]:.4g} to {values[-1]:.4g} in {run.last:,} steps" if values else f"{run.last:,} steps"
    if run.last < RECENT:
        return f"{_HEALTHY} so far, but {run.last} steps are too few to judge.", ()
    if run.learns or not values:
        return f"{_HEALTHY}: {course}.", ()
    return f"No progress beyond noise, and no known cause: {course}.", ()


def diagnosis_lines(folder: Path, diagnosis: Diagnosis) -> list[str]:
    """Return a diagnosis as `realign why` prints it: the sentence, then each cause with a command to try."""
    lines = [visible(diagnosis.sentence)]
    for number, cause in enumerate(diagnosis.causes, 1):
        lines += ["", visible(f"{number}. {cause.sentence} ({cause.surety})")]
        lines += [visible(f"   {fact}") for fact in cause.evidence]
        lines += [visible(f"   {cause.advice}"), *([f"   {command}"] if (command := cause.command(folder)) else [])]
    lines += ["", f"More: {PAGE}"] if diagnosis.causes else []
    return [*lines, *([""] if diagnosis.skipped else []), *map(visible, diagnosis.skipped)]


def diagnosis_of(folder: Path, further: Iterable[Symptom] = ()) -> Diagnosis:
    """Return what keeps the run in a folder from learning; see `diagnose`."""
    return diagnose(records_of(folder), further)


def records_of(folder: Path) -> RunRecords:
    """Return the records of the run in a folder."""
    files = (json_lines(folder / name) for name in ("samples.jsonl", "eval_samples.jsonl", "tokens.jsonl"))
    return RunRecords(json_lines(folder / METRICS), yaml_object(folder / "config.yaml"), *files)


# --- numbers that make all others meaningless ---


def not_finite(run: RunRecords) -> Cause | None:
    """Find steps whose loss or gradient was not finite."""
    steps = [record["step"] for record in run.steps if record.get("nonfinite_steps")]
    fact = f"{sum(run.values('nonfinite_steps')):g} optimizer steps were skipped"
    return _cause("not-finite", CERTAIN, fact, step=steps[0], lower=_rate(run) / 10) if steps else None


def sampler_differs(run: RunRecords) -> Cause | None:
    """Compare the log-probs of sampler and trainer before an update."""
    values = run.values("behavior_logprob_diff_max") or run.values("first_logprob_diff_max")
    wrong = [x > 0.1 for x in values]  # nats; bf16 differs by less
    if sum(wrong) < max(2, len(values) / 2) or run.recent("rollout/version_lag") > 0:
        return None
    fact = f"log-probs differ by up to {values[0]:.3g} nats in the first step, and {max(values):.3g} later"
    rate = run.setting("models.actor.dropout")
    return _cause("dropout" if rate else "sampler" if wrong[0] else "sampler-stale", CERTAIN, fact, rate=rate)


# --- prompts and responses ---

_MARKER = r"<\|?/?[A-Za-z_][^<>\s]*\|?>|\[/?INST\]|<<SYS>>"
_DOUBLED = rf"({_MARKER})(?:\s*(?:user|assistant|system))?\s*\1"


def _has_template(path: Any) -> bool:
    """Return whether a local model folder has a chat template."""
    settings, files = Path(str(path), "tokenizer_config.json"), Path(str(path)).glob("chat_template.jinja")
    return any(files) or (settings.is_file() and b'"chat_template"' in settings.read_bytes())


def template(run: RunRecords) -> Cause | None:
    """Look for the chat template of the model in the prompts: none, or its markers doubled."""
    doubled = [match[0] for text in run.prompts if (match := re.search(_DOUBLED, text))]
    if doubled and len(doubled) >= len(run.prompts) / 2:
        fact = f"in {len(doubled)} of {len(run.prompts)} recorded prompts"
        return _cause("template-twice", PROVEN, fact, text=doubled[0])
    ours, theirs = run.setting("data.template"), run.setting("evaluation.data.template", "plain")
    if ours != "plain" or any(re.search(_MARKER, x) for x in run.prompts) or (run.learns and ours == theirs):
        return None
    if not _has_template(run.setting("models.actor.path")):
        return None
    facts = [f"prompt {visible(shorten(x, 120))!r}" for x in run.prompts[:1]]
    facts += [f"evaluation.data.template={theirs}"] * (ours != theirs)
    return _cause("template-missing", PROVEN, *facts)


def prompts_cut(run: RunRecords) -> Cause | None:
    """Look for prompts that are as long as the limit."""
    limit = run.setting("data.max_prompt_tokens")
    if limit is None or run.setting("data.too_long") != "truncate_left":
        return None
    cut = [r for r in run.tokens if r.get("start", 0) + sum(r.get("given") or ()) >= limit]
    if not cut or len(cut) < len(run.tokens) / 2:
        return None
    text = visible(shorten(run.prompts[run.tokens.index(cut[0])], 120))
    fact = f"{len(cut)} of {len(run.tokens)} recorded prompts have {limit} tokens, such as {text!r}"
    return _cause("prompts-cut", PROVEN, fact, limit=limit, longer=8 * limit)


def truncated(run: RunRecords) -> Cause | None:
    """Look at responses that reach the length limit."""
    node = "evaluation.generation" if run.offline else GENERATION
    limit = run.setting(f"{node}.max_new_tokens", run.recent("response_tokens"))
    led_there = run.trains() and not run.learns and not run.offline  # by the reward
    if run.cut < (0.9 if run.learns else 0.5) or led_there or run.setting(f"{GENERATION}.fixed_length"):
        return None
    # what comes later is a consequence
    late = (run.values("truncated_fraction") or [run.cut])[0] < run.cut / 2
    sure = POSSIBLE if late else CERTAIN if run.idle() > 0.5 or run.cut > 0.9 else LIKELY
    name, shown = ("no-end-token", run.endless) if run.endless else ("truncated", run.samples)
    if run.setting("data.append_eos", True) is False:
        return _cause("no-end-in-data", PROVEN, run.show(*run.endless), share=run.cut)
    return _cause(name, sure, run.show(*shown), share=run.cut, limit=limit, longer=4 * limit)


def equal_responses(run: RunRecords) -> Cause | None:
    """Look for groups of equal responses, from the start on."""
    groups = [group for group in run.groups if len(group) > 1]
    same = [group for group in groups if not distinct(group)]
    early = [group for group in same if (group[0].get("step") or 0) <= max(2, run.last // 5)]
    if not early or len(same) < 0.6 * len(groups) or run.recent("zero_std_fraction", 1.0) < 0.5 or run.succeeds:
        return None
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "greedy": False}
    narrow = [key for key, value in usual.items() if run.setting(f"{GENERATION}.{key}", value) != value]
    facts = [f"{key}={run.setting(f'{GENERATION}.{key}')}" for key in narrow]
    tried = tuple(f"{GENERATION}.{key}={str(usual[key]).lower()}" for key in narrow or ["temperature"])
    cause = _cause(
        "equal-responses",
        CERTAIN if narrow else LIKELY,
        f"in {len(same)} of {len(groups)} sampled groups",
        *facts,
        run.show(same[0][0]),
    )
    return None if run.learns else replace(cause, settings=tried)


# --- rewards that say nothing ---


def advantages(run: RunRecords) -> Cause | None:
    """Look for advantages that are 0, or all of one sign, in groups of unequal rewards."""
    lowest, highest = run.values("advantage_min"), run.values("advantage_max")
    torn = [group for group in run.groups if distinct(group, "reward")]
    if not lowest or not highest:
        return None
    low, high = min(lowest), max(highest)
    bounds = run.setting("interfaces.actor.reward.clip", math.inf)
    floor, ceiling = bounds if isinstance(bounds, Sequence) else (-bounds, bounds)
    beyond = sum(not floor <= reward <= ceiling for reward in run.rewards)
    if torn and beyond > len(run.rewards) / 2:
        fact = f"{beyond} of {len(run.rewards)} sampled rewards are beyond it"
        return _cause("reward-clip", PROVEN, fact, run.show(*torn[0]), clip=bounds)
    if max(-low, high) <= 1e-6 and run.recent("zero_std_fraction") <= 0.5:
        fact = f"{run.recent('zero_std_fraction'):.0%} of the groups have equal rewards, and no step has an advantage"
        return _cause("advantages-cancel", CERTAIN, fact, run.show(*(torn[0] if torn else ())))
    if not torn or low < 0 < high or low == high:
        return None
    fact = f"advantages from {low:.3g} to {high:.3g} in {run.last:,} steps"
    return _cause("no-baseline", LIKELY if run.learns else CERTAIN, fact, run.show(*torn[0]))


def never_right(run: RunRecords) -> Cause | None:
    """Look for right answers among responses that all fail."""
    if not run.fails_alike or run.cut > 0.5:
        return None
    count, reward = len(run.rewards), run.rewards[0]
    stops = tuple(run.setting(f"{GENERATION}.stop_strings", ()))
    stopped = [sample for sample in run.samples if stops and response_text(sample).endswith(stops)]
    if len(stopped) > 0.8 * len(run.samples):
        return _cause("stopped", CERTAIN, run.show(*stopped), stops=", ".join(map(repr, stops)))
    tokenizer, path = (run.setting(f"models.actor.{key}") for key in ("tokenizer", "path"))
    if tokenizer not in (None, path):
        return _cause("tokenizer", LIKELY + 0.05, run.show(*run.samples), tokenizer=tokenizer, path=path)
    if len(run.right) >= max(2, 0.02 * count):
        fact = f"{len(run.right)} of {count} sampled responses contain the answer of their row"
        return _cause("not-parsed", CERTAIN, fact, run.show(*run.right), reward=reward)
    if max(run.evaluated, default=0.0) > reward + 0.02:
        return None
    more = 4 * int(run.setting(f"{GENERATION}.n", 8))
    return _cause("too-hard", LIKELY, run.show(*run.samples), count=count, reward=reward, more=more)


def equal_rewards(run: RunRecords) -> Cause | None:
    """Look for groups of different responses with equal rewards."""
    groups = [group for group in run.groups if distinct(group)]
    if not run.silent or run.cut > 0.5 or max(run.rewards, default=0.0) <= 0 or run.recent("missing_rewards") > 0.2:
        return None
    if len(groups) < max(1, len(run.groups) / 4) or run.succeeds or any(distinct(group, "reward") for group in groups):
        return None
    first = groups[0][0]
    second = next(sample for sample in groups[0] if distinct((first, sample)))
    parts = [name for name in run.names(r"rewards/.+/std") if run.recent(name) > 0]
    cancel = f"{', '.join(parts)} are above 0, so the parts cancel out" if parts else ""
    alike = f"each has {run.rewards[0]:.4g}, whatever it says"
    how = "it depends on the prompt only" if min(run.rewards) < max(run.rewards) else alike
    return _cause("equal-rewards", CERTAIN, run.show(first), run.show(second), cancel, how=how)


def dead_part(run: RunRecords) -> Cause | None:
    """Look for a part of the reward that no response ever gets."""
    parts = run.names("rewards/.+/mean")
    dead = [name for name in parts if not any(run.values(name))]
    if not dead or len(dead) == len(parts) or run.last < RECENT:
        return None
    return _cause("reward-part-dead", POSSIBLE, run.show(*run.samples[-1:]), part=dead[0].split("/")[1])


def small_groups(run: RunRecords) -> Cause | None:
    """Look at the share of groups that say nothing, because few responses are compared."""
    n, equal = run.setting(f"{GENERATION}.n", 8), run.values("zero_std_fraction")
    if n > 4 or not equal or fmean(equal) < 0.5 or run.silent or run.recent("reward") > 0.8:
        return None
    return _cause("small-groups", POSSIBLE if run.learns else LIKELY, n=n, share=fmean(equal), more=4 * n)


def solved(run: RunRecords) -> Cause | None:
    """Look for success from the first steps on."""
    rewards, equal = run.values("reward"), run.values("zero_std_fraction")
    if not rewards or not equal or run.learns or run.trains() or fmean(equal) < 0.4 or max(run.rewards, default=1) > 1:
        return None
    early = fmean(rewards[: max(3, len(rewards) // 5)])
    if min(early, *run.evaluated[:1]) < 0.7 or not run.evaluated:
        return None
    return _cause("solved", CERTAIN, f"{fmean(equal):.0%} of the groups have equal rewards", reward=early)


# --- rewards that say the wrong thing ---


def swapped_pairs(run: RunRecords) -> Cause | None:
    """Compare which side training and held-out data prefer."""
    ours, theirs = "rewards/accuracy", "eval/rewards/accuracy"
    if run.recent(ours) < 0.65 or run.recent(theirs, 1.0) > 0.35:
        return None
    return _cause("swapped-pairs", CERTAIN, training=run.recent(ours), held_out=run.recent(theirs))


def random_pairs(run: RunRecords) -> Cause | None:
    """Look for preferences at chance."""
    share = run.recent("rewards/accuracy", math.nan)
    if not abs(share - 0.5) < 0.15 or run.trains() or max(run.evaluated, default=0.0) > 0.65 or run.movement < 1e-5:
        return None
    return _cause("random-pairs", LIKELY, f"accuracy {share:.0%} in the recent steps")


def reward_noise(run: RunRecords) -> Cause | None:
    """Compare the rewards of equal responses to one prompt."""
    same: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in (sample for group in run.groups for sample in group):
        same[sample.get("step"), sample.get("id"), sample.get("response")].append(sample)
    repeated = [samples for samples in same.values() if len(samples) > 1]
    torn = [samples for samples in repeated if distinct(samples, "reward")]
    if len(torn) < max(3, 0.25 * len(repeated)):
        return None
    low, *_, high = sorted(torn[0], key=lambda sample: sample["reward"])
    facts = (f"{len(torn)} of {len(repeated)} repeated responses", run.show(low))
    return _cause(
        "reward-noise", LIKELY if run.learns else CERTAIN, *facts, f"and {high['reward']:.4g} for the same text"
    )


def outliers(run: RunRecords) -> Cause | None:
    """Look for rewards far beyond nine in ten of the others, of responses or of whole steps."""
    for what, values in (("a sampled response", run.rewards), ("the mean of a step", run.values("reward"))):
        ordered = sorted(map(abs, values))
        if len(ordered) >= RECENT and ordered[-1] >= 15 * max(usual := ordered[int(0.9 * len(ordered))], 1.0):
            fact = f"nine in ten are below {usual:.4g}"
            return _cause("reward-outliers", LIKELY if run.learns else PROVEN, fact, high=ordered[-1], what=what)
    return None


def wrong_answers(run: RunRecords) -> Cause | None:
    """Compare the first rewards of training with the first evaluation."""
    early = run.values("reward")[: max(3, len(run.steps) // 4)]
    if not early or not run.evaluated or not run.held_out[0].endswith("reward") or run.trains() or run.generalizes():
        return None
    # the first step is that of the model which was evaluated
    training, held_out = max(early[0], fmean(early)), run.evaluated[0]
    if held_out < max(2.5 * training, training + 0.05) or min(run.values("zero_std_fraction"), default=0.0) == 1:
        return None
    return _cause("wrong-answers", LIKELY + 0.05, run.show(*run.samples), training=training, held_out=held_out)


def reward_exploited(run: RunRecords) -> Cause | None:
    """Look for a reward that rises while held-out data do not improve, and at what rises with it."""
    if run.last < RECENT or not run.trains() or run.generalizes():
        return None
    if run.offline and len(run.evaluated) > 3 and run.generalizes(-1):
        limit = run.setting("data.limit")
        facts = [f"{name} {course_of(run.values(name, run.history))}" for name, _ in (run.goal, run.held_out)]
        return _cause("overfitting", CERTAIN, *facts, f"data.limit={limit}" if limit else "")
    if not run.values("reward"):
        return None
    facts = [f"reward {run.course('reward')}"]
    facts += [f"{run.held_out[0]} {run.evaluated[0]:.4g} to {run.evaluated[-1]:.4g}"] if run.evaluated else []
    parts = {name.split("/")[1]: c for name in run.names("rewards/.+/mean") if (c := run.course(name))}
    rising = next((name for name, c in parts.items() if c.moved(1)), None)
    other = next((name for name, c in parts.items() if not c.moved(1)), None)
    if rising and other:
        facts += [f"{name} {parts[name]}" for name in (rising, other)]
        return _cause("reward-parts", CERTAIN, *facts, rising=rising, other=other)
    # three evaluations of a few rows can fall by chance, but not to a quarter
    fell = len(run.evaluated) > 3 and run.generalizes(-1)
    worse = fell or (len(run.evaluated) > 2 and run.evaluated[-1] <= 0.25 * run.evaluated[0] > 0)
    if not worse and not run.length_changed:
        return None
    facts += [f"tokens of a response {run.course('response_tokens')}"] if run.length_changed else []
    latest = sorted(run.samples, key=lambda sample: (sample.get("step") or 0, sample.get("reward") or 0.0))[-1:]
    which = "get worse" if worse else "do not improve"
    return _cause("reward-hacking", CERTAIN if worse else LIKELY, *facts, run.show(*latest), held_out=which)


# --- updates that are too small, too large, or held back ---


def entropy_rises(run: RunRecords) -> Cause | None:
    """Look for sampling that gets close to chance."""
    course, bonus = run.course("entropy"), run.setting("interfaces.actor.entropy.coef", 0.0)
    if course is None or bonus <= 0 or run.learns or not course.moved(1, 0.2 * course.start):
        return None
    return _cause(
        "entropy-bonus", CERTAIN, f"entropy {course} nats per token", run.show(*run.samples[-1:]), bonus=bonus
    )


def kl_too_strong(run: RunRecords) -> Cause | None:
    """Compare the penalty of a nat with what the best response earns."""
    coef, place = (run.setting(f"interfaces.actor.kl.{key}") for key in ("coef", "place"))
    drift = run.values("ref_kl_per_sequence") or run.values("ref_kl")
    if place in (None, "none") or not drift or coef < 0.5:
        return None
    # in the loss it competes with normalized advantages, of size 1
    worth = max(max(run.rewards, default=1.0) - min(run.rewards, default=0.0), 1e-3) if place == "reward" else 1.0
    strong = coef >= 10 * worth
    if run.learns and not strong:
        return None
    sure = LIKELY if run.learns else CERTAIN if strong else POSSIBLE
    return _cause("kl-too-strong", sure, f"KL of {fmean(drift[-RECENT:]):.3g} nats on average", coef=coef, worth=worth)


def wrong_reference(run: RunRecords) -> Cause | None:
    """Look at the KL of the first step, before which the policy is its own reference."""
    drift = run.values("ref_kl")[:1]
    if not drift or abs(drift[0]) < 0.1 or run.learns or run.steps[0]["step"] != 1:
        return None
    path = run.setting("models.ref.path")
    return _cause("reference", CERTAIN, f"models.ref.path={path}" if path else "", drift=drift[0])


def weights_decay(run: RunRecords) -> Cause | None:
    """Bound how much weight decay has shrunk the weights."""
    decay = run.setting("models.actor.optimizer.weight_decay", 0.0)
    shrunk = 1 - math.exp(-decay * run.movement)
    values = {"decay": decay, "shrunk": shrunk, "steps": run.last}
    return _cause("weight-decay", CERTAIN, **values) if shrunk > 0.25 and not run.learns else None


def clipped(run: RunRecords) -> Cause | None:
    """Look at the share of clipped tokens."""
    low, high = (run.setting(f"interfaces.actor.objective.{side}", 0.2) for side in ("low", "high"))
    share, tight = run.recent("clip_fraction"), min(low, high) < 0.01
    if run.learns or share < (0.03 if tight else 0.2):
        return None
    ratios = f"ratios from {run.recent('ratio_min'):.3g} to {run.recent('ratio_max'):.3g}"
    return _cause("clip", CERTAIN if tight else POSSIBLE, f"objective.low={low:g}, high={high:g}", ratios, share=share)


def gradient_clipped(run: RunRecords) -> Cause | None:
    """Compare the norm of the gradient with its bound."""
    bound, norms = run.setting("models.actor.optimizer.grad_clip"), run.values("grad_norm")
    if not bound or not norms or run.learns or sum(norm > bound for norm in norms) < 0.9 * len(norms):
        return None
    ratio = median(norms) / bound
    fact = f"median norm {median(norms):.3g}, grad_clip={bound:g}"
    return _cause("gradient-clip", CERTAIN if ratio > 1e4 else POSSIBLE, fact, ratio=ratio) if ratio >= 20 else None


def rate_too_low(run: RunRecords) -> Cause | None:
    """Bound how far the learning rate can have moved a weight."""
    rates = run.values("lr")
    fact = f"the rate is {rates[-1] if rates else 0:.3g} in step {run.last}"
    if sum(rate < max(rates) / 1000 for rate in rates) > len(rates) / 2:
        return _cause("learning-rate-ends", CERTAIN, fact)
    if not run.movement or run.learns or (run.trains() and not run.evaluated) or run.idle() > 0.5:
        return None
    warmup = run.setting("models.actor.optimizer.schedule.warmup", 0)
    if warmup > 2 * run.last and rates[-1] < _rate(run) / 2:
        return _cause("warmup", CERTAIN, fact, warmup=warmup, steps=run.last, short=max(1, run.last // 20))
    lora = "lora" in str(run.setting("models.actor.trains")).lower()
    small = run.movement / (20 if lora else 1)
    values = {"rate": max(rates), "movement": run.movement, "steps": run.last, "higher": 10 * _rate(run)}
    sure = CERTAIN if small < 3e-5 else POSSIBLE
    return _cause("learning-rate-low", sure, fact, **values) if small <= 3e-4 else None


def rate_too_high(run: RunRecords) -> Cause | None:
    """Look for updates after which the policy is another one."""
    entropy, highest = run.values("entropy"), max(run.values("lr"), default=_rate(run))
    if run.learns or run.trains() or len(run.steps) < 3 or highest <= 3e-6:
        return None
    facts: list[tuple[float, str]] = []
    if entropy and entropy[0] > 0.01 and not run.setting("interfaces.actor.entropy.coef"):
        early = entropy[: max(4, len(entropy) // 3)]
        jump = max(abs(b - a) for a, b in itertools.pairwise(early)) / entropy[0]
        low = min(entropy[:RECENT])
        facts += [(LIKELY if jump < 1.5 else 0.85, f"the entropy jumps by {jump:.0%} within one step")] * (jump > 0.5)
        fell = f"the entropy falls from {entropy[0]:.3g} to {low:.3g} nats within {RECENT} steps"
        facts += [(0.8, fell)] * (low < 0.05 * entropy[0])
    kl = max(run.values("approx_kl"), default=0.0)
    facts += [(0.85, f"approx_kl reaches {kl:.3g} nats per token")] * (kl > 0.3)
    if not facts:
        return None
    sure = max(facts)[0]
    return _cause("learning-rate-high", sure, *(text for _, text in facts), rate=highest, lower=_rate(run) / 10)


def critic_useless(run: RunRecords) -> Cause | None:
    """Look at the explained variance of the value function."""
    values = [x for name in run.names("(.+/)?explained_variance") for x in run.values(name)]
    if len(values) < 5 or (variance := median(values)) > (-0.5 if run.learns else -0.2):
        return None
    fact = f"its median over {len(values)} steps; at worst {min(values):.3g}"
    return _cause("critic", CERTAIN if variance < -1 else LIKELY, fact, variance=variance)


# --- data, and what is measured ---


def duplicates(run: RunRecords) -> Cause | None:
    """Count sampled prompts."""
    text, share, total = most_common(str(group[0].get("prompt")) for group in run.groups)
    fact = f"{share * total:.0f} of {total}: {visible(shorten(text, 120))!r}"
    return _cause("duplicates", PROVEN, fact, share=share) if total >= 8 and share >= 0.4 else None


def one_answer(run: RunRecords) -> Cause | None:
    """Count responses, held out and late in training."""
    facts = _collapsed(run)
    late = [group for group in run.groups if (group[0].get("step") or 0) > run.last * 2 / 3]
    text, share, _ = most_common(response_text(sample) for group in late for sample in group)
    prompts = len({str(group[0].get("prompt")) for group in late})
    if prompts >= 3 and share > 0.7:
        facts.append(f"{share:.0%} of the late responses to {prompts} prompts are {visible(shorten(text, 80))!r}")
    # else a reward that is exploited led to it
    sure = POSSIBLE if run.learns else PROVEN if run.trains() and not run.length_changed else LIKELY
    return _cause("one-answer", sure, *facts) if facts else None


def _collapsed(run: RunRecords) -> list[str]:
    """Return which evaluations have mostly equal responses that earn no more than one answer to everything."""
    facts = []
    for name in run.names("eval/(.+/)?most_common_fraction"):
        prefix = name.removesuffix("most_common_fraction")
        last: Mapping[str, Any] = next((record for record in reversed(run.steps) if name in record), {name: 0.0})
        reward, constant = last.get(f"{prefix}reward"), last.get(f"{prefix}constant_reward")
        few = last.get(f"{prefix}distinct_fraction", 0) <= 1 / 8
        cut = last.get(f"{prefix}truncated_fraction", 0) > 0.5  # beginnings are alike
        better = reward is not None and constant is not None and reward > constant
        # an untrained policy may well repeat itself
        if last[name] >= (0.9 if constant is None else 0.5) and few and not cut and not better:
            which = prefix.removeprefix("eval/").removesuffix("/")
            of, share = f" of {which}" if which else "", f"{last[name]:.0%} of the held-out responses"
            earned = f"; it earns {constant:.4g} on every prompt, and the policy {reward:.4g}" if constant else ""
            facts.append(f"{share}{of} are the same one{earned}")
    return facts


def evaluation_differs(run: RunRecords) -> Cause | None:
    """Compare the settings and prompts of the evaluation with those of training."""
    texts = ({str(sample.get("prompt")) for sample in some} for some in (run.samples, run.eval_samples))
    ours, theirs = ([set(text.split()) for text in some] for some in texts)
    facts = list[str]()
    for place, these, others in (("of training", ours, theirs), ("held out", theirs, ours)):
        words = set.intersection(*these) - set[str]().union(*others) if others and len(these) > 5 else ()
        facts += [f"{' '.join(sorted(words))!r} is in all prompts {place}, and in no other"] if words else []
    if facts:
        return _cause("prompts-differ", LIKELY, *facts, run.show(*run.samples[:1]), run.show(*run.eval_samples[:1]))
    if run.generalizes() or not run.evaluated or run.silent:
        return None
    if run.trains() and len(run.evaluated) > 2 and len(set(run.evaluated)) == 1:
        facts.append(f"{run.held_out[0]} is {run.evaluated[0]:.4g} in each of {len(run.evaluated)} evaluations")
        names = (f"{node}.reward.function" for node in ("interfaces", "evaluation"))
        facts += [f"{name}={run.setting(name)}" for name in names if run.setting(name)]
    cut = run.values(f"{run.held_out[0].rpartition('/')[0]}/truncated_fraction", run.history)
    if cut and cut[-1] > 0.5 > run.cut and not run.offline:
        facts.append(f"{cut[-1]:.0%} of the held-out responses are cut off, and {run.cut:.0%} in training")
    for name, differs in (("max_new_tokens", float.__lt__), ("temperature", float.__gt__)):
        ours, theirs = run.setting(f"{GENERATION}.{name}"), run.setting(f"evaluation.generation.{name}")
        ignored = name == "temperature" and run.setting("evaluation.generation.greedy")
        if None not in (ours, theirs) and not ignored and differs(float(theirs), float(ours)):
            facts.append(f"evaluation.generation.{name}={theirs:g}, and {ours:g} in training")
    known = {word for sample in run.samples for word in str(sample.get("prompt")).split()}
    asked = [word for sample in run.eval_samples for word in str(sample.get("prompt")).split()]
    new = sum(word not in known for word in asked) / max(1, len(asked))
    if run.trains() and new > 0.2 and len(run.groups) > 5:
        facts.append(f"{new:.0%} of the words of the held-out prompts are in no sampled prompt of training")
    sure = CERTAIN if run.trains() else LIKELY
    return _cause("evaluation-differs", sure, *facts, run.show(*run.eval_samples[-1:])) if facts else None


def frozen_weights(run: RunRecords) -> Cause | None:
    """Look for steps that change nothing although there is something to learn from."""
    compares, largest = bool(run.values("zero_std_fraction")), run.recent("advantage_max")
    if run.idle() < 0.9 or len(run.steps) < RECENT:
        return None
    if compares and (run.recent("zero_std_fraction") > 0.5 or largest < 1e-6):
        return None
    fact = f"the largest advantage is {largest:.3g} on average, and the gradient 0"
    why = "rewards differ within the groups" if compares else "the loss has nothing to compare"
    return _cause("frozen-weights", CERTAIN, fact if compares else f"loss {run.recent('loss'):.4g}", why=why)


def no_gradient(run: RunRecords) -> Cause | None:
    """Count recent steps without a gradient, for any reason."""
    roles = [name.removesuffix("zero_gradient_steps") for name in run.names("(.+/)?zero_gradient_steps")]
    idle = {role: share for role in roles if len(run.steps) >= RECENT and (share := run.idle(role)) >= 0.5}
    if not idle or run.learns:
        return None
    role, share = next(iter(idle.items()))
    equal = f"{run.recent('zero_std_fraction'):.0%} of the groups have equal rewards"
    values = {"idle": f"{share * RECENT:.0f}", "recent": RECENT, "role": f" ({role[:-1]})" if role else ""}
    return _cause("no-gradient", LIKELY - 0.05, equal if run.values("zero_std_fraction") else "", **values)


def seeds_disagree(runs: Mapping[str, RunRecords]) -> Cause | None:
    """Compare runs that differ only in their seeds, by name. Needs several runs, so it is none of `SYMPTOMS`."""
    ends = {name: (run.evaluated or run.values(run.goal[0]) or [math.nan])[-1] for name, run in runs.items()}
    learned = sum(run.learns for run in runs.values())
    if learned in (0, len(runs)):
        return None
    first = next(iter(runs.values()))
    facts = (f"{name}: {'learns' if run.learns else 'does not learn'}, {ends[name]:.4g}" for name, run in runs.items())
    values = {"learned": learned, "count": len(runs), "metric": first.held_out[0] or first.goal[0]}
    return _cause("seeds", CERTAIN, *facts, low=min(ends.values()), high=max(ends.values()), **values)


SYMPTOMS: tuple[Symptom, ...] = (
    not_finite,
    sampler_differs,
    template,
    prompts_cut,
    numbers,
    advantages,
    never_right,
    truncated,
    one_answer,
    equal_responses,
    equal_rewards,
    small_groups,
    solved,
    duplicates,
    reward_noise,
    outliers,
    wrong_reference,
    weights_decay,
    swapped_pairs,
    evaluation_differs,
    reward_exploited,
    entropy_rises,
    kl_too_strong,
    clipped,
    gradient_clipped,
    rate_too_low,
    critic_useless,
    rate_too_high,
    wrong_answers,
    random_pairs,
    frozen_weights,
    no_gradient,
    dead_part,
)
"""All symptoms. Of equally sure causes, the earlier explains the later."""


def _rate(run: RunRecords) -> float:
    """Return the peak learning rate: the setting, or if the model's size decided it, what the records lead to."""
    if (given := run.setting("models.actor.optimizer.lr")) is not None:
        return float(given)
    done = sum(run.values("optimizer_steps")) * run.last / max(1, len(run.steps))
    warmup = run.setting("models.actor.optimizer.schedule.warmup", 0)
    return max(run.values("lr"), default=0.0) * max(1.0, (warmup + 1) / max(1.0, done))  # grows linearly


__all__ = [
    "Cause",
    "Diagnosis",
    "RunRecords",
    "Symptom",
    "diagnose",
    "diagnosis_lines",
    "diagnosis_of",
    "records_of",
    "seeds_disagree",
    "words_of_causes",
]
