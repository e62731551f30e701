"""What the parts of a step cost: measured here, or estimated for accelerators; `benchmarks.simulate` reads them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds."""

    decode_step_s: float
    """Of a decoding step, whatever its rows: the weights are read once, and everything is called once."""
    decode_row_s: float = 0.0
    """More for each row."""
    decode_context_s: float = 0.0
    """More for each token of all rows so far: its keys and values are read."""
    prefill_token_s: float = 0.0
    """Of a token that is read and not sampled; decoding waits meanwhile."""
    train_step_s: float = 0.0
    """Of a training step, whatever its tokens."""
    train_token_s: float = 0.0
    """More for each packed token, in all passes that are made on the training devices."""
    sync_s: float = 0.0
    """In which rollout engines stand still while the weights change."""


def measure(words: Sequence[str], prompts: int, tokens: int, repeats: int = 6) -> Costs:
    """Costs of a run here: of its generation with fewer rows and with fewer tokens, and of its training with fewer.

    Each is the median of steps in this process, so that nothing runs beside them. A step of training has all calls but
    generation and rewards, and what belongs to no call.

    Args:
        words: overrides of the command line; responses have a fixed length.
        prompts: of a batch.
        tokens: of a response.
        repeats: steps of each size that count; one before them does not.
    """
    whole, fewer, shorter = (
        _step(words, n, t, repeats)
        for n, t in ((prompts, tokens), (max(1, prompts // 4), tokens), (prompts, tokens // 4))
    )
    few = max(1, prompts // 4)
    group = whole["sequences"] / prompts
    # generate = call + tokens * (step + rows * row): the call is counted with the prompts that it reads
    by_token = (whole["generate_s"] - shorter["generate_s"]) / (tokens - tokens // 4)
    row = max(0.0, (whole["generate_s"] - fewer["generate_s"]) / (tokens * group * (prompts - few)))
    step = max(0.0, by_token - row * whole["sequences"])
    call = max(0.0, whole["generate_s"] - tokens * by_token)
    token = max(0.0, (whole["train_s"] - fewer["train_s"]) / (whole["tokens"] - fewer["tokens"]))
    return Costs(
        decode_step_s=step,
        decode_row_s=row,
        prefill_token_s=call / (prompts * whole["prompt_tokens"]),
        train_step_s=max(0.0, whole["train_s"] - token * whole["tokens"]),
        train_token_s=token,
        sync_s=whole["sync_s"],
    )


def _step(words: Sequence[str], prompts: int, tokens: int, repeats: int) -> dict[str, float]:
    """Medians of the steps of a run."""
    from realign.config import compose
    from realign.config.experiment import build_experiment
    from realign.runtime import LocalRuntime

    own = (f"batch_prompts={prompts}", f"interfaces.actor.generation.max_new_tokens={tokens}")
    runtime = LocalRuntime(build_experiment(compose([*words, *own])))
    try:
        rows, batch = [], None
        for step in range(1, repeats + 2):
            values, batch = runtime.step(step)
            rows.append(values)
        assert batch is not None
        actor = runtime.models["actor"].machine
        before = time.perf_counter()
        actor.load_weights(actor.weights())
        sync_s = time.perf_counter() - before
    finally:
        runtime.close()

    def middle(what: Callable[[Mapping[str, float]], float]) -> float:
        return statistics.median(what(row) for row in rows[1:])

    given = batch["prompt_mask"].sum() / len(batch["truncated"])
    return {
        "generate_s": middle(lambda r: r["time/actor_gen_s"]),
        "train_s": middle(lambda r: r["step_s"] - r["time/actor_gen_s"] - r["time/reward_inf_s"]),
        "sync_s": sync_s,
        "sequences": float(len(batch["truncated"])),
        "tokens": float(len(batch["input_ids"])),
        "prompt_tokens": float(given),
    }
