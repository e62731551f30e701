from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.config import build_experiment, compose
from realign.data import PassRate, PromptData, RowSource, batch_indices
from realign.errors import CheckpointError, ConfigError
from realign.interfaces import sft
from realign.runtime import run
from realign.runtime.checks.parts import check_parts
from realign.runtime.rollout.prompts import PromptStream
from tests import toys
from tests.data.text_tokenizer import make_tokenizer
from tests.tiny import save_tiny
from tests.torchrun_ranks import Ranks
from tests.toys import Rows


@dataclass
class Streamed(toys.Prompts):
    @property
    def streams(self) -> bool:
        return True


def test_batches_come_in_the_order_of_the_data_and_the_position_is_one_number():
    stream = PromptStream(Rows(5), 3, seed=1, shuffle=True)
    drawn = [stream.draw().ids for _ in range(4)]
    assert drawn == [tuple(batch_indices(5, 3, number, 1, True)) for number in range(4)]
    assert stream.drawn == 4
    resumed = PromptStream(Rows(5), 3, seed=1, shuffle=True, drawn=2)
    assert [resumed.draw().ids for _ in range(2)] == drawn[2:]


@pytest.mark.parametrize("shuffle", [True, False])
def test_places_of_the_stream_are_those_of_its_batches(shuffle):
    stream = PromptStream(Rows(5), 3, seed=1, shuffle=shuffle)
    batches = [row for number in range(6) for row in stream.rows(number)]
    assert stream.at(range(18)).ids == tuple(batches)
    assert stream.at([17, 2, 9]).ids == (batches[17], batches[2], batches[9])
    assert len(stream.order._orders) == 2


def test_rows_that_were_used_are_passed_over():
    """Draw rows 0 to 3 in file order, in batches of 3: 012 | 3 01 | 23 0 | ..."""
    stream = PromptStream(Rows(4), 3, seed=0, shuffle=False)
    used: set[int] = set()
    assert stream.draw_new(used).ids == ((0, 0), (0, 1), (0, 2))
    assert stream.draw_new(used).ids == ((0, 3),)
    assert stream.draw_new(used) is None
    assert stream.drawn == 2
    assert stream.draw_new(set()).ids == ((1, 2), (1, 3), (2, 0))


def test_batches_of_used_rows_only_are_passed_over():
    stream = PromptStream(Rows(3), 1, seed=0, shuffle=False, drawn=2)
    used: set[int] = set()
    assert [stream.draw_new(used).ids for _ in range(3)] == [((0, 2),), ((1, 0),), ((1, 1),)]
    assert stream.draw_new(used) is None


def test_a_row_that_stands_in_one_batch_twice_is_drawn_once():
    assert PromptStream(Rows(2), 3, seed=0, shuffle=False).draw_new(set()).ids == ((0, 0), (0, 1))


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.booleans())
def test_every_row_comes_once_before_there_are_none_left(n, batch, drawn, shuffle):
    stream = PromptStream(Rows(n), batch, seed=3, shuffle=shuffle, drawn=drawn)
    used: set[int] = set()
    rows = []
    while (sample := stream.draw_new(used)) is not None:
        rows += [row for _, row in sample.ids]
    assert sorted(rows) == list(range(n)) == sorted(used)


@pytest.mark.parametrize("shuffle", [False, True])
def test_without_repeats_new_rows_are_the_batch(shuffle):
    plain, new = (PromptStream(Rows(8), 3, seed=0, shuffle=shuffle) for _ in range(2))
    used: set[int] = set()
    assert [plain.draw().ids for _ in range(2)] == [new.draw_new(used).ids for _ in range(2)]


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_trap_g1_a_stream_goes_on_at_the_same_row_in_any_batch_size_that_begins_there(n, batch, drawn, other):
    first = PromptStream(Rows(n), batch, seed=3, shuffle=True, drawn=drawn)
    state = first.state_dict()
    assert (state["epoch"], state["index"]) == divmod(drawn * batch, n)
    second = PromptStream(Rows(n), other, seed=3, shuffle=True)
    if drawn * batch % other:
        with pytest.raises(CheckpointError, match="is not a multiple of it"):
            second.load_state_dict(state)
        return
    second.load_state_dict(state)
    rows = [[row for _ in range(9) for row in stream.draw().ids] for stream in (first, second)]
    length = min(map(len, rows))
    assert rows[0][:length] == rows[1][:length]


def test_prompts_that_are_taken_one_by_one_go_on_anywhere():
    state = PromptStream(Rows(9), 4, 0, True, drawn=3).state_dict()
    for batch, place, drawn in ((8, None, 2), (5, 11, 3), (4, 8, 2)):
        stream = PromptStream(Rows(9), batch, 0, True)
        stream.load_state_dict(state, place, cut=True)
        assert stream.drawn == drawn  # batches that are not drawn again
    with pytest.raises(CheckpointError, match=r"^batch_prompts=4: .* after 11 prompts \(3 batches of 4\)"):
        PromptStream(Rows(9), 4, 0, True).load_state_dict(state, 11)


