from __future__ import annotations

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from realign.environments.turns import TurnWriter, split_observation
from realign.tokenization import Tokens
from tests.data.chat_templates import KINDS, PLAIN_CHATML, chat_tokenizer
from tests.tiny import ids, tiny_tokenizer


def writer(template: str = "", **changes) -> TurnWriter:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or None
    return TurnWriter(tokenizer, chat=bool(template), **changes)


def test_trap_a13_plain_text_gets_no_start_token():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    assert tokenizer("ab")["input_ids"] == [1, *ids("ab")]
    assert TurnWriter(tokenizer).between("ab", ids("x.")) == ids("ab")
    assert TurnWriter(tokenizer).opening("ab") == ids("ab")
    assert TurnWriter(tokenizer).between("", ids("x.")) == []


CHAT = (
    "{% for m in messages %}({{ m.role }}:{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}({% endif %}"
)


def test_text_becomes_one_message_of_the_role_behind_the_end_of_the_answer():
    assert writer(CHAT).between("7", ids("x.")) == ids("\n(tool:7.\n(")
    assert writer(CHAT, role="user").between("7", ids("xy")) == ids(".\n(user:7.\n(")


def test_a_template_that_hides_the_answer_is_refused():
    with pytest.raises(ValueError, match="omits the assistant's message"):
        writer("{{ messages[-1].content }}").between("7", [])


def test_the_kinds_of_observations():
    messages = [{"role": "tool", "content": "7"}]
    assert split_observation("ab") == ("ab", None, [])
    assert split_observation(np.array([3, 4])) == ("", [3, 4], [])
    assert split_observation((3, 4)) == ("", [3, 4], [])
    assert split_observation([]) == ("", [], [])
    assert split_observation(messages) == ("", None, messages)
    for odd in (None, 3, [3, "a"], [True], [{"role": "tool"}], {"role": "tool", "content": "7"}, b"ab"):
        with pytest.raises(ValueError, match=r"the observation is .*, expected text, a list of token ids"):
            split_observation(odd)


LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def tokens_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("observation", ["Yes", " hi", "1+1=", "é🙂", ""])
def test_an_observation_has_the_tokens_that_it_has_in_the_whole_text(kind, observation):
    tokenizer = chat_tokenizer(None, kind=kind)
    for said in ("2\n", "2<|im_end|>"):
        sampled = tokens_of(tokenizer, said)
        whole = tokens_of(tokenizer, said + observation)
        assert sampled + TurnWriter(tokenizer).between(observation, sampled) == whole
    assert "".join(Tokens(tokenizer).texts(TurnWriter(tokenizer).opening(observation))) in (observation, "�" * 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [PLAIN_CHATML, LLAMA2])
def test_a_turn_and_an_observation_have_the_tokens_of_the_whole_conversation(kind, template):
    tokenizer = chat_tokenizer(template, kind=kind)
    writer = TurnWriter(tokenizer, chat=True, role="user")
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "Yes"}]
    messages.append({"role": "user", "content": "hello"})
    whole = tokens_of(tokenizer, tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    prompt = tokens_of(
        tokenizer, tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    )
    end = next(i for i in range(len(prompt), len(whole)) if whole[i] == tokenizer.eos_token_id) + 1
    assert whole[:end] + writer.between("hello", whole[len(prompt) : end]) == whole
    texts = Tokens(tokenizer).texts(whole)
    cut = next(i for i in range(end) if "".join(texts[len(prompt) : i]).strip() == "Yes")
    assert whole[:cut] + writer.between("hello", ()) == whole  # a turn that was cut off before its end
