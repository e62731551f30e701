"""Pictures, and the processor and tokenizer of a tiny model that reads images, made without downloads."""

from __future__ import annotations

from typing import Any

from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.images import MERGE, PATCH
from tests.tiny import TEXT, VOCAB

IMAGE_TEXT = "<|image_pad|>"
_SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
_VISION = (IMAGE_TEXT, "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""The last tokens of the vocabulary, as in `tests.images`."""

_TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role[0] }}"
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{%- else %}{{ part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}<|im_end|>{%- endfor %}{%- if add_generation_prompt %}<|im_start|>a{%- endif %}"
)
"""A short form of the chat template of Qwen2.5-VL."""


def picture(color: str, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """Return a picture of one color, with this width and height."""
    return Image.new("RGB", size, color)


def image_processor(merge: int = MERGE) -> Any:
    """Return an image processor for `tiny_image_model`, which keeps pictures of 16 x 16 pixels as they are."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=merge, temporal_patch_size=1, size={"shortest_edge": 64, "longest_edge": 1024}
    )


def image_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per character, the tokens of images, and a chat template with image parts."""
    tokens = [*_SPECIAL, *TEXT]
    tokens += [f"<r{i}>" for i in range(VOCAB - len(tokens) - len(_VISION))]
    tokens += _VISION
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<r0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<r0>",
        additional_special_tokens=["<|im_start|>", *_VISION],
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
