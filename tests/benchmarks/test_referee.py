from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.referee import __main__ as referee
from benchmarks.referee import batches, ours, page
from benchmarks.referee.cells import CELLS, EDGE_CELLS, EDGES, PEERS, ROWS, Cell, overrides_of

RESULTS = json.loads(referee.RESULTS.read_text())
EXECUTED = {(row, peer): cell for (row, peer), cell in {**CELLS, **EDGE_CELLS}.items() if isinstance(cell, Cell)}


def test_the_page_shows_the_results():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(RESULTS)


def test_the_results_have_every_cell_and_nothing_differs_unexplained():
    assert {(row, peer) for peer in PEERS for row in RESULTS["peers"][peer]["cells"]} == EXECUTED.keys()
    verdicts = {
        (row, peer): RESULTS["peers"][peer]["cells"][row]["verdict"]
        for peer in PEERS
        for row, of in EXECUTED
        if of == peer
    }
    assert {key for key, found in verdicts.items() if found in ("differs", "error")} == {
        ("equal", peer) for peer in ("trl", "verl", "openrlhf", "skyrl")
    }
    assert {(row, peer) for row in ROWS for peer in PEERS} == CELLS.keys()


def test_every_key_of_a_cell_is_needed():
    """The batches are such that the peer's loss differs from the preset's wherever a cell says so."""
    for (row, peer), cell in EXECUTED.items():
        if cell.differs:
            assert RESULTS["peers"][peer]["cells"][row]["preset"] > referee.GOAL, (row, peer)


@pytest.mark.parametrize("row", [*ROWS, *EDGES])
def test_the_settings_of_every_cell_compose(row):
    of = {**ROWS, **EDGES}[row]
    for (name, _), cell in EXECUTED.items():
        if name == row:
            assert ours.interfaces(overrides_of(of, cell))


def test_packed_tokens_keep_their_place_in_the_padded_tensors():
    batch = batches.batch("ragged", 0)
    data = batches.packed(batch)
    for key, other in (("logprobs", "old"), ("ref_logprobs", "ref"), ("values", "values")):
        assert torch.equal(batches.padded(data[key], data["input_ids"], batch["mask"]), batch[other])
    assert data["rewards"].tolist() == batch["rewards"].tolist()
    assert data["loss_mask"].sum() == batch["mask"].sum()


def test_the_loss_of_dpo_is_that_of_the_formula():
    batch = batches.batch("pairs", 0)
    loss, gradient = ours.run("dpo", batch, ("experiment=dpo",))
    sums = torch.where(batch["mask"], batch["new"] - batch["ref"], 0).sum(-1)
    expected = -torch.nn.functional.logsigmoid(0.1 * (sums[::2] - sums[1::2])).mean()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    assert gradient[batch["mask"]].abs().min() > 0
    assert gradient[~batch["mask"]].abs().max() == 0


def test_a_changed_cell_is_a_line_that_names_release_algorithm_and_difference():
    after = copy.deepcopy(RESULTS)
    after["peers"]["trl"]["version"] = "9.0"
    after["peers"]["trl"]["cells"]["kto"] |= {"verdict": "differs", "settings": 0.3}
    after["peers"]["verl"]["cells"]["grpo"] = {"verdict": "error", "error": "ImportError: no core_algos"}
    was = RESULTS["peers"]["trl"]["version"]
    first, second = referee.changed(RESULTS, after)
    assert first.startswith(f"TRL 9.0 (was {was}), KTO: was equal")
    assert first.endswith("now differs, with a difference of 0.3")
    assert second.endswith("ImportError: no core_algos")
    assert list(referee.changed(RESULTS, RESULTS)) == []


PEER = """
from torch import Tensor
import torch

STUBS, DECORATORS = ("heavy",), ("heavy.jit",)

def run(kind, batch, new, settings):
    from heavy import Network, jit
    if settings.get("calls the stub"):
        Network()
    return jit(lambda x: (x * batch["mask"]).sum() * settings["by"])(new)
"""


def test_the_worker_runs_a_side_and_a_stub_that_is_called_fails(tmp_path):
    (tmp_path / "side_toy.py").write_text(PEER)
    jobs = [
        {"id": "a", "batch": "b", "kind": "policy", "settings": {"by": 2.0}},
        {"id": "c", "batch": "b", "kind": "policy", "settings": {"by": 2.0, "calls the stub": True}},
    ]
    from safetensors.torch import load_file, save_file

    batch = batches.batch("pairs", 0)
    save_file({f"b/{key}": x.contiguous() for key, x in batch.items()}, tmp_path / "batches.safetensors")
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    worker = Path(referee.HERE) / "worker.py"
    environment = {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(worker), "toy", str(tmp_path)], check=True, env=environment)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["errors"] == {"c": "RuntimeError: the loss calls heavy.Network, which the referee replaced by a stub"}
    gradient = load_file(tmp_path / "results.safetensors")["a"]
    assert torch.equal(gradient, 2.0 * batch["mask"].float())


def test_a_release_that_does_not_run_is_a_line_and_the_others_are_compared(monkeypatch, capsys):
    def compare(peer, folder):
        if peer == "verl":
            raise RuntimeError("verl did not run: ModuleNotFoundError: No module named 'verl.trainer'")
        return RESULTS["peers"][peer]["cells"]

    monkeypatch.setattr(referee, "install", lambda peer, release: Path(f"{peer}-{release}"))
    monkeypatch.setattr(referee, "release_of", lambda peer, folder: "9.9")
    monkeypatch.setattr(referee, "compare", compare)
    monkeypatch.setattr(sys, "argv", ["referee", "--latest", "--check"])
    assert referee.main() == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "verl (was 0.9.1): verl did not run: ModuleNotFoundError: No module named 'verl.trainer'"
    assert [line.partition(" 9.9: ")[0] for line in printed[:-1]] == ["TRL", "OpenRLHF", "AReaL", "SkyRL"]
