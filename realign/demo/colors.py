"""Task with images: name the color of a square, for a tiny, randomly initialized Qwen2.5-VL.

The SFT demonstrations have mixed quality: a part of them names a random color. So a model after SFT sometimes samples
wrong answers, and the verifiable reward of a GRPO run teaches it to avoid them.

`prepare` writes a Hugging Face model folder, images and JSONL files, which every CLI command accepts. The same from the
shell:

    python -m realign.demo.colors [folder] [seed]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from realign.demo import tiny
from realign.demo.tiny import Task

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 180, 30),
    "blue": (30, 30, 220),
    "yellow": (230, 220, 40),
    "purple": (150, 30, 180),
    "white": (250, 250, 250),
}
"""RGB values of the colors of squares."""
QUESTION = "what color is the square ?"
IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
_SPECIAL = ("<|im_start|>", IMAGE, VIDEO, START, END)
_WORDS = (*_SPECIAL, "user", "assistant", *QUESTION.split(), *COLORS)
_SIDE, _PATCH, _MERGE = 16, 4, 2

_TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + ' ' }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{%- endif %}"
)
"""A short form of the chat template of Qwen2.5-VL."""


def prepare(folder: Path, *, seed: int, squares: int = 512, mistakes: float = 0.4, held_out: int = 64) -> Task:
    """Write model, tokenizer, image processor, images and data of the task.

    Args:
        folder: Output folder for `model/`, `images/`, `demonstrations.jsonl` (`images`, `messages`), `prompts.jsonl`
            and `held_out.jsonl` (`images`, `messages`, `answer`).
        seed: Seed of the images, the mistakes and the weights.
        squares: Number of training images.
        mistakes: Fraction of the demonstrations that name a random color.
        held_out: Number of held-out images.
    """
    task, rng = Task.of(folder), random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(squares + held_out):
        name, color = f"images/{number}.png", rng.choice(list(COLORS))
        _draw_square(COLORS[color], rng).save(folder / name)
        rows.append({"images": [name], "messages": [_question()], "answer": color})
    tiny.write_rows(task.prompts, rows[:squares])
    tiny.write_rows(task.held_out, rows[squares:])
    given = [rng.choice(list(COLORS)) if rng.random() < mistakes else str(row["answer"]) for row in rows[:squares]]
    tiny.write_rows(
        task.demonstrations,
        [
            {"images": row["images"], "messages": [_question(), {"role": "assistant", "content": answer}]}
            for row, answer in zip(rows, given, strict=False)
        ],
    )
    tiny.save(task.model, build_model(seed=seed), build_tokenizer(), _build_processor())
    return task


def _question() -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}


def _draw_square(color: tuple[int, int, int], rng: random.Random) -> Any:
    """Return an image of a square of about this color, at a random place on gray."""
    from PIL import Image

    shade = tuple(max(0, min(255, value + rng.randint(-20, 20))) for value in color)
    image = Image.new("RGB", (_SIDE, _SIDE), (110, 110, 110))
    side = rng.randint(6, 10)
    image.paste(Image.new("RGB", (side, side), shade), (rng.randint(0, _SIDE - side), rng.randint(0, _SIDE - side)))
    return image


def build_tokenizer() -> Any:
    """Return the tokenizer of the task, with one token for each word."""
    from tokenizers import pre_tokenizers

    tokenizer = tiny.build_tokenizer(_WORDS, split=pre_tokenizers.WhitespaceSplit())
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _build_processor() -> Any:
    """Return the image processor of the task."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": (4 * _SIDE) ** 2}
    return Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=_MERGE, temporal_patch_size=1, size=pixels)


def build_model(*, seed: int) -> Any:
    """Return a randomly initialized Qwen2.5-VL with about 150,000 parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    ids = dict(zip((IMAGE, VIDEO, START, END), build_tokenizer().convert_tokens_to_ids([*_SPECIAL[1:]]), strict=True))
    text = {
        "vocab_size": 2 + len(_WORDS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 100.0},
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "initializer_range": 0.06,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": 1,
        "window_size": _SIDE,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.06,
    }
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[START],
        vision_end_token_id=ids[END],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(config, trust_remote_code=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/colors")
    print(prepare(folder, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
