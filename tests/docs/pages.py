"""Read Markdown pages: extract their fenced blocks, commands and links, and run their examples."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import ModuleType

from hydra.core.override_parser.overrides_parser import OverridesParser

spec = importlib.util.spec_from_file_location("docs_site", Path(__file__).parents[2] / "scripts" / "docs_site.py")
site = importlib.util.module_from_spec(spec)
"""The hook that makes the pages of the site."""
spec.loader.exec_module(site)
ROOT = Path(__file__).parents[2]
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model of the first program."""
FENCE = re.compile(r"^(?P<fence>```+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"")
ANCHOR = re.compile(r'<a id="([^"]+)">')
HEADING = re.compile(r"^#+[ \t]+(.+?)[ \t#]*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """Fenced block of a page."""

    language: str
    code: str
    line: int
    """Line of the page where the code starts, counted from 1."""


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [
        Block(fence["language"].strip(), fence["code"], text.count("\n", 0, fence.start("code")) + 1)
        for fence in FENCE.finditer(text)
    ]


def first_program(name: str) -> str:
    """Return the first `python` block of a page."""
    return next(b.code for b in blocks((ROOT / name).read_text(encoding="utf-8")) if b.language == "python")


PROGRAM = first_program("README.md")


def run(page: Path) -> None:
    """Run the `python` blocks of a page in sequence in one namespace, and compare their output.

    Raises:
        AssertionError: a block prints something else than the `output` block right after it, or prints without one.
    """
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module  # dataclasses look up their own module
    try:
        parts = blocks(page.read_text(encoding="utf-8"))
        for block, following in zip_longest(parts, parts[1:]):
            if block.language != "python":
                continue
            printed = io.StringIO()
            numbered = "\n" * (block.line - 1) + block.code  # tracebacks contain the line of the page
            with redirect_stdout(printed):
                exec(compile(numbered, str(page), "exec", dont_inherit=True), vars(module))
            shown = following.code if following is not None and following.language == "output" else ""
            got, want = (_lines(text) for text in (printed.getvalue(), shown))
            assert got == want, f"{page}:{block.line} prints\n{chr(10).join(got)}\nbut shows\n{chr(10).join(want)}"
    finally:
        del sys.modules[module.__name__]


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command line: all lines of `bash` blocks, and lines after `$ ` in `console` blocks."""
    for block in blocks(text):
        if block.language not in ("bash", "console"):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            if block.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            if words := shlex.split(line, comments=True):
                yield words


def tables(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words of each `realign` command before a `table` block, and the rows of that block.

    Raises:
        ValueError: a `table` block is empty, or is not right after a `bash` block with exactly one `realign` command.
    """
    code_blocks, lines = blocks(text), text.splitlines()
    for before, block in zip([None, *code_blocks], code_blocks, strict=False):
        if block.language != "table":
            continue
        rows = [line.strip() for line in block.code.splitlines() if line.strip()]
        if not rows or before is None or before.language != "bash" or not _adjacent(before, block, lines):
            raise ValueError(f"line {block.line}: a `table` block states rows, right after a `bash` block")
        words = list(commands(f"```bash\n{before.code}```\n"))
        if len(words) != 1 or words[0][0].rsplit("/", 1)[-1] != "realign":
            raise ValueError(f"line {block.line}: a `table` block follows one `realign` command, found {len(words)}")
        yield words[0], rows


def _adjacent(before: Block, block: Block, lines: list[str]) -> bool:
    """Return whether only empty lines separate two blocks."""
    end = before.line + before.code.count("\n")  # line of the closing fence, counted from 1
    return not any(line.strip() for line in lines[end : block.line - 2])


def links(text: str) -> list[str]:
    """Return the targets of links and pictures in the repository."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    targets = [a or b for a, b in LINK.findall(prose)]
    return [t for t in targets if not re.match(r"[a-z][a-z0-9+.-]*:", t)]


def anchors(text: str) -> set[str]:
    """Return the URL fragments of a page: its anchors, and its headings by the rules of GitHub."""
    titles = HEADING.findall(FENCE.sub("", text))
    return {*ANCHOR.findall(text), *(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page whose file, or whose heading in that file, does not exist."""
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in links(text):
        name, _, fragment = target.partition("#")
        file = page.parent / name if name else page
        here = file.exists()
        if here and fragment and file.suffix == ".md":
            here = fragment in anchors(file.read_text(encoding="utf-8"))
        if not here:
            broken.append(target)
    return broken


def compositions(arguments: list[str]) -> list[list[str]]:
    """Return the overrides of each run of a `realign` command line. With `-m` there may be several runs."""
    overrides = [a for a in arguments if re.match(r"~[\w@./]+$|[~+]{0,2}[\w@./]+=", a)]
    out: list[list[str]] = [[]]
    for text, parsed in zip(overrides, OverridesParser.create().parse_overrides(overrides), strict=True):
        choices = [text]
        if parsed.is_sweep_override():
            choices = [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]
        out = [[*chosen, choice] for chosen in out for choice in choices]
    return out if overrides else []
