"""`realign verify` finds a changed reward, sample, weight and setting, and says when another machine is the reason."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import yaml

from realign.cli import main
from realign.runtime.chain import _linked
from realign.runtime.checkpoint.folder import facts_of, rendered_manifest
from realign.runtime.recorded_calls import RecordedCall, read_calls, recorded_calls_path, write_calls


@pytest.fixture
def copy(finished, tmp_path, monkeypatch):
    """Return a copy of the run that a test may change."""
    monkeypatch.chdir(finished)
    return shutil.copytree(finished / "runs/a", tmp_path / "a")


def links(run):
    return [json.loads(line) for line in (run / "chain.jsonl").read_text().splitlines()]


def relink(run, records):
    """Write a chain whose links are right again after its lines were changed."""
    last, lines = "", []
    for record in records:
        last = _linked(last, {key: value for key, value in record.items() if key != "link"})
        lines.append(json.dumps(record | {"link": last}) + "\n")
    (run / "chain.jsonl").write_text("".join(lines))


def change_reward(run):
    """Change a reward in metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[3]["reward"] += 0.25
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_sample(run):
    text = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    text[4] = text[4].replace('"response": "', '"response": "9', 1)
    (run / "samples.jsonl").write_text("".join(text))


def change_recorded_reward(run):
    ((name, call),) = read_calls(run, 4).items()
    batch = call.batch
    rewards = batch["rewards"].clone()
    rewards[2] += 1
    write_calls(run, 4, {name: RecordedCall(batch.with_data({"rewards": rewards}, like="rewards"), {})})


def change_weight(run):
    """Flip a bit of a weight, and make the checkpoint's own hashes fit."""
    checkpoint = run / "checkpoints/step_000004"
    tensors = checkpoint / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-100] ^= 1
    tensors.write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["files"]["tensors.safetensors"] = facts_of(tensors)
    (checkpoint / "manifest.json").write_bytes(rendered_manifest(manifest))


def change_final_weight(run):
    path = run / "final/actor/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change_setting(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["interfaces"]["actor"]["adv_norm"]["std"] = "none"
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def change_chain(run):
    records = links(run)
    place = next(i for i, record in enumerate(records) if record["kind"] == "step" and record["step"] == 3)
    records[place]["grad_norm"]["grad_norm"] *= 1.01
    (run / "chain.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def remove_link(run):
    lines = (run / "chain.jsonl").read_text().splitlines(keepends=True)
    (run / "chain.jsonl").write_text("".join(lines[:2] + lines[3:]))


def test_a_run_that_nobody_changed_agrees_and_the_cost_is_said_first(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    assert main(["verify", "runs/a", "--steps", "9"]) == 0
    out = capsys.readouterr().out
    assert "5 steps, last link" in out
    assert out.index("recomputing steps 1, 2, 3, 4, 5: 5 steps from 3 checkpoints") < out.index("step 1: agrees")
    assert out.count("agrees") == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_reward, "metrics.jsonl: its lines of step 3"),
        (change_sample, "samples.jsonl: its lines of step 2"),
        (change_recorded_reward, "calls/step_000004.safetensors: the recorded rewards or samples of step 4"),
        (change_weight, "checkpoints/step_000004/tensors.safetensors: changed after step 4"),
        (change_final_weight, "final/actor/model.safetensors: the saved model was changed"),
        (change_setting, 'config.yaml: interfaces.actor.adv_norm.std was "group", is "none"'),
        (change_chain, "(step 3): the link does not follow"),
        (remove_link, "the link does not follow"),
    ],
)
def test_a_change_is_found_and_located(change, message, copy, capsys):
    change(copy)
    assert main(["verify", str(copy)]) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "recomputing" not in captured.out


