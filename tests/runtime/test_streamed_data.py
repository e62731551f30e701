"""Runs on streamed data: exact resume with one process, two ranks, dynamic sampling and asynchronous rollout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from realign.cli import commands as cli
from realign.config import build_experiment, compose
from realign.errors import CheckpointError, ConfigError, DataError
from realign.runtime import run
from tests.checkpoint_runs import untimed
from tests.tiny import save_tiny
from tests.torchrun_ranks import Ranks

TRAIN = ["checkpoint.every_steps=1", "threads=1", "batch_prompts=4", "models.actor.gradient_checkpointing=false"]
SFT = ["experiment=sft", "models.actor.path=model", *TRAIN, "data.streaming=true", "data.max_tokens=40"]
MIXED = "data.path=[{path: 'a*.jsonl', weight: 2}, {path: b.csv, weight: 1}]"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tiny model and three files, of which every fifth row is too long."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    for file in range(2):
        rows = [{"prompt": f"{file}{i} " + "x" * (60 * (i % 5 == 4)), "response": f"r{i}"} for i in range(9)]
        Path(f"a{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("b.csv").write_text("prompt,response\n" + "".join(f"b{i},s{i}\n" for i in range(7)))
    return tmp_path


def trained(folder: str) -> dict[str, list[float]]:
    return {name: x.flatten().tolist() for name, x in load_file(f"{folder}/final/actor/model.safetensors").items()}


@pytest.mark.parametrize(
    ("path", "buffer"), [("data.path='a*.jsonl'", 5), (MIXED, 1), pytest.param(MIXED, 1000, marks=pytest.mark.slow)]
)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(here, path, buffer):
    words = [*SFT, path, f"data.shuffle_buffer={buffer}", "steps=12", "models.actor.optimizer.schedule.total=12"]
    run(build_experiment(compose([*words, "output_dir=whole"])))
    for steps in (3, 4, 9, 12):  # up to two epochs of each source
        run(build_experiment(compose([*words, "output_dir=parts", f"steps={steps}", "resume=auto"])))
    assert untimed(Path("parts/metrics.jsonl")) == untimed(Path("whole/metrics.jsonl"))
    assert trained("parts") == trained("whole")
    last = untimed(Path("whole/metrics.jsonl"))[-1]
    assert last["data/rows_read"] - last["data/rows_dropped"] >= 48
    assert last["data/rows_dropped"] > 0


@pytest.mark.slow
def test_two_ranks_read_the_same_stream_and_resume_as_one_process(here):
    words = [*SFT, MIXED, "data.shuffle_buffer=5", "models.actor.optimizer.schedule.total=6"]
    run(build_experiment(compose([*words, "output_dir=alone", "steps=6"])))
    for steps in (3, 6):
        Ranks(here, *words, "output_dir=ranks", f"steps={steps}", "resume=auto").succeeded()
    alone, ranks = (untimed(Path(f"{folder}/metrics.jsonl")) for folder in ("alone", "ranks"))
    for one, other in zip(alone, ranks, strict=True):
        assert {k: v for k, v in one.items() if k.startswith("data/")} == {
            k: v for k, v in other.items() if k.startswith("data/")
        }
    losses = [[record["loss"] for record in records if record["step"]] for records in (alone, ranks)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


GRPO = [
    "experiment=grpo",
    "models.actor.path=model",
    *TRAIN,
    "data.path=[{path: a0.jsonl}, {path: a1.jsonl}]",
    "data.streaming=true",
    "data.shuffle_buffer=4",
    "data.max_prompt_tokens=20",
    "interfaces.reward.function=letters:score",
    "interfaces.reward.workers=0",
    "interfaces.actor.generation.n=2",
    "interfaces.actor.generation.max_new_tokens=4",
    "evaluation=null",
]


@pytest.mark.parametrize(
    "more",
    [[], pytest.param(["dynamic_sampling={}"], marks=pytest.mark.slow), ["rollout=async", "rollout.max_staleness=0"]],
    ids=["sync", "dynamic", "async"],
)
def test_rollouts_of_streamed_prompts_resume_exactly(here, monkeypatch, more):
    Path("letters.py").write_text("def score(prompt, response, row):\n    return float(len(set(response)))\n")
    monkeypatch.syspath_prepend(str(here))
    for folder, ends in (("whole", [5]), ("parts", [2, 5])):
        for steps in ends:
            run(build_experiment(compose([*GRPO, *more, f"output_dir={folder}", f"steps={steps}", "resume=auto"])))
    assert untimed(Path("parts/metrics.jsonl")) == untimed(Path("whole/metrics.jsonl"))
    assert Path("parts/samples.jsonl").read_text() == Path("whole/samples.jsonl").read_text()
    assert trained("parts") == trained("whole")


def test_the_evaluation_of_a_streamed_run_reads_its_rows_into_memory(here, capsys):
    Path("held.jsonl").write_text('{"prompt": "h", "response": "r"}\n')
    words = [*SFT, MIXED, "steps=1", "output_dir=run", "evaluation.data.path=held.jsonl"]
    experiment = build_experiment(compose(words))
    assert not experiment.evaluation.data.streaming
    assert cli.main(["check", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "streamed from 3 files, 10,000 rows shuffled at a time, 1 held out for evaluation" in out
    assert "a*.jsonl (weight 2), b.csv (weight 1); streamed, shuffled 10,000 rows at a time" in out
    with pytest.raises(ConfigError, match=r"evaluation\.data\.streaming=true: all rows are read, in order"):
        run(build_experiment(compose([*words, "evaluation.data.streaming=true"])))


def test_a_changed_file_or_row_ends_the_run_with_its_place(here):
    words = [*SFT, "data.path='a*.jsonl'", "data.shuffle_buffer=2", "output_dir=run", "resume=auto"]
    run(build_experiment(compose([*words, "steps=1"])))
    text = Path("a1.jsonl").read_text()
    Path("a1.jsonl").write_text(text.replace("r8", "r9"))
    with pytest.raises(CheckpointError, match="data: the rows differ from those of the run that wrote the checkpoint"):
        run(build_experiment(compose([*words, "steps=2"])))
    Path("a1.jsonl").write_text(text + '{"prompt": "x"}\n')
    with pytest.raises(DataError, match=r"a1\.jsonl, line 10: the columns \['prompt'\] fit neither"):
        run(build_experiment(compose([*words, "steps=9", "output_dir=other"])))
