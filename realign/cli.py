"""`realign`: compose the config, build the objects, hand them to the runtime. Torch and Hydra are imported late."""

from __future__ import annotations

import argparse
import dis
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from realign.config.errors import ConfigError, explain, one_line, suggest
from realign.config.folders import list_algorithms, list_experiments

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from realign.config import ExperimentConfig
    from realign.runtime import Experiment

USER_ERROR, INTERRUPTED = 2, 130
HELP = """\
realign: reinforcement learning for language models on packed sequences

Usage
  realign <overrides>          train
  realign check <overrides>    everything but training: graph, data, shapes, rewards, devices, disk
  realign graph <overrides>    show the graph: [--format text|mermaid|svg] [--out FILE]
  realign chat MODEL           talk to a model, or answer the lines of stdin: [generation.temperature=0.7 ...]
  realign <overrides> resume=auto   go on with a run that was stopped or killed
  realign -m <overrides>       one run for each combination of a=1,2 b=x,y
  realign --cfg job <overrides>   print the composed config

  <overrides> are key=value; start from experiment=NAME, and lay algorithm=NAME over it. Any field of a component
  can be set, listed in a YAML or not.

Options
  --config-dir DIR    a folder of your own, with experiment/NAME.yaml and algorithm/NAME.yaml
  --debug             show the traceback of an error (as HYDRA_FULL_ERROR=1 does)
  --version, --help

Exit codes
  0    done
  2    a mistake, or nothing left to do: one line on stderr says which
  130  stopped by Ctrl-C, 143 by SIGTERM, after the step under way and a checkpoint (a second signal ends at once)

Experiments
{experiments}

Algorithms, over an experiment that trains an actor on rewards
{algorithms}

Examples
  realign experiment=grpo_arithmetic
  realign experiment=grpo_arithmetic interfaces.actor.adv_norm.std=none seed=1
  realign experiment=grpo_arithmetic algorithm=rloo
  realign graph experiment=grpo_arithmetic graph.kl=true --format svg --out graph.svg
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Returns:
        The exit code: 0 done; 2 a mistake of the user's, or nothing left to do (one line said which); 130 stopped by
        Ctrl-C; 143 stopped by SIGTERM.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    return guarded(lambda: _dispatch(args, debug), debug)


def guarded(action: Callable[[], int | None], debug: bool) -> int:
    """Run `action`; tell a user's mistake in one line on stderr, and leave everything else to Python.

    Returns:
        The exit code.
    """
    try:
        return action() or 0
    except KeyboardInterrupt as stop:
        print(str(stop) or "interrupted", file=sys.stderr)
        return getattr(stop, "exit_code", INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has enough of it; without this Python would complain again when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return USER_ERROR
    except Exception as error:
        message = None if debug else user_message(error)
        if message is None:
            raise
        print(f"error: {message}", file=sys.stderr)
        return USER_ERROR


def user_message(error: Exception) -> str | None:
    """One line for an error that realign or Hydra raised on purpose, or that the disk did; None for a bug."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError):
        return one_line(error)
    kinds = (ValueError, RuntimeError, ArithmeticError, ImportError)
    if isinstance(error, kinds) and _raised_by_realign(error.__traceback__):
        return one_line(error)
    if type(error).__module__.split(".")[0] in ("hydra", "omegaconf", "yaml"):
        return explain(error)
    return None


