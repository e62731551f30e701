"""The demo's task: two-digit addition for a tiny Qwen2, with a tokenizer of single characters; made here, from nothing.

`prepare` writes an ordinary Hugging Face folder and JSONL files, so that every command of the CLI works on them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+="
PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Task:
    """Where the parts of the task are."""

    model: Path
    demonstrations: Path
    """JSONL of `prompt`, `response`: the few worked problems that SFT sees."""
    prompts: Path
    """JSONL of `prompt`, `answer`: the problems that reinforcement learning practises on."""
    held_out: Path
    """JSONL of `prompt`, `answer`: problems that nothing trains on, in either order of the summands."""


def prepare(folder: Path, *, seed: int, demonstrations: int = 1500, held_out: int = 500) -> Task:
    """Write model, tokenizer and data of the task.

    Args:
        folder: gets `model/`, `demonstrations.jsonl`, `prompts.jsonl` and `held_out.jsonl`.
        seed: of the split and of the weights.
        demonstrations: worked problems for SFT.
        held_out: problems to judge by.
    """
    task = Task(folder / "model", folder / "demonstrations.jsonl", folder / "prompts.jsonl", folder / "held_out.jsonl")
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]  # a + b and b + a never part ways
    rng.shuffle(pairs)
    asked, kept = pairs[: held_out // 2], pairs[held_out // 2 :]
    practice = [p for a, b in kept for p in ({(a, b), (b, a)})]
    rng.shuffle(practice)
    _write(task.held_out, [_problem(*p) for a, b in asked for p in ((a, b), (b, a))])
    _write(task.prompts, [_problem(a, b) for a, b in practice])
    worked = [_problem(a, b) for a, b in practice[:demonstrations]]
    _write(task.demonstrations, [{"prompt": p["prompt"], "response": p["answer"]} for p in worked])
    build_model(seed).save_pretrained(task.model)
    build_tokenizer().save_pretrained(task.model)
    return task


def _problem(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_tokenizer() -> Any:
    """A tokenizer of single characters, with an end and a padding token, that puts nothing in front."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def build_model(seed: int) -> Any:
    """A Qwen2 of a few hundred thousand parameters, randomly initialised."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=2 + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)
