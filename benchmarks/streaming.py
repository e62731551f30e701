"""Memory and speed of streamed data on a JSONL file that is written for it.

    python -m benchmarks.streaming                          # 0.05 GB
    python -m benchmarks.streaming gigabytes=1 batches=400  # needs 1 GB of disk

Draws `batches` batches, resumes in the middle of the file, and compares the rows with those of the undisturbed stream.
Prints one JSON object. Exits with 1 if memory grew by more than `most_mb`, or if the rows differ.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.report import arguments, facts
from realign.data import PromptData
from realign.data.dataset import Dataset
from realign.data.order import RowOrder

WORDS = 150
"""Words per row, about 1 KB."""


def write_rows(path: Path, size: float) -> int:
    """Write rows of about 1 KB until the file has `size` bytes, and return their number."""
    n = 0
    with path.open("w", encoding="utf-8") as file:
        written = 0
        while written < size:
            text = " ".join(f"w{(n * 31 + i * 17) % 5000}" for i in range(WORDS))
            written += file.write(json.dumps({"prompt": f"{n} {text}"}) + "\n")
            n += 1
    return n


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i + 1 for i in range(5000)}}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<unk>")


def peak_mb() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def prompts(dataset: Dataset, order: RowOrder, number: int, rows: int) -> list[str]:
    """Return the prompts of a batch."""
    sample = dataset.sample(order.rows(range(number * rows, (number + 1) * rows)))
    return [row["prompt"] for row in sample.metadata["row"]]


def measure(path: Path, batches: int, rows: int, buffer: int) -> dict[str, Any]:
    """Stream batches, and resume in the middle."""
    data = PromptData(str(path), streaming=True, shuffle_buffer=buffer, max_prompt_tokens=2 * WORDS)
    words = tokenizer()
    before, started = peak_mb(), time.perf_counter()
    dataset = data.load(words)
    order = dataset.order(0, shuffle=True)
    prompts(dataset, order, 0, rows)
    first = time.perf_counter() - started
    for number in range(1, batches):
        prompts(dataset, order, number, rows)
    seconds, grown = time.perf_counter() - started, peak_mb() - before
    state = json.loads(json.dumps(order.state_dict()))
    expected = prompts(dataset, order, batches, rows)
    started = time.perf_counter()
    again = data.load(words)
    resumed = again.order(0, shuffle=True)
    resumed.load_state_dict(state)
    same = prompts(again, resumed, batches, rows) == expected
    return {
        "first_batch_s": round(first, 3),
        "rows_per_s": round(batches * rows / seconds),
        "grown_mb": round(grown, 1),
        "resume_s": round(time.perf_counter() - started, 3),
        "resumed_rows_are_the_same": same,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    defaults = {"gigabytes": "0.05", "batches": "100", "batch": "256", "buffer": "10000", "most_mb": "300"}
    given = {name: float(value) for name, value in arguments(defaults, words).items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        n = write_rows(path, given["gigabytes"] * 1e9)
        found = measure(path, int(given["batches"]), int(given["batch"]), int(given["buffer"]))
    print(json.dumps({"rows": n, **given, **found, **facts()}))
    return 0 if found["resumed_rows_are_the_same"] and found["grown_mb"] <= given["most_mb"] else 1


if __name__ == "__main__":
    sys.exit(main())
