"""Each cause is found in records that show it, and in no others."""

import json
import re
from pathlib import Path

import pytest

from realign.records.diagnosis import (
    PAGE,
    Cause,
    RunRecords,
    diagnose,
    diagnosis_lines,
    diagnosis_of,
    seeds_disagree,
    words_of_causes,
)
from realign.time_machine.why import why_lines

ROOT = Path(__file__).parents[2]
CONFIG = {
    "models": {"actor": {"optimizer": {"lr": 1e-3, "grad_clip": 1.0}}},
    "interfaces": {"actor": {"generation": {"n": 4, "max_new_tokens": 8, "temperature": 1.0}}},
}
STEPS = 20
QUIET = {"zero_std_fraction": 1.0, "zero_gradient_steps": 1.0, "optimizer_steps": 0.0}


def history(start=0.2, end=0.2, held_out=None, **metrics):
    """Return records whose reward goes from `start` to `end`; a metric may be a pair of its first and last value."""
    normal = {"lr": 1e-3, "optimizer_steps": 1.0, "zero_std_fraction": 0.2, "entropy": 1.0, "zero_gradient_steps": 0.0}
    records = [{"step": 0}]
    for step in range(1, STEPS + 1):
        share = (step - 1) / (STEPS - 1)
        values = normal | {"reward": (start, end)} | metrics
        records.append(
            {"step": step} | {k: v if isinstance(v, float) else v[0] + share * (v[1] - v[0]) for k, v in values.items()}
        )
    for place, value in zip((0, 5, 10, 15, 20), held_out or (), strict=False):
        records[place]["eval/reward"] = value
    return records


def samples(*texts, reward=0.0, prompt="{}+1=", answer=None, every=1):
    """Return the same responses to another prompt in each step; rewards may be a list."""
    rewards = reward if isinstance(reward, list) else [reward] * len(texts)
    return [
        {"step": step, "id": f"{step}@0", "prompt": prompt.format(step), "response": text, "reward": value}
        | ({} if answer is None else {"answer": answer.format(step)})
        for step in range(1, STEPS + 1, every)
        for text, value in zip(texts, rewards, strict=True)
    ]


def config(**changes):
    """Return the config with other values; keys are dotted, with `__` for a period."""
    changed = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        node = changed
        *path, last = key.split("__")
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return changed


