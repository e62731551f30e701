"""Test which checkpoint a run resumes from, what may differ, and the recovery from lost workers."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from realign.cli import commands as cli
from realign.cli.check import preflight
from realign.config import build_experiment, compose
from realign.config.files import list_experiments
from realign.engines import SharedModel, TransformersModel
from realign.engines.shared_model import Share
from realign.engines.training.optimizer import OptimizerSpec
from realign.errors import CheckpointError, ConfigError, RunComplete, TransientError
from realign.interfaces.components import KLPenalty, KLPlace
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.reference import ReferenceInterface
from realign.models import Lora, TopLayers
from realign.own_files import OwnFiles
from realign.records.checkpoint.folder import list_checkpoints, write_checkpoint
from realign.runtime import CheckpointSpec, Evaluation, Experiment, Interrupted, Ray, run
from realign.runtime.experiment import CheckpointPart
from realign.runtime.local import LocalRuntime
from realign.runtime.output_folder import alone_in
from realign.runtime.processes.watchdog import WorkerLost
from realign.runtime.resume import (
    Attempts,
    check_config,
    find_start,
    training_settings,
)
from realign.runtime.run_checkpoints import config_of, frozen_weights, restore, run_state
from realign.runtime.training import RunResult
from tests.checkpoint_runs import Killed, Killer, run_until_killed, save_files, untimed
from tests.checkpoint_runs import experiment as model_experiment
from tests.config_parts import MUST_BE_GIVEN, write_experiment
from tests.disk import DiskLog
from tests.tiny import save_tiny
from tests.toys import GENERATION, CountToken, Prompts, experiment

EVERY = CheckpointSpec(every_steps=1, keep=9)


def steps_of(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder / "checkpoints")]


def done(tmp_path: Path, steps: int = 3, **changes) -> Path:
    return run(experiment(tmp_path, steps=steps, checkpoint=EVERY, **changes)).output_dir


def resumed(tmp_path: Path, steps: int = 5, **changes) -> RunResult:
    return run(experiment(tmp_path, steps=steps, checkpoint=EVERY, **({"resume": "auto"} | changes)))


def test_a_run_with_more_steps_goes_on_and_its_record_is_whole(tmp_path):
    done(tmp_path)
    result = resumed(tmp_path)
    assert [record["step"] for record in result.history] == [0, 1, 2, 3, 4, 5]
    whole = run(experiment(tmp_path, steps=5, output_dir=tmp_path / "whole", checkpoint=None))
    assert result.series("loss") == whole.series("loss")
    assert not (tmp_path / "whole" / "checkpoints").exists()
    seconds = [json.loads(line)["seconds"] for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)  # the clock continues from the checkpoint


def test_trap_d11_resuming_a_complete_run_raises_an_error_of_its_own_class(tmp_path):
    done(tmp_path)
    with pytest.raises(RunComplete, match=r"steps=3: the run is complete, since .*step_000003 is at step 3"):
        resumed(tmp_path, steps=3)
    with pytest.raises(RunComplete, match="the run is complete"):
        resumed(tmp_path, steps=2)


def test_auto_starts_where_there_is_nothing_and_replaces_no_models(tmp_path):
    assert resumed(tmp_path, steps=1).series("step") == [0, 1]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ConfigError, match="an earlier run without a checkpoint"):
        resumed(tmp_path)
    shutil.rmtree(tmp_path / "run" / "final")  # as after a kill before the first checkpoint
    assert resumed(tmp_path, steps=1).series("step") == [0, 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "state.json").unlink(), "missing"),
        (lambda folder: truncate(folder / "tensors.safetensors"), "bytes"),
        (lambda folder: flip(folder / "tensors.safetensors"), "sha256"),
        (lambda folder: flip(folder / "manifest.json"), "manifest.json"),
    ],
)
def test_a_corrupt_newest_checkpoint_is_named_and_skipped_and_nothing_is_lost(tmp_path, damage, message):
    whole = run(experiment(tmp_path, steps=5, output_dir=tmp_path / "whole")).output_dir
    out = done(tmp_path)
    damage(out / "checkpoints" / "step_000003")
    with pytest.warns(UserWarning, match=f"Checkpoint at step 3 cannot be read .*{message}"):
        resumed(tmp_path)
    for name in ("metrics", "samples", "eval_samples"):
        records = [record for record in untimed(out / f"{name}.jsonl") if "eval/reward" not in record]
        expected = [record for record in untimed(whole / f"{name}.jsonl") if "eval/reward" not in record]
        assert records == expected
    assert steps_of(out) == [1, 2, 3, 4, 5]
    assert list_checkpoints(out / "checkpoints")[2].read()["counters"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_may_be_named_and_its_run_or_another_goes_on(tmp_path):
    out = done(tmp_path)
    branch = resumed(tmp_path, resume=str(out / "checkpoints" / "step_000002"), output_dir=tmp_path / "branch")
    assert [record["step"] for record in branch.history] == [0, 1, 2, 3, 4, 5]
    assert len((tmp_path / "branch" / "samples.jsonl").read_text().splitlines()) == 5 * 8
    assert steps_of(out) == [1, 2, 3]
    assert steps_of(tmp_path / "branch") == [3, 4, 5]
    back = resumed(tmp_path, resume=str(out / "checkpoints" / "step_000001"))
    assert back.series("loss") == branch.series("loss")
    assert find_start(experiment(tmp_path, steps=9, resume=str(out))).step == 5
    assert find_start(experiment(tmp_path, steps=9, resume=str(out / "checkpoints"))).step == 5


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere", "does not exist. Set auto"), (".", "no checkpoint"), ("file", "does not exist")],
)
def test_a_path_without_a_checkpoint_is_refused(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises((CheckpointError, ConfigError), match=message):
        resumed(tmp_path, resume=path)


def test_a_start_that_failed_is_no_earlier_run(tmp_path):
    class Fails(CountToken):
        def inference(self, model, data, mb_spec):
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        run(experiment(tmp_path, evaluation=Evaluation(Prompts(4), Fails(), GENERATION)))
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert run(experiment(tmp_path, steps=1)).series("step") == [0, 1]


def test_a_run_that_dies_while_its_models_are_saved_saves_them_when_it_is_resumed(tmp_path, monkeypatch):
    def dies(self, folder):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LocalRuntime, "save", dies)
        with pytest.raises(Killed):
            done(tmp_path)
    assert steps_of(tmp_path / "run") == [1, 2, 3]  # without the hashes that would mean that the run is complete
    with pytest.warns(UserWarning, match=r"damaged \(the folder is missing\)"):
        result = resumed(tmp_path, steps=3)
    assert [record["step"] for record in result.history] == [0, 1, 2, 3]
    assert (tmp_path / "run" / "final" / "actor").is_dir()
    assert steps_of(tmp_path / "run") == [1, 2, 3]


def test_every_key_that_differs_is_named_with_both_values(tmp_path):
    write_experiment(tmp_path)
    base = ["experiment=bigram", "steps=1", f"output_dir={tmp_path}/run"]
    run(build_experiment(compose(base, tmp_path)))
    other = [*base, "steps=2", "resume=auto", "interfaces.actor.objective.high=0.3", "data.n=9", "seed=1"]
    with pytest.raises(CheckpointError, match="The config differs from that of the checkpoint: ") as caught:
        run(build_experiment(compose(other, tmp_path)))
    for part in ("interfaces.actor.objective.high was 0.2, is 0.3", "data.n was 8, is 9", "seed was 0, is 1"):
        assert part in str(caught.value)
    assert "steps was" not in str(caught.value)
    meant = [*other, "data.n=8", "resume_allow=[interfaces.actor,seed]"]
    assert run(build_experiment(compose(meant, tmp_path))).series("step") == [0, 1, 2]
    assert "high: 0.3" in (tmp_path / "run" / "config.yaml").read_text()


def test_what_changes_nothing_of_the_training_may_differ():
    saved = {"steps": 3, "trackers": {}, "evaluation": {"every_steps": 2, "n": 1}, "checkpoint": {"keep": 1}, "lr": 0.1}
    check_config(saved, saved | {"steps": 9, "trackers": {"a": {"b": 1}}, "checkpoint": None}, [])
    check_config(saved, saved | {"evaluation": {"every_steps": 5, "n": 1}}, [])
    named = {"evaluations": {"hard": {"every_steps": 2, "n": 1}}}
    rarely = saved | {"evaluations": {"hard": {"every_steps": 3, "n": 1}}}
    check_config(saved | named, rarely, [])
    assert training_settings(saved | named) == training_settings(rarely)
    with pytest.raises(CheckpointError, match=r"evaluations\.hard\.n was 1, is 2"):
        check_config(saved | named, saved | {"evaluations": {"hard": {"every_steps": 3, "n": 2}}}, [])
    with pytest.raises(CheckpointError, match=r"the checkpoint: evaluation\.n was 1, is 2"):
        check_config(saved, saved | {"evaluation": {"every_steps": 5, "n": 2}}, [])
    check_config(saved, saved | {"evaluation": {}}, ["evaluation"])
    with pytest.raises(CheckpointError, match=r"evaluation was \(none\), is \{\}"):
        check_config(saved, saved | {"evaluation": {}}, [])
    with pytest.raises(
        ConfigError, match=r"resume_allow=evaluatoin: the config has no such key\. Did you mean 'evaluation'\?"
    ):
        check_config(saved, saved, ["evaluatoin"])
    check_config({"x": math.nan, "y": (1, 2)}, {"x": math.nan, "y": [1, 2]}, [])


def test_check_says_what_it_would_go_on_from(tmp_path, capsys):
    write_experiment(tmp_path)
    arguments = ["--config-dir", str(tmp_path), "experiment=bigram", "steps=1", f"output_dir={tmp_path}/run"]
    assert cli.main(["check", *arguments, "resume=auto"]) == 0
    assert "no checkpoint: the run would start from step 0" in capsys.readouterr().out
    assert cli.main(arguments) == 0
    assert cli.main(["check", *arguments, "resume=auto", "steps=2"]) == 0
    assert "step_000001" in capsys.readouterr().out
    assert cli.main(["check", *arguments, "resume=auto", "steps=2", "seed=1"]) == 2
    assert "seed was 0, is 1" in capsys.readouterr().err


def test_a_script_is_compared_by_what_orders_the_data(tmp_path):
    done(tmp_path)
    with pytest.raises(CheckpointError, match="batch_prompts was 8, is 4; seed was 0, is 1"):
        resumed(tmp_path, seed=1, batch_prompts=4)


def test_another_number_of_rows_is_refused_unless_the_position_is_left_out(tmp_path):
    done(tmp_path)
    with pytest.raises(CheckpointError, match="the dataset has 9 rows, but the checkpoint was written with 8"):
        resumed(tmp_path, data=Prompts(9))
    assert resumed(tmp_path, data=Prompts(9), resume_skip=["data"]).series("step") == [0, 1, 2, 3, 4, 5]


def test_a_run_that_saves_models_can_go_on_from_the_beginning(tmp_path):
    rarely = {"steps": 4, "checkpoint": CheckpointSpec(every_minutes=60), "save_every_steps": 1}
    run_until_killed(experiment(tmp_path, **rarely), 3)
    assert steps_of(tmp_path / "run") == [0]
    assert (tmp_path / "run" / "step_000002").is_dir()
    result = run(experiment(tmp_path, resume="auto", **rarely))
    whole = run(experiment(tmp_path, output_dir=tmp_path / "whole", **rarely))
    assert result.series("step") == [0, 1, 2, 3, 4]
    assert result.series("loss") == whole.series("loss")
    assert result.series("eval/reward") == whole.series("eval/reward")


SAVING = {"save_every_steps": 1, "keep_saves": 1}


def change_checkpoint(out: Path, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Replace a checkpoint by one with a changed tree and correct hashes."""
    tree = next(one for one in list_checkpoints(out / "checkpoints") if one.step == step).read()
    change(tree)
    write_checkpoint(out / "checkpoints", step, tree)


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("step_*"))


