"""The `realign` command line: read it, and call the function of its command. Imports torch and Hydra lazily."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from realign.cli.arguments import (
    COMMANDS,
    ON_EXPERIMENT,
    TRAIN,
    check_flags,
    command_words,
    read_arguments,
    without_names,
)
from realign.cli.exit_codes import full_errors, plain_warnings, run_guarded
from realign.cli.train import alone, build_experiment_of, is_one_of_many, run_on_ranks
from realign.config.aliases import COMMANDS as OTHER_COMMANDS
from realign.config.aliases import IMPORTED, import_hint
from realign.config.command_line import is_file
from realign.config.errors import ConfigError, nearest, suggest
from realign.config.files import list_algorithms, list_experiments
from realign.console import lasting_console
from realign.errors import ExitCode
from realign.own_files import make_folder, replace_text
from realign.signals import raise_on_signals

if TYPE_CHECKING:
    from realign.cli.train import Start

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that configure the memory allocator of torch."""
BRIEF = ("check", "graph")
"""Commands that import torch for a few seconds of work."""
_ANNOUNCED = (TRAIN, "check", "profile")
"""Commands whose first line appears at once, before torch is imported."""
_PRINTING = ("--cfg", "-c", "--info", "-i", "--help", "-h", "--version", "--shell-completion")
"""Options whose output is read by programs."""
COMPLETE = "--complete"
"""First argument of a call by a completion script."""
_MENU = """\
realign: a library for post-training language models

  realign experiment=NAME key=value ...   train
  realign check experiment=NAME ...       run everything except training
  realign help [KEY]                      describe config keys, such as interfaces.actor.kl
  realign chat MODEL                      chat with a saved model
  realign eval MODEL key=value ...        evaluate a saved model
  realign report RUN                      write the report of a run as an HTML file
  realign --help                          all commands, experiments and algorithms

First run (a few seconds): python -m realign.demo.arithmetic, then
  realign experiment=sft_arithmetic steps=20
"""
_HELP = """\
realign: a library for post-training language models

Usage
  realign <overrides>             train; also realign train <overrides>
  realign ./my.yaml <overrides>   train with your own experiment file
  realign check <overrides>       run everything except training: graph, data, shapes, rewards, devices, disk
  realign graph <overrides>       show the dataflow graph: [--format text|mermaid|svg] [--out FILE]
  realign plan <overrides>        compare placements on a cluster: [plan.devices=8 ...] (pip install realign-planner)
  realign profile <overrides>     profile a few steps with torch: [profile.start=2 profile.steps=2]
  realign chat MODEL              chat with a model, or answer the lines of stdin: [generation.temperature=0.7 ...]
  realign eval MODEL <overrides>  evaluate a saved model: [evaluation.data.path=FILE ... --out DIR eval.sets=[NAME]]
  realign serve MODEL             serve a model to OpenAI clients: [port=8000 ...], key in REALIGN_API_KEY
  realign export RUN_OR_FOLDER    write a model with its model card: --to DIR, --push HUB_NAME, [--merge] an adapter
  realign report RUN...           write curves, samples and tokens to an HTML file: [--out FILE report.samples_mb=3]
  realign view [RUNS]             serve the runs in a folder: [view.port=8765 view.host=127.0.0.1 view.samples_mb=3]
  realign compare RUN RUN...      compare metrics and settings of runs
  realign why RUN...              say why a run does not learn: [FILE.py:SYMPTOM ...] of your own. [--test --yes] forks
                                  it once per change, or per key=value: [why.step=0 why.steps=10]
  realign replay RUN STEP         recompute a step, bit for bit: [--out DIR] [--break interfaces.actor] opens a debugger
                                  with recorded rewards and episodes; [--rescore] computes them again
  realign fork RUN STEP <overrides>   continue a run from a step with other settings, in a new folder
  realign bisect RUN RUN          find the first step, key, response and token at which two runs part: [--tolerance X]
                                  with one run, --run COMMAND finds the first step for which a command fails
  realign import TOOL FILE        translate a config, script or command of trl, verl, openrlhf or areal, and compare
                                  the losses: [--out experiment.yaml]
  realign help [<overrides>] [KEY]  describe config keys: type, default, valid values, meaning
  realign <overrides> resume=auto   resume a run that was stopped or killed
  realign -m <overrides>          sweep: one run for each combination of a=1,2 b=x,y
  realign --cfg job <overrides>   print the composed config
  torchrun --nproc-per-node N -m realign <overrides>   train on N ranks

  <overrides> are key=value. Start from experiment=NAME, and add algorithm=NAME to change its algorithm. Every field of
  a component can be set, whether or not a YAML file lists it. `--key value` means key=value.

Options
  --config-dir DIR    your own folder with experiment/NAME.yaml and algorithm/NAME.yaml
  --shell-completion bash|zsh|fish   print a script for tab completion: eval "$(realign --shell-completion bash)"
  --debug             show the traceback of every error (like HYDRA_FULL_ERROR=1)
  --version, --help

Exit codes
  0    success, or no steps left to do
  1    a bug; the traceback is on stderr
  2    an error that a restart does not fix; one line on stderr
  75   a failure that restarting with resume=auto fixes, such as a full disk or a lost worker
  130  stopped by Ctrl-C; 143: by SIGTERM; 129: by a closed terminal; 138: by SIGUSR1. The first signal finishes the
       step and saves a checkpoint, and the second signal stops the run immediately.

Experiments
{experiments}

Algorithms (presets for experiments that train an actor on rewards)
{algorithms}

Examples
  realign experiment=grpo_arithmetic
  realign experiment=grpo_arithmetic interfaces.actor.adv_norm.std=none seed=1
  realign experiment=grpo_arithmetic algorithm=rloo
  realign graph experiment=grpo_arithmetic interfaces.actor.kl.place=loss --format svg --out graph.svg
"""


