"""Compare the losses of other frameworks with realign's: `python -m benchmarks.referee`.

    python -m benchmarks.referee                     the releases of results.json; writes it, and docs/equivalence.md
    python -m benchmarks.referee --latest --check    the newest releases; a line for each cell that changed, and exit 1
    python -m benchmarks.referee slime=PATH          a checkout of slime, which has no wheel

Each peer's wheel is installed without dependencies into a folder of its own, .bench/referee/PEER-VERSION, and its
losses run in a process of their own, which does not import realign. A process imports torch and transformers of this
environment; `side_PEER.py` names what else a peer needs, and what is stubbed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.referee import batches, ours
from benchmarks.referee.cells import CELLS, EDGE_CELLS, EDGES, PEERS, ROWS, WHEELS, Cell, Row, overrides_of
from benchmarks.referee.page import PAGE, render

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
ENVIRONMENTS = HERE.parents[1] / ".bench" / "referee"
SEEDS = range(5)
GOAL = 1e-6
"""Largest difference of losses, and of gradients relative to their largest element, that counts as equal."""
Job = tuple[Row, Cell]


def jobs_of(peer: str) -> dict[str, Job]:
    """Return what is executed for a peer, by the name of the row."""
    rows = {**ROWS, **EDGES}
    both = {**CELLS, **EDGE_CELLS}
    return {row: (rows[row], cell) for (row, of), cell in both.items() if of == peer and isinstance(cell, Cell)}


def side(peer: str) -> Any:
    """Return the module with a peer's calls."""
    return importlib.import_module(f"benchmarks.referee.side_{peer}")


def install(peer: str, release: str | None) -> Path:
    """Install a release (None: the newest) without dependencies, and the small packages that its losses import."""
    first, *others = side(peer).PACKAGES
    folder = ENVIRONMENTS / f"{peer}-{release or 'latest'}"
    if release is None:
        shutil.rmtree(folder, ignore_errors=True)
    if not (folder / "installed").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        wanted = first if release is None else f"{first}=={release}"
        subprocess.run([*pip, "--target", str(folder), wanted, *others], check=True)
        (folder / "installed").touch()
    return folder


def release_of(peer: str, folder: Path) -> str:
    """Return the installed release."""
    versions = {d.name.lower().replace("_", "-"): d.version for d in distributions(path=[str(folder)])}
    return versions[side(peer).PACKAGES[0]]


def checkout(word: str) -> tuple[Path, str]:
    """Return the folder of `slime=PATH` and its commit, or else its name.

    Raises:
        ValueError: it is no checkout of slime.
    """
    key, _, path = word.partition("=")
    folder, files = Path(path).absolute(), side("slime").FILES
    if key != "slime" or not path:
        raise ValueError(f"{word}: expected slime=PATH, with PATH a checkout of slime")
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ValueError(f"{word}: {missing[0]} is missing. A checkout of slime has {', '.join(files)}")
    if not (folder / ".git").exists():  # the archives of GitHub are named slime-COMMIT
        return folder, folder.name.removeprefix("slime-")
    # With its date, since a commit says nothing about how new it is.
    command = ["git", "-C", str(folder), "log", "-1", "--abbrev=8", "--date=short", "--format=%h (%ad)"]
    return folder, subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_theirs(peer: str, folder: Path, jobs: list[dict[str, Any]], data: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Return losses and errors by id, and tensors, from a peer's losses in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        used = {job["batch"] for job in jobs}
        tensors = {f"{batch}/{key}": x.contiguous() for batch in used for key, x in data[batch].items()}
        save_file(tensors, out / "batches.safetensors")
        (out / "jobs.json").write_text(json.dumps(jobs))
        environment = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(HERE / "worker.py"), peer, name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"did not run: {done.stderr.strip().splitlines()[-1]}")
        results = json.loads((out / "results.json").read_text())
        return results["losses"], results["errors"], load_file(out / "results.safetensors")


