"""Where the config groups are. Imported by `realign --help`, so it imports nothing else."""

from __future__ import annotations

from pathlib import Path

from realign.config.errors import ConfigError


def experiments_dir() -> Path:
    """The folder with `config.yaml` and the groups: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "experiments", package.parent / "experiments"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the folder of experiments is missing; looked beside and inside {package}")


def list_experiments(config_dir: Path | None = None) -> dict[str, str]:
    """Name and one-line description (first comment line) of every experiment, ours and those of a user's folder."""
    return _listed("experiment", config_dir)


def list_algorithms(config_dir: Path | None = None) -> dict[str, str]:
    """The same of every `algorithm=NAME`, which is laid over an experiment."""
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
