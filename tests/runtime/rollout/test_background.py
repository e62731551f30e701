from __future__ import annotations

from pathlib import Path

import pytest

from realign.runtime import Async, OnUpdate
from realign.runtime.local import LocalRuntime
from tests.runtime.test_local import BigramModel, experiment


class Copied(BigramModel):
    """A model spec whose background sampler is the arguments it was called with."""

    def background_sampler(self, name: str, *, seed: int, recompute: bool) -> tuple[str, int, bool]:
        return name, seed, recompute


@pytest.mark.parametrize(("on_update", "recompute"), [(OnUpdate.keep, False), (OnUpdate.recompute, True)])
def test_the_sampler_keeps_or_recomputes_the_cache_as_the_rollout_says(
    tmp_path: Path, on_update: OnUpdate, recompute: bool
) -> None:
    run = LocalRuntime(experiment(tmp_path, models={"actor": Copied()}, seed=3))
    assert run._background_sampler(Async(2, on_update), "actor") == ("actor", 3, recompute)
    run.close()