def distance(mine: tuple[Tensor, Tensor], loss: float, gradient: Tensor) -> float:
    """Return the larger difference: of the losses, or of the gradients relative to their largest element."""
    scale = max(float(gradient.abs().max()), float(mine[1].abs().max()), 1e-30)
    return max(abs(float(mine[0]) - loss) / max(1.0, abs(loss)), float((mine[1] - gradient).abs().max()) / scale)


def compare(peer: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of a peer by row."""
    named = jobs_of(peer)
    kinds = {cell.batch or row.batch for row, cell in named.values()}
    data = {f"{kind} {seed}": ours.with_mismatched(batches.batch(kind, seed)) for kind in kinds for seed in SEEDS}
    jobs = [
        {
            "id": f"{name} {seed}",
            "batch": f"{cell.batch or row.batch} {seed}",
            "kind": row.kind,
            "settings": cell.settings,
        }
        for name, (row, cell) in named.items()
        for seed in SEEDS
    ]
    losses, errors, tensors = run_theirs(peer, folder, jobs, data)
    results: dict[str, dict[str, Any]] = {}
    for name, (row, cell) in named.items():
        ids = [f"{name} {seed}" for seed in SEEDS]
        if failed := [errors[i] for i in ids if i in errors]:
            results[name] = {"verdict": "error", "error": failed[0]}
            continue
        overrides = overrides_of(row, cell)
        plain, settled, largest = 0.0, 0.0, 0.0
        for seed, i in zip(SEEDS, ids, strict=True):
            batch = data[f"{cell.batch or row.batch} {seed}"]
            mine = cell.formula(batch, overrides) if cell.formula else ours.run(row.kind, batch, overrides)
            plain = max(plain, distance(ours.run(row.kind, batch, row.preset), losses[i], tensors[i]))
            settled = max(settled, distance(mine, losses[i], tensors[i]))
            largest = max(largest, float(tensors[i].abs().max()))
        results[name] = {"verdict": verdict(cell, settled), "preset": rounded(plain), "settings": rounded(settled)}
        results[name] |= {"largest": rounded(largest)} if row.kind == "advantages" else {}
    return results


def verdict(cell: Cell, settled: float) -> str:
    """Return whether the preset, settings or only a formula give the peer's loss and gradient, or nothing does."""
    if not settled <= GOAL:
        return "differs"
    return "formula" if cell.formula else "settings" if cell.changes or cell.instead else "equal"


def rounded(x: float) -> float:
    """Return a number with two digits."""
    return float(f"{x:.1e}")


def prove(request: Mapping[str, Any]) -> str:
    """Return a line that compares a peer's loss, with all its settings, with that of a command line of realign."""
    peer, settings = request["peer"], request["settings"]
    release = json.loads(RESULTS.read_text())["peers"][peer]["version"]
    folder = ENVIRONMENTS / f"{peer}-{release}"
    if not (folder / "installed").exists():
        return f"not computed. `python -m benchmarks.referee --peers {peer}` installs {PEERS[peer]} {release} for it."
    estimator = settings.get("algorithm.adv_estimator", settings.get("algo.advantage.estimator"))
    with_critic = estimator == "gae" or settings.get("critic.path") is not None
    of_estimator = {"policy": "single", "value": "single"} if with_critic else {"policy": "groups"}
    kinds = request["kinds"] or of_estimator
    single = {"interfaces.actor.n_minibatches": 1, **({"interfaces.actor.epochs": 1} if "policy" in kinds else {})}
    if "interfaces.actor.recompute=true" in request["overrides"]:  # the batches have old log-probs instead
        single["interfaces.actor.recompute"] = "false"
    scored = ("models.reward", "interfaces.reward")  # the batches have rewards
    words = [word for word in request["overrides"] if not word.lstrip("+").startswith(scored)]
    fixed = [word for word in words if word.partition("=")[0] not in single]
    overrides = (*fixed, *(f"{key}={value}" for key, value in single.items()))
    data = {
        f"{kind} {seed}": ours.with_mismatched(batches.batch(kind, seed))
        for kind in {*kinds.values()}
        for seed in SEEDS
    }
    jobs = [
        {"id": f"{job} {seed}", "batch": f"{kind} {seed}", "kind": job, "settings": settings}
        for job, kind in kinds.items()
        for seed in SEEDS
    ]
    losses, errors, tensors = run_theirs(peer, folder, jobs, data)
    if errors:
        return f"{PEERS[peer]} {release} refuses these settings: {next(iter(errors.values()))}"
    largest = 0.0
    for job in jobs:
        mine = ours.run(job["kind"], data[job["batch"]], overrides)
        largest = max(largest, distance(mine, losses[job["id"]], tensors[job["id"]]))
    verb = "are the same" if largest <= GOAL else "differ"
    return f"loss and gradient of {PEERS[peer]} {release} {verb}: {rounded(largest):g} on {len(SEEDS)} random batches."


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each cell whose verdict changed."""
    for peer, results in after["peers"].items():
        of = f"{PEERS[peer]} {results['version']} (was {before['peers'][peer]['version']})"
        for name, cell in results["cells"].items():
            was = before["peers"][peer].get("cells", {}).get(name, {"verdict": cell["verdict"]})
            if cell["verdict"] == was["verdict"]:
                continue
            title = {**ROWS, **EDGES}[name].title
            now = cell.get("error") or f"now {cell['verdict']}, with a difference of {cell['settings']:g}"
            yield f"{of}, {title}: was {was['verdict']} ({was['settings']:g}), {now}"


def main() -> int:
    """Compare, and write the results and the page, or say what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=WHEELS, help="all by default, or none with slime=PATH")
    parser.add_argument("slime", nargs="?", metavar="slime=PATH", help="a checkout of slime")
    parser.add_argument("--latest", action="store_true", help="the newest releases instead of those of results.json")
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a cell changed")
    parser.add_argument("--prove", choices=["-"], help=argparse.SUPPRESS)  # a request of `realign import` on stdin
    arguments = parser.parse_args()
    if arguments.prove:
        print(prove(json.load(sys.stdin)))
        return 0
    before = json.loads(RESULTS.read_text())
    after: dict[str, Any] = {"torch": version("torch"), "transformers": version("transformers"), "peers": {}}
    broken = list[str]()
    peers = list(arguments.peers or ([] if arguments.slime else WHEELS))
    try:
        checkouts = {"slime": checkout(arguments.slime)} if arguments.slime else {}
    except ValueError as error:
        parser.error(str(error))
    for peer in [*peers, *checkouts]:
        was = before["peers"][peer]
        try:
            if peer in checkouts:
                folder, release = checkouts[peer]
            else:
                folder = install(peer, None if arguments.latest else was["version"])
                release = release_of(peer, folder)
            results = {
                "version": release,
                **({"note": was["note"]} if "note" in was and release == was["version"] else {}),
                "stubs": list(side(peer).STUBS),
                "cells": compare(peer, folder),
            }
        except (RuntimeError, subprocess.CalledProcessError) as error:  # the other peers are compared all the same
            broken.append(f"{PEERS[peer]} (was {was['version']}): {error}")
            continue
        after["peers"][peer] = results
        verdicts = [cell["verdict"] for cell in results["cells"].values()]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
        print(f"{PEERS[peer]} {results['version']}: {counts}")
    lines = [*broken, *changed(before, after)]
    for line in lines:
        print(line)
    if arguments.check or broken:
        return bool(lines)
    after["peers"] = {peer: after["peers"].get(peer, before["peers"][peer]) for peer in PEERS}
    RESULTS.write_text(json.dumps(after, indent=1) + "\n")
    PAGE.write_text(render(after), encoding="utf-8")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())
