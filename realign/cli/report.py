"""`realign report`, `view` and `compare`: show the records of runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from realign.config.errors import ConfigError
from realign.own_files import OwnFiles
from realign.text import visible

NAME = "report.html"
"""Name of a report if `--out` is not set."""


def report(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign report RUN...`: write one HTML file."""
    from realign.cli.arguments import split_options
    from realign.report.data import ReportOptions
    from realign.report.page import write_report

    options, words = split_options("report", ReportOptions, words)
    folders = _runs("report", words, at_least=1)
    if args.out:
        out = Path(args.out)
    elif len(words) == 1:
        out = Path(words[0], NAME) if len(folders) > 1 else folders[0] / NAME
        OwnFiles(out.parent).claim(NAME)
    else:
        out = Path(NAME)  # the runs have no folder in common that is theirs
        if os.path.lexists(out):
            raise ConfigError(f"{NAME} exists in the current folder, and may show other runs. Name a file with --out.")
    size = write_report(folders, out, options.samples_mb)
    runs = "1 run" if len(folders) == 1 else f"{len(folders)} runs"
    sys.stdout.write(f"Report of {runs}: {visible(str(out.absolute()))} ({size / 1e6:.2f} MB)\n")
    return 0


def view(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign view FOLDER`: serve the viewer until Ctrl-C."""
    from realign.cli.arguments import split_options
    from realign.report.server import ViewOptions, serve

    options, rest = split_options("view", ViewOptions, words)
    if len(rest) > 1:
        raise ConfigError(f"realign view expects one folder with runs, such as runs/, found {rest}")
    serve(Path(rest[0] if rest else "runs"), options, lambda text: print(text, flush=True))
    return 0


def compare(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign compare RUN RUN...`: print the metrics and the settings that differ."""
    from rich.console import Console

    from realign.report.compare import comparison

    console = Console()
    for part in comparison(_runs("compare", words, at_least=2), console.width):
        console.print(part)
    return 0


def _runs(command: str, words: Sequence[str], at_least: int) -> list[Path]:
    """Return the folders of the runs that the command line names.

    Raises:
        ConfigError: a folder contains no run, or there are too few.
    """
    from realign.report.files import check_run, find_runs

    folders: list[Path] = []
    for word in words:
        runs = find_runs(Path(word)) if Path(word).is_dir() else []
        if not runs:
            check_run(Path(word))
        folders += runs
    if len(folders) < at_least:
        number = "at least two folders of runs" if at_least > 1 else "the folder of a run, such as runs/NAME"
        raise ConfigError(f"realign {command} expects {number}, found {list(words) or 'none'}")
    return folders


__all__ = ["compare", "report", "view"]
