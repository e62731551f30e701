"""Run the content of the documentation: code and its output, command lines, links, and the drawn example."""

from __future__ import annotations

import importlib.util
import re
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from realign import python_api
from realign.cli.arguments import read_arguments, split_options
from realign.cli.chat import chat_of
from realign.cli.commands import main
from realign.cli.evaluate import read_request
from realign.cli.launch_table import derived_rows
from realign.cli.serve import serve_of
from realign.config import build_experiment, compose
from realign.config.help import key_help
from realign.runtime import run
from realign.runtime.profiling import ProfileOptions
from realign_planner.options import PlanOptions
from tests.docs import pages
from tests.docs.pages import HUB_MODEL, PROGRAM, ROOT, compositions, first_program, site
from tests.tiny import save_tiny, tiny_tokenizer

OPTIONS = {"plan": PlanOptions, "profile": ProfileOptions}
"""Options of commands, which are no overrides."""
TRAIN = python_api.train
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("AGENTS.md", "CONTRIBUTING.md", "README.md", "extras/planner/README.md")),
]


FRONT = ("README.md", "docs/README.md", "docs/quickstart-python.md")
"""Pages that begin with the same program."""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def easier_train(*args: Any, reward: Any, **given: Any) -> Any:
    """Train with rewards that differ even if every answer is wrong, as those of a model with random weights are."""

    def easier(score):
        return lambda prompt, response, row: score(prompt, response, row) + len(response) / 100

    rewards = (
        {name: easier(score) if callable(score) else score for name, score in reward.items()}
        if isinstance(reward, dict)
        else easier(reward)
    )
    return TRAIN(*args, reward=rewards, **given)


LONG = (
    "docs/guides/library.md",
    "docs/guides/time-machine.md",
    "docs/quickstart-python.md",
)
"""Pages whose code trains for more than five seconds."""


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if name_of(p) in LONG else []) for p in PAGES], ids=name_of
)
def test_the_code_of_a_page_runs_and_prints_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    silent = partial(Console, quiet=True)  # progress and responses, which differ between machines
    monkeypatch.setattr("realign.python_api.console", silent)
    monkeypatch.setattr("realign.python_api.Console", silent)
    code = "".join(b.code for b in pages.blocks(page.read_text(encoding="utf-8")) if b.language == "python")
    if "runs/arithmetic" in code:
        from realign.demo.arithmetic import prepare

        prepare(Path("runs/arithmetic"), seed=0)
    # 30 steps: a model that is sometimes right, so that the rewards differ and there is a gradient
    if "runs/sft_arithmetic" in code:
        run(build_experiment(compose(["experiment=sft_arithmetic", "steps=30", "evaluation=null"])))
    if f'model="{HUB_MODEL}"' in code:  # a local folder takes precedence over the hub
        save_tiny(tmp_path / HUB_MODEL)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        tokenizer.save_pretrained(tmp_path / HUB_MODEL)
        monkeypatch.setattr(python_api, "train", easier_train)
    if "run.plot()" not in code:  # tabs, whose other two alternatives do not run either
        monkeypatch.setattr(python_api, "train", python_api.load_experiment)
    elif code.startswith(PROGRAM):  # as it is, but two steps
        monkeypatch.setattr(python_api, "train", lambda *args, steps, **given: easier_train(*args, steps=2, **given))
    pages.run(page)


def test_the_front_pages_have_one_program():
    assert {first_program(name) for name in FRONT} == {PROGRAM}


def alternatives() -> list[tuple[str, dict[str, str]]]:
    """Return page and code by language of each group of tabs that has all three."""
    groups = [(name_of(p), text) for p in PAGES for text in site.TABS.findall(p.read_text(encoding="utf-8"))]
    codes = [(name, {block.language: block.code for block in pages.blocks(text)}) for name, text in groups]
    return [(name, code) for name, code in codes if len(code) == len(site.LABELS)]


