"""Why a run doesn't learn: small functions over its records, each of which yields causes of one kind of evidence.

`diagnose` asks all of them, and needs no model. The launch check, the loop, the summary, the report, the viewer and
`realign why` share it, and causes.yaml has the words, so each cause has one wording. A symptom of your own is any
callable `(RunRecords) -> Cause | None`, or one that yields causes.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from realign.records.evidence import (
    GENERATION,
    POINTS,
    RECENT,
    RunRecords,
    distinct,
    has_answer,
    is_number,
    most_common,
    response_text,
)
from realign.records.record_files import METRICS, first_object, json_lines, yaml_object
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
    settings = tuple(filter(None, (text.format_map(values) for text in words.get("try", ()))))
    return Cause(name, words["says"].format_map(values), tuple(filter(None, facts)), words["do"], sure, settings)


Symptom = Callable[[RunRecords], Cause | Iterable[Cause] | None]
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
            causes = symptom(run) or ()
            for cause in [causes] if isinstance(causes, Cause) else causes:
                found.append(replace(cause, settings=tuple(_new_settings(run, cause.settings))))
        except Exception as error:  # a folder may come from a stranger, and a value be of any kind
            name = getattr(symptom, "__name__", type(symptom).__name__)
            skipped.append(f"{name} was skipped: {type(error).__name__}: {shorten(str(error), 200)}")
    sentence, causes = _judge(run, found)
    return Diagnosis(sentence, causes, tuple(skipped))


def _new_settings(run: RunRecords, settings: Iterable[str]) -> Iterator[str]:
    """Yield the settings that the run doesn't have yet, and also for its evaluation, where that has the same values."""
    for setting in settings:
        key, _, text = setting.partition("=")
        now, other = run.setting(key), re.fullmatch(r"\$\{(.+)\}", text)
        if now == (run.setting(other[1]) if other else load_yaml(text)):
            continue
        yield setting
        evaluated = key.replace(GENERATION, "evaluation.generation")
        if evaluated != key and now is not None and run.setting(evaluated) == now:  # config.yaml has inherited values
            yield f"{evaluated}={text}"


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


# --- what settings and metrics say by themselves ---


def limits(run: RunRecords) -> Iterator[Cause]:
    """Compare settings, metrics and quantities with the limits that causes.yaml has."""
    for name, words in words_of_causes().items():
        rules = words.get("when", {}) if words.get("always") or not run.learns else {}
        split = ((sure, [text.split() for text in rule.split(" and ")]) for rule, sure in rules.items())
        if found := [rule for rule in split if all(run.holds(*condition) for condition in rule[1])]:
            sure, conditions = max(found)
            key, _, limit = conditions[0]
            shown = dict.fromkeys(x for x, *_ in conditions if x not in run.quantities and math.isfinite(run.number(x)))
            facts = [*(f"{x.replace(':', ' ')}: {run.number(x):.4g}" for x in shown), run.show(*run.samples[-1:])]
            given = {"key": key, "value": run.number(key), "bound": run.number(limit), "more": 4 * run.number(key)}
            yield _cause(name, sure, *facts, **given, **run.quantities)


# --- what a text proves ---

_MARKER = r"<\|?/?[A-Za-z_][^<>\s]*\|?>|\[/?INST\]|<<SYS>>"
_DOUBLED = rf"({_MARKER})(?:\s*(?:user|assistant|system))?\s*\1"


def _has_template(path: Any) -> bool:
    """Return whether a local model folder has a chat template."""
    settings, files = Path(str(path), "tokenizer_config.json"), Path(str(path)).glob("chat_template.jinja")
    return any(files) or (settings.is_file() and b'"chat_template"' in settings.read_bytes())


def _as_text(run: RunRecords) -> dict[str, str]:
    """Return the settings that read prompts as text; each is empty where none is known to work."""
    columns = (
        f"data.prompt_column={name}.{place - len(cell)}.content"
        for name, cell in first_object(Path(str(run.setting("data.path")))).items()
        for place, message in enumerate(cell if isinstance(cell, list) else ())
        if isinstance(message, Mapping) and re.search(_MARKER, str(message.get("content")))
    )
    column = next(columns, "")
    works = not run.offline if column else run.setting("data.template") == "chat"
    return {"plain": "data.template=plain" * works, "column": column * works}


