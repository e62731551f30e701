"""Test the simulator: schedules small enough to verify by hand, and properties of all schedules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign_planner.simulator import Costs, RuntimeSchedule, Tail, Work, simulate

COSTS = Costs(decode_step_s=1.0, train_step_s=4.0, sync_s=1.0)
ONE = Work(batch_prompts=1, group=1, steps=4, prompt_tokens=0, lengths=Tail(3), reward_s=Tail(2.0))


@pytest.mark.parametrize(
    ("plan", "ends"),
    [
        # In sequence: 3 s of decoding, 2 s of scoring, 4 s of training and 1 s of weight sync.
        (RuntimeSchedule(), [10.0, 20.0, 30.0, 40.0]),
        # As above, but the weight sync precedes the next prompt.
        (RuntimeSchedule(max_staleness=0), [9.0, 19.0, 29.0, 39.0]),
        # Prompts 0 and 1 are sampled together until 3 and scored until 5. Prompt 0 trains until 9, prompt 1 until 13.
        # Prompt 2 is sampled from 10 to 13 under version 1, scored until 15 and trained until 19.
        # Prompt 3 is sampled from 14 to 17 and scored until 19.
        (RuntimeSchedule(max_staleness=1), [9.0, 13.0, 19.0, 23.0]),
        # Prompts 0, 1 and 2 are ready at 5. Prompt 3 is sampled from 10 to 13 and ready at 15: then training never
        # waits again.
        (RuntimeSchedule(max_staleness=2), [9.0, 13.0, 17.0, 21.0]),
        (RuntimeSchedule(max_staleness=1, switch_s=0.5), [10.0, 15.0, 21.0, 26.0]),
    ],
)
def test_one_prompt_and_two_workers_by_hand(plan, ends):
    assert simulate(COSTS, ONE, plan).ends == pytest.approx(ends)


def test_versions_at_the_head_and_at_the_tail_by_hand():
    """Sampling takes 6 s and training 4 s. The weights change while prompt 2 is sampled, so its KV cache is
    recomputed."""
    costs = replace(COSTS, prefill_token_s=0.5)
    work = replace(ONE, lengths=Tail(6), reward_s=Tail(0.0), steps=3, prompt_tokens=2)
    report = simulate(costs, work, RuntimeSchedule(max_staleness=1))
    # Prompts 0 and 1: 2 s of prefill for both, then 6 s of decoding. Prompt 0 trains from 8 to 12, prompt 1 until 16.
    # Prompt 2: prefill from 13 to 14; at 16 it has 2 tokens. Weight sync takes 1 s, and recomputing the KV cache of
    # 4 tokens takes 2 s. Decoding continues at 19 and ends at 23.
    assert report.ends == pytest.approx([12.0, 16.0, 27.0])
    assert [(t.prompt, t.step, t.head, t.tail) for t in report.trained] == [(0, 1, 0, 0), (1, 2, 0, 0), (2, 3, 1, 2)]
    assert report.full == slice(2, 3)
    assert report.staleness() == {"head": 1.0, "tail": 0.0, "max": 1.0}
    assert report.step_s == pytest.approx(11.0)
    assert report.tokens_per_s == pytest.approx(6 / 11)
    kept = simulate(costs, work, RuntimeSchedule(max_staleness=1, recompute=False))
    assert kept.ends == pytest.approx([12.0, 16.0, 25.0])


def test_rows_and_context_make_a_step_longer_by_hand():
    costs = Costs(decode_step_s=1.0, decode_row_s=0.25, decode_context_s=0.125, train_step_s=1.0, train_token_s=0.5)
    work = Work(batch_prompts=1, group=2, steps=1, prompt_tokens=2, lengths=Tail(2))
    report = simulate(costs, work, RuntimeSchedule())
    # Two rows take 1.5 s per step, plus 0.125 s for each of 4 context tokens (then 6): 2 s and 2.25 s. The two tokens
    # that a step adds count half in that step. For infinitely small steps, (4 + 6) / 2 and (6 + 8) / 2 would be
    # exact.
    sampling = 2 * 1.5 + 0.125 * (4 * 2 + 2 * 2 * 2 / 2)
    assert report.ends == pytest.approx([sampling + 1 + 0.5 * 8])


def test_a_slot_is_waited_for_by_hand():
    work = Work(batch_prompts=2, group=2, steps=1, prompt_tokens=0, lengths=Tail(3))
    assert simulate(COSTS, work, RuntimeSchedule(slots=2)).ends == pytest.approx([3 + 3 + 4 + 1])
    assert simulate(COSTS, work, RuntimeSchedule(slots=2, engines=2)).ends == pytest.approx([3 + 4 + 1])


def test_reward_workers_are_waited_for_by_hand():
    work = Work(
        batch_prompts=2, group=1, steps=1, prompt_tokens=0, lengths=Tail(3), reward_s=(2.0, 5.0), reward_workers=1
    )
    assert simulate(COSTS, work, RuntimeSchedule()).ends == pytest.approx([3 + 7 + 4 + 1])
    assert simulate(COSTS, replace(work, reward_workers=2), RuntimeSchedule()).ends == pytest.approx([3 + 5 + 4 + 1])


@st.composite
def runs(draw: st.DrawFn) -> tuple[Costs, Work, RuntimeSchedule]:
    work = Work(
        batch_prompts=draw(st.integers(1, 5)),
        group=draw(st.integers(1, 3)),
        steps=draw(st.integers(1, 5)),
        prompt_tokens=draw(st.integers(0, 9)),
        lengths=Tail(draw(st.floats(1, 50)), draw(st.floats(0, 1.5)), 100),
        reward_s=Tail(draw(st.floats(0, 20)), draw(st.floats(0, 1.5))),
        reward_workers=draw(st.none() | st.integers(1, 4)),
        seed=draw(st.integers(0, 9)),
    )
    cost = st.floats(0, 2)
    costs = Costs(draw(st.floats(0.01, 1)), draw(cost), draw(cost), draw(cost), draw(cost), draw(cost), draw(cost))
    plan = RuntimeSchedule(
        draw(st.none() | st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.booleans())
    )
    return costs, work, plan


@settings(max_examples=150, deadline=None)
@given(runs())
def test_every_prompt_is_trained_once_and_none_is_older_than_the_bound(run):
    costs, work, plan = run
    report = simulate(costs, work, plan)
    assert sorted(t.prompt for t in report.trained) == list(range(work.batch_prompts * work.steps))
    assert report.ends == sorted(report.ends)
    bound = plan.max_staleness or 0
    for t in report.trained:
        assert 0 <= t.head <= t.tail <= t.step - 1 <= t.head + bound
    assert sum(report.response_tokens) == sum(sum(work.tokens_of(t.prompt)) for t in report.trained)
    assert simulate(costs, work, plan).ends == report.ends


@pytest.mark.parametrize("seed", range(3))
def test_more_of_what_helps_makes_no_run_longer(seed):
    work = Work(16, 4, 8, 100, Tail(400, 0.8, 2000), Tail(5.0, 1.0), seed=seed)
    costs = Costs(0.02, 1e-4, 1e-8, 1e-5, 1.0, 1e-4, 0.5)

    def seconds(plan: RuntimeSchedule, **faster: float) -> float:
        return simulate(replace(costs, **faster), work, plan).ends[-1]

    by_staleness = [seconds(RuntimeSchedule(max_staleness=k, engines=2)) for k in (0, 1, 2, 4, 8)]
    assert by_staleness == sorted(by_staleness, reverse=True)
    by_engines = [seconds(RuntimeSchedule(max_staleness=1, engines=n)) for n in (1, 2, 4, 8)]
    assert by_engines == sorted(by_engines, reverse=True)
    plan = RuntimeSchedule(max_staleness=2, engines=2)
    assert seconds(plan, train_token_s=5e-5) <= seconds(plan)
    assert seconds(plan, sync_s=0.0) <= seconds(plan)
    assert seconds(RuntimeSchedule(max_staleness=2, engines=2, recompute=False)) <= seconds(plan)
    # No schedule is faster than its training, and none is slower than the synchronous schedule.
    report = simulate(costs, work, plan)
    assert report.training_s <= report.ends[-1] <= seconds(RuntimeSchedule(engines=2))


def test_a_tail_has_its_mean_and_is_a_function_of_its_names():
    values = Tail(2.0, 1.0).draw(20000, "x")
    assert values[:5] == Tail(2.0, 1.0).draw(5, "x") != Tail(2.0, 1.0).draw(5, "y")
    assert sum(values) / len(values) == pytest.approx(2.0, rel=0.05)
    assert max(Tail(2.0, 1.0, most=3.0).draw(1000, "x")) == 3.0
