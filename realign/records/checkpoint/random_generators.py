"""The global random number generators: seed them, and save and restore their state."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from realign.api.seeds import derive_seed


def seed_random(seed: int) -> None:
    """Seed the global random number generators, which only user code such as a reward function draws from."""
    random.seed(derive_seed(seed, "python"))
    # numpy's legacy generator takes 32 bits only
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))


def random_state() -> dict[str, Any]:
    """Return the state of the global random number generators."""
    kind, words, place = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "python": [kind, list(words), place],
        "numpy": {
            **{key: value for key, value in numpy.items() if key != "state"},
            "key": numpy["state"]["key"].tolist(),
            "pos": int(numpy["state"]["pos"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Restore the state that `random_state` returned. CUDA devices without saved state are unchanged."""
    kind, words, place = state["python"]
    random.setstate((kind, tuple(words), place))
    numpy = dict(state["numpy"])
    numpy["state"] = {"key": np.array(numpy.pop("key"), dtype=np.uint32), "pos": numpy.pop("pos")}
    np.random.set_state(numpy)
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        # a resumed run may have fewer GPUs than the one that wrote the state
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)