def template(run: RunRecords) -> Iterator[Cause]:
    """Look for the chat template of the model in the prompts: none, or its markers doubled."""
    doubled = [match[0] for text in run.prompts if (match := re.search(_DOUBLED, text))]
    ours, theirs = run.setting("data.template"), run.setting("evaluation.data.template", "plain")
    bare = ours == "plain" and not any(re.search(_MARKER, text) for text in run.prompts)
    if doubled and len(doubled) >= len(run.prompts) / 2:
        fact = f"in {len(doubled)} of {len(run.prompts)} recorded prompts"
        yield _cause("template-twice", PROVEN, fact, text=doubled[0], **_as_text(run))
    elif bare and not (run.learns and ours == theirs) and _has_template(run.setting("models.actor.path")):
        yield _cause("template-missing", PROVEN, run.show(*run.samples), f"evaluation.data.template={theirs}")


def truncated(run: RunRecords) -> Iterator[Cause]:
    """Look at responses that reach the length limit."""
    limit = run.number(f"{'evaluation.generation' if run.offline else GENERATION}.max_new_tokens")
    led_there = run.trains() and not run.learns and not run.offline  # by the reward
    if run.cut < (0.9 if run.learns else 0.5) or led_there or run.setting(f"{GENERATION}.fixed_length"):
        return
    # what comes later is a consequence
    late = (run.values("truncated_fraction") or [run.cut])[0] < run.cut / 2
    sure = POSSIBLE if late else CERTAIN if run.idle() > 0.5 or run.cut > 0.9 else LIKELY
    name, shown = ("no-end-token", run.endless) if run.endless else ("truncated", run.samples)
    yield _cause(name, sure, run.show(*shown), share=run.cut, limit=limit, longer=4 * limit)


# --- what should vary, and doesn't ---