_USAGES = re.sub(r"\n {10,}", " ", _HELP).splitlines()
"""The lines of `_HELP`, each with the lines that continue it."""
_WIDTH = 80


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Returns:
        The exit code, as listed in `realign.errors.ExitCode`.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    configure_torch()
    debug = "--debug" in args or full_errors()
    with lasting_console() as console, plain_warnings(debug):
        if argv is None:
            # The last collection of a process with torch and transformers takes a CPU second, and frees what ends
            # anyway.
            atexit.register(gc.freeze)
            if line := first_line(args):
                print(line, flush=True)
        code = run_guarded(lambda: _run(args, debug), debug)
        if not code and not _works(args):
            console.flush()
            if console.lost is not None:
                return run_guarded(partial(_report_lost_output, console.lost), debug)
        return code


def _works(args: Sequence[str]) -> bool:
    """Return whether a command line does more than print, so that it succeeds without its output, too."""
    command = next(iter(args), "")
    trains = command not in COMMANDS or command in (TRAIN, "fork")
    return command in ("serve", "view") or (trains and not {arg.partition("=")[0] for arg in args} & {*_PRINTING})


def _report_lost_output(error: OSError) -> int:
    """Return the exit code of a command whose output was lost, or raise why; a closed pipe needs no words."""
    if isinstance(error, BrokenPipeError):
        return ExitCode.error
    raise error


