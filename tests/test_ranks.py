"""Test communication between ranks, in one process and in three."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from realign.cli import commands as cli
from realign.errors import ConfigError
from realign.ranks import Ranks, current, is_of_another_rank, ranks_of_launcher
from realign.records.checkpoint.saved_models import Saves
from tests.engines.distributed.run_ranks import run_ranks
from tests.torchrun_ranks import free_port


def test_one_process_is_its_own_leader_and_needs_nobody() -> None:
    alone = current()
    assert (alone, alone.leader) == (Ranks(0, 1), True)
    assert alone.broadcast("x") == "x"
    assert alone.gather(3) == [3]
    assert (alone.first(0), alone.first(None)) == (0, None)
    alone.barrier()
    assert (alone.lead(lambda: 5), alone.together(lambda: 6)) == (5, 6)
    for call in (alone.lead, alone.together):
        with pytest.raises(ZeroDivisionError) as caught:
            call(lambda: 1 / 0)
        assert not is_of_another_rank(caught.value)


def test_ranks_are_those_of_the_launcher(monkeypatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        assert ranks_of_launcher() == Ranks()
        monkeypatch.setenv(name, value)
    assert ranks_of_launcher() == Ranks(1, 3)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks_of_launcher() == Ranks()
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in ("3", "-1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ConfigError, match=rf"RANK={rank}: must be at least 0 and below WORLD_SIZE=3\."):
            ranks_of_launcher()
    monkeypatch.setenv("WORLD_SIZE", "x")
    with pytest.raises(ConfigError, match=r"must be an integer. Start the run with torchrun, or unset"):
        ranks_of_launcher()


class Picky(Exception):
    """Exception that pickle cannot restore."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raised_by(action) -> tuple[str, str, bool]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), is_of_another_rank(error)
    return "", "", False


def fails_on(rank: int, error: Exception):
    def action() -> int:
        if current().rank == rank:
            raise error
        return current().rank

    return action


def saved(folder: Path) -> list[str]:
    """Return the results of `Saves` for a working disk, a disk too full for models, and an impossible folder."""
    ranks = current()
    mine = folder if ranks.leader else folder / f"not_of_{ranks.rank}"
    written = []

    def write(path: Path) -> None:
        if path.is_dir():
            (path / "weights").write_text("1")
        written.append(path.name)
        ranks.together(fails_on(1, OSError("disk full")) if len(written) == 2 else lambda: None)

    saves = Saves(mine, write, 1, ranks=ranks)
    for step in (1, 2):
        saves.after_step(step, {}, last=False)
    if ranks.leader:
        (folder / "file").touch()
        saves.folder = folder / "file"  # no folder can be created there
    saves.after_step(3, {}, last=False)
    return [*saves.state_dict()["made"], *written]


def command(ports: list[int], *words: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command line of three ranks."""
    ranks, out, err = current(), io.StringIO(), io.StringIO()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.pop())}
    os.environ |= {**address, "RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(list(words))
    ranks.barrier()  # the first rank hosts the store
    return code, out.getvalue(), err.getvalue()


def scenario(folder: Path, ports: list[int]) -> dict[str, object]:
    ranks, counted = current(), []
    outcomes: dict[str, object] = {
        "ranks": (ranks.rank, ranks.size, ranks.leader),
        "broadcast": ranks.broadcast(f"of {ranks.rank}"),
        "gather": ranks.gather(ranks.rank**2),
        "first": (ranks.first(ranks.rank or None), ranks.first(None)),
        "lead": ranks.lead(lambda: counted.append(ranks.rank) or "judged"),
        "counted": counted,
        "lead raises": raised_by(lambda: ranks.lead(fails_on(0, KeyError("x")))),
        "picky": raised_by(lambda: ranks.lead(fails_on(0, Picky(1, 2)))),
        "together": ranks.together(lambda: ranks.rank),
        "one of all": raised_by(lambda: ranks.together(fails_on(1, OSError(28, "full")))),
        "saved": saved(folder),
    }
    sys.argv = ["realign"]
    outcomes["mistake"] = command(ports, "experiment=bigrm")
    outcomes["version"] = command(ports, "--version")
    outcomes["sweep"] = command(ports, "-m", "experiment=sft_arithmetic", "seed=1,2")
    return outcomes


@pytest.mark.slow
def test_three_processes_agree(tmp_path) -> None:
    ranks = run_ranks(3, scenario, tmp_path, [free_port() for _ in range(3)])
    by_name = {name: [each[name] for each in ranks] for name in ranks[0]}
    assert by_name["ranks"] == [(0, 3, True), (1, 3, False), (2, 3, False)]
    assert by_name["broadcast"] == ["of 0"] * 3
    assert by_name["gather"] == [[0, 1, 4]] * 3
    assert by_name["first"] == [(1, None)] * 3
    assert by_name["lead"] == ["judged"] * 3
    assert by_name["counted"] == [[0], [], []]
    assert by_name["lead raises"] == [("KeyError", "'x'", rank > 0) for rank in range(3)]
    others = [("RuntimeError", "Picky: 1 and 2", True)] * 2
    assert by_name["picky"] == [("Picky", "1 and 2", False), *others]
    assert by_name["together"] == [0, 1, 2]
    assert by_name["one of all"] == [("OSError", "[Errno 28] full", rank != 1) for rank in range(3)]

    made = ["step_000001"]
    assert by_name["saved"] == [[*made, "new", "new"], *[[*made, "step_000001", "step_000002"]] * 2]
    assert {path.name for path in tmp_path.iterdir()} == {"step_000001", "file", "files.jsonl"}

    assert [code for code, _, _ in by_name["mistake"]] == [2, 2, 2]
    assert [out for _, out, _ in by_name["mistake"]] == [""] * 3
    (said,) = filter(None, (err for _, _, err in by_name["mistake"]))
    assert said.startswith("error: unknown experiment 'bigrm'")
    assert said.count("\n") == 1
    assert [code for code, _, _ in by_name["version"]] == [0, 0, 0]
    assert [bool(out) for _, out, _ in by_name["version"]] == [True, False, False]
    assert [code for code, _, _ in by_name["sweep"]] == [2, 2, 2]
    assert by_name["sweep"][0][2].startswith("error: -m: a sweep cannot run under torchrun")
