"""Test bugs in user code: the process prints the traceback with file and line, and exits with code 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import Command
from tests.tiny import save_tiny

SOURCE = """
from dataclasses import dataclass

from realign.interfaces.components import Objective


@dataclass
class WrongShape(Objective):
    def loss(self, tokens):
        return tokens.logprobs_T[:-1] * tokens.advantages_T  # a bug in the loss


@dataclass
class Constructor(Objective):
    scale: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        raise ValueError("a bug in the constructor")

    def loss(self, tokens):
        return tokens.logprobs_T


def score(prompt, response, row):
    return float(response == row["answer"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, prompts and a user's file."""
    folder = tmp_path_factory.mktemp("user")
    save_tiny(folder / "m")
    (folder / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    (folder / "own.py").write_text(SOURCE)
    return folder


def run(folder: Path, name: str, *overrides: str) -> tuple[int | None, str, str]:
    """Return exit code, stdout and stderr of a run of the user's file."""
    words = ["experiment=grpo", "models.actor.path=m", "models.actor.device=cpu", "data.path=prompts.jsonl", "steps=2"]
    words += ["batch_prompts=2", "interfaces.actor.generation.max_new_tokens=4", "interfaces.reward.workers=1"]
    words += [f"output_dir=runs/{name}"]
    if not any(word.startswith("interfaces.reward.function") for word in overrides):
        words.append("interfaces.reward.function=own.py:score")
    with Command(folder, *words, *overrides) as command:
        out, err = command.communicate()
    return command.returncode, out, err


def line_of(text: str) -> int:
    """Return the number of the line of `own.py` that contains a text."""
    return next(i for i, line in enumerate(SOURCE.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("override", "place", "error"),
    [
        pytest.param(
            "interfaces.actor.objective._target_=own.WrongShape",
            "a bug in the loss",
            "RuntimeError: The size of tensor",
            marks=pytest.mark.slow,
        ),
        ("interfaces.actor.objective._target_=own.Constructor", "a bug in the constructor", "ValueError: a bug in the"),
    ],
    ids=["objective", "constructor"],
)
def test_a_bug_in_a_component_ends_with_1_and_points_at_the_line_of_the_user(folder, override, place, error):
    code, _, err = run(folder, place.rpartition(" ")[2], override)
    assert code == 1, err
    assert "Traceback (most recent call last):" in err
    assert f'own.py", line {line_of(place)}, in ' in err
    assert error in err
    if "constructor" in place:
        assert "while building interfaces.actor.objective" in err
