from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest

from extras.planner.tests.cluster import CLUSTER, LOAD
from realign.errors import ConfigError, DataError
from realign_planner.measured import MeasuredStep, calibrated, read_runs, with_measured_lengths
from realign_planner.options import PlanOptions
from realign_planner.placements import PlannedGroup, PlannedPlacement
from realign_planner.predict import Scale, costs_of
from realign_planner.simulator import Tail

FIXED = replace(LOAD, work=replace(LOAD.work, lengths=Tail(64.0, 0.0, 64.0)))
ONE = PlannedPlacement((PlannedGroup(("actor", "ref"), 1),))


def steps_of(scale, sizes, load=FIXED):
    """Return the steps that runs with these factors would have, for pairs of sequences and response tokens."""
    c = costs_of(ONE, load, replace(CLUSTER, scale=scale))
    steps = []
    for sequences, length in sizes:
        tokens, prompt = sequences * length, 10.0
        context = tokens * (prompt + length / 2)
        sampling = length * c.decode_step_s + tokens * c.decode_row_s + context * c.decode_context_s
        sampling += sequences / load.work.group * prompt * c.prefill_token_s
        training = c.train_step_s + sequences * (prompt + length) * c.train_token_s
        steps.append(MeasuredStep(sequences, length, prompt, sampling, 0.5, training))
    return steps


def test_steps_of_different_sizes_determine_all_costs():
    true = Scale(0.5, 3.0, 2.0, 4.0, 6.0, 0.25)
    sizes = [(8, 64), (2, 64), (8, 16), (4, 32), (2, 8), (32, 4)]
    scale = calibrated(CLUSTER, FIXED, steps_of(true, sizes)).scale
    assert astuple(scale) == pytest.approx(astuple(true), rel=0.1)


def test_steps_of_one_size_keep_the_ratio_of_the_analytic_costs():
    true = Scale(3.0, 3.0, 3.0, 3.0, 0.2, 0.2)
    scale = calibrated(CLUSTER, FIXED, steps_of(true, [(8, 64)] * 3)).scale
    assert astuple(scale) == pytest.approx(astuple(true), rel=1e-6)
    other = calibrated(CLUSTER, FIXED, steps_of(Scale(0.0, 5.0, 1.0, 1.0, 1.0, 2.0), [(8, 64)])).scale
    measured = steps_of(Scale(0.0, 5.0, 1.0, 1.0, 1.0, 2.0), [(8, 64)])[0]
    fitted = steps_of(other, [(8, 64)])[0]
    assert (fitted.generate_s, fitted.train_s) == pytest.approx((measured.generate_s, measured.train_s), rel=0.01)


def test_costs_are_never_negative():
    steps = [replace(one, generate_s=s) for one, s in zip(steps_of(Scale(), [(8, 64), (2, 64)]), (1, 9), strict=True)]
    assert min(astuple(calibrated(CLUSTER, FIXED, steps).scale)) >= 0


ROW = {
    "rollout_tokens": 64.0,
    "response_tokens": 8.0,
    "tokens": 144.0,
    "time/actor_gen_s": 2.0,
    "time/reward_inf_s": 1.0,
    "step_s": 7.0,
}
MEASURED = MeasuredStep(8.0, 8.0, 10.0, 2.0, 1.0, 4.0)
READ = replace(LOAD, reward_calls=("reward_inf",))


def run_folder(tmp_path, rows, config=None):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "cut')
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    return str(tmp_path)


def test_a_run_gives_its_steps_without_the_evaluation_and_the_warm_up(tmp_path):
    rows = [{"step": 0, "eval/reward": 1.0}, {"step": 1, **ROW, "step_s": 99.0}, {"step": 2, **ROW}]
    assert read_runs([run_folder(tmp_path, rows)], READ) == [MEASURED]
    assert read_runs([run_folder(tmp_path, rows[2:])], READ) == [MEASURED]
    assert (
        read_runs([run_folder(tmp_path, rows[2:])], replace(READ, calls=(replace(READ.calls[-1], epochs=2),)))[
            0
        ].prompt_tokens
        == 1.0
    )


def test_folders_that_measure_nothing_are_errors(tmp_path):
    with pytest.raises(ConfigError, match=r"plan.runs=.*contains no metrics.jsonl"):
        read_runs([str(tmp_path)], READ)
    with pytest.raises(DataError, match="contains no training step"):
        read_runs([run_folder(tmp_path, [{"step": 0}])], READ)
    with pytest.raises(DataError, match=r"step 1 of .* has no metric 'time/actor_gen_s'"):
        read_runs([run_folder(tmp_path, [{"step": 1, "rollout_tokens": 1.0, "response_tokens": 1.0}])], READ)
    for node in ("rollout: {_target_: realign.runtime.rollout.spec.Async}", "runtime: {_target_: a.b.Ray}"):
        name = node.partition(":")[0]
        with pytest.raises(ConfigError, match=rf"the run used {name}=\w+, so that its calls overlapped"):
            read_runs([run_folder(tmp_path, [{"step": 1, **ROW}], node)], READ)


def test_lengths_and_rewards_are_those_of_the_runs():
    lengths = with_measured_lengths(PlanOptions(), [MEASURED, replace(MEASURED, response_tokens=10.0)], READ)
    assert (lengths.prompt_tokens, lengths.response_tokens, lengths.reward_s) == (10.0, 9.0, 1.0)
    four = replace(READ, work=replace(READ.work, reward_workers=4))
    assert with_measured_lengths(PlanOptions(), [MEASURED], four).reward_s == pytest.approx(1.0 * 4 / 8)
