"""Check the prose of the project for British spelling and long sentences.

Reads docs (`*.md`), comments (also of YAML and shell files), docstrings, and the texts of `raise`, `warnings.warn` and
logging calls. Skips these messages in tests. Sentences of docs and docstrings may have 30 words.
Prints one line per finding and exits with 1 if there is any.

    python scripts/lint_english.py [FILE OR FOLDER ...]
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LONGEST = 30
"""Maximum number of words of a sentence."""
CALLS = ("warn", "warning", "info", "error", "print", "debug", "note", "add_note")
BRITISH = re.compile(
    r"\b(?:behavi|col|fav|neighb|hon|lab)our\w*|\b\w*(?:normal|initial|optim|serial|organ|recogn|summar|real|util"
    r"|general|special|parallel|quant|token|penal)is(?:e|es|ed|ing|ation|er|ers)\b|\b(?:labell|modell|travell)(?:ed|ing)\b"
    r"|\b(?:centre|analyse|catalogue|licence|judgement)(?:s|d)?\b",
    re.IGNORECASE,
)
Text = tuple[int, str, bool]
"""Line, text, and whether the lengths of its sentences are checked."""


def markdown(source: str) -> Iterator[Text]:
    """Yield the paragraphs of a page without code, formulas and link targets. Tables have no sentences."""
    source = re.sub(r"```.*?```|\$\$.*?\$\$", lambda m: "\n" * m[0].count("\n"), source, flags=re.DOTALL)
    line = 1
    for block in re.split(r"(\n\s*\n)", source):
        for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.)\s)", block):
            text = re.sub(r"\]\([^)]*\)", "]", item)
            if text.strip():
                yield line + len(item) - len(item.lstrip("\n")), text, not text.lstrip().startswith(("|", "#", "<"))
            line += item.count("\n") + 1
        line -= 1


def python(source: str, *, messages: bool = True) -> Iterator[Text]:
    """Yield docstrings (of fields too), comments and optionally messages of a module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, re.split(r"\n\s*>>> ", node.value.value)[0], True
        elif messages and isinstance(node, ast.Raise | ast.Call):
            name = node.func if isinstance(node, ast.Call) else None
            if name is None or (isinstance(name, ast.Attribute) and name.attr in CALLS):
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.lineno, part.value, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False


def test_module(source: str) -> Iterator[Text]:
    """Yield docstrings and comments of a test module. Its strings are test data and expected messages."""
    return python(source, messages=False)


def comments(source: str) -> Iterator[Text]:
    """Yield the comments of a YAML file or a shell script. Consecutive lines form one text."""
    for found in re.finditer(r"(?:^|(?<=\s))#.*(?:\n#.*)*", source, flags=re.MULTILINE):
        yield source[: found.start()].count("\n") + 1, re.sub(r"(?m)^# ?", "", found[0]), False


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without code, commands, tables and lists of arguments."""
    plain = re.sub(r"`[^`]*`", "X", re.sub(r"(?m)^ +(?:python|realign|make|torchrun|pip) .*$", "", text))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.|\w+(?:, \w+)*:)\s)", plain):
        yield from re.split(r"(?<=[.:;!?])\s+", paragraph)


READERS = {".md": markdown, ".py": python, ".yaml": comments, ".sh": comments, ".sbatch": comments}
"""Function that reads a file, by suffix; other files are read for comments."""


def findings(path: Path) -> Iterator[str]:
    """Yield one line for each word in British spelling and each long sentence of a file."""
    source = path.read_text(encoding="utf-8")
    read = READERS.get(path.suffix, comments)
    if read is python and "tests" in path.parts:
        read = test_module
    for line, text, measured in read(source):
        for match in BRITISH.finditer(re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), text)):
            yield f"{path}:{line + text[: match.start()].count(chr(10))}: American spelling of {match[0]!r}"
        for sentence in sentences(text) if measured else ():
            if (words := len(re.findall(r"[\w'/-]+", sentence))) > LONGEST:
                yield f"{path}:{line}: a sentence of {words} words: {' '.join(sentence.split())[:60]} ..."


def main(arguments: list[str]) -> int:
    """Check files and folders; return the exit code."""
    found = list[str]()
    for name in arguments:
        path = Path(name)
        files = sorted(p for p in path.rglob("*") if p.suffix in READERS) if path.is_dir() else [path]
        for file in files:
            found += findings(file)
    print("\n".join(found) or "English: no findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
