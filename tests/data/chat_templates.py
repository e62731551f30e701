"""Chat templates in the style of common models, and a byte-level tokenizer with their special tokens."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from realign.data.encoding import decode_row

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<think>",
    "</think>",
]
BLANK = "\u2581"
"""Blank of SentencePiece."""
CORPUS = [
    "user assistant system tool the answer is hello world 1 + 1 = 2 \n\n",
    '{"name": "add", "arguments": {"a": 1}}',
]

_TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{%- endif %}"
    "{{ '# Tools\n' }}{%- for tool in tools %}{{ tool | tojson + '\n' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
)
_CALLS = (
    "{%- for call in message.tool_calls %}"
    "{{ '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '</tool_call>' }}"
    "{%- endfor %}"
)
_RESULTS = (
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>' + message.content + '</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
)
_PROMPT = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"

CHATML = (
    _TOOLS + "{%- for message in messages %}"
    "{%- if message.role == 'system' %}"
    "{%- elif message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}"
    + _CALLS
    + "{{ '<|im_end|>\n' }}"
    + _RESULTS
    + "{%- endif %}{%- endfor %}"
    + _PROMPT
)
"""In the style of Qwen2.5: a tools block, tool calls, and consecutive tool messages in one user turn."""

PLAIN_CHATML = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}" + _PROMPT
)
"""ChatML of small models: every role, but neither tools nor tool calls."""

LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
"""In the style of Llama 3: BOS, headers, and contents without whitespace around them."""

GENERATION = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}" + _PROMPT
)
"""ChatML with `{% generation %}` blocks."""

REASONING = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if message.reasoning_content and loop.index0 > ns.last %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
    "{{- message.content.split('</think>')[-1].lstrip('\n') if loop.index0 <= ns.last else message.content }}"
    "{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}" + _PROMPT
)
"""In the style of Qwen3: reasoning only after the last user message."""


KINDS = ("bytes", "blank", "added")
"""Tokenizers: byte-level; with a blank before each text, as of Llama 2; byte-level with added tokens of all kinds."""
KIND = "bytes"
"""Kind of a tokenizer if none is given; the fixture `each_kind` changes it."""
ADDED = [
    AddedToken("hello", single_word=True, normalized=True),
    AddedToken("1+1", normalized=False),
    AddedToken("<tool_call>", normalized=False),
    AddedToken("be ", normalized=False),
    AddedToken("~~", lstrip=True, normalized=True),
    AddedToken("||", rstrip=True, normalized=False),
]
"""Added tokens that are words, contain a blank, or take the blanks around them."""


@cache
def _core(kind: str) -> str:
    if kind == "blank":
        return _blank_core()
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    if kind == "added":
        core.add_tokens(ADDED)
    return core.to_str()


def _blank_core() -> str:
    """Return a tokenizer as of Llama 2: its normalizer and decoder, and bytes for characters that are no tokens."""
    words = [*SPECIAL, "<unk>", *(f"<0x{i:02X}>" for i in range(256)), BLANK, *map(chr, range(33, 127))]
    merges = [pair for word in ("hi", "ok", "hello", "Yes", "is", ".") for pair in _merges(word)]
    words += [a + b for a, b in merges]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words))}
    core = Tokenizer(
        models.BPE(vocabulary, list(dict.fromkeys(merges)), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    core.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core.to_str()


def _merges(word: str) -> list[tuple[str, str]]:
    """Return the merges of a word with and without a blank before it."""
    texts = (BLANK + word, word)
    return [(text[:n], text[n]) for text in texts for n in range(1, len(text))]


def chat_tokenizer(template: str | None, eos: str = "<|im_end|>", kind: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind, with a chat template. Merges span letters and blanks, not special tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core(kind or KIND)),
        bos_token="<|begin_of_text|>",
        eos_token=eos,
        additional_special_tokens=SPECIAL,
    )
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def tool(text: str) -> dict:
    return {"role": "tool", "content": text}


def runs(dataset, row=0):
    """Return the (text, trained) runs of each sequence of a row."""
    decoded = decode_row(dataset.sample([(0, row)]), chat_tokenizer(None))
    return [[tuple(segment) for segment in sequence.segments] for sequence in decoded]
