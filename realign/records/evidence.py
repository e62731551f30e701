"""What the records of a run show, as `RunRecords`: courses of metrics, groups of rewards, samples, settings."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median
from typing import Any, NamedTuple, TypeGuard

from realign.text import shorten, visible

RECENT = 10
"""Steps at the end of a run that count as recent. Fewer are not judged."""
GENERATION = "interfaces.actor.generation"
"""Settings of the sampler in training."""
OPTIMIZER = "models.actor.optimizer"
"""Settings of the optimizer."""
POINTS = 400
"""Number of steps that are looked at; of longer runs, an even selection and the recent ones."""


class Course(NamedTuple):
    """How a metric moved: its level at the start and at the end, and the standard error of the difference."""

    start: float
    end: float
    error: float

    def moved(self, sign: int, least: float = 0.03) -> bool:
        """Return whether the metric rose (1) or fell (-1), by more than noise and more than `least`."""
        return sign * (self.end - self.start) > max(2 * self.error, least)

    def __str__(self) -> str:
        return f"{self.start:.4g} to {self.end:.4g}"


def course_of(values: Sequence[float]) -> Course | None:
    """Return the course of a metric; None of fewer than two values."""
    if len(values) < 2:
        return None
    first, last = max(1, len(values) // 5), max(1, len(values) // 4)
    jumps = [abs(b - a) for a, b in itertools.pairwise(values)]
    # not their mean: a single jump that stays is progress, and not noise
    spread = median(jumps) if len(jumps) > 4 else min(jumps)
    error = spread * math.sqrt(1 / first + 1 / last) if len(jumps) > 1 else 0.0
    return Course(fmean(values[:first]), fmean(values[-last:]), error)


_GOALS = (("reward", 1), ("rewards/accuracy", 1), ("accuracy", 1), ("nll", -1), ("loss", -1))
"""Metrics that should improve, the first one that a run has, and in which direction."""


@dataclass
class RunRecords:
    """The records of a run, as its files have them; any of them may be missing."""

    history: Sequence[Mapping[str, Any]]
    """A record of each step, with its metrics."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Responses of training."""
    eval_samples: Sequence[Mapping[str, Any]] = ()
    """Held-out responses."""
    tokens: Sequence[Mapping[str, Any]] = ()
    """Responses with their tokens."""

    def __post_init__(self) -> None:
        every, recent = max(1, len(self.history) // POINTS), len(self.history) - RECENT
        self.history = [record for i, record in enumerate(self.history) if i % every == 0 or i < 2 or i >= recent]
        self.steps = [record for record in self.history if isinstance(step := record.get("step"), int) and step > 0]
        self.last = int(self.steps[-1]["step"]) if self.steps else 0
        """The last step."""
        actor = self.setting("interfaces.actor")
        # their responses and rewards are rows of the data, and say nothing about the policy
        self.offline = isinstance(actor, Mapping) and "generation" not in actor
        if self.offline:
            self.samples = ()

    def values(self, name: str, records: Iterable[Mapping[str, Any]] | None = None) -> list[float]:
        """Return the finite values of a metric, from the first step on."""
        chosen = self.steps if records is None else records
        return [x for record in chosen if is_number(x := record.get(name))]

    def recent(self, name: str, default: float = 0.0) -> float:
        """Return the mean of a metric over the recent steps; `default` without any."""
        values = self.values(name)[-RECENT:]
        return fmean(values) if values else default

    def course(self, name: str) -> Course | None:
        """Return the course of a metric of training."""
        return course_of(self.values(name))

    def names(self, pattern: str) -> list[str]:
        """Return the metrics whose whole name matches a pattern."""
        names = dict.fromkeys(name for record in (*self.history[:3], *self.history[-RECENT:]) for name in record)
        return [name for name in names if re.fullmatch(pattern, name)]

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the config; `default` if it has no such key, or null."""
        node: Any = self.config
        for name in key.split("."):
            node = dict(enumerate(node)) if isinstance(node, list) else node
            node = node.get(int(name) if name.isdecimal() else name) if isinstance(node, Mapping) else None
        return default if node is None else node

    def number(self, word: str) -> float:
        """Return what a word of a condition stands for, see causes.yaml; NaN if it is no number."""
        if word.startswith("-"):
            return -self.number(word[1:])
        kind, _, name = word.rpartition(":")
        if name in self.quantities:
            return self.quantities[name]
        values = self.values(name, self.history)
        if kind == "first" and self.history[0].get("step") not in (0, 1):  # of a resumed run, it is elsewhere
            return math.nan
        if values:
            part = {"first": values[:1], "last": values[-1:], "max": [max(values)], "median": [median(values)]}
            return fmean(part.get(kind, values[-RECENT:]))
        try:
            return float(self.setting(name, name))
        except (TypeError, ValueError):
            return math.nan

    def holds(self, left: str, sign: str, right: str) -> bool:
        """Return whether a condition is true. `is` and `isnt` compare texts, and the others numbers."""
        if sign in ("is", "isnt"):
            return (str(self.setting(left)) == str(self.setting(right, right))) is (sign == "is")
        a, b = self.number(left), self.number(right)
        return {">": a > b, ">=": a >= b, "<": a < b, "<=": not a > b}[sign]

    @cached_property
    def quantities(self) -> dict[str, float]:
        """What causes.yaml compares beside settings and metrics; NaN if the records don't say it."""
        rates, entropy = self.values("lr"), self.values("entropy")
        early, kept = entropy[: max(4, len(entropy) // 3)], bool(entropy) and entropy[0] > 0.01
        jumps = [abs(b - a) / entropy[0] for a, b in itertools.pairwise(early)] if kept else []
        bonus = self.recent("entropy_coef", self.setting("interfaces.actor.entropy.coef", 0.0))
        rewards = self.values("reward")
        # the first step is that of the model which was evaluated
        reward = max(rewards[0], fmean(rewards[: max(3, len(self.steps) // 4)])) if rewards else math.nan
        before = self.evaluated[0] if self.evaluated else math.nan
        lengths = [sum(record.get("given") or ()) + record.get("start", 0) for record in self.tokens]
        coef, place = (self.setting(f"interfaces.actor.kl.{key}") for key in ("coef", "place"))
        # in the loss, a penalty competes with normalized advantages, of size 1
        worth = 1.0 if place == "loss" else max(self.rewards, default=0.0) - min(self.rewards, default=0.0)
        advantage, loss = max(self.values("advantage_max"), default=0.0), self.values(self.goal[0])
        gains = [self.held_out[1] * (x - before) for x in self.evaluated]
        passes = (id_ for record in self.tokens if (id_ := str(record.get("id")).rpartition("@")[2]).isdecimal())
        return {
            "shrinkage": 1 - math.exp(-self.rates * self.setting(f"{OPTIMIZER}.weight_decay", 0.0)),
            # how much of the loss it took away
            "entropy_gain": bonus * (entropy[-1] - entropy[0]) / advantage if entropy and advantage else math.nan,
            "passes": max((float(id_) + 1 for id_ in passes), default=math.nan),
            "loss_gap": self.evaluated[-1] / loss[-1] if self.evaluated and any(loss[-1:]) else math.nan,
            "loss_left": loss[-1] / max(loss) if any(loss) and self.goal[1] < 0 else math.nan,
            "held_out_lost": 1 - gains[-1] / max(gains) if any(gains) and max(gains) > 0 else math.nan,
            "nat_price": coef / worth if is_number(coef) and place in ("reward", "loss") and worth else math.nan,
            "steps_done": float(self.last),
            "trend": float(self.trains() - self.trains(-1)),
            "held_out_count": float(len(self.evaluated)),
            "held_out_gain": max(gains[1:], default=math.nan),
            "held_out_trend": float(self.generalizes() - self.generalizes(-1)),
            "learns": float(self.learns),
            "idle": self.idle(),
            "nonfinite_step": next((float(r["step"]) for r in self.steps if r.get("nonfinite_steps")), math.nan),
            "rate": self.rate,
            "lower_rate": self.rate / 10,
            "higher_rate": self.rate * 10,
            "rate_left": median(rates) / max(rates) if any(rates) else math.nan,
            "movement": self.movement,
            "damping": self.damping,
            "entropy_jump": max(jumps, default=math.nan),
            "entropy_left": min(entropy[:RECENT]) / entropy[0] if kept else math.nan,
            "prompt_tokens": median(lengths or [0]),
            "start_gap": before - reward,
            "start_ratio": before / max(reward, 1e-6),
        }

    @property
    def rate(self) -> float:
        """Peak learning rate: the setting, or if the model's size decided it, what the records lead to."""
        if (given := self.setting(f"{OPTIMIZER}.lr")) is not None:
            return float(given)
        done = sum(self.values("optimizer_steps")) * self.last / max(1, len(self.steps))
        warmup = self.setting(f"{OPTIMIZER}.schedule.warmup", 0)
        return max(self.values("lr"), default=0.0) * max(1.0, (warmup + 1) / max(1.0, done))  # grows linearly

    @cached_property
    def held_out(self) -> tuple[str, int]:
        """The held-out metric that should improve, and in which direction; an empty name without an evaluation."""
        found = ((name, sign) for ending, sign in _GOALS for name in self.names(rf"eval/(\w+/)?{ending}"))
        return next(found, ("", 1))

    @cached_property
    def evaluated(self) -> list[float]:
        """Values of `held_out`, that before training included."""
        return _from_chance(self.held_out[0], self.values(self.held_out[0], self.history))

    @cached_property
    def goal(self) -> tuple[str, int]:
        """The metric of training that should improve, and in which direction."""
        goals = _GOALS[self.offline :]  # the reward comes first
        return next(((name, sign) for name, sign in goals if self.values(name)), ("", 1))

    def trains(self, sign: int = 1) -> bool:
        """Return whether the metric of training improved (1) or got worse (-1)."""
        name, good = self.goal
        course = course_of(_from_chance(name, self.values(name)))
        return course is not None and course.moved(sign * good)

    def generalizes(self, sign: int = 1) -> bool:
        """Return whether the held-out metric improved (1) or got worse (-1)."""
        course = course_of(self.evaluated)
        return course is not None and course.moved(sign * self.held_out[1])

    @cached_property
    def learns(self) -> bool:
        """Whether held-out data improved, or without evaluations the training batch."""
        return self.generalizes() if len(self.evaluated) > 1 else self.trains()

    @cached_property
    def length_changed(self) -> bool:
        """Whether the length of responses changed by half."""
        course = self.course("response_tokens")
        return course is not None and not 0.67 < course.end / max(course.start, 1e-6) < 1.5

    def idle(self, role: str = "") -> float:
        """Return the share of recent steps that changed no weight of a role (`critic/`), for want of a gradient."""
        recent = [record for record in self.steps[-RECENT:] if f"{role}zero_gradient_steps" in record]
        # a step of several mini-batches counts only if none of them changed the weights
        idle = [r for r in recent if r[f"{role}zero_gradient_steps"] and not r.get(f"{role}optimizer_steps")]
        return len(idle) / max(1, len(recent))

    @property
    def movement(self) -> float:
        """Upper bound on how far Adam moved a weight; a twentieth with LoRA, which needs more for the same effect."""
        made = self.rates * self.damping
        return made / 20 if "lora" in str(self.setting("models.actor.trains")).lower() else made

    @property
    def rates(self) -> float:
        """Sum of the learning rates of all updates."""
        made = sum((record.get("lr") or 0.0) * (record.get("optimizer_steps") or 0.0) for record in self.steps)
        return made * self.last / max(1, len(self.steps))

    @cached_property
    def damping(self) -> float:
        """Share of the learning rate that Adam's eps leaves to a gradient of typical size; 1 if that isn't known."""
        speed = self.recent("train_tokens_per_s")
        weights = self.recent("train_tflop_per_s") * 1e12 / 6 / speed if speed else 0.0
        norm = median(self.values("grad_norm") or [0.0])
        if not weights or not norm:
            return 1.0
        gradient = min(norm, self.setting(f"{OPTIMIZER}.grad_clip", math.inf)) / math.sqrt(weights)
        return gradient / (gradient + self.setting(f"{OPTIMIZER}.eps", 1e-8))

    @cached_property
    def silent(self) -> bool:
        """Whether rewards within nearly all recent groups are equal."""
        return bool(self.values("zero_std_fraction")) and self.recent("zero_std_fraction") >= 0.85

    @cached_property
    def cut(self) -> float:
        """Share of recent responses at the length limit: held-out ones if training samples none."""
        return self.recent("eval/truncated_fraction" if self.offline else "truncated_fraction")

    @cached_property
    def endless(self) -> list[Mapping[str, Any]]:
        """Sampled responses that repeat themselves if most do, or all if one goes on after an end token."""
        samples = self.samples or self.eval_samples
        repeating = [sample for sample in samples if _repeats(sample)]
        ends = (text for record in self.tokens for text in _token_texts(record, given=False)[:-2])
        goes_on = any(re.fullmatch(r"<\|?(end\w*|eot_id|im_end|eos|/s)\|?>", text.strip()) for text in ends)
        return repeating if len(repeating) > len(samples) / 2 else [*samples] if goes_on else []

    @cached_property
    def groups(self) -> list[list[Mapping[str, Any]]]:
        """The sampled responses of each prompt of a step, those with a reward."""
        groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
        for sample in self.samples:
            if is_number(sample.get("reward")):
                groups[sample.get("step"), sample.get("id")].append(sample)
        return list(groups.values())

    @cached_property
    def rewards(self) -> list[float]:
        """Rewards of the sampled responses."""
        return [sample["reward"] for group in self.groups for sample in group]

    @cached_property
    def fails_alike(self) -> bool:
        """Whether all sampled responses have the same reward of 0 or less."""
        if not self.rewards or not self.silent or max(self.rewards) > min(self.rewards) or self.rewards[0] > 0:
            return False
        # a rare success among all responses of a step is no signal
        return max(self.values("reward"), default=0.0) <= self.rewards[0] + 0.02

    @cached_property
    def right(self) -> list[Mapping[str, Any]]:
        """Sampled responses that contain the answer of their row; none if those of other rows are as frequent."""
        found = [sample for sample in self.samples if has_answer(sample)]
        half = len(self.samples) // 2
        answers = [sample.get("answer") for sample in (*self.samples[half:], *self.samples[:half])]
        other = [(s, answer) for s, answer in zip(self.samples, answers, strict=True) if answer != s.get("answer")]
        by_chance = sum(has_answer({**sample, "answer": answer}) for sample, answer in other)
        return found if len(found) * max(1, len(other)) > 2 * by_chance * len(self.samples) else []

    @property
    def succeeds(self) -> bool:
        """Whether most sampled responses are right."""
        return len(self.right) > 0.7 * len(self.samples)

    @cached_property
    def prompts(self) -> list[str]:
        """Sampled prompts, with special tokens where they were recorded."""
        recorded = ["".join(_token_texts(record, given=True)) for record in self.tokens]
        return recorded or list(dict.fromkeys(str(sample.get("prompt")) for sample in self.samples))

    def show(self, *samples: Mapping[str, Any]) -> str:
        """Return the first of some samples as evidence; empty without any."""
        if not samples:
            return ""
        prompt, response = (visible(shorten(str(samples[0].get(key)), 120)) for key in ("prompt", "response"))
        place = f"step {samples[0]['step']}: " if "step" in samples[0] else ""
        reward = samples[0].get("reward")
        return f"{place}{prompt!r} -> {response!r} has reward {'none' if reward is None else format(reward, '.4g')}"


# --- texts and values of records ---


def _from_chance(name: str, values: Sequence[float]) -> list[float]:
    """Return the values of a metric, where a policy that prefers neither side counts as chance, and not as 0."""
    return [max(x, 0.5) for x in values] if name.endswith("rewards/accuracy") else [*values]


def is_number(x: Any) -> TypeGuard[float]:
    """Return whether a value is a finite number; in a damaged file it can be of any kind."""
    return isinstance(x, int | float) and -1e300 < x < 1e300


def response_text(sample: Mapping[str, Any]) -> str:
    """Return the response of a sample, in which runs of white space are one blank."""
    return " ".join(str(sample.get("response")).split())


def distinct(samples: Iterable[Mapping[str, Any]], key: str = "") -> bool:
    """Return whether samples differ in a value, or without a key in their responses."""
    return len({sample[key] if key else response_text(sample) for sample in samples}) > 1


def most_common(texts: Iterable[str]) -> tuple[str, float, int]:
    """Return the most common text, its share, and the number of texts."""
    counts = Counter(texts)
    text, count = next(iter(counts.most_common(1)), ("", 0))
    return text, count / max(1, counts.total()), counts.total()


def _token_texts(record: Mapping[str, Any], *, given: bool) -> list[str]:
    """Return the texts of the prompt's tokens, or of the others."""
    pairs = zip(record.get("text") or (), record.get("given") or (), strict=False)
    return [text for text, of_prompt in pairs if bool(of_prompt) is given]


def has_answer(sample: Mapping[str, Any]) -> bool:
    """Return whether a response contains the answer of its row as a word."""
    answer = re.escape(str(sample.get("answer") or ""))
    return bool(answer) and re.search(rf"(?<![\w.]){answer}(?!\w)", str(sample.get("response"))) is not None


def _repeats(sample: Mapping[str, Any]) -> bool:
    """Return whether the second half of a response repeats a few words."""
    words = str(sample.get("response")).split()
    tail = words[len(words) // 2 :]
    return len(tail) >= 4 and len(set(tail)) <= max(2, len(tail) / 3)


__all__ = [
    "GENERATION",
    "POINTS",
    "RECENT",
    "Course",
    "RunRecords",
    "distinct",
    "has_answer",
    "is_number",
    "most_common",
    "response_text",
]
