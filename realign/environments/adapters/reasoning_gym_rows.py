"""Tasks of reasoning-gym as rows of prompts, scored by `realign.rewards.reasoning` (needs the extra `tasks`).

    python -m realign.environments.adapters.reasoning_gym_rows OUTPUT.jsonl task=chain_sum size=1000 seed=0 max_terms=3

The arguments after the path are those of `rows`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from realign.environments.adapters import import_optional
from realign.errors import ConfigError
from realign.own_files import replace_text
from realign.safe_yaml import load_yaml


def rows(task: str, *, size: int = 1000, seed: int = 0, **settings: Any) -> Iterator[dict[str, Any]]:
    """Draw questions of a task. The columns are those that `realign.rewards.reasoning:verified` reads.

    Args:
        task: name of the task, such as `chain_sum`; or `composite`, with `datasets` in the settings.
        size: number of questions.
        seed: seed of the questions.
        settings: settings of the task in reasoning-gym.

    Raises:
        ConfigError: reasoning-gym is not installed, or does not accept the settings.
    """
    gym = import_optional("reasoning_gym", extra="tasks", user=f"task={task}")
    try:
        entries = gym.create_dataset(task, size=size, seed=seed, **settings)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"task={task}: reasoning-gym does not accept these settings ({error}).") from error
    for entry in entries:
        source = entry["metadata"].get("source_dataset", task)
        yield {"prompt": entry["question"], "answer": entry["answer"], "task": source, "metadata": entry["metadata"]}


def main(arguments: Sequence[str]) -> None:
    """Write the rows of a task to a file."""
    path, *given = arguments
    values = {name: load_yaml(value) for name, _, value in (part.partition("=") for part in given)}
    lines = [json.dumps(row, default=str) + "\n" for row in rows(**values)]
    replace_text(Path(path), "".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
