"""Test communication between ranks, in one process and in three."""

from __future__ import annotations

import pytest

from realign.errors import ConfigError
from realign.ranks import Ranks, current, is_of_another_rank, ranks_of_launcher


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
