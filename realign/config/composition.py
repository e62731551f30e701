"""`compose`: overrides and config groups become an `ExperimentConfig`, with everything resolved and checked by type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from realign.config.components import fill
from realign.config.errors import ConfigError, explain
from realign.config.folders import experiments_dir
from realign.config.schema import COMPONENTS, ExperimentConfig

if TYPE_CHECKING:
    from collections.abc import Callable

HYDRA_VERSION = "1.3"
"""The behaviour of Hydra that is asked for (its `version_base`)."""


def compose(overrides: Sequence[str] = (), config_dir: Path | str | None = None) -> ExperimentConfig:
    """Compose a config as the command line does, without a Hydra application around it.

    Args:
        overrides: such as `experiment=grpo_arithmetic`, `steps=10`, `interfaces.actor.adv_norm.std=none`.
        config_dir: a folder of one's own with a group `experiment/`, or `algorithm/`.

    Raises:
        ConfigError: one line that names the key and the nearest valid one.
    """
    # Imported here: `realign --help` must not wait for Hydra.
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from yaml import YAMLError

    register_schema()
    try:
        with initialize_config_dir(str(experiments_dir()), version_base=HYDRA_VERSION, job_name="realign"):
            composed = hydra_compose("config", overrides=[*search_path(config_dir), *overrides])
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain(error)) from error
    return resolve(composed)


def resolve(composed: DictConfig) -> ExperimentConfig:
    """Read every value of a composed config, so that `???` and bad interpolations fail now.

    Raises:
        ConfigError: names the key.
    """
    try:
        if missing := sorted(_missing_keys(OmegaConf.to_container(composed, resolve=False))):
            raise ConfigError(f"missing: {', '.join(missing)}; give a value, or start from experiment=NAME")
        plain = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(plain, dict)
    return config_of({str(key): value for key, value in plain.items()})


def _missing_keys(node: Any, path: str = "") -> Iterator[str]:
    """Paths of the values that are `???`. (OmegaConf's own search stops at an interpolation to one.)"""
    if node == "???":
        yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from _missing_keys(value, f"{path}.{key}" if path else str(key))


def config_of(plain: Mapping[str, Any]) -> ExperimentConfig:
    """The config that plain values (of a saved `config.yaml`, say) stand for; components stay as they are."""
    values = fill(ExperimentConfig, {key: value for key, value in plain.items() if key not in COMPONENTS}, "")
    return replace(values, **{key: value for key, value in plain.items() if key in COMPONENTS})


def register_schema() -> None:
    """Give Hydra the schema that `experiments/config.yaml` starts from."""
    from hydra.core.config_store import ConfigStore

    schema = OmegaConf.structured(ExperimentConfig)
    for key in COMPONENTS:
        OmegaConf.set_struct(schema[key], False)
    ConfigStore.instance().store(name="experiment_schema", node=schema)


def search_path(config_dir: Path | str | None) -> list[str]:
    """The override that adds a user's folder of config groups to those that are searched."""
    if config_dir is None:
        return []
    folder = Path(config_dir).resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-dir: there is no folder {str(config_dir)!r}")
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return [f"hydra.searchpath=['file://{quoted}']"]


def hydra_main(task: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """`task` as a Hydra application over our experiments; it reads its arguments from `sys.argv`."""
    import hydra

    register_schema()
    return hydra.main(version_base=HYDRA_VERSION, config_path=str(experiments_dir()), config_name="config")(task)