FLAT = (0.2, 0.2, 0.2, 0.2, 0.2)
CASES = {
    "not-finite": RunRecords(history(nonfinite_steps=1.0), CONFIG),
    "dropout": RunRecords(history(first_logprob_diff_max=2.0), config(models__actor__dropout=0.1)),
    "sampler": RunRecords(history(first_logprob_diff_max=2.0), CONFIG),
    "sampler-stale": RunRecords(history(first_logprob_diff_max=(0.0, 3.0)), CONFIG),
    "template-twice": RunRecords(history(), CONFIG, samples("4", prompt="<|user|> <|user|> {}?")),
    "template-missing": RunRecords(
        history(), config(data__template="plain", models__actor__path="MODEL"), samples("4", prompt="{}+3?")
    ),
    "prompts-cut": RunRecords(
        history(),
        config(data__max_prompt_tokens=2, data__too_long="truncate_left"),
        tokens=[{"text": ["a", "b", "c"], "given": [1, 1, 0], "start": 0}],
    ),
    "shuffled": RunRecords(history(), config(interfaces__reward__shuffle=True)),
    "advantages-cancel": RunRecords(history(advantage_max=0.0, advantage_min=0.0), CONFIG),
    "no-baseline": RunRecords(
        history(advantage_max=1.0, advantage_min=0.0), CONFIG, samples("a", "b", reward=[0.0, 1.0])
    ),
    "reward-clip": RunRecords(
        history(advantage_max=0.0, advantage_min=0.0, **QUIET),
        config(interfaces__actor__reward__clip=5.0),
        samples("a", "b", reward=[10.0, 90.0]),
    ),
    "critic-warmup": RunRecords(history(), config(interfaces__actor__critic_warmup_steps=50, steps=STEPS)),
    "overlong": RunRecords(history(), config(interfaces__actor__truncation__overlong_buffer=8)),
    "not-shuffled": RunRecords(history(), config(shuffle=False)),
    "stopped": RunRecords(
        history(0.0, 0.0, **QUIET), config(interfaces__actor__generation__stop_strings=["is"]), samples("it is", "this")
    ),
    "tokenizer": RunRecords(history(0.0, 0.0, **QUIET), config(models__actor__tokenizer="other"), samples("a", "b")),
    "no-end-in-data": RunRecords(
        history(**{"eval/truncated_fraction": 1.0}),
        {"interfaces": {"actor": {"_target_": "sft"}}, "data": {"append_eos": False}},
        eval_samples=[{"step": 20, "prompt": "7?", "response": "7" + " so" * 12, "reward": 0.0}],
    ),
    "small-groups": RunRecords(history(zero_std_fraction=0.7), config(interfaces__actor__generation__n=2)),
    "swapped-pairs": RunRecords(history(**{"rewards/accuracy": 0.9, "eval/rewards/accuracy": 0.1}), CONFIG),
    "prompts-differ": RunRecords(
        history(), CONFIG, samples("a", "b", prompt="Answer {}", reward=[0.0, 1.0]), [{"step": 20, "prompt": "Say 7"}]
    ),
    "overfitting": RunRecords(
        [r | {"loss": 1 - r["step"] / 20, "eval/loss": 1 + r["step"] / 20} for r in history()],
        {"interfaces": {"actor": {"_target_": "sft"}}, "data": {"limit": 16}},
    ),
    "by-heart": RunRecords(
        [r | {"loss": 0.001 if r["step"] > 9 else 1.0} for r in history()],
        {"interfaces": {"actor": {"_target_": "sft"}}},
        tokens=[{"step": step, "id": f"7@{step}"} for step in range(STEPS)],
    ),
    "reference": RunRecords(history(ref_kl_per_sequence=2.0), CONFIG),
    "weight-decay": RunRecords(history(), config(models__actor__optimizer__weight_decay=30.0)),
    "untrained": RunRecords(history(trained_fraction=0.1), CONFIG),
    "vetoed": RunRecords(history(vetoed_steps=1.0), CONFIG),
    "stale": RunRecords(history(**{"rollout/version_lag": 9.0}), CONFIG),
    "missing-rewards": RunRecords(history(missing_rewards=0.8), CONFIG),
    "not-parsed": RunRecords(
        history(0.0, 0.0, **QUIET), CONFIG, samples("so {} is 7.", "no", answer="7") + samples("x", answer="{}9")
    ),
    "too-hard": RunRecords(history(0.0, 0.0, **QUIET), CONFIG, samples("a", "b", answer="7")),
    "truncated": RunRecords(history(0.0, 0.0, truncated_fraction=1.0, **QUIET), CONFIG, samples("one two three four")),
    "no-end-token": RunRecords(history(0.0, 0.0, truncated_fraction=1.0, **QUIET), CONFIG, samples("7" + " so" * 12)),
    "equal-responses": RunRecords(
        history(zero_std_fraction=0.9), config(interfaces__actor__generation__temperature=0.1), samples("7", "7", "7")
    ),
    "equal-rewards": RunRecords(history(1.0, 1.0, **QUIET), CONFIG, samples("a", "b", reward=1.0)),
    "solved": RunRecords(history(0.95, 0.95, (0.95,) * 5, zero_std_fraction=0.8), CONFIG),
    "random-pairs": RunRecords(
        history(**{"rewards/accuracy": 0.5, "logprobs/chosen": -3.0, "logprobs/rejected": -2.0, "reward": 0.5}), CONFIG
    ),
    "reward-part-dead": RunRecords(history(**{"rewards/form/mean": 0.0, "rewards/right/mean": 0.2}), CONFIG),
    "reward-breaks": RunRecords(
        [record | ({"reward": 0.0} if record["step"] > 9 else {}) for record in history(response_tokens=5.0)], CONFIG
    ),
    "rows-apart": RunRecords(
        history(0.5, 0.5),
        CONFIG,
        [
            sample
            for ours, theirs in zip(
                samples("a", "b", reward=[0.0, 1.0], prompt="of {}?"), samples("a", "b", prompt="Say {}!"), strict=True
            )
            for sample in ([ours] if ours["step"] % 2 else [theirs])
        ],
    ),
    "right-punished": RunRecords(
        history(0.2, 0.2, zero_std_fraction=0.0),
        CONFIG,
        [
            sample | {"answer": f"r{i}", "response": f"r{i}" if good else "w", "reward": 0.0 if good else 1.0}
            for i, sample in enumerate(samples("a"))
            for good in (True, False)
        ],
    ),
    "reward-unrelated": RunRecords(
        history(),
        CONFIG,
        [
            sample | {"answer": f"r{i}", "response": f"{j} r{i}" if j < 4 else f"w{j}", "reward": float(j % 2)}
            for i, sample in enumerate(samples("a"))
            for j in range(8)
        ],
    ),
    "wrong-sign": RunRecords(
        history(), config(interfaces__actor__truncation={"reward": "add", "penalty": 1.0, "overlong_buffer": 0})
    ),
    "eps": RunRecords(
        history(grad_norm=0.1, train_tokens_per_s=1e6, train_tflop_per_s=6.0),
        config(models__actor__optimizer={"lr": 1e-3, "eps": 1.0}),
    ),
    "rows-contradict": RunRecords(
        [r | {"loss": 1 - r["step"] / 20, "eval/loss": 1 + r["step"] / 20} for r in history()],
        {"interfaces": {"actor": {"_target_": "sft"}}},
    ),
    "gets-worse": RunRecords(history(0.5, 0.1, (0.5, 0.4, 0.3, 0.2, 0.1)), CONFIG),
    "duplicates": RunRecords(history(), CONFIG, samples("a", "b", reward=[0.0, 1.0], prompt="1+1=")),
    "reward-noise": RunRecords(history(), CONFIG, samples("a", "a", "b", reward=[0.0, 1.0, 0.5])),
    "reward-outliers": RunRecords(history(), CONFIG, [*samples("a", "b", reward=0.5), *samples("c", reward=900.0)[:1]]),
    "evaluation-differs": RunRecords(
        history(0.2, 0.9, FLAT),
        CONFIG,
        samples("a", "b", reward=[0.0, 1.0]),
        [{"step": 20, "prompt": "How many?", "response": "c", "reward": 0.0}],
    ),
    "reward-parts": RunRecords(
        history(1.0, 9.0, FLAT, **{"rewards/short/mean": (1.0, 9.0), "rewards/right/mean": 0.2}), CONFIG
    ),
    "reward-hacking": RunRecords(history(1.0, 9.0, (0.5, 0.4, 0.2, 0.1, 0.0), response_tokens=(9.0, 60.0)), CONFIG),
    "entropy-bonus": RunRecords(
        history(entropy=(1.0, 3.0), advantage_max=1.0), config(interfaces__actor__entropy__coef=1.0)
    ),
    "high-temperature": RunRecords(history(entropy=3.0), config(interfaces__actor__generation__temperature=3.0)),
    "kl-too-strong": RunRecords(
        history(ref_kl=0.001), config(interfaces__actor__kl__coef=50.0, interfaces__actor__kl__place="loss")
    ),
    "clip": RunRecords(history(clip_fraction=0.9), config(interfaces__actor__objective__low=1e-6)),
    "gradient-clip": RunRecords(
        history(grad_norm=1.0, train_tokens_per_s=1e6, train_tflop_per_s=6.0),
        config(models__actor__optimizer={"lr": 1e-3, "grad_clip": 1e-9, "eps": 1e-8}),
    ),
    "warmup": RunRecords(history(lr=1e-8), config(models__actor__optimizer__schedule__warmup=10_000)),
    "learning-rate-ends": RunRecords(
        [record | ({"lr": 1e-9} if record["step"] > 5 else {}) for record in history()], CONFIG
    ),
    "learning-rate-low": RunRecords(history(lr=1e-9), config(models__actor__optimizer__lr=1e-9)),
    "learning-rate-high": RunRecords(
        [record | ({"entropy": 5.0} if record["step"] > 2 else {}) for record in history(0.2, 0.0)], CONFIG
    ),
    "critic": RunRecords(history(**{"critic/explained_variance": -4.0}), CONFIG),
    "wrong-answers": RunRecords(history(0.02, 0.02, (0.5, 0.5, 0.4, 0.4, 0.3)), CONFIG),
    "one-answer": RunRecords(history(), CONFIG, samples("always", "always", reward=[0.0, 0.0])),
    "frozen-weights": RunRecords(
        history(advantage_max=1.0, **QUIET | {"zero_std_fraction": 0.1}), CONFIG, samples("a", "b", reward=[0.0, 1.0])
    ),
    "no-gradient": RunRecords(history(**QUIET), CONFIG),
}


