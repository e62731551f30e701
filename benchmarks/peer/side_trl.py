"""TRL's side of GRPO: a `GRPOTrainer` whose training loop waits for a request before each step."""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer.work import EOS, Scenario, reward


class ForcedLengths:
    """Logits processor that ends row i exactly at its given length."""

    def __init__(self, lengths: list[int]) -> None:
        self.last_step = torch.tensor(lengths) - 1
        self.sampled = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.last_step = self.last_step.to(scores.device)  # copied in the first call only
        ends = self.sampled >= self.last_step
        self.sampled += 1
        scores[:, EOS] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, EOS] = 0.0
        return scores


class TurnTaking:
    """A training loop in a separate thread that executes one step per request."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.spent: dict[str, float] = defaultdict(float)
        self.go: queue.Queue[int] = queue.Queue()
        self.done: queue.Queue[dict[str, Any] | BaseException] = queue.Queue()
        self.number = 0
        self.lengths: list[int] = []
        self.prompt_tokens: list[int] = []
        self.trainer: Any = None

    def start(self) -> None:
        """Start the training loop, which waits before its first step."""
        threading.Thread(target=self._train, daemon=True).start()

    def _train(self) -> None:
        try:
            self.trainer.train()
        except BaseException as error:
            self.done.put(error)

    def await_turn(self) -> None:
        """Wait for the request of a step, then start its timer."""
        self.number = self.go.get()
        self.spent.clear()
        self.started = time.perf_counter()

    def report(self) -> None:
        """Report the times of the step that just ended."""
        wall = time.perf_counter() - self.started
        generate = self.spent["generate"]
        spent = {"wall": wall, "rollout": generate, "training": wall - generate}
        self.done.put(spent | {"prompt_tokens": self.prompt_tokens, "lengths": self.lengths})

    def force_lengths(self, model: Any) -> None:
        """Patch `model.generate` to end each row at its forced length. A call may contain a part of the batch."""
        generate, group = model.generate, self.scenario.group

        def forced(*args: Any, **kwargs: Any) -> Any:
            rows = len(kwargs["attention_mask"])
            all_lengths = self.scenario.lengths(self.number)
            if len(self.lengths) >= len(all_lengths) or not self.spent:
                self.lengths, self.prompt_tokens = [], []
            mine = all_lengths[len(self.lengths) : len(self.lengths) + rows]
            self.lengths += mine
            self.prompt_tokens += [int(n) for n in kwargs["attention_mask"].sum(1)[::group]]
            started = time.perf_counter()
            out = generate(*args, logits_processor=[ForcedLengths(mine)], **kwargs)
            self.spent["generate"] += time.perf_counter() - started
            return out

        model.generate = forced

    def step(self, number: int) -> dict[str, Any]:
        """Execute a step (from 1)."""
        self.go.put(number)
        result = self.done.get()
        if isinstance(result, BaseException):
            raise result
        return result


def settings(scenario: Scenario, options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of both trainers: the work of a step, in micro-batches of the size to try."""
    on_cpu = options.get("device", "cpu") == "cpu"
    micro = min(options.get("per_device_train_batch_size", 16), scenario.sequences)
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": scenario.sequences // micro,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "temperature": 1.0,
        "bf16": options.get("bf16", not on_cpu),
        "gradient_checkpointing": False,
        "use_cpu": on_cpu,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 10_000,
        "disable_tqdm": True,
        "seed": 1,
    }


class Side(TurnTaking):
    """TRL's `GRPOTrainer`."""

    def __init__(self, scenario: Scenario, folder: Path, steps: int, options: dict[str, Any]) -> None:
        super().__init__(scenario)
        from datasets import Dataset
        from transformers import AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer

        config = GRPOConfig(
            **settings(scenario, options),
            num_generations=scenario.group,
            max_completion_length=scenario.max_new,
            max_steps=steps,
            beta=0.0,
            shuffle_dataset=False,
            **options.get("config", {}),
        )
        self.trainer = GRPOTrainer(
            model=str(folder / "model"),
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": scenario.prompt_texts(steps)}),
            processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left"),
        )
        side = self

        class Steps(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                side.await_turn()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                side.report()

        self.trainer.add_callback(Steps())
        self.force_lengths(self.trainer.model)
        self._check_lengths()
        self.start()

    def _check_lengths(self) -> None:
        score = self.trainer._generate_and_score_completions

        def scored(*args: Any, **kwargs: Any) -> Any:
            out = score(*args, **kwargs)
            assert out["completion_mask"].sum(1).tolist() == self.lengths, "wrong response lengths"
            return out

        self.trainer._generate_and_score_completions = scored
