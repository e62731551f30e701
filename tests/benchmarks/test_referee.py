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
        ("equal", peer) for peer in ("trl", "verl", "openrlhf", "skyrl", "slime")
    }
    assert {(row, peer) for row in ROWS for peer in PEERS} == CELLS.keys()


def test_every_key_of_a_cell_is_needed():
    """The batches are such that the peer's loss differs from the preset's wherever a cell says so."""
    for (row, peer), cell in EXECUTED.items():
        if cell.differs or cell.changes:
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


def test_the_losses_of_a_checkout_of_slime_run_and_what_is_missing_in_it_is_named(slime):
    assert referee.checkout(f"slime={slime}") == (slime, "0123abcd")
    batch = batches.batch("groups", 0)
    jobs = [
        {"id": "a", "batch": "b", "kind": "policy", "settings": {}},
        {"id": "c", "batch": "b", "kind": "policy", "settings": {"use_opsm": True}},
        {"id": "d", "batch": "b", "kind": "advantages", "settings": {}},
    ]
    losses, errors, tensors = referee.run_theirs("slime", slime, jobs, {"b": batch})
    leaf, mask = batch["new"].clone().requires_grad_(), batch["mask"]
    token = -(leaf - batch["old"]).exp() * (batch["rewards"] - 0.5)[:, None] * mask
    expected = (token.sum(-1) / mask.sum(-1)).mean()
    expected.backward()
    assert losses["a"] == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(tensors["a"], leaf.grad, atol=1e-6)
    assert torch.equal(tensors["d"], (batch["rewards"] - 0.5)[:, None] * mask)
    assert errors == {
        "c": "RuntimeError: the loss calls slime.utils.later.correction, which the referee replaced by a stub"
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("slime=SLIME/none", "slime/backends/megatron_utils/cp_utils.py is missing. A checkout of slime has "),
        ("slime=SLIME", "slime/utils/ppo_utils.py is missing. A checkout of slime has "),
        ("slime=", "expected slime=PATH, with PATH a checkout of slime"),
        ("slim=SLIME", "expected slime=PATH, with PATH a checkout of slime"),
    ],
)
def test_what_is_no_checkout_of_slime_is_refused_in_one_line(slime, monkeypatch, capsys, word, said):
    (slime / "slime/utils/ppo_utils.py").unlink()
    word = word.replace("SLIME", str(slime))
    monkeypatch.setattr(sys, "argv", ["referee", word])
    with pytest.raises(SystemExit, match="2"):
        referee.main()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert f"error: {word}: {said}" in line
