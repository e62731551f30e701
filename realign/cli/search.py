"""Search: `realign --trials N <overrides>` starts N runs, with values that Optuna proposes from earlier results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from realign.cli.sweep import Launcher, SweptRun, launch_all, sweep_overrides
from realign.cli.train import Start
from realign.config.composition import compose_layers
from realign.config.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def search(words: Sequence[str], config_dir: str | None, start: Start, debug: bool, trials: int) -> int:
    """Start the runs of a search, and print their table and the best of them by the metric of `save_best`.

    Args:
        words: Overrides of the command line. Keys with several values or an interval are searched, also those of
            `hydra.sweeper.params`.
        config_dir: As for `compose`.
        start: Runs an experiment.
        debug: Whether to print the traceback of every error.
        trials: Number of runs.

    Returns:
        The exit code.

    Raises:
        ConfigError: a run is invalid, or optuna is not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ConfigError(f"--trials needs {error.name}. Run pip install 'realign-rl[search]'.") from error
    if trials < 1:
        raise ConfigError(f"--trials {trials}: must be at least 1")
    _, given = sweep_overrides(words, config_dir)
    fixed = [str(override.input_line) for override in given if not override.is_sweep_override()]
    space = {x.get_key_element(): _values(x) for x in given if x.is_sweep_override()}
    if not space:
        raise ConfigError("--trials: no key to search. Give one several values: KEY=a,b or 'KEY=interval(a,b)'.")
    # with a value of each key, since the experiment may need one
    shared = compose_layers([*fixed, *(f"{key}={_first(values)}" for key, values in space.items())], config_dir)
    settings = shared.resolve()
    if settings.save_best is None:
        raise ConfigError("--trials: which runs are better? Set save_best, such as save_best=eval/reward.")
    metric = settings.save_best.removeprefix("-")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        direction="maximize" if metric == settings.save_best else "minimize",
        sampler=optuna.samplers.TPESampler(seed=settings.seed),
    )

    def start_runs(launcher: Launcher) -> None:
        size = launcher.batch or 1  # more at once know fewer results
        for first in range(0, trials, size):
            asked = [study.ask(space) for _ in range(min(size, trials - first))]
            runs = [
                compose_layers([*fixed, *(f"{key}={x}" for key, x in trial.params.items())], config_dir)
                for trial in asked
            ]
            for run in runs:
                run.resolve()
            for trial, folder in zip(asked, launcher.launch(runs), strict=True):
                value = SweptRun.read(folder).best(metric)
                study.tell(trial, value, None if value is not None else optuna.trial.TrialState.FAIL)

    code = launch_all(shared, start, debug, start_runs)
    if study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
        best = study.best_trial
        values = " ".join(f"{key}={value}" for key, value in best.params.items())
        print(f"best run: {best.number}, {metric} {best.value:.4g}, with {values}")
    return code


def _values(override: Override) -> Any:
    """Return the distribution of the values that an override gives its key."""
    from hydra.core.override_parser.types import Glob, IntervalSweep
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None
        assert value.end is not None
        log = "log" in value.tags
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(value.start, value.end, log=log)
        return FloatDistribution(float(value.start), float(value.end), log=log)
    if isinstance(value, Glob):
        raise ConfigError(
            f"{override.input_line}: --trials searches lists (a,b), range(a,b), interval(a,b) and int(interval(a,b))."
        )
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def _first(values: Any) -> Any:
    """Return a value of a distribution."""
    return values.choices[0] if hasattr(values, "choices") else values.low
