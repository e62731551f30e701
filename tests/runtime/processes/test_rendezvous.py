"""Test runs with several processes: their output files, and how they end together."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import yaml

from realign.cli import commands as cli
from realign.ranks import current
from realign.records.checkpoint.folder import list_checkpoints
from realign.records.checkpoint.last_failure import last_failure
from realign.runtime.processes import rendezvous
from realign.runtime.processes.agreement import software
from tests.checkpoint_runs import untimed
from tests.config_parts import write_experiment
from tests.engines.distributed.run_ranks import run_ranks
from tests.torchrun_ranks import ARGS, STEPS, Ranks, assert_same_as_whole, free_port, torchrun

FAULTY = """\
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
import torch
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
            if self.fault == "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\\nFurther lines.")
            if not Path("killed").exists():
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step(model, data, mb_spec)

def reward(prompt, response, row):
    return float(len(response))
"""
KILLED = """\
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from realign.testing import BigramEngine
from tests.config_parts import Bigram, CountThrees

class Killed(BigramEngine):
    phase = ""
    trained = False

    def generate(self, data, config, *, seed):
        kill_in(self, "rollout" if self.trained else "evaluation")
        return super().generate(data, config, seed=seed)

    def train_batch(self, *arguments):
        if self.trained:
            kill_in(self, "training")
        self.trained = True
        return super().train_batch(*arguments)

    def save(self, path):
        kill_in(self, "saving")
        super().save(path)

@dataclass
class Scoring(CountThrees):
    phase: str = ""
    calls = 0

    def inference(self, model, data, mb_spec):  # on rank 0 only, for which the others wait
        Scoring.calls += 1
        if self.phase and Scoring.calls == 3:  # of step 2, after the evaluation and step 1
            while not Path("runs/bigram/checkpoints/step_000001").exists():
                time.sleep(0.01)
            os.kill(os.getpid() if self.phase == "scoring" else int(Path("rank 1").read_text()), signal.SIGKILL)
        return super().inference(model, data, mb_spec)

def kill_in(engine, phase):
    if engine.phase == phase and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

@dataclass
class Killing(Bigram):
    phase: str = ""

    def load(self, name, *, seed):
        kill_in(self, "loading")
        Path(f"rank {os.environ['RANK']}").write_text(str(os.getpid()))
        model = super().load(name, seed=seed)
        model.engine.__class__ = Killed
        model.engine.phase = self.phase
        return model
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
    (tmp_path / "killing.py").write_text(KILLED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("slow", None)  # another test may have imported its own file of this name
    return tmp_path


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_a_rank_that_hangs_ends_all_with_one_line(here):
    codes, said = Ranks(here, *FAULTS, "interfaces.actor.fault=hang", "runtime.rpc_timeout_minutes=0.1").ended()
    assert codes == [75, 75]
    failure = last_failure(Path("runs/bigram"))
    assert "".join(said) == f"error: {failure.message}\n"
    exceeded = r"rank [01] of 2: call 'actor_train' exceeded runtime\.rpc_timeout_minutes=0\.1\. Restart the run"
    assert re.match(exceeded, failure.message)
    assert (failure.exit_code, failure.count) == (75, 1)


@pytest.mark.slow
def test_a_rank_out_of_memory_ends_both_with_one_line_and_the_record_of_that_rank(here):
    codes, said = Ranks(here, *FAULTS, "interfaces.actor.fault=out of memory").ended()
    message = "RPC 'actor_train' on rank 1 of 2: out of memory (CUDA out of memory. Tried to allocate 20.00 GiB). "
    message += "Lower microbatch.max_tokens_per_microbatch=16384."
    assert (codes, "".join(said)) == ([2, 2], f"error: {message}\n")
    failure = last_failure(Path("runs/bigram"))
    assert (failure.exit_code, failure.message, failure.count) == (2, message, 1)


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_other_and_both_can_be_started_again(here):
    words = (*FAULTS, "interfaces.actor.fault=kill", "checkpoint.every_steps=1", "resume=auto")
    done, left = torchrun(here, *words, options=["--max-restarts=1"])
    assert (done.returncode, left) == (0, []), done.stderr
    # the launcher's SIGTERM may come before rank 0 notices by itself, and then it has nothing to say
    assert done.stderr.count("rank 0 of 2 lost another rank, which was killed or whose machine failed") <= 1
    assert "Traceback (most recent call last)" not in done.stderr.partition("torch/distributed/elastic")[0]
    assert "step_000001. Next step: 2 of 4." in done.stdout
    assert [record["step"] for record in untimed(Path("runs/bigram/metrics.jsonl"))] == [0, 1, 2, 3, 4]
    assert last_failure(Path("runs/bigram")) is None  # the run succeeded in the end


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["loading", "scoring", "training"])
def test_a_rank_that_is_killed_in_any_phase_ends_the_other_with_one_message_and_exit_code_75(here, phase):
    evaluation = "evaluation={data: {_target_: tests.config_parts.Prompts, n: 3}, every_steps: 100}"
    model = ("models.actor._target_=killing.Killing", f"+models.actor.phase={phase}")
    scoring = phase if phase in ("rewards", "scoring") else ""
    reward = ("interfaces.reward._target_=killing.Scoring", f"+interfaces.reward.phase='{scoring}'")
    words = ("--config-dir=conf", "experiment=bigram", "steps=3", "checkpoint.every_steps=1")
    codes, said = Ranks(here, *words, *model, *reward, evaluation).ended()
    left = 1 if phase == "scoring" else 0  # of rank 0, which alone scores
    assert (codes[left], codes[1 - left]) == (75, -signal.SIGKILL), said
    (line,) = re.findall(r"^error: .*", said[left], re.MULTILINE)
    # torch says from another thread that the store of rank 0 is gone, before or after our line
    assert left or said[left] == f"{line}\n"
    assert "Traceback" not in said[left]
    assert line.startswith(f"error: rank {left} of 2 lost another rank, which was killed or whose machine failed")
    assert line.endswith("Restart the run with resume=auto.")
    # the last checkpoint comes after the models of `final`
    done = {"rollout": 1, "rewards": 1, "scoring": 1, "training": 1, "saving": 2}.get(phase)
    checkpoints = [checkpoint.step for checkpoint in list_checkpoints(Path("runs/bigram/checkpoints"))]
    assert checkpoints[-1:] == ([] if done is None else [done])


