"""TRL's side of PPO: the `PPOTrainer` of version 1.12, the last one that has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peer.side_trl import TurnTaking, settings
from benchmarks.peer.work import Scenario


class Side(TurnTaking):
    """TRL's `PPOTrainer`."""

    def __init__(self, scenario: Scenario, folder: Path, steps: int, options: dict[str, Any]) -> None:
        super().__init__(scenario)
        from datasets import Dataset
        from torch.utils.data import DataLoader
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoTokenizer,
            TrainerCallback,
        )
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        config = PPOConfig(
            **settings(scenario, options),
            num_mini_batches=1,
            num_ppo_epochs=scenario.epochs,
            local_rollout_forward_batch_size=scenario.sequences,
            total_episodes=steps * scenario.sequences,
            response_length=scenario.max_new,
            stop_token="eos",
            kl_coef=0.05,
            vf_coef=1.0,
            num_sample_generations=0,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left")
        rows = [{"input_ids": tokenizer(text)["input_ids"]} for text in scenario.prompt_texts(steps)]
        policy, reference = (AutoModelForCausalLM.from_pretrained(folder / "model") for _ in range(2))
        reward, value = (
            AutoModelForSequenceClassification.from_pretrained(folder / "reward", num_labels=1) for _ in range(2)
        )
        data = Dataset.from_list(rows)
        self.trainer = PPOTrainer(
            args=config,
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=data,
        )
        # same order of prompts as on the other side
        self.trainer.dataloader = DataLoader(
            data, batch_size=scenario.sequences, collate_fn=self.trainer.data_collator, shuffle=False
        )
        side = self

        class Steps(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                side.await_turn()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                side.report()
                side.await_turn()

        self.trainer.add_callback(Steps())
        self.force_lengths(policy)
        self.start()
