from __future__ import annotations

import math

import pytest

from realign.api import EvaluationEvent, StepEvent
from realign.errors import ConfigError
from realign.interfaces.components import KLPenalty, KLPlace
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.runtime import Evaluation, run
from realign.runtime.callbacks import EarlyStopping, Goal
from tests.toys import GENERATION, BigramModel, CountToken, Prompts, experiment


def fed(callback: EarlyStopping, *values: float) -> list[str | None]:
    """Return the reason to stop after each evaluation."""
    events = (EvaluationEvent(step, 9, {"eval/reward": value}, ()) for step, value in enumerate(values))
    return [None if (result := callback.on_evaluation(event)) is None else result.stop for event in events]


def test_it_stops_after_patience_evaluations_without_an_improvement_and_names_the_best():
    reasons = fed(EarlyStopping(patience=2), 0.1, 0.4, 0.4, 0.5, 0.5, 0.2)
    assert reasons[:-1] == [None] * 5
    assert reasons[-1] == "eval/reward did not improve in 2 measurements (best 0.5 at step 3)"


def test_min_delta_is_the_smallest_change_that_counts():
    assert fed(EarlyStopping(patience=1, min_delta=0.1), 0.1, 0.25, 0.3)[-1] is not None
    assert fed(EarlyStopping(patience=1, min_delta=0.04), 0.1, 0.25, 0.3) == [None] * 3


def test_with_mode_min_smaller_values_are_better():
    assert fed(EarlyStopping(patience=1, mode="min"), 3.0, 2.0, 1.0, 1.5)[-1] is not None  # type: ignore[arg-type]


def test_a_value_that_is_not_a_number_is_no_improvement():
    assert fed(EarlyStopping(patience=2), math.nan, math.nan)[-1].endswith("(best never a number)") is False
    assert "never a number" in fed(EarlyStopping(patience=2), math.nan, math.nan)[-1]


def test_a_training_metric_is_compared_at_every_step_and_steps_without_it_are_skipped():
    callback = EarlyStopping(metric="loss", mode="min", patience=1)  # type: ignore[arg-type]
    assert fed(callback, 0.1, 0.1, 0.1) == [None] * 3
    assert callback.on_step(StepEvent(1, 9, {"loss": 1.0})) is None
    assert callback.on_step(StepEvent(2, 9, {"other": 1.0})) is None
    assert callback.on_step(StepEvent(3, 9, {"loss": 1.0})).stop


def test_its_state_continues_the_count():
    first = EarlyStopping(patience=3)
    fed(first, 0.5, 0.1, 0.1)
    second = EarlyStopping(patience=3)
    second.load_state_dict(first.state_dict())
    assert fed(second, 0.1) == ["eval/reward did not improve in 3 measurements (best 0.5 at step 0)"]


def test_a_bound_stops_after_patience_values_beyond_it_in_a_row_whether_or_not_they_improve():
    far = {"mode": Goal.min, "bound": 10.0}
    reasons = fed(EarlyStopping(patience=2, **far), 1.0, 12.0, 9.0, 30.0, 20.0)
    assert reasons == [None] * 4 + ["eval/reward was above 10 2 times in a row (last 20)"]
    assert fed(EarlyStopping(patience=1, **far), 10.0, 10.5)[-1] == "eval/reward was above 10 once (last 10.5)"
    assert fed(EarlyStopping(patience=1, **far), math.nan) == ["eval/reward was above 10 once (last nan)"]
    assert fed(EarlyStopping(patience=1, bound=0.5), 0.5, 0.4)[-1] == "eval/reward was below 0.5 once (last 0.4)"
    assert fed(EarlyStopping(patience=1, **far), *[3.0] * 9) == [None] * 9


def test_seed_b15_c31_a_policy_that_is_too_far_from_the_reference_ends_the_run(tmp_path):
    """The KL divergence grows from 0, since the policy starts as the reference."""
    parts = {
        "actor": GRPOActorInterface(generation=GENERATION, kl=KLPenalty(KLPlace.loss, 1e-3)),
        "reward": CountToken(),
    }
    parts["ref"] = ReferenceInterface()
    settings = {"interfaces": parts, "models": {"actor": BigramModel(lr=8.0), "ref": BigramModel()}, "evaluation": None}

    def stopping(bound: float, **more):
        kl = EarlyStopping(metric="ref_kl", mode=Goal.min, bound=bound, patience=1)
        return run(experiment(tmp_path, steps=8, callbacks={"kl": kl}, **settings, **more))

    result = stopping(0.05)
    kls = result.series("ref_kl")
    assert result.stopped is not None
    assert result.stopped.startswith("callbacks.kl: ref_kl was above 0.05")
    assert max(kls[:-1]) <= 0.05 < kls[-1]
    assert len(kls) < 8
    assert (result.output_dir / "final" / "actor").is_dir()
    assert len(stopping(1e9, resume="auto").series("ref_kl")) == 8


@pytest.mark.parametrize(
    ("metric", "changes", "message"),
    [
        ("eval/reward", {"evaluation": None}, "callbacks.stop: the run has no evaluation that measures eval/reward"),
        ("eval/rewrd", {}, "callbacks.stop: the evaluation does not measure 'eval/rewrd'; did you mean 'eval/reward'"),
        ("lss", {}, "callbacks.stop: no metric 'lss' was measured in the first step. Did you mean 'loss'?"),
    ],
)
def test_a_metric_that_the_run_does_not_measure_is_an_error(tmp_path, metric, changes, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        run(experiment(tmp_path, **changes, callbacks={"stop": EarlyStopping(metric=metric)}))


def test_a_run_without_progress_ends_early(tmp_path):
    evaluation = Evaluation(Prompts(4), CountToken(), GENERATION, every_steps=1, batch_prompts=4)
    result = run(
        experiment(
            tmp_path, steps=9, evaluation=evaluation, callbacks={"stop": EarlyStopping(patience=2, min_delta=99.0)}
        )
    )
    assert result.series("step") == [0, 1, 2]
    assert result.stopped.startswith("callbacks.stop: eval/reward did not improve in 2 measurements")
