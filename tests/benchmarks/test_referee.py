from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
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


CHECKOUT = {
    "slime/backends/megatron_utils/cp_utils.py": """
from megatron.core import mpu

def get_mean(lengths, masks):
    assert mpu.get_context_parallel_world_size() == 1
    return lambda x: sum((row * mask).sum() / mask.sum() for row, mask in zip(x.split(lengths), masks))
""",
    "slime/utils/distributed_utils.py": """
import torch.distributed as dist

def total(x):
    dist.all_reduce(x)
    return x
""",
    "slime/utils/ppo_utils.py": """
import torch

@torch.compile(dynamic=True)
def policy_loss(new, old, advantages):
    return -(new - old).exp() * advantages
""",
    "slime/backends/megatron_utils/loss.py": """
import torch
from slime.utils.distributed_utils import total
from slime.utils.later import correction
from slime.utils.ppo_utils import policy_loss
from slime.utils.types import RolloutBatch

from .cp_utils import get_mean

def get_log_probs_and_entropy(logits):
    raise AssertionError("replaced")

def compute_advantages_and_returns(args, data: RolloutBatch):
    data["advantages"] = [reward * torch.ones_like(x) for x, reward in zip(data["log_probs"], data["rewards"])]

def loss_function(args, batch, num_microbatches, logits):
    if args.use_opsm:
        correction()
    new = get_log_probs_and_entropy(logits)[1]["log_probs"]
    token = policy_loss(*(torch.cat(x) for x in (new, batch["log_probs"], batch["advantages"])))
    summed = get_mean(batch["response_lengths"], batch["loss_masks"])(token)
    return summed, total(torch.tensor(args.global_batch_size)), {}
""",
    "slime/ray/rollout.py": """
import ray
from sglang.srt.constants import WEIGHTS

@ray.remote
class RolloutManager:
    def _post_process_rewards(self, samples):
        assert len(samples) == self.args.n_samples_per_prompt * self.args.rollout_batch_size
        raw = [sample.get_reward_value(self.args) for sample in samples]
        return raw, [x - 0.5 for x in raw]
""",
}
"""A checkout of slime with the calls of its losses, and the simplest contents."""


@pytest.fixture
def slime(tmp_path):
    for name, text in CHECKOUT.items():
        file = tmp_path / "slime-0123abcd" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        # the packages of a checkout import Megatron and more
        (file.parent / "__init__.py").write_text("raise AssertionError('imported')\n")
    return tmp_path / "slime-0123abcd"
