"""Train from Python: `realign.train`, `realign.load_experiment`, `realign.chat`, and the `Run` that training returns.

A thin layer over the command line. Arguments become overrides, so experiments, presets, checks, messages and files are
those of `realign experiment=NAME key=value ...`. Three things are no text: a function of the session, which runs in a
thread of the run, and rows and models in memory, which are written to files named by their content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import re
import shlex
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from omegaconf import OmegaConf
from rich.console import Console

from realign.cache_folder import Cache
from realign.cli.chat import Chat, read_lines
from realign.cli.commands import configure_torch
from realign.cli.exit_codes import plain_warnings
from realign.cli.export import Export, model_or_run
from realign.cli.train import build, console, is_one_of_many, record, run_alone
from realign.config.aliases import translate
from realign.config.classes import import_path
from realign.config.command_line import prepare, quote_text
from realign.config.composition import Composed, compose_layers
from realign.config.construct import fill
from realign.config.errors import suggest
from realign.config.experiment import as_node
from realign.config.trees import get, merge
from realign.config.words import TARGET
from realign.console import lasting_console
from realign.errors import ConfigError, DataError, RealignError, RunComplete
from realign.own_files import OwnFiles, move, open_new, refuse_link, remove_scratch
from realign.records.diagnosis import Diagnosis, Symptom, diagnosis_of
from realign.records.metrics.samples import as_one_line
from realign.records.record_files import METRICS, json_lines
from realign.report.compare import comparison
from realign.report.data import status
from realign.report.files import check_run, run_info, summary
from realign.report.page import write_report
from realign.rewards.pool.functions import SessionFunction, source_of
from realign.runtime import Experiment
from realign.runtime.output_folder import START
from realign.runtime.run_report import attempts_in
from realign.signals import Interrupted, raise_on_signals

_StrPath: TypeAlias = str | os.PathLike[str]
_PLAIN = re.compile(r"[A-Za-z_./][\w./:@-]*", re.ASCII)
"""Text that Hydra reads as text, without quotes."""
_KEYWORDS = ("null", "true", "false", "nan", "inf")
"""Words that Hydra reads as another value than text."""


@runtime_checkable
class _Table(Protocol):
    """Rows in memory: a `datasets.Dataset`, or a DataFrame of pandas."""

    def to_parquet(self, path: Any, /) -> Any:
        """Write the rows to a file."""


@runtime_checkable
class _Pretrained(Protocol):
    """A model or tokenizer of transformers, or a model of peft."""

    name_or_path: str

    def save_pretrained(self, folder: Any, /) -> Any:
        """Write it to a folder."""


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A run: its folder, and what to look at and do next.

    `Run("runs/grpo")` opens any run: one that goes on, has ended, was stopped or failed. Wherever a model is expected,
    a run means its trained model.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).expanduser().absolute())
        check_run(self.folder)

    def __repr__(self) -> str:
        info = run_info(self.folder)
        state = status(self.folder, info, summary(self.folder))["state"]
        last = next((record["step"] for record in reversed(self.history) if "step" in record), 0)
        return f"Run({str(self.folder)!r}: {state}, step {last} of {info['steps'] or '?'})"

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per step: `step` and its metrics. Step 0 is before training."""
        return json_lines(self.folder / METRICS)

    def series(self, metric: str) -> list[float]:
        """Return the values of one metric, over the steps that have it.

        Raises:
            ConfigError: no step has it; names the nearest one that some step has.
        """
        history = self.history
        known = dict.fromkeys(name for step in history for name in step)
        if metric not in known:
            raise ConfigError(f"{self.folder}: no step has a metric {metric!r}{suggest(metric, known)}")
        return [step[metric] for step in history if metric in step]

    def plot(self) -> Path:
        """Show the curves in a notebook. Return their picture.

        Raises:
            ConfigError: the run has no curves, which takes two steps.
        """
        picture = self.folder / "curves.png"
        if not picture.is_file():
            raise ConfigError(
                f"{self.folder}: the run has no curves yet. They are drawn at its end, from two steps on."
            )
        if Console().is_jupyter:
            from IPython.display import Image, display

            display(Image(filename=str(picture)))
        return picture

    def samples(self, best: int | None = None, worst: int | None = None) -> Samples:
        """Print responses with their rewards, and return their records.

        Args:
            best: Number of responses with the highest rewards of the run; of equal ones the latest.
            worst: Number of responses with the lowest rewards, in addition. With neither, the responses of the last
                recorded step.

        Raises:
            ConfigError: the run has no responses.
        """
        records = json_lines(self.folder / "samples.jsonl")
        if not records:
            raise ConfigError(f"{self.folder}: the run recorded no responses. Only runs that sample have some.")
        if best is None and worst is None:
            shown = [sample for sample in records if sample["step"] == records[-1]["step"]]
        else:
            latest = {
                (record["prompt"], record["response"]): record for record in records
            }  # a repeated one counts once
            scored = [record for record in reversed(latest.values()) if record["reward"] is not None]
            scored.sort(key=lambda record: -record["reward"])
            shown = [*scored[: best or 0], *scored[max(best or 0, len(scored) - (worst or 0)) :]]
        output = Console()
        for sample in shown:
            reward = "none" if sample["reward"] is None else f"{sample['reward']:.4g}"
            line = f"step {sample['step']}: reward {reward}  {as_one_line(sample)}"
            output.print(line, markup=False, highlight=False, soft_wrap=True)
        return Samples(shown)

    def why(self, *symptoms: Symptom) -> Diagnosis:
        """Return what keeps the run from learning, as `realign why` prints it.

        Args:
            symptoms: Symptoms of your own: callables that get the `RunRecords`, and return a `Cause` or None.
        """
        return diagnosis_of(self.folder, symptoms)

    def save(self, folder: _StrPath) -> Path:
        """Write the trained model to a new folder with a model card, which transformers and vLLM load.

        Raises:
            ConfigError: the folder exists and is not empty, or the run has several models.
        """
        say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)
        Export(str(self.folder), Path(folder)).run(say)
        return Path(folder)

    def report(self) -> Path:
        """Write the report of the run, one HTML file, and open it in the browser."""
        page = self.folder / "report.html"
        OwnFiles(self.folder).claim(page.name)
        write_report([self.folder], page)
        webbrowser.open(page.resolve().as_uri())
        return page

    def chat(self, *messages: str, **settings: Any) -> list[str]:
        """Chat with the trained model; see `realign.chat`."""
        return chat(self.folder, *messages, **settings)


