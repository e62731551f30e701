"""Files about the project: metadata, workflows, the page that PyPI shows."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_pypi_gets_absolute_links():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    for rule in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(rule["pattern"], rule["replacement"], page)
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links
    assert not [link for link in links if not link.startswith(("https://", "#"))]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_targets_of_the_makefile(path):
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = {word for words in re.findall(r"run: make ([a-z -]+)$", text, re.MULTILINE) for word in words.split()}
    assert used <= targets


def test_files_for_tools_are_valid():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["version"] == PROJECT["tool"]["hatch"]["version"]["fallback-version"]
    assert json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))["name"] == "realign"
    for path in [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path


def test_one_sentence_says_everywhere_what_realign_is():
    sentence = PROJECT["project"]["description"]
    assert sentence.startswith("A library for post-training language models: SFT")
    for name in ("README.md", "docs/README.md", "CITATION.cff", "mkdocs.yml"):
        text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
        assert sentence.removeprefix("A ").rstrip(".") in text, name


def test_the_package_declares_its_types():
    assert (ROOT / "realign" / "py.typed").read_text(encoding="utf-8") == ""


def test_the_actions_of_workflows_are_pinned_to_commits():
    uses = [line for path in WORKFLOWS for line in re.findall(r"uses: (.+)$", path.read_text("utf-8"), re.MULTILINE)]
    foreign = [line for line in uses if not line.startswith("./")]
    assert len(foreign) > 10
    assert [line for line in foreign if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_the_extra_all_has_every_extra_that_needs_no_gpu_and_no_build():
    extras = PROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert (
        everything
        == f"realign-rl[{','.join(sorted(set(extras) - {'all', 'deepspeed', 'flash-attn', 'quantization'}))}]"
    )


def test_the_source_distribution_can_run_its_checks():
    """What `make lint`, `make docs` and the tests read besides the package."""
    read = {
        "scripts",
        "docs",
        "extras",
        "tests",
        "docker",
        "mkdocs.yml",
        ".ci",
        ".github",
        ".devcontainer",
        ".pre-commit-config.yaml",
    }
    included = set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert read <= included
    assert [name for name in included if not (ROOT / name).exists()] == []