def first_line(args: Sequence[str]) -> str:
    """Return the line that shows at once what a command line starts; empty for commands that are quick."""
    if not args or os.environ.get("RANK", "0") != "0" or {arg.partition("=")[0] for arg in args} & {*_PRINTING}:
        return ""
    command = args[0] if args[0] in COMMANDS else TRAIN
    run = next((arg for arg in args if arg.startswith("experiment=") or is_file(arg)), None)
    if run is None or command not in _ANNOUNCED:
        return ""
    return f"realign {command} {run}: importing torch and transformers"


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile. Importing torch and transformers makes none, but looking for it takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def configure_torch() -> None:
    """Let torch grow its blocks on CUDA, and use large pages and sleep on CPUs, unless the user configures it.

    Micro-batches have different shapes, which would otherwise fragment the memory of a GPU. On Linux, a training step
    of 135M weights takes 900,000 pages of 4 KiB, which cost a seventh of its CPU time. Threads of torch that wait keep
    a core busy for some time, with which a rollout took 1.3 times as long. torch reads these settings once.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"


def _run(args: list[str], debug: bool) -> int:
    """Run a command line in this process, or on all ranks that a launcher started."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that `_target_` can name a class in a file of the current folder
    if args[:1] == ["fork"] and not {"--help", "-h"} & {*args}:
        args = _function_of("fork")(args[1:])  # a command line of `train`: all below sees a usual run
    words = command_words(args)
    if is_one_of_many():
        return run_on_ranks(lambda start: dispatch(args, start), debug, words)
    return dispatch(args, lambda _, experiment, checked: alone(experiment, checked, debug, words))


def dispatch(argv: list[str], start: Start) -> int:
    """Run a command; training is left to `start`. Return the exit code."""
    # Before the arguments are parsed: an unfinished command line is usually no valid one.
    if argv[:1] == [COMPLETE]:
        from realign.cli.completion import completions

        return _say(*completions(argv[1] if argv[1:] else ""))
    if argv[:1] == ["import"] and not {"--help", "-h"} & {*argv}:  # its words are settings of other tools
        from realign.cli.import_config import import_config

        return import_config(None, [word for word in argv[1:] if word != "--debug"])
    args = read_arguments(argv)
    if args.shell_completion:
        from realign.cli.completion import script

        return _say(script(args.shell_completion))
    if args.version:
        from realign.version import installed_version

        return _say(installed_version())
    if args.help:
        command, keys = args.words[:1], [word for word in args.words if word not in COMMANDS]
        if keys or not command or command == ["help"]:
            folder = Path(args.config_dir) if args.config_dir else None
            return describe_keys(args, keys) if keys else _say(_help_text(folder))
        return _say(_command_help(command[0]))
    command, words = _command_of(args.words)
    check_flags(command, args)
    if not argv:
        return _say(_MENU)
    if command in ON_EXPERIMENT and not (words or args.cfg or args.info):
        raise ConfigError("no overrides. Start from experiment=NAME; `realign --help` lists the experiments.")
    if args.multirun or args.trials is not None:
        from realign.cli.sweep import sweep

        debug = args.debug or full_errors()
        with raise_on_signals():
            if args.trials is not None:
                from realign.cli.search import search

                return search(words, args.config_dir, start, debug, args.trials)
            return sweep(words, args.config_dir, start, debug)
    with without_garbage_collection() if command in BRIEF else nullcontext():
        function = _function_of(command)
        return int(function(args, words, start) if command == TRAIN else function(args, words))


def _function_of(command: str) -> Callable[..., Any]:
    """Return the function of a command.

    Raises:
        ConfigError: the distribution that has it isn't installed.
    """
    module, colon, name = COMMANDS[command].function.partition(":")
    if colon:
        return cast(Callable[..., Any], getattr(import_module(f"realign.{module}"), name))
    from importlib.metadata import entry_points  # imports a parser of e-mail

    for point in entry_points(group="realign.commands", name=command):
        return cast(Callable[..., Any], point.load())
    raise ConfigError(f"realign {command} is a package of its own: pip install {module}")