@pytest.mark.parametrize("name", [name for name in words_of_causes() if name != "seeds"])
def test_each_cause_is_named_first_in_records_that_show_it(name, tmp_path):
    run = CASES[name]
    if name == "template-missing":
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
        run.config["models"]["actor"]["path"] = str(tmp_path)
    named = {cause.name: cause.sure for cause in diagnose(run).causes}
    assert next(iter(named), None) == name or (name in named and named[name] == max(named.values())), named


def test_a_run_that_learns_is_accused_of_nothing():
    told = samples("one", "two", reward=[0.0, 1.0], answer="two")
    learned = diagnose(RunRecords(history(0.2, 0.9, (0.2, 0.5, 0.7, 0.8, 0.9)), CONFIG, told))
    assert learned.causes == ()
    assert "eval/reward 0.2 to 0.9 in 20 steps" in learned.sentence
    without_evaluation = diagnose(RunRecords(history(0.2, 0.9), CONFIG, told))
    assert without_evaluation.causes == ()
    shorter = history(0.2, 0.9, response_tokens=(33.0, 15.0))  # without held-out data, no loophole
    assert diagnose(RunRecords(shorter, CONFIG, told)).causes == ()
    negative = {"rewards/right/mean": (0.2, 0.9), "advantage_min": -1.0, "advantage_max": 1.0}
    assert diagnose(RunRecords(history(0.2, 0.9, **negative), CONFIG, told)).causes == ()
    idle_at_the_end = [r | (QUIET if r["step"] > 12 else {}) for r in history(0.2, 1.0, (0.2, 0.5, 0.9, 1.0, 1.0))]
    assert diagnose(RunRecords(idle_at_the_end, CONFIG, told)).causes == ()


