"""Task of all parts: models, prompts, and a reward function that an untrained model can learn from."""

from __future__ import annotations

from pathlib import Path

REWARD = """
import hashlib
import math
import random
import time


def seconds(prompt):
    normal = random.Random(hashlib.sha256(prompt.encode()).hexdigest()).gauss(0, 1)
    return math.exp({sigma} * normal - {sigma} ** 2 / 2)


def at_once(prompt, response, row):
    return response.count("7") / {tokens}


def slow(prompt, response, row):
    time.sleep(seconds(prompt))
    return at_once(prompt, response, row)
"""
"""Reward of the task. An untrained model gets some of it and improves within a few steps. Its mean duration is 1 s."""
SIGMA = 0.75
TOKENS = 16
"""Tokens of a response."""
ON_RAY = ("runtime=ray", "runtime.placement=separate")


def prepare(folder: Path) -> Path:
    """Write model, prompts and reward function; return their folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from realign.demo import arithmetic

    arithmetic.prepare(folder, seed=0, demonstrations=1, held_out=2)
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        vocab_size=2 + len(arithmetic.CHARACTERS),
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "larger")
    arithmetic.build_tokenizer().save_pretrained(folder / "larger")
    (folder / "reward.py").write_text(REWARD.format(sigma=SIGMA, tokens=TOKENS))
    return folder


def common(task: Path, steps: int, reward: str) -> list[str]:
    """Return the overrides of every run."""
    return [
        "experiment=grpo_arithmetic",
        f"steps={steps}",
        "threads=1",
        f"data.path={task / 'prompts.jsonl'}",
        "evaluation=null",
        f"interfaces.reward.function={task / 'reward.py'}:{reward}",
        f"interfaces.actor.generation.max_new_tokens={TOKENS}",
        "interfaces.actor.generation.fixed_length=true",
    ]