def test_a_resumed_run_removes_the_models_that_it_saved_before(tmp_path):
    out = done(tmp_path, **SAVING)
    assert saved(out) == ["step_000002"]  # the models of the last step are in `final`
    resumed(tmp_path, **SAVING)
    assert saved(out) == ["step_000004"]


@pytest.mark.parametrize("name", ["{victim}", "../victim", "final", "step_000001/../../victim", ""])
def test_a_checkpoint_of_somebody_else_removes_no_folder(tmp_path, name):
    out = done(tmp_path, **SAVING)
    victim = tmp_path / "victim"
    victim.mkdir()
    name = name.format(victim=victim)
    change_checkpoint(out, 3, lambda tree: tree["saves"].update(made=[name]))
    with pytest.raises(CheckpointError, match=re.escape(f"saves.made={name!r}"[:50])):
        resumed(tmp_path, **SAVING)
    assert victim.is_dir()
    assert (out / "final").is_dir()


@pytest.mark.parametrize("name", ["../secret", "{folder}/secret", "config", ""])
def test_a_checkpoint_of_somebody_else_reads_no_other_file(tmp_path, name):
    out = done(tmp_path)
    (tmp_path / "secret.jsonl").write_text("secret")
    name = name.format(folder=tmp_path)
    change_checkpoint(out, 3, lambda tree: tree["records"]["sizes"].update({name: 6}))
    with pytest.raises(CheckpointError, match=r"records\.sizes\..* in the checkpoint: Input should be 'metrics', '"):
        resumed(tmp_path, resume=str(out), output_dir=tmp_path / "branch")
    assert not list((tmp_path / "branch").glob("secret*"))


