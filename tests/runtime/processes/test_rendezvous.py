"""Test runs with several processes: their output files, and how they end together."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from realign.cli import commands as cli
from realign.runtime.checkpoint.folder import list_checkpoints
from tests.config_parts import write_experiment
from tests.runtime.checkpoint.test_state import untimed
from tests.runtime.processes.test_signals import ARGS, STEPS, assert_same_as_whole
from tests.torchrun_ranks import Ranks, torchrun

FAULTY = """\
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from realign.interfaces.grpo import GRPOActorInterface

@dataclass
class Faulty(GRPOActorInterface):
    fault: str = ""

    def train_step(self, model, data, mb_spec):
        if model.version == 1 and os.environ["RANK"] == "1":
            if self.fault == "raise":
                raise KeyError("a bug on one rank")
            if self.fault == "hang":
                time.sleep(1000)
            if not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(model, data, mb_spec)

def reward(prompt, response, row):
    return float(len(response))
"""
STOPPING = """\
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from tests.config_parts import CountThrees

@dataclass
class Slow(CountThrees):
    calls: int = 0

    def inference(self, model, data, mb_spec):
        self.calls += 1
        time.sleep(0.02)
        if self.calls == 3 and Path("stop").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return super().inference(model, data, mb_spec)
"""
FAULTS = ("--config-dir=conf", "experiment=bigram", "steps=4", "interfaces.actor._target_=faulty.Faulty")
REWARD = "interfaces.reward={_target_: realign.interfaces.rule_reward.RuleRewardInterface, function: 'faulty:reward'}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_experiment(tmp_path / "conf")
    (tmp_path / "slow.py").write_text(STOPPING)
    (tmp_path / "faulty.py").write_text(FAULTY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("slow", None)  # another test may have imported its own file of this name
    return tmp_path


def test_a_run_goes_from_one_process_to_two_and_back_bit_for_bit_and_a_signal_to_one_rank_stops_both(here):
    Path("stop").touch()
    assert cli.main([*ARGS, "output_dir=run"]) == 143
    Path("stop").unlink()
    ranks = Ranks(here, *ARGS, "output_dir=run", "resume=auto", "checkpoint.every_steps=null")
    ranks.wait_for(Path("run/metrics.jsonl"), 7)
    ranks.processes[1].send_signal(signal.SIGTERM)
    codes, said = ranks.ended()
    assert codes == [143, 143], said
    older, newest = list_checkpoints(Path("run/checkpoints"))
    assert older.step == 3
    assert "".join(said).count(f"stopped after step {newest.step} of {STEPS}. Continue with resume=auto.") == 1
    assert untimed(Path("run/metrics.jsonl"))[-1]["step"] == newest.step < STEPS
    assert not Path("run/final").exists()
    assert cli.main([*ARGS, "output_dir=run", "resume=auto"]) == 0
    assert_same_as_whole("run")
    assert yaml.safe_load(Path("run/config.yaml").read_text())["steps"] == STEPS


def test_trap_g5_a_rank_that_raises_ends_all_with_the_first_traceback_once(here):
    done, left = torchrun(here, *FAULTS, "interfaces.actor.fault=raise", REWARD)
    ended = time.time()
    assert (done.returncode, left) == (1, [])
    assert done.stderr.count("KeyError: 'a bug on one rank'") == 1
    ours, _, torchs = done.stderr.partition("torch/distributed/elastic")
    assert ours.count("Traceback (most recent call last)") == 1
    assert re.match(r"rank 1 of 2 failed first, in call 'actor_train' for \d+ s on SequenceSample\(4 prompts", ours)
    assert "input_ids        [96]" in ours
    assert "KeyError" not in torchs
    # rank 0 has waited for rank 1 since that time
    assert ended - Path("runs/bigram/metrics.jsonl").stat().st_mtime < 30


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_the_operations_of_all_ranks(here):
    codes, said = Ranks(here, *FAULTS, "interfaces.actor.fault=hang", "runtime.rpc_timeout_minutes=0.1").ended()
    assert codes == [75, 75]
    text = "".join(said)
    assert text.startswith("error: call 'actor_train' exceeds runtime.rpc_timeout_minutes=0.1. The run ends.\nrank 0: ")
    assert re.search(r"\nrank 1: call 'actor_train' for \d+ s in Faulty.train_step \(.*faulty.py:\d+\) on Seq", text)
    assert "  input_ids        [96]" in text
    assert text.count("error: ") == 1


def test_a_rank_that_is_killed_ends_the_other_and_both_can_be_started_again(here):
    words = (*FAULTS, "interfaces.actor.fault=kill", "checkpoint.every_steps=1", "resume=auto")
    done, left = torchrun(here, *words, options=["--max-restarts=1"])
    assert (done.returncode, left) == (0, []), done.stderr
    assert done.stderr.count("rank 0 of 2 lost another rank, which was killed or whose machine failed") == 1
    assert "Traceback (most recent call last)" not in done.stderr.partition("torch/distributed/elastic")[0]
    assert "step_000001. Next step: 2 of 4." in done.stdout
    assert [record["step"] for record in untimed(Path("runs/bigram/metrics.jsonl"))] == [0, 1, 2, 3, 4]
