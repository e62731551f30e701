"""Runs the losses of one peer on the referee's batches: `python worker.py PEER FOLDER`, in the peer's environment.

It reads `jobs.json` and `batches.safetensors` from the folder and writes `results.json` and `results.safetensors`. It
imports nothing of realign. `side_PEER.py` has the calls, and names the modules that are stubbed: packages that a peer
imports beside its losses, and that would need a GPU or gigabytes. A stub fails as soon as the loss calls it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors.torch import load_file, save_file


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import some packages as empty modules, whose attributes are classes that cannot be instantiated."""

    def __init__(self, names: tuple[str, ...], decorators: tuple[str, ...] = ()) -> None:
        self.names, self.decorators = names, decorators

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        stub = Stub(spec.name)
        for name in self.decorators:
            module, _, attribute = name.rpartition(".")
            if module == spec.name:
                setattr(stub, attribute, lambda function: function)
        return stub

    def exec_module(self, module: ModuleType) -> None:
        pass


class Stub(ModuleType):
    """A module that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"the loss calls {self.__name__}.{name}, which the referee replaced by a stub")

        return type(name, (), {"__new__": refuse})


def main(peer: str, folder: Path) -> None:
    """Run all jobs."""
    sys.path.insert(0, str(Path(__file__).parent))
    side = importlib.import_module(f"side_{peer}")
    sys.meta_path.insert(0, Stubs(side.STUBS, side.DECORATORS))
    tensors, errors, losses = {}, {}, {}
    data = load_file(folder / "batches.safetensors")
    for job in json.loads((folder / "jobs.json").read_text()):
        prefix = job["batch"] + "/"
        batch = {key.removeprefix(prefix): x for key, x in data.items() if key.startswith(prefix)}
        leaf = batch["new_values" if job["kind"] == "value" else "new"].clone().requires_grad_()
        try:
            result = side.run(job["kind"], batch, leaf, job["settings"])
            if job["kind"] == "advantages":
                losses[job["id"]], tensors[job["id"]] = 0.0, result.float().contiguous()
            else:
                result.backward()
                losses[job["id"]], tensors[job["id"]] = result.item(), leaf.grad.contiguous()
        except Exception as error:
            errors[job["id"]] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
    save_file(tensors, folder / "results.safetensors")
    (folder / "results.json").write_text(json.dumps({"losses": losses, "errors": errors}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