def test_another_batch_size_goes_on_at_the_same_row(tmp_path):
    """After 3 batches of 8, with 10 rows, the run has used 24 prompts, or 6 batches of 4. The next prompts are 24 to
    27."""
    done(tmp_path, data=Prompts(10), shuffle=False)
    with pytest.raises(
        CheckpointError, match=r"batch_prompts=5: .* after 24 prompts \(3 batches of 8\), which is not a multiple of it"
    ):
        resumed(tmp_path, data=Prompts(10), shuffle=False, batch_prompts=5, resume_allow=["batch_prompts"])
    allowed = {"batch_prompts": 4, "resume_allow": ["batch_prompts"], "sample_prompts": 4, "shuffle": False}
    out = resumed(tmp_path, 4, data=Prompts(10), **allowed).output_dir
    last = [record["id"] for record in untimed(out / "samples.jsonl") if record["step"] == 4]
    assert list(dict.fromkeys(last)) == ["4@2", "5@2", "6@2", "7@2"]


def with_reference(folder: Path, out: Path, **changes):
    return experiment(
        out,
        interfaces={
            "actor": GRPOActorInterface(generation=replace(GENERATION, n=2), kl=KLPenalty(KLPlace.loss, coef=1e-9)),
            "ref": ReferenceInterface(),
            "reward": CountToken(),
        },
        models={
            "actor": TransformersModel(str(folder / "a"), optimizer=OptimizerSpec(lr=1e-2)),
            "ref": TransformersModel(str(folder / "ref")),
        },
        evaluation=None,
        **changes,
    )


