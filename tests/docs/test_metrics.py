"""Test that docs/metrics.md contains exactly the metrics that the code reports."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample, stat_values
from realign.data import PassRate, PromptData, RowSource
from realign.engines.training.load_balancing import LoadBalancing
from realign.engines.training.optimizer import OptimizerSpec
from realign.engines.training.stepper import REASONS
from realign.interfaces import grpo, reward_model, sft
from realign.interfaces.components import KLPenalty, KLPlace
from realign.interfaces.reference import ReferenceInterface
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.runtime import DynamicSampling, Evaluation, Experiment, LossEvaluation, RewardCalibration, run
from realign.testing import random_batch, random_preferences, train_once
from tests.config_parts import Bigram, CountThrees, Prompts
from tests.data.text_tokenizer import make_tokenizer
from tests.interfaces import declared
from tests.tiny import random_sample, tiny_engine
from tests.toys import Judged

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
ROW = re.compile(r"^\| (`[^`|]+`(?:, `[^`|]+`)*) \|", re.MULTILINE)
"""A row, with the metrics that it defines."""


SAME_METRICS = {"adv_norm", "aggregation"}
"""Settings with many values that do not add metrics."""
GENERATION = GenerationConfig(n=4, max_new_tokens=4, fixed_length=True)


@cache
def documented() -> tuple[str, ...]:
    """Return the metrics in the first column of the page's tables. `<...>` matches any name."""
    return tuple(name for row in ROW.findall(PAGE.read_text(encoding="utf-8")) for name in re.findall("`(.+?)`", row))


def unknown(names, roles: tuple[str, ...] = ()) -> list[str]:
    """Return the `names` that the page lacks, ignoring the prefixes and suffixes that it explains."""
    known = "|".join(re.sub("<[^>]*>", "[^/]+", re.escape(name)) for name in documented())
    prefix = "|".join(map(re.escape, ("eval", *roles)))
    return [name for name in names if not re.fullmatch(rf"(({prefix})/)?({known})(@\w+=.*)?", name)]


def refuse(names: list[str], whose: str) -> None:
    assert not names, (
        f"{whose} gives the metric {names[0]!r}, which docs/metrics.md does not have: add a row with its definition, "
        f"unit and what a bad value looks like (all that are missing: {', '.join(names)})"
    )


@pytest.mark.parametrize("cls", declared.trainers(), ids=lambda cls: cls.__name__)
def test_every_metric_of_an_algorithm_under_any_setting_is_on_the_page(cls):
    """Use the settings of the invariance tests of the algorithm."""
    names: dict[str, None] = {}
    for case_of, kwargs, inputs in declared.cases():
        if case_of is not cls or (kwargs and kwargs.keys() <= SAME_METRICS):
            continue
        data = random_preferences() if "labels" in inputs else random_batch()
        metrics = train_once(cls(**kwargs), data.select(inputs), MicroBatchSpec()).metrics
        names |= dict.fromkeys(metrics)
    refuse(unknown(names), cls.__name__)


def experiment(tmp_path: Path, **changes) -> Experiment:
    actor = grpo.GRPOActorInterface(generation=GENERATION, kl=KLPenalty(KLPlace.reward, 0.1))
    interfaces = {"actor": actor, "ref": ReferenceInterface(), "reward": CountThrees()}
    settings = {
        "name": "metrics",
        "steps": 1,
        "batch_prompts": 4,
        "graph": grpo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {"actor": Bigram(), "ref": Bigram()},
        "data": Prompts(8),
        "output_dir": tmp_path / "run",
    }
    return Experiment(**(settings | changes))


