"""Model cards (README.md of the hub) of exported models: base model, data, algorithm, metrics, config and version."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from realign.config.trees import get
from realign.models.files.adapters import AdapterFolder
from realign.models.files.model_folder import read_object
from realign.records.record_files import json_lines, yaml_object
from realign.report.files import number
from realign.secrets import redact_text, secret_variables
from realign.text import visible
from realign.version import installed_version

HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
SHOWN = ("reward", "loss", "kl", "preference_loss", "rewards/accuracy", "nll")
"""Metrics of training in a model card, in addition to those of evaluations."""
_MOST_STAGES = 10
_MOST_METRICS = 100


def model_card(name: str, source: Path, exported: Path, adapter: AdapterFolder | None) -> str:
    """Return the model card of an exported model.

    Args:
        name: title.
        source: the folder that was exported; the run that contains it describes the training.
        exported: the new folder.
        adapter: the adapter in `source`, if any.
    """
    stages = list(_stages(source))
    run, role = stages[0] if stages else (None, source.name)
    config = _config_of(run) if run is not None else {}
    base = _base(stages) or (adapter.base if adapter is not None else None)
    rows = {
        "Base model": base and _public(base),
        "Algorithm": _algorithm(config, role),
        "Data": ", ".join(map(_public, _data(config))),
        "Steps": _steps(config, run),
        "Role in the run": role if run is not None else None,
        # from the first stage on, without this run
        "Earlier stages": ", ".join(str(_config_of(folder).get("name")) for folder, _ in stages[:0:-1]),
        "realign": installed_version(),
    }
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(exported, base, config), sort_keys=False)}---",
        f"# {_cell(name)}",
        "Trained with realign, a library for reinforcement learning of language models.",
        "\n".join(["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows.items() if value)]),
        _usage(name, exported),
        *_metrics(run),
    ]
    if config:
        shown = visible(yaml.safe_dump(_publishable(config), sort_keys=False, allow_unicode=True))
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", shown)), 0)  # longer than all in the text
        parts.append(f"## Config\n\n{fence}yaml\n{shown}{fence}")
    return "\n\n".join(parts) + "\n"


def _cell(text: object) -> str:
    """Return a text of a run in one line of Markdown, without links, HTML and the end of a table cell."""
    return re.sub(r"([\\|`<>\[\]])", r"\\\1", visible(" ".join(str(text).split())))


def _stages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield run folder and role of the run that saved `folder`, then of the run that saved its start, and so on."""
    # Bounded, since a run may start from a folder that a later run wrote: the stages can form a circle.
    for _ in range(_MOST_STAGES):
        folder = folder.resolve()
        run = next((p for p in (folder.parent, folder.parent.parent) if (p / "config.yaml").is_file()), None)
        if run is None:
            return
        yield run, folder.name
        start = _start(_config_of(run), folder.name)
        if start is None or not os.path.isdir(os.path.expanduser(start)):
            return
        folder = Path(os.path.expanduser(start))


def _start(config: Mapping[str, Any], role: str) -> str | None:
    """Return the path that a role of a run started from."""
    path = get(config, ("models", role.removesuffix("_ema"), "path"))
    return path if isinstance(path, str) and path.isprintable() else None


def _base(stages: list[tuple[Path, str]]) -> str | None:
    """Return the path that the first stage started from."""
    return _start(_config_of(stages[-1][0]), stages[-1][1]) if stages else None


def _config_of(run: Path) -> dict[str, Any]:
    return yaml_object(run / "config.yaml")


