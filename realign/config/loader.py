"""Hydra config loader that applies the layers of realign, and the Hydra application that uses it.

All configs of the project are composed through `LayeredLoader`: by `compose`, runs, sweeps and `--cfg`. So all of them
have the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from realign.config.command_line import as_layer, rewrite
from realign.config.errors import ConfigError, one_line
from realign.config.folders import SCHEME, experiments_dir
from realign.config.layers import Layers
from realign.config.places import ROOTS
from realign.config.schema import REPORT
from realign.config.secret_variables import without_secrets
from realign.config.trees import leaves, node_at
from realign.safe_yaml import check_yaml

HYDRA_VERSION = "1.3"
"""Compatibility version of Hydra (`version_base`)."""
_SOURCES: Any = Plugins.instance().discover(ConfigSource)
_FILES: Any = next(source for source in _SOURCES if source.scheme() == "file")
"""Hydra's plugin that reads config files."""


class CheckedFiles(_FILES):
    """Hydra plugin that reads the folder of `--config-dir`: it checks the size of each file before Hydra expands it."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of its URLs."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file.

        Raises:
            ConfigError: the file has too many values, or is no YAML.
        """
        file = Path(self.path, config_path if config_path.endswith(".yaml") else f"{config_path}.yaml")
        try:
            check_yaml(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: the file cannot be read: {one_line(error)}") from error
        result: ConfigResult = super().load_config(config_path)
        return result


class LayeredLoader(ConfigLoaderImpl):
    """Config loader that changes the files and overrides of a config before Hydra merges them."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self._overrides: list[Override] = []
        self._loaded: list[ConfigResult] = []

    def _parse_overrides_and_create_caching_repo(self, config_name: str | None, overrides: list[str]) -> Any:
        self._overrides, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return self._overrides, repository

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: Any) -> DictConfig:
        layers = Layers()
        self._loaded = []
        loaded = [super(LayeredLoader, self)._load_single_config(default, repo) for default in defaults]
        for default, result in zip(defaults, loaded, strict=True):
            if default.config_path is not None and not default.config_path.startswith("hydra/"):
                _check_defaults(default.config_path, result)
                layers.add_file(default.config_path, result.config)
        for override in self._overrides:
            if override.key_or_group.partition(".")[0] in REPORT:
                raise ConfigError(f"{override.input_line}: only realign sets {override.key_or_group}")
        tree, deleted = as_layer(self._overrides, layers.view)
        keys = [override.key_or_group for override in self._overrides]
        plain = [key for key in keys if key.split(".")[0] not in ROOTS]
        typed = sorted({*(".".join(path) for path, _ in leaves(tree, ())), *plain})
        rewrite(self._overrides, layers.add_command_line(tree, deleted))
        self._overrides, self._loaded = [], loaded
        composed = super()._compose_config_from_defaults_list(defaults, repo)
        with open_dict(composed):
            composed.dropped, composed.owners = layers.dropped(), layers.owners
            composed.typed = typed
        return composed

    def _load_single_config(self, default: ResultDefault, repo: Any) -> ConfigResult:
        return self._loaded.pop(0)


def _check_defaults(path: str, result: ConfigResult) -> None:
    """Raise an error for defaults that choose settings of Hydra, which Hydra ignores or `check_node` refuses."""
    chosen = [one for one in result.defaults_list or () if isinstance(one, GroupDefault) and one.override]
    groups = [group for one in chosen if (group := str(one.group).strip("/")).startswith("hydra/")]
    if "hydra" in result.config and node_at(result.config, ("hydra", "defaults")) is not None:
        groups.append("hydra.defaults")
    refused = [group for group in groups if group != "hydra/launcher"]
    if path != "config" and refused:
        key = refused[0].replace("/", ".")
        raise ConfigError(f"{path}.yaml: {key}: a config cannot change this setting of Hydra. Remove it.")


def whole_config(overrides: Sequence[str]) -> DictConfig:
    """Compose the config of one run, including the `hydra` node."""
    with _Application() as hydra:
        return hydra.compose_config(
            config_name="config",
            overrides=list(overrides),
            run_mode=RunMode.RUN,
            from_shell=False,
            with_log_configuration=False,
        )


def run_application(task: Callable[[DictConfig], Any], overrides: Sequence[str], multirun: bool) -> list[Path]:
    """Run `task` as a Hydra application on one config, or on each config of a sweep.

    Returns:
        The folders of the runs of a sweep; empty for a single run.
    """
    words = list(overrides)
    with _Application() as hydra:
        mode = RunMode.MULTIRUN if multirun else hydra.get_mode("config", words) or RunMode.RUN
        run = hydra.multirun if mode is RunMode.MULTIRUN else hydra.run
        done = run(config_name="config", task_function=task, overrides=[*words, f"hydra.mode={mode.name}"])
    if mode is not RunMode.MULTIRUN:
        return []
    return [Path(one.hydra_cfg.hydra.runtime.output_dir) for batch in done or () for one in batch]


def show_config(overrides: Sequence[str], kind: str, package: str | None, resolve: bool) -> None:
    """Print a composed config (`--cfg`). `kind` selects the config of the job, of Hydra, or both."""
    with _Application() as hydra, without_secrets():
        hydra.show_cfg(config_name="config", overrides=list(overrides), cfg_type=kind, package=package, resolve=resolve)


def show_info(overrides: Sequence[str], kind: str) -> None:
    """Print how Hydra finds and composes a config (`--info`)."""
    with _Application() as hydra:
        hydra.show_info(kind, config_name="config", overrides=list(overrides))


class _Application:
    """Context manager of the Hydra application; sets Hydra's global instance while it is open."""

    def __enter__(self) -> Hydra:
        version.setbase(HYDRA_VERSION)
        Plugins.instance().register(CheckedFiles)
        loader = LayeredLoader(create_config_search_path(str(experiments_dir())))
        hydra = Hydra(task_name="realign", config_loader=loader)
        self._before = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        GlobalHydra.instance().initialize(hydra)
        return hydra

    def __exit__(self, *_: object) -> None:
        GlobalHydra.instance().hydra = self._before
