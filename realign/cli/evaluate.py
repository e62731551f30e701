"""`realign eval MODEL <overrides>`: run the evaluations of an experiment on saved weights, without training."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from transformers.utils.logging import disable_progress_bar

from realign.cli.arguments import compose_line, split_options
from realign.cli.export import model_or_run
from realign.cli.train import build, is_one_of_many
from realign.config.command_line import is_file, quote_text
from realign.config.errors import ConfigError, suggest
from realign.config.experiment import as_node
from realign.config.files import EXPERIMENT
from realign.own_files import OwnFiles, open_regular, replace_text
from realign.records.metrics.samples import readable
from realign.records.metrics.shown_metrics import number
from realign.runtime.standalone_evaluation import Outcome, StandaloneEvaluations
from realign.settings import Count, Settings
from realign.version import installed_version

if TYPE_CHECKING:
    from rich.table import Table

    from realign.api import SequenceSample
    from realign.runtime import Experiment

BASE = "grpo"
"""Experiment whose settings apply if the command line names none."""
_UNNAMED = "evaluation"
"""Name of the evaluation without a name."""
RESULTS, SAMPLES = "results.json", "samples.jsonl"
_UNUSED = "realign.rewards.arithmetic:exact_answer"
"""Reward of training, which must be set but is not called if each evaluation has its own reward."""


@dataclass
class EvalOptions(Settings):
    """Options of `realign eval`."""

    sets: list[str] = field(default_factory=list)
    """Names of the evaluations to run: entries of `evaluations`, and `evaluation` for the one without a name. Empty:
    all of them."""
    role: str | None = None
    """Role that gets the weights; null: actor, or the only role with a model."""
    samples: Count | None = None
    """Number of prompts of each set whose responses are written to samples.jsonl; null: all of them."""


@dataclass(frozen=True)
class EvalRequest:
    """A parsed command line."""

    model: str
    """Folder or hub name of the weights."""
    options: EvalOptions
    experiment: Experiment
    """The experiment, with the weights as its model."""
    out: Path
    """Folder of the results."""

    @property
    def keys(self) -> dict[str, str]:
        """Config keys of the evaluations to run, by name.

        Raises:
            ConfigError: `eval.sets` names an evaluation that does not exist, or the experiment has none.
        """
        known = {key.partition(".")[2] or _UNNAMED: key for key in self.experiment.all_evaluations}
        if not known:
            raise _no_evaluation()
        for name in self.options.sets:
            if name not in known:
                raise ConfigError(f"eval.sets: no evaluation has the name {name!r}{suggest(name, known)}")
        return {name: key for name, key in known.items() if name in self.options.sets or not self.options.sets}


def evaluate(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign eval MODEL`: print a table per evaluation, and write samples and results."""
    from rich.console import Console

    if is_one_of_many():
        raise ConfigError("realign eval: it runs in one process. Start it without torchrun.")
    request = read_request(args, words)
    keys, console = request.keys, Console()
    disable_progress_bar()
    if (request.out / RESULTS).exists() and not request.experiment.overwrite:
        raise ConfigError(
            f"{str(request.out)!r} contains an earlier result. Choose another folder with --out, or set overwrite=true."
        )
    OwnFiles(request.out).claim(RESULTS, SAMPLES)
    outcomes: dict[str, Outcome] = {}
    with (
        closing(StandaloneEvaluations(request.experiment, list(keys.values()))) as loaded,
        open_regular(request.out / SAMPLES, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "wb") as file,
    ):
        for name, key in keys.items():
            decode = loaded.models[loaded.evaluations[key].role].tokenizer.decode
            samples = SampleWriter(file, name, request.options.samples, decode)
            with console.status(f"evaluating {name}"):
                outcomes[name] = loaded.measure(key, samples.add)
            done = outcomes[name]
            title = f"{name}: {done.prompts:,} rows in {done.seconds:.1f} s ({loaded.evaluations[key].describe()})"
            console.print(title, markup=False, highlight=False, soft_wrap=True)
            console.print(_outcome_table(done))
            console.print()
    _write_results(request, keys, outcomes)
    for path in (RESULTS, SAMPLES):
        console.print(str((request.out / path).absolute()), markup=False, highlight=False, soft_wrap=True)
    return 0


def read_request(args: argparse.Namespace, words: Sequence[str]) -> EvalRequest:
    """Parse the command line `MODEL [FILE.yaml] key=value ...`.

    Raises:
        ConfigError: the command line names no model or several, or an option or override is invalid.
    """
    options, rest = split_options("eval", EvalOptions, words)
    models = [word for word in rest if "=" not in word and not word.startswith("~") and not is_file(word)]
    if len(models) != 1:
        raise ConfigError(
            f"realign eval expects one model (a folder or hub name) and overrides, found {models or 'none'}. Example: "
            f"realign eval MODEL evaluation.data.path=held_out.jsonl interfaces.reward.function=reward.py:score"
        )
    model = model_or_run("eval", models[0])
    composed = compose_line(list(_overrides(rest, models[0])), args.config_dir, BASE)
    raw = composed.tree
    overrides = [
        *composed.overrides,
        f"models.{_role(raw, options.role)}.path={quote_text(model)}",
        *_of_training(raw),
    ]
    out = Path(args.out) if args.out else Path("evals") / _folder_name(model)
    return EvalRequest(model, options, build(composed.again(overrides).resolve()), out)