def test_trap_b7_the_reference_is_loaded_from_its_path_and_must_be_what_it_was(tmp_path):
    for name in ("a", "ref"):
        save_tiny(tmp_path / name)
    run(with_reference(tmp_path, tmp_path, steps=1))
    state = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].read()
    assert state["models"]["ref"] == {"version": 0, "engine": None}
    assert state["frozen"].keys() == {"ref"}
    assert state["frozen"]["ref"]["path"] == str(tmp_path / "ref")
    start = frozen_weights(LocalRuntime(with_reference(tmp_path, tmp_path)))
    result = run(with_reference(tmp_path, tmp_path, steps=2, resume="auto"))
    assert list_checkpoints(result.output_dir / "checkpoints")[-1].read()["frozen"] == start
    shutil.rmtree(tmp_path / "ref")
    save_tiny(tmp_path / "ref", seed=5)
    with pytest.raises(
        CheckpointError, match=r"models\.ref: the weights loaded from .* differ from those that the run"
    ):
        run(with_reference(tmp_path, tmp_path, steps=3, resume="auto"))
    with pytest.raises(CheckpointError, match=r"models\.ref: the weights loaded from"):
        preflight(with_reference(tmp_path, tmp_path, steps=3, resume="auto"), Console(quiet=True))


@pytest.mark.parametrize("partly", [{"trains": TopLayers(1)}, {"trains": Lora(rank=2)}], ids=["top layer", "adapters"])
def test_weights_that_do_not_train_are_in_no_checkpoint_and_must_be_what_they_were(tmp_path, partly):
    def changed(**changes):
        made = with_reference(tmp_path, tmp_path, **changes)
        actor = TransformersModel(str(tmp_path / "a"), optimizer=OptimizerSpec(lr=1e-2), **partly)
        return replace(made, models={"actor": actor, "ref": SharedModel("actor", Share.reference)})

    save_tiny(tmp_path / "a")
    run(changed(steps=1))
    state = list_checkpoints(tmp_path / "run" / "checkpoints")[-1].read()
    fixed = LocalRuntime(changed()).models["actor"].engine.fixed_weights()["module"]
    saved = state["models"]["actor"]["engine"]["module"]
    assert "model.embed_tokens.weight" in fixed
    assert not fixed.keys() & saved.keys()
    whole = LocalRuntime(changed()).models["actor"].engine.module.state_dict()
    assert fixed.keys() | saved.keys() == whole.keys()
    assert run(changed(steps=2, resume="auto")).series("step") == [0, 1, 2]
    shutil.rmtree(tmp_path / "a")
    save_tiny(tmp_path / "a", seed=5)
    with pytest.raises(
        CheckpointError, match=r"models\.actor: the weights loaded from .* differ from those that the run started"
    ):
        run(changed(steps=3, resume="auto"))


