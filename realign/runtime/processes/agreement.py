"""Check that all processes of a distributed run have the same packages, code, settings and data.

A machine with another version would compute something else, or wait in another collective than the other machines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import platform
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from realign.data.dataset import content_hash
from realign.errors import ConfigError, DataError, RealignError
from realign.ranks import Ranks
from realign.runtime.experiment import Experiment
from realign.version import UNKNOWN, installed_version, version_of

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
"""Packages whose version can change results or collectives."""
LONGEST = 32
"""Number of items from which a list is compared as a whole."""
CURE = "All processes need the same packages, code, settings and data."


def software() -> dict[str, str]:
    """Return the versions of this process that all ranks must share, by name."""
    packages = {name: version_of(name) or UNKNOWN for name in PACKAGES}
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "python": python,
        **packages,
        "realign": installed_version(),
        "source code of realign": _source_of_realign(),
    }


def check_same(facts_of: Mapping[str, Mapping[str, str]], error: type[RealignError] = ConfigError) -> None:
    """Check that the facts of all processes are equal.

    Args:
        facts_of: Facts by name, of each process by its description.
        error: Class of the error.

    Raises:
        RealignError: The facts differ. The message contains the first fact that differs, with both values.
    """
    first = next(iter(facts_of))
    for other, facts in facts_of.items():
        for name in {**facts_of[first], **facts}:
            wanted, has = (of.get(name, "(none)") for of in (facts_of[first], facts))
            if wanted != has:
                raise error(f"{name}: {first} has {wanted}, but {other} has {has}. {CURE}")


def by_rank(gathered: Sequence[Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    """Return facts in rank order as `check_same` takes them."""
    return {f"rank {rank}": facts for rank, facts in enumerate(gathered)}


def check_same_settings(experiment: Experiment, ranks: Ranks) -> None:
    """Check that all ranks have the same packages, settings and classes; collective.

    Raises:
        ConfigError: They differ. The message contains the key.
    """
    if ranks.size > 1:
        check_same(by_rank(ranks.gather(software() | settings_of(experiment))))


def settings_of(experiment: Experiment) -> dict[str, str]:
    """Return the settings of an experiment by key, and the hashes of the files with classes and functions of the user.

    The state of a component is not part of its settings.
    """
    return dict(_settings("", experiment, frozenset()))


def check_same_data(datasets: Mapping[str, Any], ranks: Ranks) -> None:
    """Check that all ranks have loaded the same rows; collective.

    Args:
        datasets: Datasets by config key; None is skipped.
        ranks: The ranks of the run.

    Raises:
        DataError: Rows differ. The message contains the config key.
    """
    if ranks.size > 1:
        own = {key: _content(dataset) for key, dataset in datasets.items() if dataset is not None}
        check_same(by_rank(ranks.gather(own)), DataError)


def _content(dataset: Any) -> str:
    digest = content_hash(dataset)
    rows = "an unknown number of" if dataset.size is None else len(dataset)
    return f"{rows} rows" + ("" if digest is None else f" with sha256 {digest[:12]}")


def _settings(path: str, value: Any, within: frozenset[int]) -> Iterator[tuple[str, str]]:
    """Yield key and value of each setting, and for code of the user the hash of its file.

    Args:
        path: Key of the value.
        value: A setting, or an object that contains settings.
        within: Ids of the objects that contain `value`, which may refer to them.
    """
    if id(value) in within:
        return
    within |= {id(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield _code(path, type(value))
        for field in dataclasses.fields(value):
            yield from _settings(f"{path}.{field.name}".lstrip("."), getattr(value, field.name, None), within)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _settings(f"{path}.{key}", inner, within)
    elif isinstance(value, list | tuple):
        items = [fact for i, inner in enumerate(value) for fact in _settings(f"{path}.{i}", inner, within)]
        # a long list, such as rows in memory, is one hash: its items would be a message of megabytes to each rank
        yield from items if len(items) <= LONGEST else [(path, f"{len(value)} items with {_sha256(repr(items))}")]
    elif isinstance(value, str | int | float | Path | Enum | None):
        yield path, repr(value)
    elif isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, value)))
    else:  # a function or an object of the user, or the state of a component
        yield _code(path, value if isinstance(value, type | FunctionType) else type(value))


def _code(path: str, code: type | FunctionType) -> tuple[str, str]:
    """Return the key and the qualified name of a class or function, with the hash of its file if it is of the user."""
    of_user = code.__module__.partition(".")[0] != __name__.partition(".")[0]
    name = f"{code.__module__}.{code.__qualname__}{_file_of(code) if of_user else ''}"
    return f"{path}._target_".lstrip("."), name


@cache
def _file_of(code: type | FunctionType) -> str:
    """Return the hash of the file of a class or function, for a message; empty if it has no file."""
    try:
        content = Path(inspect.getfile(code)).read_bytes()
    except (TypeError, OSError):  # built-in, or defined in an interactive session
        return ""
    return f" in a file with {_sha256(content)}"


def _sha256(content: bytes | str) -> str:
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return f"sha256 {hashlib.sha256(data).hexdigest()[:12]}"


@cache
def _source_of_realign() -> str:
    """Return the hash of all source files of this package, since a checkout may have the version of another one."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"sha256 {digest.hexdigest()[:12]}"


__all__ = ["by_rank", "check_same", "check_same_data", "check_same_settings", "settings_of", "software"]