def test_a_reward_that_falls_with_the_policy_does_not_break_and_rows_that_fail_by_chance_are_not_apart():
    broken = [
        r | ({"reward": 0.03 + r["step"] / 999} if r["step"] > 9 else {})
        for r in history(response_tokens=5.0, held_out=(0.2,) * 5)
    ]
    assert diagnose(RunRecords(broken, CONFIG)).causes[0].name == "reward-breaks"
    shorter = [r | ({"response_tokens": 1.0} if r["step"] > 9 else {}) for r in broken]
    fallen = [r | ({"eval/reward": 0.0} if r["step"] == 15 else {}) for r in broken]
    for records, config in ((shorter, CONFIG), (fallen, CONFIG), (broken, CONFIG | {"curriculum": {"prefer": "new"}})):
        assert "reward-breaks" not in [cause.name for cause in diagnose(RunRecords(records, config)).causes]
    chance = samples("a", "b", reward=[0.0, 0.0], prompt="Say {}!")[:6] + samples("a", "b", reward=[0.0, 1.0])[6:]
    assert diagnose(RunRecords(history(0.2, 0.9), CONFIG, chance)).causes == ()


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_penalty_is_compared_with_the_rewards_whatever_their_scale(scale):
    rated = samples("a", "b", reward=[0.0, scale])
    for coef, accused in ((0.1, False), (20.0, True)):
        settings = config(interfaces__actor__kl__coef=coef * scale, interfaces__actor__kl__place="reward")
        causes = [
            cause.name for cause in diagnose(RunRecords(history(0.2 * scale, 0.2 * scale), settings, rated)).causes
        ]
        assert ("kl-too-strong" in causes) is accused


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_an_entropy_bonus_is_compared_with_the_advantages_whatever_their_scale(scale):
    for coef, accused in ((0.01, False), (2.0, True), (-2.0, False)):
        records = history(entropy=(1.0, 3.0), advantage_max=scale)
        causes = diagnose(RunRecords(records, config(interfaces__actor__entropy__coef=coef * scale))).causes
        assert ("entropy-bonus" in [cause.name for cause in causes]) is accused