ALL = (0, 1, 2)


def command(port: int, ranks: Sequence[int] = ALL, **environment: str) -> tuple[int, str] | None:
    """Return exit code and stderr of a command line of these ranks; None on other ranks."""
    rank = current().rank
    ended = None
    if rank in ranks:
        launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "3"}
        err = io.StringIO()
        changed = mock.patch.dict(os.environ, {**launched, "LOCAL_RANK": str(rank), **environment})
        with changed, redirect_stdout(io.StringIO()), redirect_stderr(err):
            ended = cli.main(["--version"]), err.getvalue()
    current().barrier()  # the first rank hosts the store
    return ended


def failed_starts(ports: Mapping[str, int]) -> dict[str, tuple[int, str] | None]:
    last = current().rank == 2
    starts = {}
    versions = software() | ({"torch": "2.9.0"} if last else {})
    with mock.patch.object(rendezvous, "software", return_value=versions):
        starts["versions"] = command(ports["versions"])
    starts["number of ranks"] = command(ports["number of ranks"], WORLD_SIZE="4" if last else "3")
    starts["same rank"] = command(ports["same rank"], **({"RANK": "1"} if last else {}))
    starts["rank"] = command(ports["rank"], [2], RANK="3")
    starts["port"] = command(ports["port"], MASTER_PORT="none")
    starts["size"] = command(ports["size"], WORLD_SIZE="three")
    with (
        mock.patch.object(rendezvous, "NEARBY", timedelta(seconds=1)),
        mock.patch.object(rendezvous, "PATIENCE_S", 0.1),
    ):
        starts["absent"] = command(ports["absent"], [0, 1])
        starts["no server"] = command(ports["no server"], [1, 2], LOCAL_RANK=str(current().rank - 1))
        with socket.socket() as other:
            if current().leader:
                other.bind(("127.0.0.1", ports["port in use"]))
                other.listen()
            starts["port in use"] = command(ports["port in use"], [0])
    return starts


@pytest.mark.slow
def test_errors_before_all_ranks_are_connected_are_printed_once_with_one_exit_code():
    of_settings = ("versions", "number of ranks", "same rank", "rank", "port", "size")
    of_network = ("absent", "no server", "port in use")
    names = (*of_settings, *of_network)
    ports = {name: free_port() for name in names}
    ranks = run_ranks(3, failed_starts, ports)
    ended = {name: [each[name] for each in ranks if each[name] is not None] for name in names}
    texts = {}
    for name, of_ranks in ended.items():
        (texts[name],) = (text for _, text in of_ranks if text)
        assert texts[name].count("\n") == 1, name
    codes = {name: {code for code, _ in of_ranks} for name, of_ranks in ended.items()}
    assert codes == {name: {2} for name in of_settings} | {name: {75} for name in of_network}
    assert re.match(r"error: torch: rank 0 has 2\.\S+, but rank 2 has 2\.9\.0\.", texts["versions"])
    assert texts["number of ranks"].startswith("error: WORLD_SIZE: rank 0 has 3, but rank 2 has 4.")
    assert texts["same rank"].startswith("error: RANK=1: another process has the same rank.")
    assert texts["rank"].startswith("error: RANK=3: must be at least 0 and below WORLD_SIZE=3.")
    assert texts["port"].startswith("error: MASTER_PORT='none': must be a port number.")
    assert texts["size"].startswith("error: WORLD_SIZE='three': must be an integer.")
    assert texts["absent"].startswith("error: WORLD_SIZE=3: rank 2 of 3 did not connect within 1 seconds.")
    assert texts["absent"].endswith("unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT.\n")
    address = rf"MASTER_ADDR=127\.0\.0\.1, MASTER_PORT={ports['no server']} within 1 seconds"
    assert re.match(rf"error: rank 1 of 3 could not connect to {address} \(.*refused\)", texts["no server"])
    assert re.match(r"error: rank 0 of 3 could not listen .*address already in use", texts["port in use"])
