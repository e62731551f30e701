"""Prepare the words of a command line for Hydra: quote text that its grammar cannot read, and register YAML files.

Hydra reads letters outside ASCII, spaces and parentheses only in quotes. A shell removes one pair of quotes, so users
would have to write two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from realign.config.errors import ConfigError, one_line
from realign.config.folders import list_experiments
from realign.config.module_words import with_target
from realign.safe_yaml import check_yaml

ENDINGS = (".yaml", ".yml")
EXPERIMENT = "experiment"
_PLAIN_KEY = re.compile(r"[+~]{0,2}[\w@./:-]+")
_SPECIAL = re.compile(r"""[,'"\[\]{}\\]|\$\{""")
"""Characters whose meaning in Hydra's grammar (lists, mappings, quotes, interpolations) a user may have intended."""


def prepare(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with quotes added where needed, YAML files registered as experiments, and words of shipped
    classes replaced by their import paths.

    Raises:
        ConfigError: a YAML file does not exist or cannot be read.
    """
    return [quoted(with_target(with_file(word))) for word in overrides]


def quoted(word: str) -> str:
    """Return an override whose value Hydra reads as text, with quotes if Hydra's grammar needs them.

    A value with commas, brackets, quotes or interpolations stays unchanged, since it may be a list or a sweep.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = word.partition("=")
    if not equals or not value.strip() or not _PLAIN_KEY.fullmatch(key) or _SPECIAL.search(value):
        return word
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return f'{key}="{value}"'
    return word


def quoted_text(value: str) -> str:
    """Return a text in the quotes of Hydra's grammar, as the value of an override. Interpolations stay in effect."""
    # Hydra reads a backslash as an escape only before a quote
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{escaped}'"


def is_file(word: str) -> bool:
    """Return whether a word is the path of a YAML file instead of an override."""
    return "=" not in word and word.lower().endswith(ENDINGS)


def with_file(word: str) -> str:
    """Return `experiment=NAME` for a word such as `./my.yaml` or `experiment=./my.yaml`, after registering the file.

    Raises:
        ConfigError: the file does not exist or cannot be read.
    """
    key, _, value = word.partition("=") if not is_file(word) else (EXPERIMENT, "=", word)
    files = [one.strip("'\"") for one in value.split(",")]
    if key.lstrip("+") != EXPERIMENT or not all(one.lower().endswith(ENDINGS) for one in files):
        return word
    return f"{key}={','.join(register_file(Path(one).expanduser()) for one in files)}"


def register_file(path: Path, base: str | None = None) -> str:
    """Make a YAML file available as `experiment=NAME`, and return the name.

    Its `hydra` node is checked like those of all files. A file without a `@package` header sets keys at the root.

    Args:
        path: the file.
        base: experiment that the file builds on if it has neither `defaults` nor a `graph`.

    Raises:
        ConfigError: the file does not exist or cannot be read.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not path.is_file():
        raise ConfigError(f"experiment={path}: this file does not exist. `realign --help` lists the experiments.")
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        node = OmegaConf.create(text)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"experiment={path}: the file cannot be read: {one_line(error)}") from error
    if base is not None and not {"defaults", "graph"} & set(node):
        node = OmegaConf.merge({"defaults": [f"/{EXPERIMENT}/{base}", "_self_"]}, node)
    header = re.match(r"\s*#\s*@package\s+(\S+)", text)
    name = re.sub(r"[^\w.-]", "_", path.stem, flags=re.ASCII)
    if name in list_experiments():  # a shipped experiment has precedence in Hydra's search path
        name = f"{name}.file"
    ConfigStore.instance().store(
        group=EXPERIMENT, name=name, node=node, package=header[1] if header else "_global_", provider=str(path)
    )
    return name


__all__ = ["is_file", "prepare", "quoted", "quoted_text", "register_file", "with_file"]
