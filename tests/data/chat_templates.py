"""Chat templates in the style of common models, and a byte-level tokenizer with their special tokens."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


@cache
def _core() -> str:
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
    return core.to_str()


def chat_tokenizer(template: str | None, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template. Merges span letters and blanks, not special tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_core()),
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
