"""Write the pages in docs/reference from the classes: `python docs/reference.py`. A test checks them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realign.config.classes import Class, Type
from realign.config.composition import compose_raw
from realign.config.files import list_algorithms, list_experiments
from realign.config.help import Entry, Section, entries_of, section
from realign.config.index import indexed
from realign.config.keys import component_paths
from realign.config.places import ROOTS, Place, place_of
from realign.config.trees import get
from realign.config.words import TARGET, is_component, words_of

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
PLAIN = ("microbatch", "checkpoint", "records")
"""Root keys that contain settings and are no component."""


def reference() -> list[Section]:
    """Describe the root keys, and the fields of every shipped component, each class once.

    The sections of classes have the import path of the class as key, and names of fields as keys of their entries.
    """
    return [section(key) for key in ("", *PLAIN)] + [
        Section(cls.path, cls.name, cls.text, entries_of(cls)) for cls in shipped_components()
    ]


def shipped_components() -> list[Class]:
    """Return the classes of realign that a config can select, directly or as a field of another component."""
    kinds = tuple(place_of((name,)).field.types[0] for name in ROOTS if name != "graph")
    shipped = {cls.path: cls for cls in _component_classes(kinds)}
    waiting = list(shipped.values())
    while waiting:
        for field in waiting.pop().fields.values():
            for inner in _component_classes(field.types):
                if inner.path not in shipped:
                    shipped[inner.path] = inner
                    waiting.append(inner)
    return [shipped[path] for path in sorted(shipped)]


def _component_classes(types: tuple[Type, ...]) -> Iterator[Class]:
    """Yield the component classes that an annotation accepts, also inside of lists and mappings."""
    for member in types:
        for argument in member.arguments:
            yield from _component_classes(argument)
        base = indexed(member.path) if is_component(member) else None
        for classes in words_of(base).values() if base is not None else ():
            yield from (cls for cls in classes if cls.is_dataclass and indexed(cls.path))


def set_by() -> dict[tuple[str, str], list[str]]:
    """Return which experiments set which field: (import path of the class, field) -> names of experiments."""
    experiments_of: dict[tuple[str, str], list[str]] = {}
    for name in list_experiments():
        config = compose_raw([f"experiment={name}"])
        for path in component_paths(config):
            for used in _used(place_of(path), get(config, path)):
                experiments = experiments_of.setdefault(used, [])
                if name not in experiments:
                    experiments.append(name)
    return experiments_of


def _used(place: Place, node: Any) -> Iterator[tuple[str, str]]:
    """Yield the class and the name of each field that a node sets, and of those below it."""
    if not isinstance(node, Mapping):
        return
    target = node.get(TARGET)
    cls = place.class_of(target)
    for name, value in node.items():
        if cls is not None and cls.returns is None and name in cls.fields:
            yield cls.path, name
        yield from _used(place.child(name, target), value)


def pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    sections, used = reference(), set_by()
    written: dict[str, list[Section]] = {name: [] for name in PAGES}
    config = []
    for one in sections:
        if "." not in one.key:
            config.append(one)
        else:
            written[_page_of(one.key)].append(one)
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
    for one in sections:
        title = f"## {one.key}" if one.key else "## Root keys"
        text = "" if not one.key else f"{_plain(one.text)}\n\n"
        parts.append(f"{title}\n\n{text}{_entries(one.entries, 'config')}")
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