def test_a_reward_that_was_changed_everywhere_is_found_by_computing_the_step_again(copy, capsys):
    change_recorded_reward(copy)
    records = links(copy)
    changed = hashlib.sha256(recorded_calls_path(copy, 4).read_bytes()).hexdigest()
    relink(copy, [r | {"calls": changed} if (r["kind"], r["step"]) == ("step", 4) else r for r in records])
    assert main(["verify", str(copy), "--steps", "5"]) == 2
    out = capsys.readouterr().out
    assert "step 4: differs in rewards, grad_norm (" in out
    assert "step 3: agrees" in out


def test_another_machine_is_named_as_the_reason(copy, capsys):
    records = links(copy)
    for record in records:
        if record["kind"] == "start":
            record["environment"]["cpu"] = "Abacus 9000 (NO AVX)"
        if record["kind"] == "step":
            record["grad_norm"]["grad_norm"] *= 1 + 1e-6  # as if its sums had rounded differently
    relink(copy, records)
    assert main(["verify", str(copy), "--steps", "1"]) == 2
    out = capsys.readouterr().out
    assert "cpu was Abacus 9000 (NO AVX), is " in out
    assert "this can be the reason" in out
    assert main(["verify", str(copy), "--steps", "1", "--tolerance", "1e-4"]) == 0


def test_several_processes_are_named_as_the_reason(copy, capsys):
    records = links(copy)
    for record in records:
        if record["kind"] == "step":
            record["grad_norm"]["grad_norm"] *= 1 + 1e-6  # as if each rank had summed its part
    relink(copy, records)
    assert main(["verify", str(copy), "--steps", "1"]) == 2
    assert "torchrun" not in capsys.readouterr().out
    info = json.loads((copy / "run.json").read_text())
    info["attempts"][0]["command"] = ["torchrun", "--nproc-per-node", "2", "-m", "realign"]
    (copy / "run.json").write_text(json.dumps(info))
    said = "Several processes of torchrun ran it, and one process recomputes it: sums round differently"
    assert main(["verify", str(copy), "--steps", "1"]) == 2
    assert said in capsys.readouterr().out
    change_reward(copy)  # of step 3
    assert main(["replay", str(copy), "3"]) == 0
    assert said in capsys.readouterr().out
    assert main(["replay", str(copy), "4"]) == 0
    assert said not in capsys.readouterr().out


def test_a_resumed_run_and_a_fork_continue_the_chain(finished, monkeypatch, capsys):
    monkeypatch.chdir(finished)
    assert main(["fork", "runs/a", "3", "interfaces.actor.adv_norm.std=none", "output_dir=runs/b"]) == 0
    assert main(["runs/b/config.yaml", "steps=6", "resume=auto", "resume_allow=[]"]) == 0
    capsys.readouterr()
    assert main(["verify", "runs/b", "--steps", "9"]) == 0
    out = capsys.readouterr().out
    assert "recomputing steps 4, 5, 6" in out
    assert [r["step"] for r in links(finished / "runs/b") if r["kind"] == "start"][-1] == 5


def test_a_run_without_a_chain_is_one_line(copy, capsys):
    (copy / "chain.jsonl").unlink()
    assert main(["verify", str(copy)]) == 2
    assert "the run has no chain" in capsys.readouterr().err
    assert main(["verify", str(copy), "--steps", "x"]) == 2
    assert "--steps x: expected a number of steps of at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("parent", [{"run": 5, "step": "x"}, [1], {"step": 3}, "text"])
def test_a_damaged_parent_in_run_json_is_no_parent(parent, copy, capsys):
    info = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(info | {"id": {}, "parent": parent}))
    assert main(["verify", str(copy), "--steps", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["chain, settings, records and checkpoints agree"]


def test_a_fork_is_verified_from_its_first_step_and_says_where_the_others_are(copy, capsys):
    info = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(info | {"parent": {"run": "/gone/b", "step": 3}}))
    assert main(["verify", str(copy), "--steps", "0"]) == 0
    said = f"a fork of {copy.with_name('b')} at step 3: verify that run for the steps up to there"
    assert capsys.readouterr().out.splitlines()[1] == said