def test_another_number_of_rows_has_another_order():
    with pytest.raises(CheckpointError, match="the dataset has 5 rows, but the checkpoint was written with 4"):
        PromptStream(Rows(5), 2, 0, True).load_state_dict(PromptStream(Rows(4), 2, 0, True).state_dict())


def of_curriculum(tmp_path, name, steps=6, **changes):
    """Build a run on six prompts, whose reward says by row and chance whether a response passes."""
    curriculum = PassRate(pass_reward=1.0, min_weight=0.05)
    settings = {"data": toys.Prompts(6), "batch_prompts": 4, "evaluation": None, "curriculum": curriculum}
    more = {"steps": steps, "sample_prompts": 4, "output_dir": tmp_path / name}
    return toys.experiment(tmp_path, **(settings | more | changes))


def lines(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_with_a_curriculum_records_why_it_chose_its_prompts(tmp_path):
    """The pass rates in samples.jsonl are those of the rewards in its earlier lines."""
    run(of_curriculum(tmp_path, "run"))
    past: dict[str, list[float]] = {}
    for step in range(1, 7):
        groups: dict[str, list[dict[str, float]]] = {}
        for record in lines(tmp_path / "run", "samples"):
            if record["step"] == step:
                groups.setdefault(record["id"], []).append(record)
        assert len(groups) == 4
        expected = []
        for prompt, records in groups.items():
            last = past.get(prompt.split("@")[0], [])[-2:]
            rate = sum(last) / len(last) if last else None
            assert {record["pass_rate"] for record in records} == {rate}
            expected += [] if rate is None else [rate]
        for prompt, records in groups.items():
            past.setdefault(prompt.split("@")[0], []).append(sum(r["reward"] >= 1 for r in records) / len(records))
        (metrics,) = [record for record in lines(tmp_path / "run", "metrics") if record["step"] == step]
        assert metrics.get("curriculum/pass_rate", None) == (sum(expected) / len(expected) if expected else None)
        assert metrics["curriculum/new_fraction"] == 1 - len(expected) / 4
    usual = [f"{row}@{epoch}" for step in range(6) for epoch, row in batch_indices(6, 4, step, 0, True)]
    chosen = list(dict.fromkeys(record["id"] for record in lines(tmp_path / "run", "samples")))
    assert chosen[:6] == usual[:6]
    assert chosen != usual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": Streamed(6)}, "curriculum: it chooses among all rows, which data.streaming=true"),
        ({"graph": sft.dataflow()}, "curriculum: no RPC of the graph writes the key 'rewards'"),
    ],
)
def test_a_curriculum_needs_rows_in_memory_and_rewards(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_parts(of_curriculum(tmp_path, "run", **changes))


@pytest.mark.slow
def test_two_ranks_choose_and_resume_as_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    Path("parity.py").write_text("def score(prompt, response, row):\n    return float(len(response) % 2)\n")
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(6)))
    words = [
        *("experiment=grpo", "models.actor.path=model", "data.path=rows.jsonl", "evaluation=null", "threads=1"),
        *("interfaces.reward.function=parity:score", "interfaces.reward.workers=0", "batch_prompts=4"),
        *("interfaces.actor.generation.n=4", "interfaces.actor.generation.max_new_tokens=4", "sample_prompts=4"),
        *("models.actor.gradient_checkpointing=false", "checkpoint.every_steps=1", "curriculum=pass_rate"),
    ]
    monkeypatch.syspath_prepend(str(tmp_path))
    run(build_experiment(compose([*words, "steps=6", "output_dir=alone"])))
    for steps in (3, 6):
        Ranks(tmp_path, *words, f"steps={steps}", "resume=auto", "output_dir=ranks").succeeded()
    alone, ranks = (lines(tmp_path / name, "samples") for name in ("alone", "ranks"))
    shown = ("step", "id", "reward", "pass_rate")
    assert [[record[key] for key in shown] for record in alone] == [[record[key] for key in shown] for record in ranks]
    assert len({record["pass_rate"] for record in alone}) > 2
    losses = [
        [record["loss"] for record in lines(tmp_path / name, "metrics") if record["step"]]
        for name in ("alone", "ranks")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("curriculum", [None, PassRate()])
def test_rows_of_a_source_that_no_longer_comes_are_not_waited_for(curriculum, tmp_path):
    for name, count in (("stays", 6), ("ends", 3)):
        rows = "".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    stays = RowSource(str(tmp_path / "stays.jsonl"), weight=1)
    ends = RowSource(str(tmp_path / "ends.jsonl"), weight=1, final_weight=0, ramp_prompts=4)
    dataset = PromptData([stays, ends]).load(make_tokenizer())
    stream = PromptStream(dataset, 4, seed=0, shuffle=True, drawn=2, curriculum=curriculum)
    used: set[int] = set()
    while stream.draw_new(used) is not None:
        pass
    assert used == set(range(6))
