"""GRPO with a real vLLM as sampler, compared with the in-process sampler; servers that are killed.

    make servers                                            # all parts, after installing vLLM in .servers/venv
    python -m benchmarks.servers python=PYTHON parts=faults # PYTHON: interpreter of an environment with vLLM

updates    A model is given to a server several times. Reports the seconds of an update, and the largest difference of
           the log-probs that vLLM reports and those of the training engine for the same weights.
delivery   SmolLM2-135M, trained with the rate lr=1e-6. Reports the bytes and seconds of an update by each way: fp32 and
           bf16 in shared memory, files in a folder, deltas. way=delta selects one.
faults     Two servers, of which one is killed while it generates, while it loads weights and while it is paused.
           Reports responses lost or duplicated, and tokens whose log-prob is not that of the weights of their version.
curves     GRPO of the demo's additions with both samplers, with the same seeds. Reports the mean reward of the last
           steps, and the difference in standard errors.
language   GRPO of SmolLM2-135M-Instruct (`make llm`) with both samplers, one seed.

Prints a table for each part and one JSON object as the last line. The exit code is 1 if a part failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.report import arguments, facts
from benchmarks.servers.curves import curves, language
from benchmarks.servers.delivery import delivery
from benchmarks.servers.faults import faults
from benchmarks.servers.updates import updates

Part: TypeAlias = Callable[[Path, Mapping[str, str]], dict[str, Any]]

PARTS: Mapping[str, Part] = {
    "updates": updates,
    "delivery": delivery,
    "faults": faults,
    "curves": curves,
    "language": language,
}
DEFAULTS = {
    "parts": ",".join(PARTS),
    "python": ".servers/venv/bin/python",
    "launch": "",
    "seeds": "3",
    "steps": "60",
    "language_steps": "20",
    "responses": "64",
    "folder": "",
    "model": "",
    "way": "",
    "lr": "1e-6",
}


def main(given: Sequence[str] | None = None) -> int:
    """Run the parts and print their results."""
    words = arguments(DEFAULTS, given)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(words["folder"] or made)
        folder.mkdir(parents=True, exist_ok=True)
        for name in words["parts"].split(","):
            print(f"\n{name}", flush=True)
            started = time.time()
            try:
                results[name] = PARTS[name](folder, words)
            except Exception as error:
                traceback.print_exc()
                results[name] = {"good": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            results[name]["seconds"] = round(time.time() - started)
    good = all(result["good"] for result in results.values())
    print(json.dumps({"benchmark": "servers", "good": good, **facts(), **results}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
