"""Locations of the config groups. `realign --help` imports this module, so it has no slow imports."""

from __future__ import annotations

from pathlib import Path

from realign.config.errors import ConfigError

GROUPS = ("experiment", "algorithm", "runtime", "rollout")
"""Config groups: folders with files that one word selects."""
SCHEME = "realign"
"""Scheme of the URL of `--config-dir` in Hydra's search path, which selects `realign.config.loader.CheckedFiles`."""


def experiments_dir() -> Path:
    """Return the folder with `config.yaml` and the groups: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "experiments", package.parent / "experiments"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no folder of experiments inside {package} or beside it. Reinstall realign.")


def list_experiments(config_dir: Path | None = None) -> dict[str, str]:
    """Return name and description (first comment line) of every experiment, including those of a user's folder."""
    return _listed("experiment", config_dir)


def list_algorithms(config_dir: Path | None = None) -> dict[str, str]:
    """Return name and description (first comment line) of every `algorithm=NAME`, which modifies an experiment."""
    return _listed("algorithm", config_dir)


def _listed(group: str, config_dir: Path | None) -> dict[str, str]:
    folders = [experiments_dir(), *([config_dir] if config_dir is not None else [])]
    files = [path for folder in folders for path in sorted((folder / group).glob("*.yaml"))]
    return {path.stem: _header(path) for path in files}


def _header(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line and line.strip("# "):
            return line.strip("# ")
    return ""
