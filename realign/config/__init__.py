"""From YAML and overrides to typed, checked objects. Importing this package imports neither torch nor Hydra.

`compose` gives an `ExperimentConfig` (values only); `build_experiment` imports the classes it names and gives an
`Experiment` that nothing has been loaded for yet.
"""

from realign.config.assemble import build_experiment, resolved_config
from realign.config.build import build, build_graph
from realign.config.compose import compose
from realign.config.errors import ConfigError
from realign.config.schema import ExperimentConfig, MicroBatchConfig

__all__ = [
    "ConfigError",
    "ExperimentConfig",
    "MicroBatchConfig",
    "build",
    "build_experiment",
    "build_graph",
    "compose",
    "resolved_config",
]
