"""Configuration: turn YAML files and overrides into typed, validated objects.

`compose` returns an `ExperimentConfig`, which contains only values. `build_experiment` imports the classes that the
config names and returns an `Experiment`, without loading models or data. Public names are imported on first use. So
importing this package imports neither torch nor Hydra, and `realign --help` is fast.

Modules, in the order of a launch:

- `aliases` and `allocation`: names and notations of other tools, as keys of realign.
- `command_line` and `files`: read the layers, which are overrides and YAML files.
- `classes` and `index`: what a class tells a config, and one file with what all classes of realign tell.
- `words` and `places`: the class that a word selects, and the class at a key.
- `layers` and `composition`: lay one layer over the other, and check and resolve the result.
- `experiment` and `construct`: build the objects that the values describe.
- `keys` and `help`: find and describe keys.
- `errors`, `hydra_settings`, `secret_variables` and `trees`: what these share.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from realign.config.composition import compose
    from realign.config.construct import build
    from realign.config.errors import ConfigError
    from realign.config.experiment import ExperimentConfig, build_experiment

HOMES = {
    "ConfigError": "errors",
    "ExperimentConfig": "experiment",
    "build": "construct",
    "build_experiment": "experiment",
    "build_graph": "construct",
    "compose": "composition",
    "resolve_config": "experiment",
}
"""Module of each public name."""

__all__ = [
    "ConfigError",
    "ExperimentConfig",
    "build",
    "build_experiment",
    "compose",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'realign.config' has no attribute {name!r}")
    return getattr(import_module(f"realign.config.{HOMES[name]}"), name)