def test_weight_decay_is_judged_by_what_it_did_to_the_weights():
    settings = config(models__actor__optimizer__weight_decay=30.0)
    for rate, accused in ((1e-6, False), (1e-3, True)):
        causes = [cause.name for cause in diagnose(RunRecords(history(lr=rate), settings)).causes]
        assert ("weight-decay" in causes) is accused


def test_preferences_that_a_reference_changes_before_the_first_update_come_from_another_model():
    """Rewards are beta times a log-ratio, and without a reference beta times a log-prob."""
    for first, free, accused in ((0.0, False, False), (0.9, False, True), (-0.9, False, True), (-0.9, True, False)):
        settings = {"interfaces": {"actor": {"beta": 0.1, "reference_free": free}}}
        records = history(**{"rewards/accuracy": (0.5, 0.9), "rewards/chosen": (first, 2.0)})
        causes = [cause.name for cause in diagnose(RunRecords(records, settings)).causes]
        assert causes == ["reference"] * accused


def offline(loss, held_out=None, passes=1, data="rows.jsonl", evaluated="rows.jsonl"):
    """Return the records of SFT whose loss ends at `loss`."""
    records = [r | {"loss": 1.0 if r["step"] < 5 else loss} for r in history()]
    for place, value in zip((0, 5, 10, 15, 20), held_out or (), strict=False):
        records[place]["eval/loss"] = value
    settings = {"interfaces": {"actor": {"_target_": "sft"}}}
    settings |= {"data": {"path": data}, "evaluation": {"data": {"path": evaluated}}}
    return RunRecords(records, settings, tokens=[{"step": i, "id": f"7@{i}"} for i in range(passes)])


def test_rows_that_are_learned_by_heart_are_told_from_rows_that_teach():
    fell = (2.0, 1.0, 0.5, 0.4, 0.4)
    for run, expected in (
        (offline(0.001, fell, passes=20), ["by-heart"]),  # the evaluation is of the same rows
        (offline(0.001, fell, passes=20, evaluated="others.jsonl"), ["by-heart"]),  # 400 times as badly
        (offline(0.001, (2.0, 1.0, 0.1, 0.01, 0.005), passes=20, evaluated="others.jsonl"), []),
        (offline(0.001, fell, passes=3), []),
        (offline(0.5, fell, passes=20), []),
        (offline(0.001, (2.0, 1.0, 1.2, 1.4, 1.5), evaluated="others.jsonl"), ["overfitting"]),
    ):
        assert [cause.name for cause in diagnose(run).causes] == expected


def test_a_template_in_the_data_is_removed_by_settings_that_fit_the_rows(tmp_path):
    text = "<|user|> Why? <|assistant|>"
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    plain, column = "data.template=plain", "data.prompt_column=prompt.-1.content"
    for template, prompt, actor, expected in (
        ("chat", text, {"generation": {}}, (plain,)),
        ("auto", said, {"generation": {}}, (plain, column)),
        ("chat", said, {"generation": {}}, (plain, column)),
        ("chat", said, {}, ()),  # rows with an answer are no longer those of a conversation
        ("auto", None, {"generation": {}}, ()),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "7"}) + "\n")
        settings = {"interfaces": {"actor": actor}, "data": {"template": template, "path": f"{tmp_path}/rows.jsonl"}}
        doubled = [{"text": ["<|user|>", "<|user|>", "Why?"], "given": [1, 1, 1]}]
        (cause,) = diagnose(RunRecords(history(0.2, 0.9), settings, tokens=doubled)).causes
        assert (cause.name, cause.settings) == ("template-twice", expected)


