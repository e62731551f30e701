from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.referee import __main__ as referee
from benchmarks.referee import batches, page
from benchmarks.referee.cells import CELLS, EDGE_CELLS, PEERS, ROWS, Cell

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
    assert {key for key, verdict in verdicts.items() if verdict in ("differs", "error")} == {
        ("equal", peer) for peer in ("trl", "verl", "openrlhf", "skyrl", "slime")
    }
    assert {(row, peer) for row in ROWS for peer in PEERS} == CELLS.keys()


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
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["errors"] == {
        "c": "RuntimeError: the loss calls heavy.Network, which the referee replaced by a stub"
    }
    gradient = load_file(tmp_path / "results.safetensors")["a"]
    assert torch.equal(gradient, 2.0 * batch["mask"].float())
