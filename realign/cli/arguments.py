"""Arguments of the command line: commands, their options, and overrides in the notations that people try first.

The shell waits for this module at every press of the tab key, so it imports neither torch nor OmegaConf.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from realign.config.aliases import import_hint, is_name, tools_of, translate
from realign.config.command_line import prepare
from realign.config.errors import ConfigError, suggest
from realign.config.experiment import ExperimentConfig
from realign.config.files import GROUPS

if TYPE_CHECKING:
    from realign.config.composition import Composed

T = TypeVar("T")


class Command(NamedTuple):
    """A command of `realign`."""

    function: str
    """Module in `realign` and function, which receives the arguments and the words after the command. A name
    without a colon is that of a distribution, whose entry point in `realign.commands` is the function."""
    flags: tuple[str, ...] = ()
    """Options that apply to this command, and not to every one."""
    settings: str = ""
    """Class of its settings such as `plan.devices=8`; empty if it has none."""


TRAIN = "train"
"""The default command."""


def tolerance(text: str) -> float:
    """Return the value of `--tolerance`.

    Raises:
        argparse.ArgumentTypeError: it is no number, or negative.
    """
    with suppress(ValueError):
        if float(text) >= 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number of at least 0, such as 1e-4, found {text!r}")


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        TRAIN: Command("cli.train:train", ("config_dir", "multirun", "trials", "cfg", "info")),
        "check": Command("cli.check:check", ("config_dir",)),
        "graph": Command("cli.commands:graph", ("config_dir", "format", "out")),
        "plan": Command("realign-planner", ("config_dir",), "realign_planner.options.PlanOptions"),
        "profile": Command("cli.profile:profile", ("config_dir",), "realign.runtime.profiling.ProfileOptions"),
        "chat": Command("cli.chat:chat"),
        "eval": Command("cli.evaluate:evaluate", ("config_dir", "out"), "realign.cli.evaluate.EvalOptions"),
        "serve": Command("cli.serve:serve"),
        "export": Command("cli.export:export", ("to", "merge", "push")),
        "report": Command("cli.report:report", ("out",), "realign.report.data.ReportOptions"),
        "view": Command("cli.report:view", (), "realign.report.server.ViewOptions"),
        "compare": Command("cli.report:compare"),
        "why": Command("time_machine.why:why", ("test", "yes"), "realign.time_machine.why.WhyOptions"),
        "replay": Command("time_machine.commands:replay", ("out", "break_in", "rescore", "tolerance")),
        "fork": Command("time_machine.commands:fork_words"),
        "bisect": Command("time_machine.commands:bisect", ("run", "tolerance")),
        "import": Command("cli.import_config:import_config"),
        "help": Command("cli.commands:describe_keys", ("config_dir",)),
    }
)
ON_EXPERIMENT = (TRAIN, "check", "graph", "plan", "profile")
"""Commands that need overrides, which select an experiment."""
_SWEEPS = ("-m", "--multirun")
_SWITCH: Mapping[str, Any] = MappingProxyType({"action": "store_true"})
OPTIONS: Mapping[tuple[str, ...], Mapping[str, Any]] = MappingProxyType(
    {
        ("--help", "-h"): _SWITCH,
        ("--version",): _SWITCH,
        ("--debug",): _SWITCH,
        ("--multirun", "-m"): _SWITCH,
        ("--trials",): {"type": int},
        ("--resolve",): _SWITCH,
        ("--merge",): _SWITCH,
        ("--rescore",): _SWITCH,
        ("--test",): _SWITCH,
        ("--yes",): _SWITCH,
        ("--out", "-o"): {},
        ("--to",): {},
        ("--push",): {},
        ("--run",): {},
        ("--config-dir", "-cd"): {},
        ("--package", "-p"): {},
        ("--break",): {"dest": "break_in"},
        ("--tolerance",): {"type": tolerance, "default": 0.0},
        ("--cfg", "-c"): {"choices": ("job", "hydra", "all")},
        ("--info", "-i"): {"nargs": "?", "const": "all"},
        ("--format",): {"choices": ("text", "mermaid", "svg")},
        ("--shell-completion",): {"choices": ("bash", "zsh", "fish")},
    }
)
"""Names of each option, and the arguments of `add_argument`."""
OPTION_NAMES = tuple(name for names in OPTIONS for name in names)


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError`."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see realign --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options. Words without dashes are commands and overrides."""
    # Without abbreviations, so that an unknown flag is an error, and not the option that begins like it.
    reader = _Parser(prog="realign", add_help=False, allow_abbrev=False)
    reader.add_argument("words", nargs="*")
    for names, settings in OPTIONS.items():
        reader.add_argument(*names, **settings)
    return reader


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options and words of a command line, with flags of other tools as overrides.

    Raises:
        ConfigError: an option is unknown or lacks its value.
    """
    # Intermixed: overrides may stand between options, as people type them.
    args, unknown = parser().parse_known_intermixed_args(with_overrides_for_flags(argv))
    if unknown:
        raise ConfigError(unknown_option(unknown, tools_of([*unknown, *args.words])))
    return args


def with_overrides_for_flags(argv: Sequence[str]) -> list[str]:
    """Replace `--key value` and `--key=value` by `key=value`, if the key is one of realign or of another tool.

    `--key` alone is `key=true`. Dashes in the first name of a key count as underscores. Other words stay unchanged, so
    that the parser reports unknown options.
    """
    words: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--config-dir" and waiting:  # its value may be any text
            words += [word, waiting.pop(0)]
            continue
        if not word.startswith("--") or f"--{name}" in OPTION_NAMES or (key := _key(name)) is None:
            words.append(word)
        elif equals:
            words.append(f"{key}={value}")
        elif waiting and _is_value(waiting[0]):
            words.append(f"{key}={waiting.pop(0)}")
        else:
            words.append(f"{key}=true")
    return words


def check_flags(command: str, args: argparse.Namespace) -> None:
    """Check that the options of a command line apply to its command.

    Raises:
        ConfigError: one does not apply. The message names the commands to which it does.
    """
    for flag in dict.fromkeys(flag for known in COMMANDS.values() for flag in known.flags):
        if getattr(args, flag) and flag not in COMMANDS[command].flags:
            others = " and ".join(f"realign {name}" for name, known in COMMANDS.items() if flag in known.flags)
            shown = flag.removesuffix("_in").replace("_", "-")
            raise ConfigError(f"--{shown} does not apply to realign {command}; it applies to {others}")


def split_options(command: str, cls: type[T], words: Sequence[str]) -> tuple[T, list[str]]:
    """Return the settings of a command, such as `plan.devices=8`, and the remaining words.

    Args:
        command: Name of the command. Its settings begin with it and a period.
        cls: Dataclass of the settings.
        words: Overrides and settings.

    Raises:
        ConfigError: a setting is unknown, or its value is invalid. The message names the setting.
    """
    from realign.config.construct import fill

    own = [word for word in words if word.startswith(f"{command}.")]
    if wrong := [word for word in own if "=" not in word]:
        raise ConfigError(f"{wrong[0]}: an option has a value, such as {wrong[0]}=1.")
    values = _values([word.removeprefix(f"{command}.") for word in own])
    return fill(cls, values, command), [word for word in words if word not in own]


def settings_of(command: str, cls: type[T], words: Sequence[str]) -> T:
    """Return the settings of a command on one model: `MODEL key=value ...`.

    Args:
        command: Name of the command, for messages.
        cls: Dataclass of the settings, with the model spec as the field `model`.
        words: The command line after the command.

    Raises:
        ConfigError: the command line names no model or several, or a key or value is invalid.
    """
    from realign.cli.export import model_or_run
    from realign.config.construct import fill

    paths = [word for word in words if "=" not in word]
    if len(paths) != 1:
        raise ConfigError(
            f"realign {command} expects one model (a folder or hub name) and key=value settings, found "
            f"{paths or 'none'}"
        )
    values = _values([word for word in words if "=" in word])
    model = values.get("model", {})
    values["model"] = {"path": model_or_run(command, paths[0]), **(model if isinstance(model, Mapping) else {})}
    return fill(cls, values, "")


def _values(words: Sequence[str]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist(list(words)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(words)}: {error}") from error
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def compose_line(words: Sequence[str], config_dir: str | None, base: str | None = None) -> Composed:
    """Compose the overrides of a command line, with names of other tools replaced.

    Prints a note about each replaced name on stderr.

    Args:
        words: Overrides.
        config_dir: As for `compose`.
        base: As for `compose_layers`.
    """
    from realign.config.composition import compose_layers

    overrides, composed = _translate(words, config_dir, base)
    return compose_layers(overrides, config_dir, base) if composed is None else composed.again(overrides)


def without_names(words: Sequence[str], config_dir: str | None) -> list[str]:
    """Return the overrides of a sweep with names of other tools replaced. Prints a note about each name on stderr."""
    return _translate(words, config_dir, None)[0]


def _translate(words: Sequence[str], config_dir: str | None, base: str | None) -> tuple[list[str], Composed | None]:
    overrides, notes, composed = translate(prepare(words), config_dir, base)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    return overrides, composed


def command_words(argv: Sequence[str]) -> list[str] | None:
    """Return the words that repeat a run on the command line; None for a sweep, which has no single command."""
    if any(word in _SWEEPS for word in argv):
        return None
    return [word for word in with_overrides_for_flags(argv) if word not in (TRAIN, "--debug")]


def unknown_option(words: Sequence[str], tools: Sequence[str] = ()) -> str:
    """Return the message about options that neither the parser nor the config knows.

    Args:
        words: The options.
        tools: Tools that have other names of the command line.
    """
    name = words[0].removeprefix("--").partition("=")[0]
    keys = [option.removeprefix("--") for option in OPTION_NAMES if option.startswith("--")]
    end = import_hint(tools) if tools else "see realign --help"
    return f"unrecognized arguments: {' '.join(words)}{suggest(name, [*keys, *_roots()])}; {end}"


def _roots() -> list[str]:
    return [*(field.name for field in dataclasses.fields(ExperimentConfig)), *GROUPS]


def _key(name: str) -> str | None:
    """Return the config key of a flag's name; None if there is none."""
    first, dot, rest = name.partition(".")
    first = first.replace("-", "_")
    key = f"{first}{dot}{rest}"
    is_setting = bool(dot) and first in COMMANDS and COMMANDS[first].settings
    return key if first in _roots() or is_name(key) or is_setting else None


def _is_value(word: str) -> bool:
    """Return whether a word can be the value of the flag before it: a number may begin with a dash."""
    if "=" in word:
        return False
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."
