"""`realign chat MODEL`: chat with a model, or answer the lines of a file. For inspection, not for evaluation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from transformers.utils.logging import disable_progress_bar

from realign.api import GenerationConfig, Model, SequenceSample, derive_seed
from realign.cli.arguments import settings_of
from realign.config.errors import ConfigError
from realign.data import Template
from realign.data.messages import Message
from realign.data.writer import Writer
from realign.engines import TransformersModel
from realign.runtime.models import open_sampler
from realign.text import visible
from realign.tokenization import Tokens, with_start


@dataclass
class Chat:
    """Settings of a chat: model, sampling and prompt format."""

    model: TransformersModel
    """Model to load: a folder that a run saved, such as `runs/grpo/final/actor`, the folder of a run, or a name on the
    Hugging Face Hub."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Sampling settings. With `n` above 1, all answers are shown and the conversation continues from the first one.
    Answers end at the context window of the model."""
    template: Template | None = None
    """plain: continue each line as text, independently of other lines. chat: a conversation in the tokenizer's chat
    template. null: chat if the tokenizer has a template, otherwise plain."""
    prefix: str = ""
    """Text before each line (template=plain)."""
    suffix: str = ""
    """Text after each line (template=plain)."""
    system: str = ""
    """Text of the system message (template=chat)."""
    seed: int = 0
    """Seed of the sampler."""

    def talk(self, lines: Iterable[str], say: Callable[[str], None]) -> None:
        """Load the model, and pass its answers to each line to `say`.

        Raises:
            RealignError: the model cannot be loaded, or a setting does not apply to the template.
        """
        model = self.model.load("chat", seed=self.seed)
        open_sampler(self.model, model)
        try:
            self._talk(model, lines, say)
        finally:
            if model.external_sampler is not None:
                model.external_sampler.close()

    def _talk(self, model: Model, lines: Iterable[str], say: Callable[[str], None]) -> None:
        template = self.template or (Template.chat if model.tokenizer.chat_template else Template.plain)
        if template is Template.chat and (self.prefix or self.suffix):
            raise ConfigError("prefix and suffix apply only to template=plain, but template=chat. Remove them.")
        if template is Template.plain and self.system:
            raise ConfigError("system applies only to template=chat, but template=plain. Remove it.")
        writer = Writer(model.tokenizer, template, self.prefix, self.suffix, self.system)
        conversation: list[Message] = []
        tokens = Tokens(model.tokenizer)
        for turn, line in enumerate(lines):
            conversation.append({"role": "user", "content": line})
            written = writer.prompt(conversation if template is Template.chat else line)
            start = [] if written.chat else tokens.start()
            ids = with_start(next(tokens.encode([written.text])), start)
            if not ids:
                continue  # an empty line, and no start token
            prompt = SequenceSample.from_sequences([str(turn)], {"prompt_ids": [[ids]]})
            out = model.sampler.generate(prompt, self._fit(model, len(ids)), seed=derive_seed(self.seed, "chat", turn))
            both = zip(out.sequences("input_ids"), out.sequences("prompt_mask"), strict=True)
            answers = [tokens.decode(x[~given].tolist(), ids, special=False) for x, given in both]
            for answer in answers:
                say(visible(answer))
            conversation.append({"role": "assistant", "content": answers[0]})

    def _fit(self, model: Model, prompt_tokens: int) -> GenerationConfig:
        """Return the sampling settings, with `max_new_tokens` reduced to fit the context window.

        Training raises an error instead.
        """
        limit = model.engine.capabilities().positions
        if limit is None:
            return self.generation
        room = limit - prompt_tokens
        shortest = self.generation.max_new_tokens if self.generation.fixed_length else self.generation.min_new_tokens
        if not max(1, shortest) <= room < self.generation.max_new_tokens:
            return self.generation
        return replace(self.generation, max_new_tokens=room)


def chat(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run `realign chat`: answer each line until the end of the input."""
    conversation = chat_of(words)
    disable_progress_bar()
    conversation.talk(read_lines() if sys.stdin.isatty() else map(str.rstrip, sys.stdin), print)
    return 0


def read_lines() -> Iterator[str]:
    """Yield the lines that the user types."""
    with suppress(EOFError):
        while True:
            yield input("> ")


def chat_of(words: Sequence[str]) -> Chat:
    """Parse a command line `MODEL key=value ...`, with the fields of `Chat` as keys.

    Raises:
        ConfigError: the command line names no model or several, or a key or value is invalid.
    """
    return settings_of("chat", Chat, words)