def made(folder: Path, skip: list[str]) -> LocalRuntime:
    """Return a new runtime with the state of a run of two steps, except the parts in `skip`."""
    first = LocalRuntime(with_reference(folder, folder))
    for step in (1, 2):
        first.step(step)
    torch.manual_seed(9)
    state = run_state(first, {})
    torch.manual_seed(10)
    second = LocalRuntime(with_reference(folder, folder))
    restore(second, state, skip)
    weights = [runtime.models["actor"].engine.module.state_dict() for runtime in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return second


def facts(runtime: LocalRuntime) -> dict[str, bool]:
    """Return for each part whether it equals that of the previous run."""
    stepper = runtime.models["actor"].engine._stepper
    return {
        CheckpointPart.optimizer: stepper.optimizer_steps == 2 and bool(stepper.optimizer.state),
        CheckpointPart.data: runtime.prompts.drawn == 2,
        CheckpointPart.random: torch.initial_seed() == 9,
        CheckpointPart.counters: runtime.models["actor"].version == 2 and runtime.counters.optimizer_steps == 2,
    }


def test_parts_of_a_checkpoint_are_left_out_one_by_one(tmp_path):
    for name in ("a", "ref"):
        save_tiny(tmp_path / name)
    whole = facts(made(tmp_path, []))
    assert all(whole.values())
    for skipped in whole:
        assert facts(made(tmp_path, [skipped])) == {part: part != skipped for part in whole}
    runtime = made(tmp_path, list(CheckpointPart))
    assert not any(facts(runtime).values())
    assert runtime.models["actor"].engine._stepper.train_steps == 0


def test_weights_alone_start_a_new_run_in_a_folder_of_its_own(tmp_path):
    greedy = {"evaluation": Evaluation(Prompts(4), CountToken(), replace(GENERATION, greedy=True))}
    out = done(tmp_path, **greedy)
    with pytest.raises(ConfigError, match="starts a new one"):
        resumed(tmp_path, resume=str(out), resume_skip=list(CheckpointPart))
    new = {"resume": str(out), "resume_skip": list(CheckpointPart), "output_dir": tmp_path / "next", **greedy}
    result = resumed(tmp_path, 2, **new)
    assert [record["step"] for record in result.history] == [0, 1, 2]
    assert result.history[0]["eval/reward"] == untimed(out / "metrics.jsonl")[-1]["eval/reward"]
    assert list_checkpoints(tmp_path / "next" / "checkpoints")[-1].read()["counters"]["optimizer_steps"] == 2


def test_an_interface_that_cannot_restore_its_state_keeps_its_traceback_with_a_note(tmp_path):
    done(tmp_path)

    class Forgetful(CountToken):
        def state_dict(self):
            return {"calls": 1}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    parts = {"actor": GRPOActorInterface(generation=GENERATION), "reward": Forgetful()}
    with pytest.raises(KeyError, match="calls") as caught:
        resumed(tmp_path, interfaces=parts)
    assert caught.value.__notes__ == [
        "interfaces.reward: the state in the checkpoint was not restored. Set resume_skip=[interfaces] to resume "
        "without it."
    ]
    assert caught.traceback[-1].path == Path(__file__)
    resumed(tmp_path, interfaces=parts, resume_skip=["interfaces"])
    state = dict(list_checkpoints(tmp_path / "run" / "checkpoints")[-1].read())
    del state["interfaces"]["interfaces.actor"]
    with pytest.raises(CheckpointError, match=r"interfaces\.actor: the checkpoint has no state of it"):
        restore(LocalRuntime(experiment(tmp_path)), state)


def test_the_checkpoint_is_not_kept_in_memory_while_the_run_goes_on(tmp_path, monkeypatch):
    done(tmp_path)
    starts: list[weakref.ref] = []

    def watched_start(e):
        start = find_start(e)
        starts.append(weakref.ref(start))
        return start

    class Watching(Killer):
        def log(self, step, metrics):
            assert starts[0]() is None

    monkeypatch.setattr("realign.runtime.run_experiment.find_start", watched_start)
    run(experiment(tmp_path, steps=4, resume="auto"), trackers=[Watching(0)])
    assert len(starts) == 1


def test_a_damaged_line_of_the_record_is_a_gap_that_is_said(tmp_path):
    path = done(tmp_path) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff" * (len(lines[1]) - 1) + b"\n" + b"".join(lines[2:]))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 2: .* The line is skipped"):
        result = resumed(tmp_path)
    assert [record["step"] for record in result.history] == [0, 2, 3, 4, 5]


