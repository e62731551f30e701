"""Rollouts of vLLM in the process of this side. Runs in vLLM's own environment, which has no realign."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.peer.work import GREEDY, Scenario


class Side:
    """Samples the responses of a step."""

    def __init__(self, scenario: Scenario, folder: Path, steps: int, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.scenario = scenario
        self.engine = LLM(
            model=str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="bfloat16" if scenario.bf16 else "float32",
            enforce_eager=True,
            max_model_len=scenario.prompt_high + scenario.max_new,
            max_num_seqs=scenario.sequences,
            logprobs_mode="processed_logprobs",
        )
        self.greedy = self._sample(scenario.prompt_ids(1)[:1], [GREEDY], temperature=0.0)[0]

    def _sample(self, prompts: list[list[int]], lengths: list[int], temperature: float) -> list[list[int]]:
        from vllm import SamplingParams

        settings = [
            SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
            for n in lengths
        ]
        answers = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def step(self, number: int) -> dict[str, Any]:
        """Sample the responses of a step (from 1)."""
        prompts = [ids for ids in self.scenario.prompt_ids(number) for _ in range(self.scenario.group)]
        started = time.perf_counter()
        texts = self._sample(prompts, self.scenario.lengths(number), temperature=1.0)
        wall = time.perf_counter() - started
        return {"wall": wall, "lengths": [len(ids) for ids in texts], "greedy": self.greedy}
