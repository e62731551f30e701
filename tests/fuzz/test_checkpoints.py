"""Fuzz checkpoints with damaged or forged files.

Oracle: either reading returns bit for bit what was written, or the checkpoint is corrupt and the message names the
file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realign.records.checkpoint.folder import Checkpoint, CorruptCheckpoint, list_checkpoints, newest, write_checkpoint
from tests.fuzz.refusals import BOUNDED, Refused, attempt

FILES = ("manifest.json", "state.json", "tensors.safetensors")
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=4), st.sampled_from(["../x", "/etc/passwd"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


def tree() -> dict[str, Any]:
    shared = torch.arange(6.0)
    return {"weights": shared, "tied": shared, "steps": 3, "state": {0: (1, float("nan")), "x": [None, True, "é"]}}


@cache
def pristine() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a checkpoint to copy. It is removed at the end of the process."""
    folder = tempfile.TemporaryDirectory()
    write_checkpoint(Path(folder.name), 7, tree())
    return folder


def read_or_named(folder: Path) -> None:
    """Apply the oracle to a checkpoint folder."""
    checkpoint = Checkpoint(folder / "step_000007", 7)
    outcome = attempt(checkpoint.read, *FILES)
    if isinstance(outcome, Refused):
        with pytest.raises(CorruptCheckpoint):
            checkpoint.read()
        with pytest.raises(CorruptCheckpoint, match="No checkpoint in"):
            newest(folder, lambda message: None)
        return
    assert repr(outcome) == repr(tree())
    assert outcome["weights"].data_ptr() == outcome["tied"].data_ptr()


@BOUNDED
@given(st.sampled_from(FILES), st.integers(0, 2000), st.binary(max_size=6), st.integers(0, 2000), st.booleans())
def test_damaged_bytes(name, at, put, cut, missing):
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "checkpoints")
        shutil.copytree(pristine().name, folder)
        file = folder / "step_000007" / name
        data = file.read_bytes()
        if missing and not put:
            file.unlink()
        else:
            file.write_bytes(data[:at] + put + data[at + cut :])
        read_or_named(folder)


def sealed(manifest: Any) -> bytes:
    """Return a manifest in the library's format, with its correct sha256."""
    if not isinstance(manifest, dict):
        return json.dumps(manifest).encode()
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    whole = {**manifest, "sha256": hashlib.sha256(canonical).hexdigest()}
    return json.dumps(whole, sort_keys=True, indent=2).encode() + b"\n"


@BOUNDED
@given(st.sampled_from(["", "format", "realign", "step", "files", "files.state.json", "entry", "more"]), JSON)
def test_a_forged_manifest(what, value):
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "checkpoints")
        shutil.copytree(pristine().name, folder)
        file = folder / "step_000007" / "manifest.json"
        manifest = json.loads(file.read_bytes())
        del manifest["sha256"]
        if what == "":
            manifest = value
        elif what == "files.state.json":
            manifest["files"]["state.json"] = value
        elif what == "entry":
            manifest["files"][str(value)] = manifest["files"].pop("state.json")
        else:
            manifest[what] = value
        file.write_bytes(sealed(manifest))
        read_or_named(folder)


@BOUNDED
@given(st.sampled_from(["", "tree", "weights", "tag"]), JSON)
def test_a_forged_state_is_no_tree_or_a_plain_one(what, value):
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "checkpoints")
        shutil.copytree(pristine().name, folder)
        path = folder / "step_000007"
        state = json.loads((path / "state.json").read_bytes())
        if what == "":
            state = value
        elif what == "tree":
            state["tree"] = value
        elif what == "weights":
            state["tree"]["weights"] = value
        else:
            state["tree"]["weights"] = {"$tensor": value}
        data = json.dumps(state).encode()
        (path / "state.json").write_bytes(data)
        manifest = json.loads((path / "manifest.json").read_bytes())
        del manifest["sha256"]
        manifest["files"]["state.json"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (path / "manifest.json").write_bytes(sealed(manifest))
        outcome = attempt(Checkpoint(path, 7).read, *FILES)
        assert isinstance(outcome, Refused | dict)
        assert isinstance(outcome, Refused) or what != "tag" or value in ("weights", "tied")


@BOUNDED
@given(st.lists(st.text("step_0123456789./ ", max_size=12), max_size=4))
def test_names_of_folders(names):
    with tempfile.TemporaryDirectory() as work:
        for name in names:
            if name.strip("./ ") and "/" not in name:
                Path(work, name).mkdir(exist_ok=True)
        checkpoints = list_checkpoints(Path(work))
        assert all(c.path.parent == Path(work) and c.path.name == f"step_{c.step:06d}" for c in checkpoints)
        assert checkpoints == sorted(checkpoints, key=lambda c: c.step)