def test_lines_behind_the_checkpoint_are_cut_off_and_a_gap_is_said(tmp_path):
    run_until_killed(experiment(tmp_path, steps=4, checkpoint=EVERY), 3)
    out = tmp_path / "run"
    with (out / "samples.jsonl").open("a") as file:
        file.write('{"step": 3, "torn')
    resumed(tmp_path)
    assert [record["step"] for record in untimed(out / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert [record["step"] for record in untimed(out / "samples.jsonl")] == [s for s in range(1, 6) for _ in range(8)]
    (out / "samples.jsonl").unlink()
    with pytest.warns(UserWarning, match=r"samples\.jsonl has 0 bytes, but had .* earlier lines are missing"):
        resumed(tmp_path, 6)


def test_the_checkpoint_of_the_best_step_stays(tmp_path):
    last, best = (
        CheckpointSpec(every_steps=2, keep=1),
        {"save_best": "optimizer_steps"},
    )  # each step makes 1 optimizer step, so the first step is the best
    run(experiment(tmp_path, steps=4, checkpoint=last, **best))
    assert steps_of(tmp_path / "run") == [1, 4]
    run(experiment(tmp_path, steps=6, checkpoint=last, resume="auto", **best))
    assert steps_of(tmp_path / "run") == [1, 6]
    run(experiment(tmp_path, steps=8, checkpoint=last, resume="auto"))
    assert steps_of(tmp_path / "run") == [8]


def test_a_full_disk_warns_and_does_not_end_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("realign.records.checkpoint.folder._fill", full)
    with pytest.warns(UserWarning, match=r"Checkpoint at step 3 failed \(.*No space left"):
        out = done(tmp_path)
    assert steps_of(out) == []
    assert (out / "final").is_dir()


def test_a_state_that_cannot_be_saved_raises_at_the_start_and_warns_later(tmp_path):
    @dataclass
    class Arrays(CountToken):
        calls: int = 0
        first: int = 0

        def inference(self, model, data, mb_spec):
            self.calls += 1
            return super().inference(model, data, mb_spec)

        def state_dict(self):
            return {"array": np.zeros(2)} if self.calls >= self.first else {}

    def parts(first: int):
        return {"actor": GRPOActorInterface(generation=GENERATION), "reward": Arrays(first=first)}

    with pytest.raises(ValueError, match=r"interfaces\.reward/array: .*ndarray cannot be saved"):
        done(tmp_path, interfaces=parts(0))
    with pytest.warns(UserWarning, match=r"Checkpoint at step 2 failed \(.*ndarray cannot be saved"):
        out = done(tmp_path, interfaces=parts(2))
    assert steps_of(out) == [1]
    assert (out / "final").is_dir()


def test_a_stop_whose_checkpoint_fails_says_so(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    @dataclass
    class Stopper(Killer):
        def log(self, step, metrics):
            if step == self.step:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("realign.records.checkpoint.folder._fill", full)
    with pytest.raises(Interrupted, match=r"stopped after step 2 of 3\. .*Checkpoint at step 2 failed .*No space"):
        run(experiment(tmp_path), trackers=[Stopper(2)])
    with pytest.raises(
        Interrupted, match=r"stopped after step 2 of 3\. The run cannot be resumed, since checkpoint=null"
    ):
        run(experiment(tmp_path, checkpoint=None, overwrite=True), trackers=[Stopper(2)])
    assert not (tmp_path / "run" / "final").exists()
    assert run(experiment(tmp_path, overwrite=True), trackers=[Stopper(3)]).series("step") == [0, 1, 2, 3]


WEIGHTS = "actor/bigram.npz"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing folder": shutil.rmtree,
    "flipped byte": lambda final: flip(final / WEIGHTS),
    "flipped byte of the state": lambda final: flip(final / "actor" / "interface_state.json"),
    "missing file": lambda final: (final / WEIGHTS).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models_of_a_complete_run_are_saved_again_from_the_checkpoint(tmp_path, damage):
    out = done(tmp_path)
    with pytest.raises(RunComplete):  # undamaged: nothing is left to do
        resumed(tmp_path, steps=3)
    before = {path: path.read_bytes() for path in (out / "final").rglob("*") if path.is_file()}
    metrics = (out / "metrics.jsonl").read_bytes()
    DAMAGES[damage](out / "final")
    with pytest.raises(RunComplete, match=r"saved models in .*final are damaged \(.*\)\. Set steps=3 to restore them"):
        resumed(tmp_path, steps=2)
    with pytest.warns(UserWarning, match=r"The run is complete, but its saved models in .*final are damaged \("):
        result = resumed(tmp_path, steps=3)
    assert {path: path.read_bytes() for path in (out / "final").rglob("*") if path.is_file()} == before
    assert (out / "metrics.jsonl").read_bytes() == metrics
    assert result.series("step") == [0, 1, 2, 3]
    assert steps_of(out) == [1, 2, 3]
    with pytest.raises(RunComplete):
        resumed(tmp_path, steps=3)


def test_models_without_hashes_in_the_checkpoint_may_be_those_of_another_step_and_are_saved_again(tmp_path):
    out = done(tmp_path)
    saved = (out / "final" / WEIGHTS).read_bytes()
    change_checkpoint(out, 3, lambda tree: tree["saves"].pop("final"))
    flip(out / "final" / WEIGHTS)
    with pytest.warns(UserWarning, match=r"damaged \(they are not those of the last step\)"):
        resumed(tmp_path, steps=3)
    assert (out / "final" / WEIGHTS).read_bytes() == saved


def test_models_with_a_calibration_after_training_are_saved_again_bit_for_bit(tmp_path):
    files = save_files(tmp_path)
    run(model_experiment(files, tmp_path / "run", "reward model", steps=2))
    final = tmp_path / "run" / "final"
    before = {path: path.read_bytes() for path in final.rglob("*") if path.is_file()}
    assert any(path.name == "interface_state.json" for path in before)
    shutil.rmtree(final)
    with pytest.warns(UserWarning, match="saved again"):
        run(model_experiment(files, tmp_path / "run", "reward model", steps=2, resume="auto"))
    assert {path: path.read_bytes() for path in final.rglob("*") if path.is_file()} == before


def test_the_saved_models_are_on_the_disk_before_the_checkpoint_says_so(tmp_path, monkeypatch):
    log = DiskLog(monkeypatch)
    files = save_files(tmp_path / "files")
    saving = {"save_every_steps": 1, "save_best": "-loss", "checkpoint": EVERY, "evaluation": None}
    out = run(model_experiment(files, tmp_path / "run", "sft", steps=2, **saving)).output_dir
    checkpoint = log.renamed_to(out / "checkpoints" / "step_000002")
    for name in ("final", "best", "step_000001"):
        inside = [out / name, *(out / name).rglob("*")]
        assert len(inside) > 4
        for path in inside:
            assert 0 <= log.last_sync(path) < checkpoint, path
    for name in ("best", "step_000001", "final/actor", "final/actor_ema"):
        renamed = log.renamed_to(out / name)
        assert any(renamed < sync < checkpoint for sync in log.syncs((out / name).parent)), name


def test_leftovers_of_interrupted_saves_are_removed_or_restored_at_the_start(tmp_path):
    out = done(tmp_path, **SAVING, save_best="reward_ema")
    best = (out / "best" / "best.json").read_bytes()
    (out / "best").rename(OwnFiles(out).scratch("best") / "old")
    for name in ("step_000002", "final"):
        (OwnFiles(out).scratch(name) / "new" / "actor").mkdir(parents=True)
    with pytest.warns(UserWarning, match="best was restored"), pytest.raises(RunComplete):
        resumed(tmp_path, steps=3, **SAVING, save_best="reward_ema")
    assert (out / "best" / "best.json").read_bytes() == best
    assert not list(out.rglob(".*"))


def test_leftovers_of_a_run_that_is_active_stay(tmp_path):
    out = done(tmp_path)
    (out / ".step_000002.ab12cd34" / "new").mkdir(parents=True)
    with alone_in(out), pytest.raises(TransientError, match="another run is active"):
        resumed(tmp_path)
    assert (out / ".step_000002.ab12cd34").is_dir()


LOST = WorkerLost("RPC 'actor_gen', actor: generate: the worker has died")


def on_ray(tmp_path, **changes) -> Experiment:
    settings = {"runtime": Ray(max_recoveries=1), "checkpoint": CheckpointSpec(every_steps=1)}
    return experiment(tmp_path, **settings | changes)


def checkpointed(e: Experiment, step: int) -> None:
    (e.output_dir / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


def test_a_run_continues_from_its_own_checkpoint_with_fresh_interfaces(tmp_path):
    e = on_ray(tmp_path)
    attempts = Attempts(e)
    assert attempts.experiment is e
    e.interfaces["reward"].shuffle = True  # the failed attempt leaves a changed state
    attempts.began()
    checkpointed(e, 4)
    with pytest.warns(UserWarning, match=r"has died. The run continues after step 4 \(recovery 1 of at most 1\)"):
        attempts.recover(LOST)
    assert attempts.experiment.resume == "auto"
    assert attempts.experiment.interfaces["reward"].shuffle is False
    with pytest.raises(WorkerLost, match=r"recovered runtime\.max_recoveries=1 times"):
        attempts.recover(LOST)


def test_checkpoints_of_an_earlier_run_are_not_used(tmp_path):
    e = on_ray(tmp_path, overwrite=True)
    checkpointed(e, 9)
    attempts = Attempts(e)
    with pytest.warns(UserWarning, match=r"The run restarts \(recovery 1 of at most 1\)"):
        attempts.recover(LOST)  # before the output folder belongs to this run
    assert attempts.experiment.resume is None


def test_a_run_without_a_checkpoint_yet_restarts_with_its_original_resume_settings(tmp_path):
    how = {"resume": "auto", "resume_skip": ["optimizer"], "resume_allow": ["models"]}
    e = on_ray(tmp_path, runtime=Ray(max_recoveries=3), **how)
    checkpointed(e, 10)
    checkpointed(e, 30)
    attempts = Attempts(e)
    attempts.began()
    with pytest.warns(UserWarning, match="The run restarts"):
        attempts.recover(LOST)
    assert {name: getattr(attempts.experiment, name) for name in how} == how
    attempts.began()
    checkpointed(e, 12)  # after resume=.../step_000010; the checkpoint of step 30 will soon be removed
    with pytest.warns(UserWarning, match="The run continues after step 12"):
        attempts.recover(LOST)
    assert attempts.experiment.resume == str(e.output_dir / "checkpoints" / "step_000012")
    checkpointed(e, 31)
    with pytest.warns(UserWarning, match="The run continues after step 31"):
        attempts.recover(LOST)
    now = attempts.experiment
    assert (now.resume, now.resume_skip, now.resume_allow) == ("auto", [], [])


@pytest.mark.parametrize("changes", [{"checkpoint": None}, {"runtime": Ray(max_recoveries=0)}])
def test_a_run_that_cannot_continue_says_why(tmp_path, changes):
    why = "checkpoint=null" if "checkpoint" in changes else "max_recoveries=0 times"
    with pytest.raises(WorkerLost, match=f"has died. The run .*{why}"):
        Attempts(on_ray(tmp_path, **changes)).recover(LOST)


STRETCHED = {
    "deepspeed_chat",
    "dpo",
    "kto",
    "lm_human_preferences",
    "lm_human_preferences_cnndm",
    "lm_human_preferences_reward",
    "lm_human_preferences_reward_cnndm",
    "lm_human_preferences_reward_tldr",
    "lm_human_preferences_tldr",
    "reward_model",
    "reward_sentiment",
    "sft",
    "sft_arithmetic",
    "sft_sentiment",
}
"""Experiments whose learning rate decays over all steps."""


@pytest.mark.parametrize("name", [x for x in sorted(list_experiments()) if x in STRETCHED or x == "grpo"])
def test_more_steps_are_allowed_for_shipped_experiments(name):
    few, many = (
        config_of(build_experiment(compose([f"experiment={name}", *MUST_BE_GIVEN.get(name, []), f"steps={steps}"])))
        for steps in (300, 900)
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_config(few, many, [])
    warnings_shown = [str(w.message) for w in told]
    assert bool(warnings_shown) == (name in STRETCHED)
    for message in warnings_shown:
        assert "schedule.total was 300, is 900" in message
        assert message.endswith("schedule.total=300.")


def test_a_run_with_a_cosine_schedule_continues_with_more_steps(tmp_path):
    save_tiny(tmp_path / "model")
    rows = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rates(steps: int, out: Path, *more: str) -> list[float]:
        words = ["experiment=sft", f"models.actor.path={tmp_path}/model", f"data.path={tmp_path}/rows.jsonl"]
        words += [f"steps={steps}", "batch_prompts=4", f"output_dir={out}", "models.actor.optimizer.schedule.warmup=0"]
        return run(build_experiment(compose([*words, *more]))).series("lr")

    whole = rates(6, tmp_path / "whole")
    few = rates(3, tmp_path / "run")
    assert few[1:] != whole[1:3]
    with pytest.warns(
        UserWarning, match=r"schedule\.total was 3, is 6.* set models\.actor\.optimizer\.schedule\.total=3"
    ):
        continued = rates(6, tmp_path / "run", "resume=auto")
    assert continued == [*few, *whole[3:]]
    kept = rates(8, tmp_path / "run", "resume=auto", "models.actor.optimizer.schedule.total=6")
    assert kept == [*continued, 0.0, 0.0]