def test_seeds_disagree_if_only_some_learn():
    good, bad = (RunRecords(history(0.2, 0.2, held), CONFIG) for held in ((0.2, 0.4, 0.6, 0.8, 0.9), FLAT))
    cause = seeds_disagree({"1": good, "2": bad})
    assert cause is not None
    assert cause.sentence == "Seeds disagree: 1 of 2 runs learn, and eval/reward ends between 0.2 and 0.9."
    assert cause.evidence == ("1: learns, 0.9", "2: does not learn, 0.2")
    assert seeds_disagree({"1": good, "3": good}) is None


def test_rows_of_offline_training_say_nothing_about_the_policy():
    told = samples("one", "one", reward=[0.0, 1.0], prompt="the same")
    offline = {"interfaces": {"actor": {"_target_": "ilql"}}}
    records = history(0.2, 0.9, (0.5, 0.4, 0.3, 0.2, 0.1))
    assert {"duplicates", "reward-noise"} <= {
        cause.name for cause in diagnose(RunRecords(records, CONFIG, told)).causes
    }
    assert diagnose(RunRecords(records, offline, told)).causes == ()


def test_few_steps_and_no_steps_are_not_judged():
    assert diagnose(RunRecords([{"step": 0}])).sentence == "The run has no complete step."
    assert "too few to judge" in diagnose(RunRecords(history()[:4], CONFIG)).sentence
    rising = [{"step": step, "reward": 0.3 + 0.1 * step, "eval/reward": 0.375 - 0.03 * (step > 2)} for step in range(4)]
    assert "too few to judge" in diagnose(RunRecords(rising, CONFIG)).sentence


def test_without_a_rate_in_the_config_advice_starts_from_the_recorded_one():
    open_rate = config(models__actor__optimizer__lr=None)
    (cause,) = diagnose(RunRecords(history(nonfinite_steps=1.0), open_rate)).causes
    assert cause.settings == ("models.actor.optimizer.lr=0.0001",)
    # 20 of 100 steps of the warm-up: the peak is five times the last rate
    warming = config(models__actor__optimizer__lr=None, models__actor__optimizer__schedule={"warmup": 99})
    (cause,) = diagnose(RunRecords(history(0.2, 0.2, FLAT, lr=(1e-5, 2e-4)), warming)).causes
    assert cause.name == "warmup"


def test_a_command_changes_what_the_run_has_also_where_its_evaluation_inherited_it():
    given = config(steps=STEPS, models__actor__optimizer__schedule={"total": STEPS, "unit": "optimizer_step"})
    (cause,) = diagnose(RunRecords(CASES["learning-rate-ends"].history, given)).causes
    assert cause.settings == ("models.actor.optimizer.schedule.unit=train_step",)
    run = CASES["stopped"]
    inherits = run.config | {"evaluation": {"generation": run.setting("interfaces.actor.generation")}}
    cause = diagnose(RunRecords(run.history, inherits, run.samples)).causes[0]
    names = ("interfaces.actor.generation", "evaluation.generation")
    assert cause.settings == tuple(f"{name}.stop_strings=[]" for name in names)


def test_a_few_right_answers_among_rewards_of_0_are_no_proof_of_a_wrong_form():
    few = [sample | {"answer": f"r{i}"} for i, sample in enumerate(samples(*"abcd"))]
    few[:3] = [sample | {"response": sample["answer"]} for sample in few[:3]]
    named = {cause.name: cause.sure for cause in diagnose(RunRecords(history(0.0, 0.0, **QUIET), CONFIG, few)).causes}
    assert named["not-parsed"] < 0.5


def test_held_out_pairs_below_chance_are_no_constant_evaluation():
    records = history(**{"rewards/accuracy": (0.5, 0.95), "eval/rewards/accuracy": (0.4, 0.1)})
    assert [cause.name for cause in diagnose(RunRecords(records, CONFIG)).causes] == ["swapped-pairs"]


def test_answers_that_are_wrong_at_first_are_no_constant_evaluation_of_a_loss_that_falls():
    offline = {"interfaces": {"actor": {"_target_": "sft"}}, "evaluation": {"role": "actor"}}
    records = [record | {"nll": 2 - record["step"] / 20} for record in history(held_out=(0.0,) * 5)]
    assert diagnose(RunRecords(records, offline)).causes == ()
    records[18] |= {"eval/reward": 0.0}
    assert [cause.name for cause in diagnose(RunRecords(records, offline)).causes] == ["evaluation-differs"]


