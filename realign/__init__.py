"""realign: a library for post-training language models, with one file per algorithm.

    run = realign.train("grpo", model="HuggingFaceTB/SmolLM2-135M-Instruct", data="prompts.jsonl", reward=score)
    run.plot()

Importing this package has no side effects: the names below import torch when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realign.errors import RealignError
    from realign.python_api import Run, chat, compare, load_experiment, train
    from realign.rewards.attack import check_reward
    from realign.runtime import Experiment

    __version__: str

HOMES = {
    "Experiment": "realign.runtime",
    "RealignError": "realign.errors",
    "Run": "realign.python_api",
    "chat": "realign.python_api",
    "check_reward": "realign.rewards.attack",
    "compare": "realign.python_api",
    "load_experiment": "realign.python_api",
    "train": "realign.python_api",
}
"""Module of each public name."""
__all__ = [
    "Experiment",
    "RealignError",
    "Run",
    "__version__",
    "chat",
    "check_reward",
    "compare",
    "load_experiment",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from realign.version import installed_version  # reads the metadata of the distribution

        return installed_version()
    if name not in HOMES:
        raise AttributeError(f"module 'realign' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
