"""Compare the rules of `realign import` with the newest releases of the tools: `python scripts/names_of_tools.py`.

Takes the wheels of TRL, verl, OpenRLHF and AReaL without what they depend on, and reads their config classes, options
and generated YAML as text. TRL inherits the `TrainingArguments` of transformers, whose wheel is read, too. Fails with a
line for each name that realign neither translates nor answers, and for each default that is no longer the one of
`realign/config/imports`.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from realign.cli.import_config import RULES, settings_of_rules
from realign.config.aliases import describe, read_own_yaml

_PARTS = {"trl": ("grpo", "rloo", "dpo", "kto", "sft", "reward"), "openrlhf": ("ppo_ray", "sft", "dpo", "rm")}
"""Config classes of TRL, and programs of OpenRLHF."""
_BASES = {"trl/trainer/model_config.py": "ModelConfig", "transformers/training_args.py": "TrainingArguments"}
"""Further classes of TRL's command lines."""
_WHEELS = {"trl": ("trl", "transformers")}
"""Wheels of a tool, if it has the settings of another package."""
_UNKNOWN = object()
"""A default that only a run knows."""


def names_of(tool: str, folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the settings in the unpacked wheel of a tool, each with its default."""
    if tool == "verl":
        (path,) = folder.rglob("_generated_ppo_trainer.yaml")
        yield from _leaves(yaml.safe_load(path.read_text(encoding="utf-8")))
    elif tool == "trl":
        for kind in _PARTS[tool]:
            (path,) = folder.rglob(f"trainer/{kind}_config.py")
            yield from ((f"{kind}:{name}", default) for name, default, _ in _fields(path)[f"{_title(kind)}Config"])
        for file, name in _BASES.items():
            (path,) = folder.rglob(file)
            yield from ((field, default) for field, default, _ in _fields(path)[name])
    elif tool == "openrlhf":
        for kind in _PARTS[tool]:
            (path,) = folder.rglob(f"cli/train_{kind}.py")
            yield from ((f"{_KIND.get(kind, kind)}:{name}", default) for name, default in _options(path))
    else:
        (path,) = folder.rglob("api/cli_args.py")
        classes = _fields(path)
        for kind, name in (("rl", "GRPOConfig"), ("sft", "SFTConfig"), ("dpo", "DPOConfig"), ("rw", "RWConfig")):
            yield from ((f"{kind}:{full}", default) for full, default in _nested(classes, name))


_KIND = {"ppo_ray": "rl"}


def _title(kind: str) -> str:
    return kind.title() if kind == "reward" else kind.upper()


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _UNKNOWN if "${" in str(value) else value


def _fields(path: Path) -> dict[str, list[tuple[str, Any, str]]]:
    """Return the fields of each class of a file, with default and type; those of base classes of the file, too."""
    found: dict[str, list[tuple[str, Any, str]]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            own = [
                (field.target.id, _default(field.value), ast.unparse(field.annotation))
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            ]
            inherited = [field for base in node.bases for field in found.get(ast.unparse(base), ())]
            found[node.name] = [*(field for field in inherited if field[0] not in {x[0] for x in own}), *own]
    return found


def _default(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        node = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
    try:
        return _UNKNOWN if node is None else ast.literal_eval(node)
    except ValueError:
        return _UNKNOWN


def _options(path: Path) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name = ast.unparse(node.args[0]).removeprefix("f").strip("'\"").removeprefix("--")
            switch = ast.unparse(given["action"]) == "'store_true'" if "action" in given else False
            default = False if switch else _default(given.get("default"))
            for prefix in ("actor", "critic") if "{prefix}" in name else ("",):
                yield name.replace("{prefix}", prefix), _UNKNOWN if prefix else default


def _nested(classes: Mapping[str, Any], name: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field, default, annotation in classes[name]:
        below = [word for word in annotation.replace("|", " ").split() if word in classes and word != name]
        if below and prefix.count(".") < 3:
            yield from _nested(classes, below[0], f"{prefix}{field}.")
        else:
            yield f"{prefix}{field}", default


def problems_of(tool: str, folder: Path) -> list[str]:
    """Return a line for each name without a translation or an answer, and for each default that has changed."""
    rules = read_own_yaml(RULES / f"{tool}.yaml")
    named, lines = settings_of_rules(tool), []
    patterns = [x for entry in rules["bookkeeping"] for x in (entry if isinstance(entry, list) else entry["names"])]
    patterns += rules["neutral"]
    patterns += [x for entry in rules["recognize"] for x in entry.get("has", ()) if "refuse" in entry]
    for full, default in dict(names_of(tool, folder)).items():
        kind, _, name = full.rpartition(":")
        private = name.rpartition(".")[2].startswith("_")
        known = name in named or describe(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        if not private and not known:
            lines.append(f"{rules['tool']}: realign import doesn't know {name}{f' of {kind}' if kind else ''}")
        kinds = [rules["kinds"][kind]] if kind in rules["kinds"] else [rules["kinds"].get("rl", {})]
        ours = kinds[0].get("defaults", {}).get(name, _UNKNOWN) if kind or tool == "verl" else _UNKNOWN
        if (
            ours is not None
            and _UNKNOWN not in (ours, default)
            and str(ours) != str(default)
            and not _equal(ours, default)
        ):
            lines.append(f"{rules['tool']}: the default of {name} is {default}, and {ours} in imports/{tool}.yaml")
    return lines


def _equal(ours: Any, theirs: Any) -> bool:
    try:
        return float(ours) == float(theirs)
    except (TypeError, ValueError):
        return list(ours) == list(theirs) if isinstance(theirs, list | tuple) and isinstance(ours, list) else False


def main() -> int:
    """Compare the tools, and return 1 if something is unknown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels, instead of the newest ones")
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        wheels = arguments.wheels or Path(temporary) / "wheels"
        for tool in sorted(path.stem for path in RULES.glob("*.yaml")):
            names = _WHEELS.get(tool, (tool,))
            if not arguments.wheels:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
                subprocess.run([*command, *names], check=True)
            for name in names:
                (wheel,) = wheels.glob(f"{name}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(Path(temporary) / tool)
            found = problems_of(tool, Path(temporary) / tool)
            print(f"{wheel.name}: {len(found)} to look at")
            lines += found
    print("\n".join(lines))
    return bool(lines)


if __name__ == "__main__":
    raise SystemExit(main())