class Samples(list[dict[str, Any]]):
    """Records of responses. They have been printed, so a shell that echoes this list shows their number only."""

    def __repr__(self) -> str:
        return f"{len(self)} samples"


def train(
    experiment: _StrPath | Experiment,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    reward: Any = None,
    config_dir: _StrPath | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Train, as `realign experiment=NAME key=value ...` does, and return the run.

    Args:
        experiment: Name of an experiment such as `grpo`, path of a YAML file, or an `Experiment`, which takes no
            settings.
        model: Hub name or folder of the trained model, a `Run`, a model of transformers or peft (the run trains a copy,
            the object stays as it is), or a `TransformersModel`.
        tokenizer: Hub name or folder of the tokenizer, or a tokenizer of transformers. Needed with a model object that
            has no name; otherwise that of `model`.
        data: File, folder or hub name, a list of rows (dicts), a `datasets.Dataset`, a DataFrame, or a data node such
            as `PromptData`.
        reward: A function `(prompt, response, row) -> float`, its name such as `reward.py:score`, a list of them whose
            rewards are added, or a dict with the functions of several rewards by name.
        config_dir: Your folder with `experiment/NAME.yaml` and `algorithm/NAME.yaml`.
        quiet: Whether to show no progress.
        overrides: Any other key of the config: `steps=60`, `algorithm="dapo"`. Keys with dots are unpacked,
            `**{"models.actor.optimizer.lr": 1e-5}`, and a dict sets the keys below. Values can be components. TRL's
            names of arguments mean ours: `train_dataset`, `eval_dataset`, `reward_funcs`, `processing_class`.

    Returns:
        The run. If `resume="auto"` finds that no step is left, it is the complete run.

    Raises:
        RealignError: a setting, the data, the model or the reward is wrong, in the words of the command line. Its `run`
            is the run, if it had begun.
        Interrupted: a signal stopped the run, as in a notebook the button; the message contains the last step. Its
            `run` is the run.
    """
    configure_torch()
    arguments = {"model": model, "tokenizer": tokenizer, "data": data, "reward": reward}
    with plain_warnings(debug=False), raise_on_signals(), lasting_console():
        if isinstance(experiment, Experiment):
            if given := [
                *overrides,
                *(name for name, value in arguments.items() if value is not None),
            ]:
                raise ConfigError(f"{given[0]}: an Experiment has all its settings. Change its attribute, or name one.")
            call, built, command = None, experiment, None
        else:
            call = _Call.of(experiment, **arguments, overrides=overrides, config_dir=config_dir)
            built, command = call.build(), call.command
        if is_one_of_many():
            words = shlex.join(command or ["experiment=...", "interfaces.reward.function=FILE:NAME"])
            raise ConfigError(
                f"realign.train runs in one process, but WORLD_SIZE={os.environ['WORLD_SIZE']}. With torchrun, use its "
                f"command: -m realign {words}. Without it, unset WORLD_SIZE."
            )
        shown = console()
        shown.quiet |= quiet
        earlier = attempts_in(built.output_dir)
        try:
            checked = (lambda: None) if call is None else partial(record, call.composed, str(built.output_dir))
            run_alone(built, checked, command, shown)
        except RunComplete as complete:
            shown.print(str(complete), markup=False, highlight=False, soft_wrap=True)
        except (RealignError, Interrupted) as error:
            if attempts_in(built.output_dir) != earlier:
                error.run = Run(built.output_dir)
            raise
    return Run(built.output_dir)


def load_experiment(
    experiment: _StrPath,
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    reward: Any = None,
    config_dir: _StrPath | None = None,
    **overrides: Any,
) -> Experiment:
    """Return the experiment that `realign.train` would run with the same arguments, without loading model or data.

    A model or tokenizer given as an object is saved below `output_dir`, and rows in the cache folder, since an
    experiment names files only.

    Raises:
        ConfigError: a setting is wrong; names the key.
    """
    with plain_warnings(debug=False):
        return _Call.of(experiment, model, tokenizer, data, reward, overrides, config_dir).build()


def compare(*runs: _StrPath | Run) -> None:
    """Print the metrics and the settings that differ between runs, as `realign compare` does.

    Raises:
        ConfigError: a folder contains no run.
    """
    output = Console()
    for part in comparison([(run if isinstance(run, Run) else Run(Path(run))).folder for run in runs], output.width):
        output.print(part)


def chat(model: _StrPath | Run, *messages: str, **settings: Any) -> list[str]:
    """Return the answers of a model to the messages of one conversation. Without messages, read them from the keyboard.

    Args:
        model: Folder of a model or a run, hub name, or a `Run`.
        messages: What you say, turn by turn.
        settings: Settings of `realign chat`, such as `seed=1` or `**{"generation.temperature": 0.7}`.

    Raises:
        RealignError: the model cannot be loaded, or a setting is wrong.
    """
    path = str(model.folder if isinstance(model, Run) else model)
    values: dict[str, Any] = {"model": {"path": model_or_run("chat", path)}}
    for key, value in settings.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        merge(values, value)
    console()  # without the progress bars of transformers
    answers: list[str] = []
    say: Callable[[str], None] = answers.append
    if not messages:
        say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)
    fill(Chat, values, "").talk(messages or read_lines(), say)
    return answers


# --- arguments as a command line ---


@dataclasses.dataclass(frozen=True)
class _Call:
    """Arguments of `train` as a composed command line."""

    words: Sequence[str]
    functions: Mapping[str, SessionFunction]
    sources: Mapping[str, str]
    """Source code of the functions, by key."""
    composed: Composed

    @classmethod
    def of(
        cls,
        experiment: _StrPath,
        model: Any,
        tokenizer: Any,
        data: Any,
        reward: Any,
        overrides: Mapping[str, Any],
        config_dir: _StrPath | None,
    ) -> _Call:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # as on the command line, for `_target_` in a file of the current folder
        model, tokenizer, data, reward, overrides = _from_trl_names(model, tokenizer, data, reward, overrides)
        writer = _Writer()
        words = [f"experiment={os.fspath(experiment)}"]
        for key, value in overrides.items():
            words += writer.overrides(key, value)
        if data is not None:
            words += writer.overrides("data", data)
        words += writer.reward(reward)
        folder = None if config_dir is None else os.fspath(config_dir)
        words += writer.model(model, tokenizer, partial(compose_layers, tuple(words), folder))
        translated, notes, _ = translate(prepare(words), folder)
        for note in notes:
            if not note.startswith("model="):  # an argument of `train` itself
                sys.stderr.write(f"note: {note}\n")
        return cls(translated, writer.functions, writer.sources, compose_layers(translated, folder))

    @property
    def command(self) -> Sequence[str] | None:
        """Words of the command line that repeats the run; None if it has functions of this session."""
        return None if self.functions else self.words

    def build(self) -> Experiment:
        """Build the experiment.

        Raises:
            ConfigError: a setting is invalid; names the key.
        """
        config = self.composed.resolve()
        for key, function in self.functions.items():
            *path, name = key.split(".")
            get(vars(config), tuple(path))[name] = function
        experiment = build(config)
        experiment.sources = self.sources
        return experiment


class _Writer:
    """Writes values of Python as overrides."""

    def __init__(self) -> None:
        self.functions: dict[str, SessionFunction] = {}
        self.sources: dict[str, str] = {}

    def model(self, model: Any, tokenizer: Any, composed: Callable[[], Composed]) -> Iterator[str]:
        """Yield the overrides of the arguments `model` and `tokenizer`. `composed` has the other arguments.

        Raises:
            ConfigError: a model object without a name has no tokenizer.
        """
        if isinstance(model, _Pretrained):
            tokenizer = tokenizer or model.name_or_path
            if not tokenizer:
                raise ConfigError(
                    f"model: this {type(model).__name__} has no name to find its tokenizer by. Add tokenizer=TOKENIZER."
                )
            model = _save(model, composed())
        if isinstance(model, str | os.PathLike | Run):
            yield from self.overrides("model", model)
        elif model is not None:
            yield from self.overrides(_key_of_trained(composed()), model)
        if tokenizer is not None:
            tokenizer = _save(tokenizer, composed()) if isinstance(tokenizer, _Pretrained) else tokenizer
            yield from self.overrides(f"{_key_of_trained(composed())}.tokenizer", tokenizer)

    def reward(self, reward: Any) -> Iterator[str]:
        """Yield the overrides of the argument `reward`."""
        if isinstance(reward, list | tuple):
            reward = _by_name(reward)
        if isinstance(reward, Mapping):
            yield "interfaces.reward.function=null"
            yield from self.overrides("interfaces.reward.functions", reward)
        elif dataclasses.is_dataclass(reward):
            yield from self.overrides("interfaces.reward", reward)
        elif reward is not None:
            yield from self.overrides("interfaces.reward.function", reward)

    def overrides(self, key: str, value: Any) -> Iterator[str]:
        """Yield the overrides that set a key to a value.

        Raises:
            ConfigError: the value is no setting.
            DataError: a row is no JSON.
        """
        if isinstance(value, Run):
            value = model_or_run("train", str(value.folder))
        elif inspect.isclass(value):
            value = {TARGET: import_path(value)}
        elif dataclasses.is_dataclass(value):
            value = as_node(value)
        is_data = key.rpartition(".")[2] == "data"
        if is_data and isinstance(value, Mapping) and value and all(isinstance(x, _Table) for x in value.values()):
            names = ", ".join(map(repr, value))
            raise DataError(
                f"{key}: a dataset with the splits {names}. Give one of them, such as {next(iter(value))!r}."
            )
        if isinstance(value, Mapping) and value:
            for name, item in value.items():
                yield from self.overrides(f"{key}.{name}", item)
        elif key == "evaluation" and (isinstance(value, _Table) or _are_rows(value)):
            yield from self.overrides("evaluation.data", value)
        elif is_data and not isinstance(value, Mapping | None):
            yield from self.overrides(f"{key}.path", _file_of(key, value))
        elif callable(value):
            yield f"{key}={_text(key, self._function(key, value))}"
        else:
            yield f"{key}={_text(key, value)}"

    def _function(self, key: str, function: Any) -> str:
        """Return the name of a function for a config."""
        if key == "graph":
            return f"{function.__module__}.{function.__qualname__}"
        if (name := _importable(function)) is not None:
            return name
        self.functions[key] = named = SessionFunction.of(function)
        self.sources[key] = source_of(function)
        return str(named)


_OF_TRL = {"train_dataset": "data", "reward_funcs": "reward", "processing_class": "tokenizer"}
"""Arguments of TRL's trainers that are others of ours."""


def _from_trl_names(
    model: Any, tokenizer: Any, data: Any, reward: Any, overrides: Mapping[str, Any]
) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Return the arguments of `train` under our names.

    Raises:
        ConfigError: an argument is given under both names, or has no counterpart.
    """
    given, rest = {"tokenizer": tokenizer, "data": data, "reward": reward}, dict(overrides)
    for theirs, ours in _OF_TRL.items():
        if theirs in rest:
            if given[ours] is not None:
                raise ConfigError(f"{theirs}: {ours} is given too, and means the same. Give one of them.")
            given[ours] = rest.pop(theirs)
    if "args" in rest:
        raise ConfigError(
            "args: settings are arguments of realign.train itself, such as steps=60 or lr=1e-6. `realign import trl "
            "FILE` translates a config of TRL."
        )
    held_out = rest.pop("eval_dataset", None)
    if isinstance(held_out, Mapping) and not isinstance(held_out, _Table):
        rest |= {f"evaluations.{name}.data": part for name, part in held_out.items()}
    elif held_out is not None:
        rest["evaluation.data"] = held_out
    return model, given["tokenizer"], given["data"], given["reward"], rest


def _by_name(functions: Sequence[Any]) -> Any:
    """Return several reward functions by their names, numbered if equal; one function as it is.

    Raises:
        ConfigError: there is none.
    """
    if not functions:
        raise ConfigError("reward: the list is empty. Give a function, or a list of them.")
    if len(functions) == 1:
        return functions[0]
    named: dict[str, Any] = {}
    for number, function in enumerate(functions, 1):
        name = function.rpartition(":")[2] if isinstance(function, str) else getattr(function, "__name__", "")
        name = name if name.isidentifier() else f"reward_{number}"
        named[name if name not in named else f"{name}_{number}"] = function
    return named


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _importable(function: Any) -> str | None:
    """Return the name by which a worker process can import a function; None if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not isinstance(module, str) or module == "__main__" or not name.replace(".", "").isidentifier():
        return None  # a script is `__main__`, too: a worker that imported it would start the run again
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    with suppress(ImportError, ValueError):  # a module that was made, not imported
        if value is function and find_spec(module) is not None:
            return f"{module}:{name}"
    return None


def _key_of_trained(composed: Composed) -> str:
    """Return the key of the model that an experiment trains."""
    roles = composed.tree["models"]
    return "models." + ("actor" if "actor" in roles else next(iter(roles), "actor"))


def _save(thing: _Pretrained, composed: Composed) -> Path:
    """Return a folder below `output_dir` with a model or tokenizer. Equal ones have the same, as resuming needs."""
    folder = Path(str(OmegaConf.select(composed.with_hydra(), "output_dir")), START)
    refuse_link(folder)
    own = OwnFiles(folder)
    scratch = own.scratch("model")
    try:
        written = scratch / "written"
        thing.save_pretrained(written)
        digest = hashlib.sha256()
        for file in sorted(path for path in written.rglob("*") if path.is_file()):
            with file.open("rb") as content:
                digest.update(
                    f"{file.relative_to(written)} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode()
                )
        named = folder / digest.hexdigest()[:16]
        own.record(named.name, written)
        try:
            move(written, named)
        except OSError:  # an equal one is there, perhaps since another process wrote it a moment ago
            if not named.is_dir():
                raise
        return named
    finally:
        remove_scratch(scratch)


def _file_of(key: str, rows: Any) -> Any:
    """Return the path of data: as given, or of a file with the rows."""
    if isinstance(rows, str | os.PathLike):
        return os.fspath(rows)
    if isinstance(rows, _Table):
        return _store_rows(partial(_write_table, key, rows), "parquet")
    rows = list(rows) if isinstance(rows, Iterable) else rows
    if _are_rows(rows):
        return _store_rows(partial(_write_lines, key, rows), "jsonl")
    return rows


def _write_table(key: str, table: _Table, path: Path) -> None:
    try:
        table.to_parquet(path)
    except Exception as error:  # of pyarrow, or of the text in a cell
        reasons = [str(error)] if isinstance(error, UnicodeError) else map(str, error.args)  # pyarrow: what, and where
        reason = " ".join(" ".join(reasons).split())
        raise DataError(
            f"{key}: the table cannot be written: {reason}. Give each column values of one type, such as text with "
            "astype(str), or pass a list of dicts."
        ) from error


def _write_lines(key: str, rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    with open_new(path) as file:
        for number, row in enumerate(rows, 1):
            try:
                file.write(f"{json.dumps(dict(row), ensure_ascii=False)}\n".encode())
            except UnicodeEncodeError as error:
                half = f"\\u{ord(error.object[error.start]):04x}"
                raise DataError(f"{key}: row {number} has {half} alone, half of a character. Remove it.") from error
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(
                    f"{key}: row {number} is no JSON ({error}). Use text, numbers, lists and dicts."
                ) from error


def _store_rows(write: Callable[[Path], Any], ending: str) -> str:
    """Return the path of a file in the user's cache with these rows. Equal rows have the same, as resuming needs."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, f"rows.{ending}")
        write(file)
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
        return str(Cache("rows", limit=0).store(f"{digest}.{ending}", file))


def _text(key: str, value: Any) -> str:
    """Return a value in the grammar of overrides.

    Raises:
        ConfigError: the value is no setting.
    """
    value = as_node(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Integral):  # also of numpy
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value.lower() not in _KEYWORDS else quote_text(value)
    if isinstance(value, list):
        return f"[{','.join(_text(key, item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}: {_text(key, item)}' for name, item in value.items())}}}"
    if isinstance(value, os.PathLike):
        return _text(key, os.fspath(value))
    kind = type(value).__name__
    raise ConfigError(
        f"{key}: an object of {kind} is no setting. Give a name, a number, a list, a dict or a component."
    )


__all__ = ["Run", "Samples", "chat", "compare", "load_experiment", "train"]
