"""Commands of `realign`: compose the config, build the objects, start the runtime. Imports torch and Hydra lazily."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from realign.cli.errors import guarded, plain_warnings
from realign.cli.train import alone, build, is_one_of_many, on_ranks, print_derived, quiet_transformers, train
from realign.config.errors import ConfigError, suggest
from realign.config.folders import list_algorithms, list_experiments

if TYPE_CHECKING:
    from realign.cli.train import Start
    from realign.runtime import Experiment

HELP = """\
realign: reinforcement learning for language models on packed sequences

Usage
  realign <overrides>             train
  realign check <overrides>       run everything except training: graph, data, shapes, rewards, devices, disk
  realign graph <overrides>       show the dataflow graph: [--format text|mermaid|svg] [--out FILE]
  realign chat MODEL              chat with a model, or answer the lines of stdin: [generation.temperature=0.7 ...]
  realign export RUN_OR_FOLDER    write a model with its model card: --to DIR, --push HUB_NAME, [--merge] an adapter
  realign <overrides> resume=auto   resume a run that was stopped or killed
  realign -m <overrides>          sweep: one run for each combination of a=1,2 b=x,y
  realign --cfg job <overrides>   print the composed config
  torchrun --nproc-per-node N -m realign <overrides>   train on N ranks

  <overrides> are key=value. Start from experiment=NAME, and add algorithm=NAME to change its algorithm. Every field of
  a component can be set, whether or not a YAML file lists it.

Options
  --config-dir DIR    your own folder with experiment/NAME.yaml and algorithm/NAME.yaml
  --debug             show the traceback of every error (like HYDRA_FULL_ERROR=1)
  --version, --help

Exit codes
  0    success, or no steps left to do
  1    a bug; the traceback is on stderr
  2    an error that a restart does not fix; one line on stderr
  75   a failure that restarting with resume=auto fixes, such as a full disk or a lost worker
  130  stopped by Ctrl-C; 143: stopped by SIGTERM. The first signal finishes the step and saves a checkpoint, and the
       second signal stops the run immediately.

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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Returns:
        The exit code, as listed in `realign.errors.ExitCode`.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    with plain_warnings(debug):
        return guarded(lambda: _of_all_ranks(args, debug), debug)


def _of_all_ranks(args: list[str], debug: bool) -> int:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that `_target_` can name a class in a file of the current folder
    if is_one_of_many():
        return on_ranks(lambda start: _dispatch(args, start), debug)
    return _dispatch(args, lambda config: alone(config, debug))


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError`."""

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
    parser.add_argument("--to")
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--push")
    return parser


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse options and words of a command line.

    Raises:
        ConfigError: an option is unknown or lacks its value.
    """
    return _parser().parse_intermixed_args(argv)


def _dispatch(argv: list[str], start: Start) -> int:
    args = read_arguments(argv)
    if args.help:
        _say(help_text(Path(args.config_dir) if args.config_dir else None))
        return 0
    if args.version:
        from importlib.metadata import version

        _say(version("realign"))
        return 0
    commands = {"graph": show_graph, "check": check, "chat": chat, "export": export}
    command, overrides = None, list(args.words)
    if overrides and "=" not in overrides[0] and not overrides[0].startswith("~"):
        command = overrides.pop(0)
        if command not in commands:
            raise ConfigError(f"unknown command {command!r}{suggest(command, commands)}; overrides are key=value")
    if command != "graph" and (args.format or args.out):
        raise ConfigError("--format and --out apply only to realign graph")
    if command != "export" and (args.to or args.merge or args.push):
        raise ConfigError("--to, --merge and --push apply only to realign export")
    if command and (args.multirun or args.cfg or args.info):
        raise ConfigError(f"--multirun, --cfg and --info do not apply to realign {command}")
    if not overrides and command not in ("chat", "export") and not (args.cfg or args.info):
        raise ConfigError("no overrides. Start from experiment=NAME; `realign --help` lists the experiments.")
    if command is not None:
        return commands[command](args, overrides)
    return train(args, overrides, start)


def help_text(config_dir: Path | None = None) -> str:
    """Return the text of `realign --help`. Imports neither torch nor Hydra."""
    groups = {"experiments": list_experiments(config_dir), "algorithms": list_algorithms(config_dir)}
    width = max((len(name) for found in groups.values() for name in found), default=0)
    lines = {
        group: "\n".join(f"  {name:<{width}}  {line}".rstrip() for name, line in found.items())
        for group, found in groups.items()
    }
    return HELP.format(**lines)


def _built(args: argparse.Namespace, overrides: Sequence[str]) -> Experiment:
    from realign.config import compose

    return build(compose(overrides, args.config_dir))


def show_graph(args: argparse.Namespace, overrides: list[str]) -> int:
    """Run `realign graph`: print the graph, or write it to a file whose extension selects the format."""
    from realign.draw import FORMATS
    from realign.engines.shared_model import shared_roles

    endings = {".svg": "svg", ".mmd": "mermaid", ".md": "mermaid", ".txt": "text", "": "text"}
    ending = Path(args.out or "").suffix
    if args.format is None and ending not in endings:
        known = ", ".join(filter(None, endings))
        raise ConfigError(
            f"--out {args.out}: no format has the extension {ending!r}. Set --format, or use one of {known}."
        )
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
    """Run `realign check`: everything except training."""
    from rich.console import Console

    from realign.cli.check import preflight
    from realign.runtime.checks.launch import check_ready

    experiment = _built(args, overrides)
    check_ready(experiment)
    console = Console()
    print_derived(experiment, console)
    quiet_transformers()
    preflight(experiment, console)
    return 0


def chat(args: argparse.Namespace, words: list[str]) -> int:
    """Run `realign chat`: answer each line until the end of the input."""
    from realign.cli.chat import chat_of

    if args.config_dir:
        raise ConfigError("--config-dir does not apply to realign chat, which has no experiment")
    conversation = chat_of(words)
    quiet_transformers()
    conversation.talk(_typed_lines() if sys.stdin.isatty() else map(str.rstrip, sys.stdin), _say)
    return 0


def export(args: argparse.Namespace, words: list[str]) -> int:
    """Run `realign export`: write a saved model for other programs, and push it to the hub."""
    from realign.cli.export import Export

    if len(words) != 1 or args.config_dir:
        raise ConfigError(f"realign export expects one run or model folder, found {words or 'none'}")
    quiet_transformers()
    Export(words[0], None if args.to is None else Path(args.to), args.merge, args.push).run(_say)
    return 0


def _typed_lines() -> Iterator[str]:
    with suppress(EOFError):
        while True:
            yield input("> ")


def _say(text: str) -> None:
    print(text)


if __name__ == "__main__":
    sys.exit(main())
