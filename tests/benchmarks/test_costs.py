from __future__ import annotations

import pytest

from benchmarks import costs
from realign.planning.simulator import Costs

TRUE = Costs(
    decode_step_s=0.01, decode_row_s=0.0002, prefill_token_s=0.001, train_step_s=0.3, train_token_s=0.0004, sync_s=0.02
)
GROUP, PROMPT = 4, 6


def test_costs_are_read_off_three_sizes_of_a_run(monkeypatch):
    def step(words, prompts, tokens, repeats):
        rows = prompts * GROUP
        packed = rows * (PROMPT + tokens)
        call = 8 * PROMPT * TRUE.prefill_token_s  # cost of a call with 8 prompts; smaller calls cost the same
        return {
            "generate_s": call + tokens * (TRUE.decode_step_s + rows * TRUE.decode_row_s),
            "train_s": TRUE.train_step_s + packed * TRUE.train_token_s,
            "sync_s": TRUE.sync_s,
            "sequences": float(rows),
            "tokens": float(packed),
            "prompt_tokens": float(PROMPT),
        }

    monkeypatch.setattr(costs, "_step", step)
    assert vars(costs.measure([], 8, 16)) == pytest.approx(vars(TRUE))
