from __future__ import annotations

import json
import re
import warnings

import pytest
from rich.console import Console

from realign.api.memory import RoleMemory
from realign.cli import commands as cli
from realign.cli.check import KINDS, print_memory, summary
from realign.ranks import Ranks
from realign.runtime.checks.device_estimate import DeviceEstimate
from tests.tiny import save_tiny

MIB = 2**20


def test_the_table_has_a_column_per_role_and_a_line_per_device(capsys):
    actor = RoleMemory("cpu", 4 * MIB, moments=8 * MIB, gradients=4 * MIB, activations=50 * MIB, cache=3 * MIB)
    roles = {"actor": actor} | {role: RoleMemory("cpu", 4096 * MIB) for role in ("critic", "reference", "reward")}
    print_memory(Console(width=80), [DeviceEstimate("cpu", roles, free=65536 * MIB)], 512)
    out = capsys.readouterr().out
    assert "prompts of up to 512 tokens" in out
    rows = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert ["actor", "critic", "reference", "reward"] in rows
    assert [row[:2] for row in rows if row[0] in KINDS] == [
        ["weights", "4 MiB"],
        ["optimizer", "8 MiB"],
        ["gradients", "4 MiB"],
        ["activations", "50 MiB"],
        ["head"],
        ["KV cache", "3 MiB"],
        ["rollout"],
        ["peak of a call", "54 MiB"],
    ]
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_device_that_is_too_small_is_a_warning():
    device = DeviceEstimate("cpu", {"actor": RoleMemory("cpu", 4 * MIB)}, free=MIB, processes=2)
    with pytest.warns(UserWarning, match="cpu: weights and optimizer state need 8 MiB, but 1 MiB are free"):
        print_memory(Console(width=150), [device], 1)
    assert summary(device) == "cpu in 2 processes: 8 MiB between calls, peak 8 MiB, 1 MiB free"


def test_check_prints_the_estimate_before_it_loads_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    save_tiny(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    words = ["experiment=sft", "models.actor.path=model", "data.path=rows.jsonl", "batch_prompts=1"]
    assert cli.main(["check", *words]) == 0
    out = capsys.readouterr().out
    assert out.index("Memory (estimate") < out.index("\nData\n")
    assert "between calls, peak" in out


def test_check_shows_the_mesh_of_each_role_and_the_memory_of_a_rank(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    save_tiny(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    words = ["experiment=sft", "models.actor.path=model", "data.path=rows.jsonl", "batch_prompts=1"]
    monkeypatch.setattr("realign.ranks.ranks_of_launcher", lambda: Ranks(0, 8))
    assert cli.main(["check", *words, "models.actor.sharding.replicate=2"]) == 0
    out = capsys.readouterr().out
    assert "\n  actor: 8 ranks = replicate 2 x shard 4\n" in out
    assert "cpu in 8 processes: " in out
    assert cli.main(["check", *words, "models.actor.sharding.replicate=3"]) == 2
    assert "models.actor.sharding.replicate=3: must divide the number of ranks (8)" in capsys.readouterr().err


def test_check_warns_about_memory_that_the_rows_need_and_not_about_that_of_the_limits(tmp_path, monkeypatch):
    """The peak of the limits does not fit into the free memory, that of the rows does."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    words = ["experiment=sft", "models.actor.path=model", "data.path=rows.jsonl", "batch_prompts=1"]
    monkeypatch.setattr("realign.cli.check.free_memory", lambda device: 3 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cli.main(["check", *words]) == 0
