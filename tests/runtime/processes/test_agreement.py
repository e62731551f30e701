"""Test that ranks with other packages, code, settings, data or models are found before the first step."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from realign.errors import ConfigError, RealignError
from realign.ranks import current
from realign.runtime import run
from realign.runtime.processes import agreement as checks
from realign.runtime.processes.agreement import by_rank, check_same, settings_of, software
from tests import checkpoint_runs
from tests.engines.distributed.run_ranks import run_ranks
from tests.tiny import save_tiny
from tests.toys import CountToken, Prompts, experiment

CURE = "All processes need the same packages, code, settings and data."
OWN = """\
from tests.toys import CountToken

class Own(CountToken):
    weight = {weight}
"""


def test_the_first_difference_is_named_with_both_values() -> None:
    same = {"torch": "2.13.0", "numpy": "2.4"}
    check_same(by_rank([same, dict(same)]))
    with pytest.raises(ConfigError) as raised:
        check_same({"the driver": same, "worker 0": same, "worker 1": same | {"torch": "2.9.0", "numpy": "1.26"}})
    assert str(raised.value) == f"torch: the driver has 2.13.0, but worker 1 has 2.9.0. {CURE}"
    with pytest.raises(ConfigError, match=r"steps: rank 0 has \(none\), but rank 1 has 3"):
        check_same(by_rank([same, same | {"steps": "3"}]))


@dataclass
class Strange(CountToken):
    """Reward with fields that refer to itself, have no order, are long, or are functions."""

    own: Any = None
    names: frozenset[str] = frozenset({"a", "b", "c"})
    table: list[int] = field(default_factory=lambda: list(range(1000)))
    function: Callable[..., Any] = save_tiny

    def __post_init__(self) -> None:
        self.own = self


@pytest.mark.parametrize(
    ("name", "value"), [("names", frozenset("b")), ("table", [0]), ("function", pytest.raises), ("own", 3)]
)
def test_settings_of_any_kind_are_compared(tmp_path, name, value) -> None:
    def facts(reward: Strange) -> dict[str, str]:
        interfaces = experiment(tmp_path).interfaces
        return settings_of(experiment(tmp_path, interfaces=interfaces | {"reward": reward}))

    other = Strange()
    check_same(by_rank([facts(Strange()), facts(other)]))
    setattr(other, name, value)
    with pytest.raises(ConfigError, match=rf"^interfaces\.reward\.{name}.*: rank 0 has .*, but rank 1 has "):
        check_same(by_rank([facts(Strange()), facts(other)]))


def of_two_ranks(folder: Path) -> dict[str, str]:
    """Return the errors of runs whose second rank differs. The current folder of each rank has its own files."""
    rank = current().rank
    os.chdir(folder / str(rank))
    sys.path.insert(0, os.getcwd())
    rewards = importlib.import_module("own").Own()
    interfaces = experiment(folder).interfaces

    def of_state(files: Path, **changes: Any) -> Any:
        return checkpoint_runs.experiment(files, folder / "state", "raft", **changes)

    attempts = {
        "seed": lambda: run(experiment(folder, seed=rank)),
        "field": lambda: run(experiment(folder, interfaces=interfaces | {"reward": CountToken(shuffle=rank == 1)})),
        "file": lambda: run(experiment(folder, interfaces=interfaces | {"reward": rewards})),
        "versions": lambda: run(experiment(folder)),
        "length": lambda: run(experiment(folder, data=Hidden(), evaluation=None)),
        "rows": lambda: run(of_state(Path("rows"))),
        "weights": lambda: run(of_state(Path("weights"))),
    }
    with other_versions(rank):
        versions = message_of(attempts.pop("versions"))
    return {"versions": versions, **{name: message_of(attempt) for name, attempt in attempts.items()}}


def save_files(folder: Path, *, rows: int, seed: int) -> None:
    folder.mkdir(parents=True)
    save_tiny(folder / "llama", seed=seed)
    lines = [{"prompt": f"{i}+{i + 1}=", "response": str(2 * i + 1)} for i in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Hidden(Prompts):
    """Prompts whose number is no setting."""

    def __len__(self) -> int:
        return 8 + current().rank


@contextmanager
def other_versions(rank: int) -> Iterator[None]:
    versions = software() | ({"transformers": "5.0"} if rank else {})
    with mock.patch.object(checks, "software", return_value=versions):
        yield


def message_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except RealignError as error:
        return f"{type(error).__name__} {error}"
    return ""


@pytest.mark.slow
def test_ranks_that_differ_in_anything_end_at_launch_with_one_error(tmp_path) -> None:
    for rank in range(2):
        save_files(tmp_path / str(rank) / "rows", rows=6 + rank, seed=0)
        save_files(tmp_path / str(rank) / "weights", rows=6, seed=rank)
        (tmp_path / str(rank) / "own.py").write_text(OWN.format(weight=rank))
    ranks = run_ranks(2, of_two_ranks, tmp_path)
    assert ranks[0] == ranks[1]
    said = ranks[0]
    assert said["seed"] == f"ConfigError seed: rank 0 has 0, but rank 1 has 1. {CURE}"
    assert said["field"] == f"ConfigError interfaces.reward.shuffle: rank 0 has False, but rank 1 has True. {CURE}"
    assert said["file"].startswith("ConfigError interfaces.reward._target_: rank 0 has own.Own in a file with sha256 ")
    own = software()["transformers"]
    assert said["versions"] == f"ConfigError transformers: rank 0 has {own}, but rank 1 has 5.0. {CURE}"
    assert said["length"] == f"DataError data: rank 0 has 8 rows, but rank 1 has 9 rows. {CURE}"
    assert said["rows"].startswith("DataError data: rank 0 has 6 rows with sha256 ")
    assert ", but rank 1 has 7 rows with sha256 " in said["rows"]
    assert said["weights"].startswith("DataError models.actor: weight 'model.embed_tokens.weight' of rank 1 differs")
    assert list(tmp_path.glob("*/metrics.jsonl")) == []