def test_every_metric_of_a_run_is_on_the_page(tmp_path):
    sampled = run(
        experiment(
            tmp_path,
            dynamic_sampling=DynamicSampling(),
            evaluation=Evaluation(Prompts(4), CountThrees(), sweep={"max_new_tokens": [3]}),
        )
    )
    judged = run(
        experiment(
            tmp_path,
            overwrite=True,
            graph=reward_model.dataflow(),
            interfaces={"reward": reward_model.RewardModelInterface()},
            models={"reward": Bigram(), "policy": Bigram()},
            data=Judged(8),
            evaluation=LossEvaluation(Judged(4), role="reward"),
            calibration=RewardCalibration(Prompts(8), before=True, samples=16, generation=GENERATION, verify=True),
        )
    )
    chosen = run(experiment(tmp_path, output_dir=tmp_path / "chosen", curriculum=PassRate(min_weight=1), steps=4))
    assert any("curriculum/pass_rate" in record for record in chosen.history)
    for result in (sampled, judged, chosen):
        names = dict.fromkeys(name for record in result.history for name in record if name != "step")
        assert "step_s" in names
        refuse(unknown(names, ("reward", "ref", "policy")), "a run")
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 1


def test_every_metric_of_named_rewards_and_evaluation_sets_is_on_the_page(tmp_path):
    form = "realign.rewards.tags:well_formed"
    judge = RuleRewardInterface(functions={"form": form, "length": f"{__file__}:length"}, workers=0)
    interfaces = {"actor": grpo.GRPOActorInterface(generation=GENERATION), "reward": judge}
    result = run(
        experiment(
            tmp_path,
            graph=grpo.dataflow(interfaces),
            interfaces=interfaces,
            models={"actor": Bigram()},
            evaluations={"easy": Evaluation(Prompts(4), None, GENERATION, pass_at=[1, 4])},
        )
    )
    names = dict.fromkeys(name for record in result.history for name in record if name != "step")
    assert {"rewards/form/mean", "eval/easy/rewards/length/std", "eval/easy/pass@4", "eval/easy/mean@4"} <= names.keys()
    refuse(unknown([name.replace("eval/easy/", "eval/") for name in names]), "a run")


def test_every_metric_of_streamed_mixtures_is_on_the_page(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    source = RowSource(f"{tmp_path}/a.jsonl", weight=1)
    data = PromptData([source, source], streaming=True, max_prompt_tokens=9)
    order = data.load(make_tokenizer()).order(0, shuffle=True)
    order.rows(range(3))
    assert {"data/a.jsonl/fraction", "data/a.jsonl_2/fraction", "data/rows_dropped"} <= order.metrics().keys()
    refuse(unknown(order.metrics()), "a stream")


def length(prompt, response, row):
    return len(response)


def test_every_metric_of_the_engine_is_on_the_page():
    engine = tiny_engine(optimizer=OptimizerSpec(lr=1e-3))
    interface = sft.SFTInterface()
    sample = random_sample([[4, 5]])
    stats = engine.train_batch(sample, MicroBatchSpec(), interface.loss, interface.loss_weight)
    assert {"grad_norm", "tokens", *REASONS} <= stats.keys()
    refuse(unknown(stat_values(stats)), "the engine")
    engine = tiny_engine("qwen3_moe", optimizer=OptimizerSpec(lr=1e-3), load_balancing=LoadBalancing())
    stats = engine.train_batch(sample, MicroBatchSpec(), interface.loss, interface.loss_weight)
    assert "expert_load_max" in stats
    refuse(unknown(stat_values(stats)), "an engine with experts")
    prompts = SequenceSample.from_sequences(["a"], {"prompt_ids": [[[3, 4]]]})
    rollout = engine.generate(prompts, GenerationConfig(max_new_tokens=3, router_replay=True), seed=0)
    stats = engine.train_batch(rollout, MicroBatchSpec(), interface.loss, interface.loss_weight)
    assert "router_changes" in stats
    refuse(unknown(stat_values(stats)), "an engine that replays choices of experts")


def test_no_metric_of_the_page_is_out_of_date():
    """The code contains each metric as text, either in full or without its prefix."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "realign").rglob("*.py")))
    names = [name for name in documented() if "<" not in name]
    gone = [name for name in names if not re.search(rf"[\"'/}}]({name}|{name.rpartition('/')[2]})[\"']", code)]
    assert gone == []
    assert len(names) == len(set(names))


def test_every_row_has_a_definition_and_a_unit():
    for row in (line for line in PAGE.read_text(encoding="utf-8").splitlines() if ROW.match(line)):
        cells = [cell.strip() for cell in row.split("|")]
        assert len(cells) == 6, row
        assert all(cells[1:4]), row