def _overrides(words: Sequence[str], model: str) -> Iterator[str]:
    """Yield the overrides: those that select an experiment first, then the others."""
    # The `base` of `compose_layers` is for files only, so a command line without an experiment gets it here.
    named = any(is_file(word) or word.lstrip("+").startswith(f"{EXPERIMENT}=") for word in words)
    if not named:
        yield f"{EXPERIMENT}={BASE}"
    for word in words:
        if word != model:
            yield word


def _role(raw: Mapping[str, Any], given: str | None) -> str:
    """Return the role that gets the weights."""
    roles = [role for role, node in (raw.get("models") or {}).items() if node is not None]
    if given is not None and given not in roles:
        raise ConfigError(f"eval.role={given}: the experiment has no model of this role{suggest(given, roles)}")
    if given is None and "actor" not in roles and len(roles) != 1:
        raise ConfigError(f"eval.role is missing: name the role that gets the weights (valid: {', '.join(roles)})")
    return given or ("actor" if "actor" in roles else roles[0])


def _of_training(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides for settings that only training needs and that are missing.

    Raises:
        ConfigError: the config has no evaluation, or its evaluations need a missing reward of training.
    """
    named = {f"evaluations.{name}": node for name, node in (raw.get("evaluations") or {}).items()}
    nodes = {key: node for key, node in {"evaluation": raw.get("evaluation"), **named}.items() if node}
    if not nodes:
        raise _no_evaluation()
    if (raw.get("data") or {}).get("path") == "???":
        for key, node in nodes.items():
            if not (isinstance(node, Mapping) and (node.get("data") or {}).get("path")):
                raise ConfigError(f"{key}.data.path is missing: give it the held-out rows.")
        yield f"data.path={quote_text(str(next(iter(nodes.values()))['data']['path']))}"
    reward = (raw.get("interfaces") or {}).get("reward") or {}
    if reward.get("function") != "???" or reward.get("functions"):
        return
    if not all(isinstance(node, Mapping) and node.get("reward") for node in nodes.values()):
        raise ConfigError("interfaces.reward.function is missing: it scores the responses. Set it to FILE.py:FUNCTION.")
    yield f"interfaces.reward.function={_UNUSED}"


def _no_evaluation() -> ConfigError:
    return ConfigError("evaluation is missing: the config has no evaluation. Set evaluation.data.path=FILE.")


def _folder_name(model: str) -> str:
    """Return the name of the folder of the results: `grpo_final_actor` for the model `runs/grpo/final/actor`."""
    parts = [part for part in Path(model).parts if part.strip("./\\:")]
    return "_".join(parts[1:] if len(parts) > 1 and parts[0] == "runs" else parts) or "model"


class SampleWriter:
    """Writes responses as lines of JSON.

    Args:
        file: open file.
        name: name of the evaluation, which each line contains.
        prompts: maximum number of prompts per sampling setting; None: no limit.
        decode: `decode` of the tokenizer.
    """

    def __init__(self, file: IO[bytes], name: str, prompts: int | None, decode: Any) -> None:
        self._file, self._name, self._prompts, self._decode = file, name, prompts, decode
        self._written: dict[str, int] = {}

    def add(self, batch: SequenceSample, ending: str) -> None:
        """Write the responses of a batch. `ending` is the swept setting of the batch, such as `@temperature=0.5`."""
        before = self._written.setdefault(ending, 0)
        count = len(batch) if self._prompts is None else min(len(batch), self._prompts - before)
        self._written[ending] += count
        head = {"evaluation": self._name} | ({"sweep": ending.removeprefix("@")} if ending else {})
        for record in readable(batch, count, self._decode):
            line = json.dumps(head | record, ensure_ascii=False, default=str)
            self._file.write(f"{line}\n".encode(errors="backslashreplace"))


def _outcome_table(outcome: Outcome) -> Table:
    """Return the table of an evaluation: metric, value and standard error."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    table.add_column("metric")
    for column in ("value", "std. error"):
        table.add_column(column, justify="right")
    for metric, value in outcome.metrics.items():
        error = outcome.standard_errors.get(metric)
        table.add_row(Text(metric.removeprefix("eval/")), number(value), "" if error is None else number(error))
    return table


def _write_results(request: EvalRequest, keys: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> None:
    """Write the results as JSON. Values that are not finite become null."""

    def finite(values: Mapping[str, float]) -> dict[str, float | None]:
        return {name.removeprefix("eval/"): value if math.isfinite(value) else None for name, value in values.items()}

    evaluations = {
        name: {
            "metrics": finite(outcome.metrics),
            "standard_errors": finite(outcome.standard_errors),
            "prompts": outcome.prompts,
            "seconds": outcome.seconds,
            "settings": as_node(request.experiment.all_evaluations[keys[name]]),
        }
        for name, outcome in outcomes.items()
    }
    results = {
        "model": request.model,
        "seed": request.experiment.seed,
        "realign": installed_version(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "evaluations": evaluations,
    }
    text = json.dumps(results, indent=2, ensure_ascii=False, default=str)
    replace_text(request.out / RESULTS, f"{text}\n")


__all__ = ["EvalOptions", "evaluate", "read_request"]
