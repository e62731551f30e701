"""In-memory tokenizer for tests: one token per character. Text that equals a special token becomes that token."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<sop>"]
UNK, BOS, EOS, USER, SYSTEM, ASSISTANT, END, SOP = range(len(SPECIAL))
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +=?.:\n"

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + TURNS
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if not enable_thinking %}think {% endif %}{% endif %}"
)


def make_tokenizer(*, before=(), after=(), bos="<s>", eos="</s>", chat_template=None):
    """Return a tokenizer that adds the special tokens `before` and `after` to each text by default."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if before or after:
        core.post_processor = processors.TemplateProcessing(
            single=" ".join([*before, "$A", *after]), special_tokens=[(t, vocabulary[t]) for t in {*before, *after}]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token=bos, eos_token=eos, additional_special_tokens=SPECIAL[3:]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def characters(text):
    """Return the ids of plain characters."""
    return [len(SPECIAL) + CHARACTERS.index(c) for c in text]