def _raised_by_realign(traceback: TracebackType | None) -> bool:
    """Whether a `raise` in realign made the error; one that an operation of torch or Python made is a bug of ours."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    on_purpose = frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return on_purpose and frame.f_globals.get("__name__", "").split(".")[0] == "realign"


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see realign --help")


def _parser() -> _Parser:
    parser = _Parser(prog="realign", add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--info", "-i", nargs="?", const="all")
    parser.add_argument("--format", choices=("text", "mermaid", "svg"))
    parser.add_argument("--out")
    return parser


def _dispatch(argv: list[str], debug: bool) -> int:
    args = _parser().parse_intermixed_args(argv)
    if args.help:
        _say(help_text(Path(args.config_dir) if args.config_dir else None))
        return 0
    if args.version:
        from importlib.metadata import version

        _say(version("realign"))
        return 0
    commands = {"graph": show_graph, "check": check, "chat": chat}
    command, overrides = None, list(args.words)
    if overrides and "=" not in overrides[0] and not overrides[0].startswith("~"):
        command = overrides.pop(0)
        if command not in commands:
            raise ConfigError(f"unknown command {command!r}{suggest(command, commands)}; overrides are key=value")
    if command != "graph" and (args.format or args.out):
        raise ConfigError("--format and --out belong to realign graph")
    if command and (args.multirun or args.cfg or args.info):
        raise ConfigError(f"--multirun, --cfg and --info do not go with realign {command}")
    if not overrides and command != "chat" and not (args.cfg or args.info):
        raise ConfigError("nothing to do: start from experiment=NAME; realign --help lists them")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a class in a file of the current folder can be a _target_
    if command is not None:
        return commands[command](args, overrides)
    return train(args, overrides, debug)


def help_text(config_dir: Path | None = None) -> str:
    """What `realign --help` prints; imports neither torch nor Hydra."""
    groups = {"experiments": list_experiments(config_dir), "algorithms": list_algorithms(config_dir)}
    width = max((len(name) for found in groups.values() for name in found), default=0)
    lines = {
        group: "\n".join(f"  {name:<{width}}  {line}".rstrip() for name, line in found.items())
        for group, found in groups.items()
    }
    return HELP.format(**lines)


def _built(args: argparse.Namespace, overrides: Sequence[str]) -> Experiment:
    from realign.config import compose

    return _build(compose(overrides, args.config_dir))


def _build(config: ExperimentConfig) -> Experiment:
    import torch

    from realign.config import build_experiment

    if config.threads is not None:
        if config.threads < 1:
            raise ConfigError(f"threads must be at least 1 or null, found {config.threads}")
        torch.set_num_threads(config.threads)
    return build_experiment(config)


def show_graph(args: argparse.Namespace, overrides: list[str]) -> int:
    """`realign graph`: print the graph, or write it to a file (whose ending chooses the format)."""
    from realign.draw import FORMATS
    from realign.engines.shared import shared_roles

    endings = {".svg": "svg", ".mmd": "mermaid", ".md": "mermaid", ".txt": "text", "": "text"}
    ending = Path(args.out or "").suffix
    if args.format is None and ending not in endings:
        known = ", ".join(filter(None, endings))
        raise ConfigError(f"--out {args.out}: no format ends in {ending!r}; give --format, or one of {known}")
    form = args.format or endings[ending]
    experiment = _built(args, overrides)
    drawn = FORMATS[form](experiment.graph, shared_roles(experiment.models))
    if args.out is None:
        _say(drawn.rstrip("\n"))
        return 0
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(drawn, encoding="utf-8")
    return 0


def check(args: argparse.Namespace, overrides: list[str]) -> int:
    """`realign check`: everything but training."""
    from rich.console import Console

    from realign.preflight import preflight
    from realign.runtime.readiness import check_ready

    experiment = _built(args, overrides)
    check_ready(experiment)
    console = Console()
    _print_derived(experiment, console)
    _quiet_transformers()
    preflight(experiment, console)
    return 0


def chat(args: argparse.Namespace, words: list[str]) -> int:
    """`realign chat`: a line in, an answer out, until the end of the input."""
    from realign.chat import chat_of

    if args.config_dir:
        raise ConfigError("--config-dir does not go with realign chat, which takes no experiment")
    conversation = chat_of(words)
    _quiet_transformers()
    conversation.talk(_typed_lines() if sys.stdin.isatty() else map(str.rstrip, sys.stdin), _say)
    return 0


def _typed_lines() -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield input("> ")


def train(args: argparse.Namespace, overrides: list[str], debug: bool) -> int:
    """`realign <overrides>`: a Hydra application around the runtime; also sweeps and `--cfg`."""
    from realign.config.composition import check_launch, hydra_main, search_path

    check_launch(overrides, args.config_dir)
    if args.multirun and (given := [word for word in overrides if word.lstrip("+").startswith("resume=")]):
        raise ConfigError(
            f"{given[0]} does not go with -m: every call of a sweep makes folders of its own, so that there is nothing "
            "to go on from; resume its runs one by one, by resume=auto and their output_dir"
        )
    if not (args.multirun or args.cfg or args.info):
        from realign.runtime.readiness import check_ready, open_interfaces, used_interfaces  # torch: not for --cfg

        experiment = _built(args, overrides)  # before Hydra makes a folder for a run that cannot start
        experiment.refuse_earlier_run()
        check_ready(experiment)
        try:
            open_interfaces(experiment)
        finally:
            for interface in used_interfaces(experiment).values():
                interface.close()
    flags = ["--multirun"] if args.multirun else []
    flags += ["--resolve"] if args.resolve else []
    flags += [f"--{name}={getattr(args, name)}" for name in ("cfg", "package", "info") if getattr(args, name)]

    def job(composed: DictConfig) -> None:
        if code := guarded(lambda: _job(composed), debug):
            raise SystemExit(code)

    with _terminated_by_exception(), _hydra_arguments([*flags, *search_path(args.config_dir), *overrides]):
        try:
            hydra_main(job)()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 1
    return 0


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """A scheduler's SIGTERM ends a run as Ctrl-C does: files are closed and worker processes stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread set handlers
        return

    def stop(number: int, frame: FrameType | None) -> None:
        from realign.runtime.signals import Interrupted  # only now: the package takes a second, and --cfg needs none

        raise Interrupted(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _hydra_arguments(argv: list[str]) -> Iterator[None]:
    """Hydra reads `sys.argv`, and hands its exceptions on only if this variable is set."""
    before, variable = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [before[0], *argv], "1"
    try:
        yield
    finally:
        sys.argv = before
        if variable is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = variable


def _job(composed: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from rich.console import Console

    from realign.config.composition import resolve
    from realign.runtime import run

    config = resolve(composed)
    hydra = HydraConfig.get()
    if hydra.mode is RunMode.MULTIRUN:
        config.output_dir = hydra.runtime.output_dir  # every job of a sweep has its own
    experiment = _build(config)
    experiment.refuse_earlier_run()
    console = Console()
    _print_derived(experiment, console)
    _quiet_transformers()
    run(experiment, console=console)


def _quiet_transformers() -> None:
    """Its bars for reading and writing files would break up the live display."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _print_derived(experiment: Experiment, console: Any) -> None:
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    from realign.derived import derived_rows

    table = Table(title=f"{escape(experiment.name)}: what the config amounts to", title_justify="left", box=None)
    table.add_column("", style="bold")
    table.add_column("")
    for name, value in derived_rows(experiment):
        table.add_row(name, Text(value))
    console.print(table)


def _say(text: str) -> None:
    print(text)


if __name__ == "__main__":
    sys.exit(main())