def test_an_evaluation_whose_answers_are_all_the_same_says_what_one_answer_earns():
    """The figures are those of a real run, in which all 48 answers were equal."""
    records = history()
    equal = {"distinct_fraction": 1 / 48, "most_common_fraction": 1.0, "reward": 0.6458, "constant_reward": 0.6458}
    records[-1] |= {f"eval/math/{name}": value for name, value in equal.items()}
    (fact,) = next(c for c in diagnose(RunRecords(records, CONFIG)).causes if c.name == "one-answer").evidence
    assert fact.startswith("100% of the held-out responses of math are the same one; it earns 0.6458 on every prompt")
    for change in ({"reward": 0.7}, {"most_common_fraction": 0.4}, {"distinct_fraction": 0.5}):
        records[-1] |= {f"eval/math/{name}": value for name, value in (equal | change).items()}
        assert "one-answer" not in [cause.name for cause in diagnose(RunRecords(records, CONFIG)).causes]


def test_steps_without_a_gradient_are_judged_by_role_and_by_whole_steps():
    records = history()
    for record in records[1:]:
        record |= {"critic/optimizer_steps": 0.0, "critic/zero_gradient_steps": 2.0}
    (cause,) = (c for c in diagnose(RunRecords(records, CONFIG)).causes if c.name == "no-gradient")
    assert cause.sentence.startswith("10 of the last 10 steps had no gradient (critic)")
    several = history(optimizer_steps=1.0, zero_gradient_steps=3.0)
    assert "no-gradient" not in [cause.name for cause in diagnose(RunRecords(several, CONFIG)).causes]


def test_a_symptom_that_fails_is_named_and_hides_no_other(tmp_path):
    def broken(run):
        raise KeyError("lenght")

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history(nonfinite_steps=1.0)))
    diagnosis = diagnosis_of(tmp_path, [broken])
    assert diagnosis.causes[0].name == "not-finite"
    assert diagnosis_lines(tmp_path, diagnosis)[-1] == "broken was skipped: KeyError: 'lenght'"


def test_a_symptom_of_the_user_is_shown_with_the_others(tmp_path):
    def too_short(run):
        short = run.recent("response_tokens", 99.0) < 3
        return Cause("short", "Responses are too short.", (), "Ask for more.", 0.99, ("seed=1",)) if short else None

    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in history(response_tokens=1.0)))
    diagnosis = diagnosis_of(tmp_path, [too_short])
    assert diagnosis.sentence == "Responses are too short."
    lines = diagnosis_lines(tmp_path, diagnosis)
    assert lines[0] == "Responses are too short."
    assert f"   realign {tmp_path}/config.yaml seed=1 output_dir={tmp_path}-again" in lines


