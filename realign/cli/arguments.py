"""Arguments of the command line: options, a command, and overrides in the notations that people try first."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from realign.config.aliases import is_name, translate
from realign.config.command_line import prepare
from realign.config.errors import ConfigError, suggest
from realign.config.experiment import ExperimentConfig
from realign.config.files import GROUPS

if TYPE_CHECKING:
    from realign.config.composition import Composed

TRAIN = "train"
"""The default command."""
COMMANDS_WITH_OPTIONS = ("plan", "profile", "view", "eval")
"""Commands with options such as `plan.devices=8`."""
SWEEPS = ("-m", "--multirun")


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see realign --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options. Words without dashes are commands and overrides."""
    found = _Parser(prog="realign", add_help=False, allow_abbrev=False)
    found.add_argument("words", nargs="*")
    found.add_argument("--help", "-h", action="store_true")
    found.add_argument("--version", action="store_true")
    found.add_argument("--debug", action="store_true")
    found.add_argument("--config-dir", "-cd")
    found.add_argument("--multirun", "-m", action="store_true")
    found.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    found.add_argument("--resolve", action="store_true")
    found.add_argument("--package", "-p")
    found.add_argument("--info", "-i", nargs="?", const="all")
    found.add_argument("--format", choices=("text", "mermaid", "svg"))
    found.add_argument("--out")
    found.add_argument("--to")
    found.add_argument("--merge", action="store_true")
    found.add_argument("--push")
    found.add_argument("--break", dest="break_in")
    found.add_argument("--run")
    found.add_argument("--tolerance", type=float, default=0.0)
    found.add_argument("--shell-completion", choices=("bash", "zsh", "fish"))
    return found


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options and words of a command line, with flags of other tools as overrides.

    Raises:
        ConfigError: an option is unknown or lacks its value.
    """
    args, unknown = parser().parse_known_intermixed_args(with_overrides_for_flags(argv))
    if unknown:
        raise ConfigError(unknown_option(unknown))
    return args


def options() -> list[str]:
    """Return the options, such as `--help`."""
    return [text for action in parser()._actions for text in action.option_strings]


def with_overrides_for_flags(argv: Sequence[str]) -> list[str]:
    """Replace `--key value` and `--key=value` by `key=value`, if the key is one of realign or of another tool.

    `--key` alone is `key=true`. Dashes in the first name of a key count as underscores. Other words stay unchanged, so
    that the parser reports unknown options.
    """
    known = options()
    found: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--config-dir" and waiting:  # its value may be any text
            found += [word, waiting.pop(0)]
            continue
        key = _key(name)
        if not word.startswith("--") or f"--{name}" in known or key is None:
            found.append(word)
        elif equals:
            found.append(f"{key}={value}")
        elif waiting and _is_value(waiting[0]):
            found.append(f"{key}={waiting.pop(0)}")
        else:
            found.append(f"{key}=true")
    return found


def composed_line(words: Sequence[str], config_dir: str | None, base: str | None = None) -> Composed:
    """Compose the overrides of a command line, with names of other tools replaced.

    Prints a note about each replaced name on stderr.

    Args:
        words: Overrides.
        config_dir: As for `compose`.
        base: As for `compose_layers`.
    """
    from realign.config.composition import compose_layers

    overrides, composed = _translated(words, config_dir, base)
    return compose_layers(overrides, config_dir, base) if composed is None else composed.again(overrides)


def without_names(words: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the overrides of a sweep with names of other tools replaced. Prints a note about each name on stderr."""
    return _translated(words, config_dir, None)[0]


def _translated(words: Sequence[str], config_dir: str | None, base: str | None) -> tuple[list[str], Composed | None]:
    overrides, notes, composed = translate(prepare(words), config_dir, base)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    return overrides, composed


def command_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words that repeat a run on the command line; None for a sweep, which has no single command."""
    if any(word in SWEEPS for word in argv):
        return None
    return [word for word in with_overrides_for_flags(argv) if word not in (TRAIN, "--debug")]


def unknown_option(words: Sequence[str]) -> str:
    """Return the message about options that neither the parser nor the config knows."""
    name = words[0].removeprefix("--").partition("=")[0]
    keys = [option.removeprefix("--") for option in options() if option.startswith("--")]
    return f"unrecognized arguments: {' '.join(words)}{suggest(name, [*keys, *_roots()])}; see realign --help"


def _roots() -> list[str]:
    return [*(field.name for field in dataclasses.fields(ExperimentConfig)), *GROUPS]


def _key(name: str) -> str | None:
    """Return the config key of a flag's name; None if there is none."""
    first, dot, rest = name.partition(".")
    first = first.replace("-", "_")
    known = first in _roots() or is_name(f"{first}{dot}{rest}") or (dot and first in COMMANDS_WITH_OPTIONS)
    return f"{first}{dot}{rest}" if known else None


def _is_value(word: str) -> bool:
    """Return whether a word can be the value of the flag before it: a number may begin with a dash."""
    if "=" in word:
        return False
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."
