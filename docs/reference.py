"""Write the pages in docs/reference from the classes: `python docs/reference.py`. A test checks them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from realign.config.files import list_algorithms, list_experiments
from realign.config.help import Entry, Section
from realign.config.reference import reference, set_by

HERE = Path(__file__).parent
FOLDER = HERE / "reference"
MOST = 3
"""Number of experiments that an entry names; of more, it has the number."""

PAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "run": (
        "Settings of a run: evaluation, rollout, runtime, sampling and trackers",
        ("realign.runtime", "realign.records", "realign.api"),
    ),
    "models": ("Models, optimizers, samplers and devices", ("realign.engines", "realign.models", "realign.samplers")),
    "data": ("Datasets", ("realign.data",)),
    "components": ("Components of algorithms", ("realign.interfaces.components",)),
    "interfaces": ("Algorithms, reward functions and environments", ("realign.interfaces",)),
    "rewards": ("Reward functions, judges and tests in a sandbox", ("realign.rewards",)),
    "environments": ("Environments", ("realign.environments",)),
    "endpoint": ("The endpoint of agents", ("realign.endpoint",)),
}
"""Page -> title, and the packages of its classes. The first page whose package contains a class lists it."""


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    sections, used = reference(), set_by()
    written: dict[str, list[Section]] = {name: [] for name in PAGES}
    config = []
    for section in sections:
        if "." not in section.key:
            config.append(section)
        else:
            written[_page_of(section.key)].append(section)
    found = {"README.md": _index(), "config.md": _config(config), "experiments.md": _experiments()}
    for name, classes in written.items():
        if classes:
            title = PAGES[name][0]
            found[f"{name}.md"] = _page(title, [_component(one, used) for one in classes])
    return found


def _page_of(path: str) -> str:
    """Return the page of a class."""
    fitting = [
        (len(package), name)
        for name, (_, packages) in PAGES.items()
        for package in packages
        if path.startswith(f"{package}.")
    ]
    return max(fitting)[1]


def _index() -> str:
    lines = [
        "# Configuration reference",
        "",
        "Every key of a config: type, default, valid values and meaning. `realign help KEY` prints the same text, and",
        "the value in your experiment:",
        "",
        "```bash",
        "realign help interfaces.actor.kl experiment=grpo",
        "```",
        "",
        "| page | contents |",
        "|---|---|",
        "| [config.md](config.md) | Root keys of a config. |",
        *(f"| [{name}.md]({name}.md) | {title}. |" for name, (title, _) in PAGES.items() if _has_classes(name)),
        "| [experiments.md](experiments.md) | Shipped experiments and algorithm presets. |",
        "",
        "`python docs/reference.py` writes these pages from the classes.",
    ]
    return "\n".join(lines) + "\n"


def _has_classes(name: str) -> bool:
    return any("." in section.key and _page_of(section.key) == name for section in reference())


def _config(sections: Sequence[Section]) -> str:
    parts = []
    for section in sections:
        title = f"## {section.key}" if section.key else "## Root keys"
        text = "" if not section.key else f"{_plain(section.text)}\n\n"
        parts.append(f"{title}\n\n{text}{_entries(section.entries, 'config')}")
    return _page("Root keys of a config", parts)


def _component(section: Section, used: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return the section of a class."""
    text = _plain(section.text)
    by = {entry.key: used.get((section.key, entry.key), ()) for entry in section.entries}
    fields = _entries(section.entries, section.name, by) if section.entries else "No fields."
    return f"## {section.name}\n\n`_target_: {section.key}`\n\n{text}\n\n{fields}"


def _experiments() -> str:
    def rows(found: Mapping[str, str]) -> list[str]:
        return [f"| `{name}` | {_cell(text)} |" for name, text in found.items()]

    header = ["| name | description |", "|---|---|"]
    return _page(
        "Experiments and algorithm presets",
        [
            "\n".join(
                ["## Experiments", "", "Select one by `experiment=NAME`.", "", *header, *rows(list_experiments())]
            ),
            "\n".join(["## Presets", "", "Apply one by `algorithm=NAME`.", "", *header, *rows(list_algorithms())]),
        ],
    )


def _page(title: str, parts: Iterable[str]) -> str:
    note = "<!-- Written by docs/reference.py. Do not edit. -->"
    return f"# {title}\n\n{note}\n\n" + "\n\n".join(parts) + "\n"


def _entries(entries: Sequence[Entry], anchor: str, used: Mapping[str, Sequence[str]] | None = None) -> str:
    """Return an entry for each key, which a link reaches: its type, default and valid values, then its meaning."""
    lines = []
    for entry in entries:
        words = ", ".join(f"`{word}`" for word in entry.choices)
        default = "required" if entry.default is None else f"default `{_line(entry.default)}`" if entry.default else ""
        by = _names(used[entry.key]) if used is not None else ""
        facts = (_line(entry.type), default, _line(entry.valid) or (f"one of {words}" if words else ""))
        target = f"{anchor}.{entry.key}"
        lines += [
            f'- <a id="{target}"></a>[`{entry.key}`](#{target}) {", ".join(fact for fact in facts if fact)}<br>',
            f"  {_line(entry.text)}{f' Set by {by}.' if by else ''}",
        ]
    return "\n".join(lines)


def _names(experiments: Sequence[str]) -> str:
    """Return the names of experiments for an entry."""
    return ", ".join(experiments) if len(experiments) <= MOST else f"{len(experiments)} experiments"


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Return a docstring as Markdown, without the descriptions of its fields, which its entries have."""
    text = re.split(r"\n\s*(?:Args|Attributes|Raises|Returns):\n", text)[0].strip()
    return text


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