def run_folder(folder, records, settings, command=(), **end):
    """Write the files of a run that ended."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "config.yaml").write_text(json.dumps(settings))
    attempt = {"command": ["realign", *command], "ended": "2026-01-01", "host": "", **end}
    (folder / "run.json").write_text(json.dumps({"steps": STEPS, "attempts": [attempt]}))
    return folder


def test_a_run_that_ended_early_says_why_after_a_finding_and_how_to_go_on(tmp_path):
    config_file = f"   realign {tmp_path}/config.yaml"
    run_folder(tmp_path, [{"step": 0}], CONFIG, status="failed", reason="dynamic_sampling: none passed.")
    assert why_lines(tmp_path)[:5] == [
        "The run failed after 0 of 20 steps: dynamic_sampling: none passed.",
        "To go on:",
        f"{config_file} output_dir={tmp_path}-again",
        "",
        "The run has no complete step.",
    ]
    run_folder(tmp_path, history(0.2, 0.9)[:6], CONFIG, status="stopped", reason="callbacks.stop: no better 'loss'")
    (tmp_path / "checkpoints/step_000005").mkdir(parents=True)
    ended, _, command, *_ = why_lines(tmp_path)
    assert ended == "The run was stopped after 5 of 20 steps: callbacks.stop: no better 'loss'."
    assert command == f"{config_file} callbacks.stop=null overwrite=false resume=auto output_dir={tmp_path}"
    run_folder(tmp_path, history(nonfinite_steps=1.0)[:6], CONFIG, status="interrupted", reason="")
    lines = why_lines(tmp_path)
    assert lines[0].startswith("The loss or the gradient is not finite")
    after = lines[lines.index("The run was interrupted after 5 of 20 steps.") :]
    assert after[1] == "To go on:"
    assert "resume=auto" in after[2]
    run_folder(tmp_path, history(0.2, 0.9), CONFIG, status="completed", reason="")
    assert why_lines(tmp_path) == ["Nothing looks wrong: reward 0.2 to 0.9 in 20 steps."]
    (tmp_path / "run.json").unlink()
    (tmp_path / "summary.json").write_text('{"status": "stopped", "reason": "by hand; id", "steps": 30}')
    assert why_lines(tmp_path)[0] == "The run was stopped after 20 of 30 steps: by hand; id."
    assert "null" not in why_lines(tmp_path)[2]


def test_settings_that_differ_from_the_defaults_follow_unless_the_run_is_healthy(tmp_path):
    grpo = {"_target_": "realign.interfaces.grpo.GRPOActorInterface", "generation": {"n": 8, "max_new_tokens": 256}}
    clip = {"_target_": "realign.interfaces.components.objectives.Clip", "low": 0.2, "high": 0.2}
    rule = {"_target_": "realign.interfaces.rule_reward.RuleRewardInterface", "function": "mine.py:right"}
    settings = {
        "seed": 3,
        "output_dir": "runs/x",
        "batch_prompts": 16,
        "models": {"actor": {"path": "model", "optimizer": {"lr": 1e-3, "eps": 1.0, "schedule": {"warmup": 10}}}},
        "interfaces": {"actor": {**grpo, "objective": clip, "entropy": {"coef": 0.01}}, "reward": rule},
        "data": {"_target_": "sys.exit", "column": "x"},
        "evaluation": {"every_steps": 3},
    }
    changed = [
        "interfaces.actor.entropy.coef=0.01 (default 0)",
        "models.actor.optimizer.eps=1 (default 1e-08)",
        "interfaces.actor.generation.max_new_tokens=256 (default 512)",
        "batch_prompts=16 (default 32)",
        "models.actor.optimizer.lr=0.001 (default null)",
    ]
    run_folder(tmp_path, history(held_out=FLAT), settings, ["experiment=grpo", "batch_prompts=16"], status="completed")
    lines = why_lines(tmp_path)
    assert lines[0].startswith("No progress beyond noise, and no known cause")
    assert lines[1:] == ["", "Settings that differ from the defaults:", *(f"   {text}" for text in changed)]
    run_folder(tmp_path, history(nonfinite_steps=1.0), settings, ["experiment=grpo"], status="completed")
    assert why_lines(tmp_path)[-6:] == lines[2:]
    run_folder(tmp_path, history(0.2, 0.9, (0.2, 0.4, 0.6, 0.8, 0.9)), settings, status="completed")
    assert len(why_lines(tmp_path)) == 1


def test_the_page_has_a_heading_for_each_cause():
    headings = re.findall(r"^### (\S+)$", (ROOT / PAGE).read_text(), re.M)
    assert headings == list(words_of_causes())


def test_damaged_records_and_settings_do_not_stop_it(tmp_path):
    values = [None, "x", [], {}, -1, 1e308, True]
    for name in ("metrics", "samples", "eval_samples", "tokens"):
        keys = ["step", "reward", "id", "prompt", "response", "text", "given", "entropy", "lr", "eval/reward", "answer"]
        lines = [{key: values[(i + j) % len(values)] for j, key in enumerate(keys)} for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text("models: {actor: {optimizer: {lr: [1]}}}\ninterfaces: {actor: {kl: x}}\n")
    assert diagnosis_of(tmp_path).sentence
    run_folder(tmp_path, [{"step": "x"}], {"models": 3, "data": [1]}, [None, 1], status={}, reason=7)
    assert why_lines(tmp_path) == ["The run has no complete step."]