def _front_matter(exported: Path, base: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that the hub reads. The hub accepts only its own names as base model and data."""
    adapter = (exported / "adapter_config.json").is_file()
    model = read_object(exported / "config.json") or {}
    scalar = any("Classification" in name for name in _architectures(model))
    algorithm = _graph_name(config)
    names = [name.partition(":")[0] for name in _data(config)]  # without the split
    data = list(dict.fromkeys(name for name in names if _is_hub_name(name)))
    fields = {
        "library_name": "peft" if adapter else "transformers",
        "base_model": base if base is not None and _is_hub_name(base) else None,
        "datasets": data or None,
        "pipeline_tag": "text-classification" if scalar else "text-generation",
        "tags": ["realign", *([algorithm] if algorithm else []), *(["lora"] if adapter else [])],
    }
    return {key: value for key, value in fields.items() if value is not None}


def _is_hub_name(name: str) -> bool:
    """Return whether a text is `owner/name` and no existing path."""
    return "/" in name and HUB_NAME.fullmatch(name) is not None and not Path(name.split("/")[0]).exists()


def _graph_name(config: Mapping[str, Any]) -> str | None:
    """Return the name of the algorithm's file, such as grpo."""
    target = get(config, ("graph", "_target_"))
    return target.split(".")[-2] if isinstance(target, str) and target.count(".") else None


def _algorithm(config: Mapping[str, Any], role: str) -> str | None:
    name = _graph_name(config)
    interface = get(config, ("interfaces", role.removesuffix("_ema"), "_target_"))
    return None if name is None else f"{name} ({str(interface).rpartition('.')[2]})" if interface else name


def _data(config: Mapping[str, Any]) -> list[str]:
    """Return the values of all `path` keys below `data`."""

    def below(node: Any, key: str = "") -> Iterator[str]:
        if isinstance(node, Mapping):
            for name, value in node.items():
                yield from below(value, str(name))
        elif isinstance(node, list):
            for value in node:
                yield from below(value, key)
        elif key == "path" and isinstance(node, str):
            yield node

    return list(dict.fromkeys(below(config.get("data") or {})))


def _steps(config: Mapping[str, Any], run: Path | None) -> str | None:
    if run is None or "steps" not in config:
        return None
    prompts, seed = config.get("batch_prompts"), config.get("seed")
    return f"{config['steps']}, with {prompts} prompts each, seed {seed}"


def _usage(name: str, exported: Path) -> str:
    """Return the section with the code that loads the model."""
    config = read_object(exported / "config.json") or {}
    architecture = next(iter(_architectures(config)), "")
    package, loader = "transformers", "AutoModelForCausalLM"
    kinds = {"ConditionalGeneration": "Seq2SeqLM" if config.get("is_encoder_decoder") else "ImageTextToText"}
    kinds |= {kind: kind for kind in ("SequenceClassification", "TokenClassification")}
    for ending, kind in kinds.items():
        if architecture.endswith(ending):
            loader = f"AutoModelFor{kind}"
    if (adapter := read_object(exported / "adapter_config.json")) is not None:
        pair = adapter.get("task_type") == "SEQ_2_SEQ_LM"
        package, loader = "peft", "AutoPeftModelForSeq2SeqLM" if pair else "AutoPeftModelForCausalLM"
    lines = [
        f"from {package} import {loader}",
        "from transformers import AutoTokenizer",
        "",
        f"model = {loader}.from_pretrained({json.dumps(name)})",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)})",
    ]
    return "\n".join(["## Use", "", "```python", *lines, "```"])


def _metrics(run: Path | None) -> Iterator[str]:
    """Yield a table of the first and last value of each metric of the evaluation, and of some metrics of training."""
    series: dict[str, list[tuple[float, float]]] = {}
    for record in [] if run is None else json_lines(run / "metrics.jsonl"):
        step = number(record.get("step"))
        for key, value in record.items():
            if (key.startswith("eval/") or key in SHOWN) and (x := number(value)) is not None:
                series.setdefault(key, []).append((step or 0, x))
    if not series:
        return
    rows = [
        f"| {_cell(key)} | {points[0][1]:.4g} (step {points[0][0]}) | {points[-1][1]:.4g} (step {points[-1][0]}) |"
        for key, points in sorted(series.items())[:_MOST_METRICS]
    ]
    yield "\n".join(["## Metrics", "", "| metric | first | last |", "|---|---|---|", *rows])


def _publishable(node: Any) -> Any:
    """Return a config whose texts are `_public`, and without values of variables that look like secrets."""
    if isinstance(node, Mapping):
        variables = node.get("environment")
        hidden = (
            secret_variables({str(k): str(v) for k, v in variables.items()}) if isinstance(variables, Mapping) else ()
        )
        shown = {key: _publishable(value) for key, value in node.items()}
        return {**shown, "environment": {**shown["environment"], **dict.fromkeys(hidden, "***")}} if hidden else shown
    if isinstance(node, list):
        pairs = zip([None, *node], node, strict=False)  # of a command, such as --api-key and its value
        return ["***" if redact_text(f"{a} {b}") == f"{a} ***" else _publishable(b) for a, b in pairs]
    return _public(node) if isinstance(node, str) else node


def _public(text: str) -> str:
    """Return a path without the folders of this machine, and other text without credentials."""
    return f".../{Path(text).name}" if text.startswith(("/", "~")) else redact_text(text)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
