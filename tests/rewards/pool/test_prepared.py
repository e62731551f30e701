from typing import Any

import pytest

from realign.errors import ConfigError
from realign.rewards import RewardPool
from realign.rewards.pool.prepared import Prepared


class Shift(Prepared):
    """A function that returns how often it was prepared."""

    def __init__(self, times: int = 0) -> None:
        self.times = times

    def prepared(self) -> "Shift":
        if self.times < 0:
            raise ConfigError("the machine lacks something")
        return Shift(self.times + 1)

    @property
    def note(self) -> str:
        return f"prepared {self.times} time"

    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> float:
        return float(self.times)


by_name = Shift()
SETTINGS: dict[str, Any] = {"timeout_s": 60.0, "memory_mb": None, "max_failed_fraction": 0.0}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("function", [f"{__name__}:by_name", Shift()])
def test_a_pool_prepares_a_function_once_before_the_workers_start(function, workers):
    with RewardPool(function, workers=workers, **SETTINGS) as pool:
        assert pool.score(["", ""], ["", ""], [{}, {}]).values == [1.0, 1.0]
        assert pool.note == "prepared 1 time"


def test_a_function_that_cannot_be_prepared_ends_the_run_before_any_call():
    with pytest.raises(ConfigError, match="the machine lacks something"):
        RewardPool(Shift(-1), workers=1, **SETTINGS)