@pytest.mark.parametrize(("page", "code"), alternatives())
def test_command_yaml_and_python_are_the_same_experiment(page, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ((_, *words),) = pages.commands(f"```bash\n{code['bash']}```\n")
    expected = build_experiment(compose(words)).resolved
    Path("mine.yaml").write_text(code["yaml"], encoding="utf-8")
    assert build_experiment(compose(["./mine.yaml"])).resolved == expected
    monkeypatch.setattr(python_api, "train", python_api.load_experiment)
    names: dict[str, Any] = {}
    exec(code["python"], names)
    assert names["run"].resolved == expected


def test_relative_links_lead_somewhere():
    assert [link for page in PAGES for link in pages.broken_links(page)] == []


def command_lines(program: str) -> list[tuple[str, list[str]]]:
    """Return the arguments of each call of `program` in the pages, also as `-m program`, with the page's name."""
    lines = []
    for page in PAGES:
        for words in pages.commands(page.read_text(encoding="utf-8")):
            if words[0].rsplit("/", 1)[-1] == program:
                lines.append((name_of(page), words[1:]))
            elif program in words and words[words.index(program) - 1] == "-m":
                lines.append((name_of(page), words[words.index(program) + 1 :]))
    return lines


@pytest.mark.parametrize(("page", "arguments"), command_lines("realign"))
def test_realign_command_lines_compose_and_build(page, arguments, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")  # some commands run in this folder
    if arguments[0] == "chat":
        chat_of(arguments[1:])
        return
    if arguments[0] == "serve":
        serve_of(arguments[1:])
        return
    if arguments[0] == "eval":
        args = read_arguments(arguments)
        assert read_request(args, args.words[1:]).keys
        return
    if arguments[0] == "export":
        (folder,) = read_arguments(arguments[1:]).words
        assert folder
        return
    if arguments[0] == "help":
        assert key_help(arguments[1:])
        return
    if arguments[0] == "fork":
        arguments = ["experiment=grpo_arithmetic", *arguments[3:]]
    if arguments[0] in OPTIONS:
        _, arguments = split_options(arguments[0], OPTIONS[arguments[0]], arguments[1:])
    for overrides in compositions(arguments):
        build_experiment(compose(overrides))


def stated_tables() -> list[tuple[str, list[str], list[str]]]:
    """Return each page with rows of a launch table, the arguments of the command, and the rows."""
    return [
        (name_of(page), words[1:], rows)
        for page in PAGES
        for words, rows in pages.tables(page.read_text(encoding="utf-8"))
    ]


def wrong_rows(stated: list[str], rows: list[tuple[str, str]]) -> list[str]:
    """Return messages about stated rows that the launch table lacks, with the actual row of the same name."""
    shown = {f"{name}: {value}": name for name, value in rows}
    wrong = [line for line in stated if line not in shown]
    rows_of = {line: [row for row, name in shown.items() if line.startswith(f"{name}: ")] for line in wrong}
    return [f"{line!r}, but the table has {(same[0] if same else 'no such row')!r}" for line, same in rows_of.items()]


@pytest.mark.parametrize(("page", "arguments", "stated"), stated_tables())
def test_stated_rows_are_in_the_launch_table_of_their_command(page, arguments, stated, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    (overrides,) = compositions(arguments)
    assert wrong_rows(stated, derived_rows(build_experiment(compose(overrides)))) == []


def shown_errors() -> list[tuple[str, str, str]]:
    """Return page, command and message of every `$ realign ...` that a page shows with an `error:` below it."""
    shown = [(name_of(page), page.read_text(encoding="utf-8")) for page in PAGES]
    pattern = re.compile(r"^\$ realign (.+)\n(error: .+)$", re.MULTILINE)
    return [(page, command, message) for page, text in shown for command, message in pattern.findall(text)]


@pytest.mark.parametrize(("page", "command", "message"), shown_errors())
def test_an_error_of_a_page_is_what_the_command_prints(page, command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 2
    beginning, shortened, _ = message.partition(" ...")
    printed = capsys.readouterr().err.splitlines()
    assert any(line.startswith(beginning) if shortened else line == message for line in printed), printed


def flags() -> list[str]:
    """Return the code in the first column of the table of common flags, except sweeps and extras."""
    page = (ROOT / "docs/guides/command-line.md").read_text(encoding="utf-8")
    table = page.split("## Common flags")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`.*?) \| ", table, re.MULTILINE)
    words = [code for row in rows for code in re.findall(r"`([^`]+=[^`]+)`", row)]
    return [code for code in words if not code.startswith(("trackers.", "-m "))]


@pytest.mark.parametrize("flag", flags())
def test_common_flags_go_with_their_experiment(flag):
    build_experiment(compose(["experiment=grpo_arithmetic", *shlex.split(flag)]))


def test_make_targets_exist():
    rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = {a for _, arguments in command_lines("make") for a in arguments if "=" not in a}
    assert named - set(rules) == set()


def test_the_drawn_example_is_the_one_of_the_page():
    spec = importlib.util.spec_from_file_location("packed_layout", ROOT / "docs" / "images" / "packed_layout.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    assert drawing.PICTURE.read_text(encoding="utf-8") == drawing.draw(drawing.read_sample())
