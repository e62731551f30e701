from __future__ import annotations

import pytest
import torch

from realign.api import Completion
from realign.endpoint import Renderer
from realign.endpoint.capture import Capture, Prompt
from tests.data.chat_templates import KINDS, PLAIN_CHATML, assistant, chat_tokenizer, user
from tests.tiny import EOS, ids, tiny_tokenizer


def renderer(template: str = "") -> Renderer:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or None
    return Renderer(tokenizer)


def said(tokens: list[int], version: int = 0) -> Completion:
    n = len(tokens)
    logprobs = -0.1 - torch.arange(n) / 100
    return Completion(torch.tensor(tokens), logprobs, torch.full((n,), version, dtype=torch.int32), tokens[-1] != EOS)


def call(capture: Capture, writer: Renderer, prompt: str, response: str, version: int = 0) -> Prompt:
    prompt_id = capture.prompt(writer, prompt)
    capture.add(writer, prompt_id, said(ids(response), version))
    return prompt_id


def test_calls_that_continue_each_other_are_one_sequence_with_the_sampled_tokens_as_actions():
    capture, writer = Capture(), renderer()
    call(capture, writer, "ab", "x.", version=4)
    call(capture, writer, "abx<eos>c", "yz", version=5)
    (sequence,) = capture.sequences()
    assert sequence.ids.tolist() == ids("abx.cyz")
    assert sequence.sampled.tolist() == [False, False, True, True, False, True, True]
    assert sequence.versions.tolist() == [-1, -1, 4, 4, -1, 5, 5]
    assert sequence.logprobs.tolist() == pytest.approx([0, 0, -0.1, -0.11, 0, -0.1, -0.11])
    assert (sequence.calls, sequence.truncated) == (2, True)


def test_sampled_ids_are_kept_although_their_text_would_be_tokenized_differently():
    capture, writer = Capture(), renderer()
    reserved = len(tiny_tokenizer()) - 1  # its text has several characters, each with a separate token
    text = tiny_tokenizer().decode([reserved])
    first = capture.prompt(writer, "ab")
    capture.add(writer, first, said([reserved, EOS]))
    second = capture.prompt(writer, f"ab{text}<eos>c")
    assert list(second.ids) == [*ids("ab"), reserved, EOS, *ids("c")]
    assert second.parent is capture.calls()[0]


@pytest.mark.parametrize("prompt", ["abx", "abX<eos>c", "bx<eos>c", "c"])
def test_a_rewritten_history_begins_a_new_sequence(prompt):
    capture, writer = Capture(), renderer()
    call(capture, writer, "ab", "x.")
    assert call(capture, writer, prompt, "y.").parent is None
    assert [s.calls for s in capture.sequences()] == [1, 1]


def test_a_response_that_several_sequences_contain_trains_once():
    capture, writer = Capture(), renderer()
    call(capture, writer, "ab", "x.")
    call(capture, writer, "abx<eos>c", "y.")
    call(capture, writer, "abx<eos>d", "z.")
    first, second = capture.sequences()
    assert first.ids.tolist() == ids("abx.cy.")
    assert second.ids.tolist() == ids("abx.dz.")
    assert first.sampled.tolist() == [False, False, True, True, False, True, True]
    assert second.sampled.tolist() == [False] * 5 + [True, True]
    assert (first.calls, second.calls) == (2, 1)


ZEPHYR = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [ZEPHYR, MISTRAL, PLAIN_CHATML])
@pytest.mark.parametrize("answer", ["Yes", " hi", "1+1 é🙂", "<think>hello</think>."])
def test_turns_of_a_conversation_are_one_sequence_with_the_tokens_of_its_text(kind, template, answer):
    tokenizer = chat_tokenizer(template, kind=kind)
    capture, writer, messages = Capture(), Renderer(tokenizer), [user("hello")]
    for question in ("Yes", "1+1=", "be brief"):
        prompt = capture.prompt(writer, writer.render(messages))
        sampled = writer.encode(answer + tokenizer.eos_token, before=prompt.ids)
        capture.add(
            writer,
            prompt,
            Completion(
                torch.tensor(sampled), torch.zeros(len(sampled)), torch.zeros(len(sampled), dtype=torch.int32), False
            ),
        )
        content = writer.parse(sampled[:-1], before=prompt.ids, tools=None).content
        messages += [assistant(content if "<" not in answer else answer), user(question)]
    (sequence,) = capture.sequences()
    text = writer.render(messages[:-1], answered=True).removesuffix("\n")
    assert sequence.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert content == (answer if "<" not in answer else "hello.")
