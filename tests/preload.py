"""Import what takes seconds, such as most of what scenarios of ranks use, for forked processes to be copies of."""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

FAMILIES = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "qwen3", "qwen3_moe")]

gc.disable()  # a collection would visit millions of objects of modules
for module in (
    "realign.runtime",
    "peft",
    "numpy.ma",
    *FAMILIES,
    "tests.processes",
    "tests.engines.distributed.dimensions",
):
    with suppress(ImportError):
        import_module(module)
gc.freeze()
gc.enable()
