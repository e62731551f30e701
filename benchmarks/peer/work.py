"""Work of both sides: models, prompts, response lengths and rewards, and the floating-point operations that it takes.

All results are pure functions of the scenario, so that two processes produce the same work without communication.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PAD, BOS, EOS = 0, 1, 2
GREEDY = 8
"""Tokens that every side of a comparison of rollouts decodes greedily, to show that the weights are equal."""
CHARACTERS = [chr(i) for i in (*range(0x4E00, 0x9F00), *range(0xAC00, 0xD7A0))]
"""Characters that text normalization does not change."""


@dataclass(frozen=True)
class Scenario:
    """Kind of rollout batch. Lengths are in tokens."""

    name: str
    prompts: int
    group: int
    max_new: int
    mean_new: int
    prompt_low: int = 16
    prompt_high: int = 64
    vocabulary: int = 1024
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 768
    head_size: int = 0
    """Size of an attention head; 0 divides the hidden size."""
    algorithm: str = "grpo"
    epochs: int = 1
    """Number of passes over the rollout batch."""
    bf16: bool = False
    """Whether each side may compute in bf16, also on a CPU."""

    @property
    def sequences(self) -> int:
        """Return the responses per step."""
        return self.prompts * self.group

    def tokenizer(self) -> Any:
        """Build a tokenizer with one token per character, so that decoding restores every text."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokens = ["<pad>", "<bos>", "<eos>", *CHARACTERS[: self.vocabulary - 3]]
        tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<bos>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<bos>"
        )

    def config(self, **values: Any) -> Any:
        """Build a Qwen2 config of this size; `values` override it."""
        from transformers import Qwen2Config

        return Qwen2Config(
            **{
                "hidden_size": self.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_size or self.hidden // self.heads,
                "intermediate_size": self.mlp,
                "vocab_size": self.vocabulary,
                "max_position_embeddings": 2048,
                "tie_word_embeddings": False,
                "bos_token_id": BOS,
                "eos_token_id": EOS,
                "pad_token_id": PAD,
            }
            | values
        )

    def save_models(self, folder: Path) -> None:
        """Write random Qwen2 models of this size, `model` and `reward` (one number per sequence), and a tokenizer."""
        import torch
        from transformers import Qwen2ForCausalLM, Qwen2ForSequenceClassification

        torch.manual_seed(0)
        config = self.config()
        Qwen2ForCausalLM(config).save_pretrained(folder / "model")
        config.num_labels = 1
        Qwen2ForSequenceClassification(config).save_pretrained(folder / "reward")
        self.tokenizer().save_pretrained(folder / "tokenizer")  # AutoTokenizer ignores it beside a Qwen model

    def prompt_texts(self, steps: int) -> list[str]:
        """Draw the prompts of all steps, in order."""
        r = random.Random(f"prompts of {self.name}")
        texts = []
        for _ in range(steps * self.prompts):
            length = r.randint(self.prompt_low, self.prompt_high)
            texts.append("".join(r.choices(CHARACTERS[: self.vocabulary - 3], k=length)))
        return texts

    def prompt_ids(self, step: int) -> list[list[int]]:
        """Return the tokens of the prompts of one step, as the tokenizer splits them."""
        tokens = {character: i for i, character in enumerate(CHARACTERS, EOS + 1)}
        return [[tokens[character] for character in text] for text in self.prompt_texts(step)[-self.prompts :]]

    def lengths(self, step: int) -> list[int]:
        """Draw the tokens of each response of a step, including the end token: geometric, at most the limit."""
        r = random.Random(f"lengths of {self.name} in step {step}")
        drawn = (1 + int(r.expovariate(1 / max(1, self.mean_new - 1))) for _ in range(self.sequences))
        return [max(2, min(self.max_new, n)) for n in drawn]

    def flops(self, prompt_tokens: list[int], lengths: list[int]) -> dict[str, float]:
        """Count the floating-point operations that a step requires, with each response attending to its full prompt.

        A product with a matrix of n weights counts 2 n per token in the forward pass and 4 n in the backward pass.
        Attention counts 4 times the size of all heads for each pair of tokens of which one attends to the other. The
        language-model head counts for predicted tokens only. The prompt of a group counts once in the rollout and once
        in training.
        """
        head_size = self.head_size or self.hidden // self.heads
        heads = 2 * self.heads + 2 * self.kv_heads
        weights = self.layers * self.hidden * (heads * head_size + 3 * self.mlp)
        each = [p for p in prompt_tokens for _ in range(self.group)]
        tokens = sum(prompt_tokens) + sum(lengths)
        pairs = sum(p * (p + 1) / 2 for p in prompt_tokens)
        pairs += sum(n * p + n * (n + 1) / 2 for p, n in zip(each, lengths, strict=True))
        forward = 2 * weights * tokens + 4 * self.heads * head_size * self.layers * pairs
        head = 2 * self.hidden * self.vocabulary * sum(lengths)
        if self.algorithm == "grpo":
            return {"rollout": forward + head, "training": 3 * (forward + head)}
        # PPO: one forward pass each of reference, reward model and critic; actor and critic train in each epoch.
        scoring, training = 3 * forward + head, self.epochs * 3 * (2 * forward + head)
        return {"rollout": forward + head, "training": scoring + training}


def reward(text: str) -> float:
    """Return the fraction of characters with an even code."""
    return sum(ord(c) % 2 == 0 for c in text) / max(1, len(text))


REAL = Scenario(  # the shape of SmolLM2-135M, with as many tokens as the tokenizer has characters
    "real",
    prompts=8,
    group=8,
    max_new=128,
    mean_new=32,
    vocabulary=31_000,
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    mlp=1536,
    bf16=True,
)
SCENARIOS = {
    s.name: s
    for s in [
        REAL,
        Scenario("long_tail", prompts=8, group=8, max_new=256, mean_new=48),
        Scenario("short_tail", prompts=8, group=8, max_new=128, mean_new=64),
        Scenario("long_prompts", prompts=8, group=8, max_new=256, mean_new=64, prompt_low=128, prompt_high=256),
        Scenario("large_vocabulary", prompts=8, group=8, max_new=256, mean_new=48, vocabulary=32_000),
        Scenario("many", prompts=24, group=8, max_new=256, mean_new=48),
        Scenario("ppo_long_tail", prompts=64, group=1, max_new=256, mean_new=48, algorithm="ppo", epochs=4),
        Scenario("ppo_tiny", prompts=4, group=1, max_new=8, mean_new=4, hidden=64, mlp=96, algorithm="ppo", epochs=2),
        Scenario(  # 0.4B weights; the vocabulary is limited by the number of characters of the tokenizer
            "gpu",
            prompts=16,
            group=8,
            max_new=256,
            mean_new=96,
            prompt_low=64,
            prompt_high=256,
            vocabulary=32_000,
            hidden=896,
            layers=24,
            heads=14,
            mlp=4864,
        ),
        Scenario("tiny", prompts=2, group=2, max_new=8, mean_new=4, hidden=64, mlp=96),
        replace(REAL, name="real32", bf16=False),
        Scenario("tiny_bf16", prompts=2, group=2, max_new=8, mean_new=4, hidden=64, mlp=96, bf16=True),
    ]
}


def write_prompts(scenario: Scenario, steps: int, path: Path) -> Path:
    """Write the prompts as a JSONL file."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in scenario.prompt_texts(steps)))
    return path