def same_texts(run: RunRecords) -> Iterator[Cause]:
    """Look for one prompt, or one response, where there should be many."""
    text, share, total = most_common(str(group[0].get("prompt")) for group in run.groups)
    if total >= 8 and share >= 0.4:
        fact = f"{share * total:.0f} of {total}: {visible(shorten(text, 120))!r}"
        yield _cause("duplicates", PROVEN, fact, share=share)
    facts = _collapsed(run)
    late = [group for group in run.groups if (group[0].get("step") or 0) > run.last * 2 / 3]
    text, share, _ = most_common(response_text(sample) for group in late for sample in group)
    count = len({str(group[0].get("prompt")) for group in late})
    if count >= 3 and share > 0.7:
        facts.append(f"{share:.0%} of the late responses to {count} prompts are {visible(shorten(text, 80))!r}")
    if facts:  # else a reward that is exploited led to it
        sure = POSSIBLE if run.learns else PROVEN if run.trains() and not run.length_changed else LIKELY
        yield _cause("one-answer", sure, *facts)
    groups = [group for group in run.groups if len(group) > 1]
    same = [group for group in groups if not distinct(group)]
    early = [group for group in same if (group[0].get("step") or 0) <= max(2, run.last // 5)]
    alike = bool(early) and len(same) >= 0.6 * len(groups) and run.recent("zero_std_fraction", 1.0) >= 0.5
    if alike and not run.succeeds and not run.learns:
        fact = f"in {len(same)} of {len(groups)} sampled groups"
        sure = CERTAIN if len(same) == len(groups) and not facts else LIKELY  # one answer to everything explains it
        yield _cause("equal-responses", sure, fact, run.show(same[0][0]))


def _collapsed(run: RunRecords) -> list[str]:
    """Return which evaluations have mostly equal responses that earn no more than one answer to everything."""
    facts, keys = [], ("most_common_fraction", "distinct_fraction", "truncated_fraction", "reward", "constant_reward")
    for prefix in (name.removesuffix(keys[0]) for name in run.names(f"eval/(.+/)?{keys[0]}")):
        share, few, cut, reward, constant = (run.number(f"last:{prefix}{key}") for key in keys)
        # an untrained policy may well repeat itself, and beginnings are alike
        if share >= (0.9 if math.isnan(constant) else 0.5) and few <= 1 / 8 and not (cut > 0.5 or reward > constant):
            which = f"held-out responses of {prefix[5:-1]}" if prefix[5:] else "held-out responses"
            earned = f"; it earns {constant:.4g} on every prompt, and the policy {reward:.4g}"
            facts.append(f"{share:.0%} of the {which} are the same one" + earned * (not math.isnan(constant)))
    return facts


def same_rewards(run: RunRecords) -> Iterator[Cause]:
    """Look for rewards, or parts of them, that are equal for different responses."""
    groups = [group for group in run.groups if distinct(group)]
    varies = any(distinct(group, "reward") for group in groups) or len(groups) < max(1, len(run.groups) / 4)
    judged = run.silent and run.cut <= 0.5
    if judged and run.fails_alike:
        count, reward, more = len(run.rewards), run.rewards[0], 4 * int(run.setting(f"{GENERATION}.n", 8))
        if len(run.right) >= max(2, 0.02 * count):
            fact = f"{len(run.right)} of {count} sampled responses contain the answer of their row"
            sure = CERTAIN if len(run.right) >= 0.1 * count else POSSIBLE
            yield _cause("not-parsed", sure, fact, run.show(*run.right), reward=reward)
        elif max(run.evaluated, default=0.0) <= reward + 0.02:
            yield _cause("too-hard", LIKELY, run.show(*run.samples), count=count, reward=reward, more=more)
    elif judged and not varies and max(run.rewards) > 0 and run.recent("missing_rewards") <= 0.2 and not run.succeeds:
        two = next((first, x) for first, *rest in groups for x in rest if distinct((first, x)))
        spread = ", ".join(name for name in run.names(r"rewards/.+/std") if run.recent(name) > 0)
        fact = f"{spread} are above 0, so the parts cancel out" if spread else ""
        sure = CERTAIN if all(share == 1 for share in run.values("zero_std_fraction")) else POSSIBLE
        each = f"each has {run.rewards[0]:.4g}, whatever it says"
        how = "it depends on the prompt only" if min(run.rewards) < max(run.rewards) else each
        yield _cause("equal-rewards", sure, *map(run.show, two), fact, how=how)
    parts = run.names("rewards/.+/mean")
    dead = [name.split("/")[1] for name in parts if not any(run.values(name))]
    if run.last >= RECENT and 0 < len(dead) < len(parts):
        yield _cause("reward-part-dead", POSSIBLE, run.show(*run.samples[-1:]), part=dead[0])


def same_advantages(run: RunRecords) -> Iterator[Cause]:
    """Look for advantages that are 0, or all of one sign, in groups of unequal rewards, and for steps without any."""
    low, high = min(run.values("advantage_min"), default=-1.0), max(run.values("advantage_max"), default=1.0)
    torn = next((group for group in run.groups if distinct(group, "reward")), [])
    equal, compares = run.recent("zero_std_fraction"), bool(run.values("zero_std_fraction"))
    fact = f"{equal:.0%} of the groups have equal rewards" if compares else f"loss {run.recent('loss'):.4g}"
    if -1e-6 <= low <= high <= 1e-6 and (torn or equal <= 0.5):
        clip = run.setting("interfaces.actor.reward.clip")
        name = "advantages-cancel" if clip is None else "reward-clip"
        yield _cause(name, CERTAIN, fact, run.show(*torn), clip=clip)
    elif torn and low < high and not low < 0 < high:
        fact = f"advantages from {low:.3g} to {high:.3g} in {run.last:,} steps"
        yield _cause("no-baseline", LIKELY if run.learns else CERTAIN, fact, run.show(*torn))
    roles = [name.removesuffix("zero_gradient_steps") for name in run.names("(.+/)?zero_gradient_steps")]
    idle = {role: share for role in roles if len(run.steps) >= RECENT and (share := run.idle(role)) >= 0.5}
    if idle.get("", 0) >= 0.9 and not (compares and (equal > 0.5 or run.recent("advantage_max") < 1e-6)):
        why = "rewards differ within the groups" if compares else "the loss has nothing to compare"
        yield _cause("frozen-weights", CERTAIN, fact, why=why)
    elif idle and not run.learns:
        role, share = next(iter(idle.items()))
        values = {"idle": f"{share * RECENT:.0f}", "recent": RECENT, "role": f" ({role[:-1]})" if role else ""}
        yield _cause("no-gradient", LIKELY - 0.05, fact, **values)


# --- what differs from the rest ---


def reward_breaks(run: RunRecords) -> Iterator[Cause]:
    """Look for a step from which on rewards are at another level, while the policy is the same as before it."""
    names = ("step", "reward", "entropy", "response_tokens")
    rows = [[record[name] for name in names] for record in run.steps if all(is_number(record.get(x)) for x in names)]
    for i in range(3, len(rows) - 3):
        before, after = ([row[1] for row in some] for some in (rows[max(0, i - 5) : i], rows[i:]))
        old, new, stays = fmean(before), fmean(after), min(after) == max(after)
        apart = min(before) > max(after) or (stays and min(after) > max(before))
        at_once = abs(rows[i - 1][1] - rows[i + 1][1]) > max(0.7 * abs(old - new), 0.3 * abs(old))
        same = all(0.7 < rows[i][k] / max(rows[i - 1][k], 1e-6) < 1.4 for k in (2, 3))
        harder = run.setting("curriculum") is not None and not stays  # other prompts, as it should be
        if harder or not (apart and at_once and same):
            continue
        step = rows[i][0]
        later = run.values(run.held_out[0], (record for record in run.steps if record["step"] >= step))
        if stays or min(later, default=math.inf) >= 0.5 * max(run.evaluated, default=0.0):
            late = [sample for sample in run.samples if (sample.get("step") or 0) > step]
            fact = f"entropy and length of the responses are alike in steps {rows[i - 1][0]} and {step}"
            sure = CERTAIN if stays else LIKELY
            yield _cause("reward-breaks", sure, fact, run.show(*late), step=step, old=old, new=new)
            return


def rows_apart(run: RunRecords) -> Iterator[Cause]:
    """Look for rows whose responses all fail, while those of other rows don't, and for what these rows have in common.

    That is Fisher's exact test for each word of the prompt, and for the size of prompt and answer.
    """
    groups, traits = run.groups[-POINTS:], defaultdict[str, set[int]](set)
    floor = min(run.rewards, default=0.0)
    failed = [max(sample["reward"] for sample in group) <= floor for group in groups]
    for key in ("prompt", "answer"):
        texts = [str(group[0].get(key, "")) for group in groups]
        sizes = [float(text) if re.fullmatch(r"-?\d{1,9}", text) else len(text.split()) for text in texts]
        usual = median(sizes or [0])
        for i, text in enumerate(texts):
            for word in text.split():
                traits[f"{word!r} in the {key}"].add(i)
        traits[f"a larger {key} than most"] = {i for i, size in enumerate(sizes) if size > usual}
    total, good = len(failed), len(failed) - sum(failed)
    kinds = {frozenset(rows): trait for trait, rows in traits.items() if 0.2 * total <= len(rows) < total}
    chances = [
        (len(kinds) * math.comb(total - len(rows), good) / math.comb(total, good), trait, rows)
        for rows, trait in kinds.items()
        if all(failed[i] for i in rows) and good >= 0.5 * (total - len(rows))
    ]
    chance, trait, rows = min(chances, default=(1.0, "", frozenset[int]()))
    # at first, many responses are right in another form
    told = [i for i in range(total // 2, total) if sum(map(_ends_right, groups[i])) > 1]
    rejected = [i for i in told if failed[i]]
    paid = [_ends_right(sample) for group in groups[total // 2 :] for sample in group if sample["reward"] > floor]
    if len(told) > len(rejected) >= max(3, 0.25 * len(told)) and sum(paid) > 0.7 * len(paid):
        chance, trait, rows = 0.0, "the right answer at the end of several responses", frozenset(rejected)
    if chance < (1e-3 if run.learns else 1e-2) and not all(failed[total * 2 // 3 :]):
        other = next(group for i, group in enumerate(groups) if not failed[i])
        fact = f"of the {total - len(rows)} other prompts, {good} have a response that succeeds"
        shown = (run.show(*groups[min(rows)]), run.show(*other))
        sure = CERTAIN if chance == 0 else POSSIBLE if run.learns else LIKELY  # these rows may just be hard
        yield _cause("rows-apart", sure, fact, *shown, rows=len(rows), trait=trait)


def _ends_right(sample: Mapping[str, Any]) -> bool:
    """Return whether the answer of its row is near the end of a response."""
    return has_answer({**sample, "response": response_text(sample)[-30:]})


def rewards_apart(run: RunRecords) -> Iterator[Cause]:
    """Look for rewards that differ for the same response, that punish right ones, or that are far beyond the others."""
    answered = {id(sample) for sample in run.right}
    # later, what a reward pays for may have led to long or short responses, right or not
    rated = [s for s in run.samples if is_number(s.get("reward")) and (s.get("step") or 0) <= run.last // 4]
    right, wrong = ([s["reward"] for s in rated if (id(s) in answered) is whether] for whether in (True, False))
    shown = run.show(*(s for s in rated if id(s) in answered))
    if min(len(right), len(wrong)) > 4 and max(right) < median(wrong):
        yield _cause("right-punished", CERTAIN, shown, right=fmean(right), wrong=fmean(wrong))
    elif _unrelated(right, wrong) and not run.learns and any(distinct(group, "reward") for group in run.groups):
        fact = f"{len(right)} and {len(wrong)} early responses"
        yield _cause("reward-unrelated", LIKELY, fact, shown, right=fmean(right), wrong=fmean(wrong))
    same = defaultdict[Any, list[Mapping[str, Any]]](list)
    for sample in (sample for group in run.groups for sample in group):
        same[sample.get("step"), sample.get("id"), sample.get("response")].append(sample)
    repeated = [samples for samples in same.values() if len(samples) > 1]
    torn = [samples for samples in repeated if distinct(samples, "reward")]
    if len(torn) >= max(3, 0.25 * len(repeated)):
        low, *_, high = sorted(torn[0], key=lambda sample: sample["reward"])
        facts = (f"{len(torn)} of {len(repeated)} repeated responses", run.show(low), f"and {high['reward']:.4g}")
        yield _cause("reward-noise", LIKELY if run.learns else CERTAIN, *facts)
    for what, values in (("a sampled response", run.rewards), ("the mean of a step", run.values("reward"))):
        ordered = sorted(map(abs, values))
        if len(ordered) >= RECENT and ordered[-1] >= 15 * max(usual := ordered[int(0.9 * len(ordered))], 1.0):
            fact = f"nine in ten are below {usual:.4g}"
            yield _cause("reward-outliers", LIKELY if run.learns else PROVEN, fact, high=ordered[-1], what=what)
            break


def _unrelated(right: Sequence[float], wrong: Sequence[float]) -> bool:
    """Return whether two samples of rewards have the same mean, while a fifth of the range would be told apart."""
    rewards = [*right, *wrong]
    if min(len(right), len(wrong)) < RECENT or min(rewards) == max(rewards):
        return False
    error = pstdev(rewards) * math.sqrt(1 / len(right) + 1 / len(wrong))
    return fmean(right) - fmean(wrong) < error < 0.2 * (max(rewards) - min(rewards))


# --- what should agree, and doesn't ---


def evaluation_differs(run: RunRecords) -> Iterator[Cause]:
    """Compare prompts, settings and results of the evaluation with those of training."""
    texts = ({str(sample.get("prompt")) for sample in some} for some in (run.samples, run.eval_samples))
    ours, theirs = ([frozenset(text.split()) for text in some] for some in texts)
    known, asked = (set[str]().union(*some) for some in (ours, theirs))
    facts = list[str]()
    for place, these, others in (("of training", ours, asked), ("held out", theirs, known)):
        words = frozenset.intersection(*these) - others if others and len(these) > 5 else ()
        facts += [f"{' '.join(sorted(words))!r} is in all prompts {place}, and in no other"] if words else []
    told, told_held_out = (
        fmean([has_answer({**sample, "response": sample.get("prompt")}) for sample in some] or [0.0])
        for some in (run.samples, run.eval_samples)
    )
    leaks = bool(run.eval_samples) and told > told_held_out + 0.5
    facts += [f"{told:.0%} of the prompts of training contain their answer, and {told_held_out:.0%} held out"] * leaks
    if facts:
        shown = run.show(*run.samples[:1]), run.show(*run.eval_samples[:1])
        yield _cause("prompts-differ", CERTAIN if leaks else LIKELY, *facts, *shown)
        return
    if run.generalizes() or not run.evaluated or run.silent:
        return
    changes = run.movement > 1e-3 and len(set(run.values(run.goal[0]))) > 1
    same = run.values(run.held_out[0], run.history)
    # a loss falls long before answers are right
    enough = 6 if run.offline else 3 if run.trains() else 4
    if len(set(same)) == 1 and len(same) >= enough and (run.trains() or changes):
        facts.append(f"{run.held_out[0]} is {same[0]:.4g} in each of {len(same)} evaluations")
        names = ("interfaces.reward.function", "evaluation.reward.function", "evaluation.role")
        facts += [f"{name}={run.setting(name)}" for name in names if run.setting(name)]
    seen = Counter(word for words in ours for word in words)
    alone = sum(number == 1 for number in seen.values()) / max(1, seen.total())  # also new, in another prompt of it
    new = sum(len(words - known) for words in theirs) / max(1, sum(map(len, theirs)))
    if run.trains() and new > 0.2 + 2 * alone and len(run.groups) > 5 and len(run.evaluated) > 2:
        facts.append(f"{new:.0%} of the words of the held-out prompts are in no sampled prompt of training")
    if facts:
        facts.append(run.show(*run.eval_samples[-1:]))
        yield _cause("evaluation-differs", CERTAIN if run.trains() else LIKELY, *facts)


def only_training_improves(run: RunRecords) -> Iterator[Cause]:
    """Look for training that improves while held-out data do not, and at what rises with it."""
    if run.last < RECENT or not run.trains() or run.generalizes():
        return
    fell = len(run.evaluated) > 3 and run.generalizes(-1)
    (goal, _), (held_out, _) = run.goal, run.held_out
    facts = [f"{goal} {run.course(goal)}"]
    facts += [f"{held_out} {run.evaluated[0]:.4g} to {run.evaluated[-1]:.4g}"] if run.evaluated else []
    if goal == "reward":
        parts = {name.split("/")[1]: c for name in run.names("rewards/.+/mean") if (c := run.course(name))}
        rising = next((name for name, c in parts.items() if c.moved(1)), None)
        other = next((name for name, c in parts.items() if not c.moved(1)), None)
        # three evaluations of a few rows can fall by chance, but not to a quarter
        worse = fell or (len(run.evaluated) > 2 and run.evaluated[-1] <= 0.25 * run.evaluated[0] > 0)
        if rising and other:
            facts += [f"{name} {parts[name]}" for name in (rising, other)]
            yield _cause("reward-parts", CERTAIN, *facts, rising=rising, other=other)
        elif worse or (run.length_changed and len(run.evaluated) > 1):
            facts += [f"tokens of a response {run.course('response_tokens')}"] if run.length_changed else []
            latest = sorted(run.samples, key=lambda sample: (sample.get("step") or 0, sample.get("reward") or 0.0))[-1:]
            which = "get worse" if worse else "do not improve"
            yield _cause("reward-hacking", CERTAIN if worse else LIKELY, *facts, run.show(*latest), held_out=which)


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
    template,
    limits,
    reward_breaks,
    rows_apart,
    same_advantages,
    same_rewards,
    truncated,
    same_texts,
    rewards_apart,
    evaluation_differs,
    only_training_improves,
)
"""All symptoms. Of equally sure causes, the earlier explains the later."""

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