def _command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command, which is `train` unless the first word names another one, and the remaining words.

    Raises:
        ConfigError: the first word is no command, no override and no YAML file.
    """
    rest = list(words)
    if not rest or "=" in rest[0] or rest[0].startswith("~") or is_file(rest[0]):
        return TRAIN, rest
    command = rest.pop(0)
    if command in COMMANDS:
        return command, rest
    if command in OTHER_COMMANDS:
        raise ConfigError(f"realign has no command {command!r}: {OTHER_COMMANDS[command]}")
    theirs = [tool for tool in IMPORTED if any(re.match(rf"{tool.lower()}(\.\w|$)", word) for word in words)]
    hint = f". {import_hint(theirs)}" if theirs else ""
    if nearest(command, COMMANDS) is None and (meant := _experiment(words)):
        raise ConfigError(
            f"realign has no command {command!r}; did you mean `realign {meant} key=value ...`?{hint[1:]}"
        )
    raise ConfigError(f"unknown command {command!r}{suggest(command, COMMANDS)}; overrides are key=value{hint}")


def _experiment(words: Sequence[str]) -> str:
    """Return the override that the first words name an experiment by, as in `trl grpo`; empty if they name none."""
    known = {name: f"experiment={name}" for name in list_experiments()}
    known = {name: f"experiment=NAME algorithm={name}" for name in list_algorithms()} | known
    for word in words[:2]:
        if "=" not in word and (near := nearest(word, known)) is not None:
            return known[near]
    return ""


def _help_text(config_dir: Path | None = None) -> str:
    """Return the text of `realign --help`. Imports neither torch nor Hydra."""
    groups = {"experiments": list_experiments(config_dir), "algorithms": list_algorithms(config_dir)}
    width = max((len(name) for files in groups.values() for name in files), default=0)
    lines = {
        group: "\n".join(f"  {name:<{width}}  {line}".rstrip() for name, line in files.items())
        for group, files in groups.items()
    }
    return _HELP.format(**lines)


def _command_help(command: str) -> str:
    """Return the usage, options and settings of a command, from its lines in `_HELP`."""
    from realign.config.help import settings_help

    first = "<overrides> " if command == TRAIN else rf"{command}\b"
    usage, text = next(filter(None, (re.match(rf"  (realign {first}.*?) {{2,}}(.*)", x) for x in _USAGES))).groups()
    text, _, options = text.partition(": [")
    lines = [usage.rstrip(), "", *textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    if options:
        lines += textwrap.wrap(f"[{options}", _WIDTH, initial_indent="  ", subsequent_indent="  ")
    if path := COMMANDS[command].settings:
        lines += settings_help(path, command, _WIDTH)
    return "\n".join([*lines, "", "`realign --help` lists all commands, `realign help KEY` describes a config key."])


def describe_keys(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign help [overrides] [KEY]`: describe config keys."""
    from realign.config.help import key_help

    overrides = [word for word in words if "=" in word or word.startswith("~") or is_file(word)]
    if len(words) == 1 and words[0] in COMMANDS:
        return _say(_command_help(words[0]))
    prepared = without_names(overrides, args.config_dir) if overrides else []
    keys = [word for word in words if word not in overrides]
    folder = Path(args.config_dir) if args.config_dir else None
    return _say(key_help([*prepared, *keys], folder, min(shutil.get_terminal_size().columns, 110)))


def graph(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `realign graph`: print the graph, or write it to a file whose extension selects the format."""
    from realign.draw import FORMATS
    from realign.engines.shared_model import shared_roles
    from realign.runtime.checks.parts import check_parts

    endings = {".svg": "svg", ".mmd": "mermaid", ".md": "mermaid", ".txt": "text", "": "text"}
    ending = Path(args.out or "").suffix
    if args.format is None and ending not in endings:
        known = ", ".join(filter(None, endings))
        raise ConfigError(
            f"--out {args.out}: no format has the extension {ending!r}. Set --format, or use one of {known}."
        )
    form = args.format or endings[ending]
    experiment = build_experiment_of(overrides, args.config_dir)
    check_parts(experiment)
    drawn = FORMATS[form](experiment.graph, shared_roles(experiment.models))
    if args.out is None:
        return _say(drawn.rstrip("\n"))
    make_folder(Path(args.out).parent)
    replace_text(Path(args.out), drawn)
    return 0


def _say(*lines: str) -> int:
    print(*lines, sep="\n", end="\n" if lines else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
