"""Measure the costs of the parts of a step on this machine. Input of the simulator (`realign_planner.simulator`)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from realign_planner.simulator import Costs


def measure(words: Sequence[str], prompts: int, tokens: int, repeats: int = 6) -> Costs:
    """Measure the costs of a run on this machine.

    Compares generation with fewer rows and with fewer tokens, and training with fewer prompts. Each cost is a median
    over steps in this process, without concurrent work. The cost of a training step includes all calls except
    generation and rewards, and the work outside of calls.

    Args:
        words: Command-line overrides of a run whose responses have a fixed length.
        prompts: Number of prompts of a batch.
        tokens: Tokens of a response.
        repeats: Number of measured steps of each size, after one warm-up step.
    """
    whole, fewer, shorter = (
        _step(words, n, t, repeats)
        for n, t in ((prompts, tokens), (max(1, prompts // 4), tokens), (prompts, tokens // 4))
    )
    few = max(1, prompts // 4)
    group = whole["sequences"] / prompts
    # generate = call + tokens * (step + rows * row); prefill includes the fixed cost of the call
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
    """Execute the steps of a run and return their medians."""
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
        actor = runtime.models["actor"].engine
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
