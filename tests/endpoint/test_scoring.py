"""Log-probs of prompts and of the most likely tokens, over real sockets."""

from __future__ import annotations

from types import SimpleNamespace

import openai
import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from realign.api import GenerationConfig
from realign.cli.serve import serve_of
from realign.endpoint import ServedPolicy, Session
from realign.endpoint.requests import Parameters
from realign.endpoint.scoring import Scorer
from tests.endpoint.scripted import HELLO, KEY, served
from tests.tiny import save_tiny, tiny_engine, tiny_tokenizer

TEXT = "one plus two"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = save_tiny(tmp_path_factory.mktemp("scoring") / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def client(folder):
    with serve_of([folder, "port=0", "generation.max_new_tokens=8"]).endpoint(KEY) as endpoint:
        endpoint.start()
        with OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as found:
            yield found


def reference(folder: str, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs [T - 1, V] that transformers computes for tokens 1 to T - 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1] / temperature, -1)


def test_an_echoed_prompt_has_the_log_probs_of_the_model(folder, client):
    extra = {"return_token_ids": True}
    out = client.completions.create(model="m", prompt=TEXT, echo=True, logprobs=2, max_tokens=3, extra_body=extra)
    found = out.choices[0]
    ids = [*found.prompt_token_ids, *found.token_ids]
    assert found.text == TEXT + tiny_tokenizer().decode(found.token_ids, skip_special_tokens=True)
    expected_TV = reference(folder, ids)
    logprobs = found.logprobs
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    own = expected_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert logprobs.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)
    assert "".join(logprobs.tokens[: len(TEXT)]) == TEXT
    assert logprobs.text_offset[: len(TEXT)] == list(range(len(TEXT)))
    for place, top in enumerate(logprobs.top_logprobs[1:]):
        assert max(top.values()) == pytest.approx(float(expected_TV[place].max()), abs=1e-4)
        assert top[logprobs.tokens[place + 1]] == logprobs.token_logprobs[place + 1]  # contains the token itself
        assert len(top) in (2, 3)


def test_a_prompt_can_be_scored_without_a_response(folder, client):
    ids = tiny_tokenizer()(TEXT, add_special_tokens=False)["input_ids"]
    for prompt in (TEXT, ids):
        found = client.completions.create(model="m", prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        assert found.choices[0].text == TEXT
        assert found.choices[0].finish_reason == "length"
        assert found.usage.completion_tokens == 0
        own = reference(folder, ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert found.choices[0].logprobs.token_logprobs[1:] == pytest.approx(own.tolist(), abs=1e-4)


def test_the_most_likely_tokens_of_a_chat_are_those_of_the_softmax_at_its_temperature(folder, client):
    extra = {"return_token_ids": True}
    ask = {"model": "m", "messages": HELLO, "logprobs": True, "temperature": 0.5, "seed": 1, "extra_body": extra}
    found = client.chat.completions.create(**ask, top_logprobs=4).choices[0]
    given = len(found.prompt_token_ids)
    expected_TV = reference(folder, [*found.prompt_token_ids, *found.token_ids], 0.5)[given - 1 :]
    assert len(found.logprobs.content) == len(found.token_ids)
    for row_V, token in zip(expected_TV, found.logprobs.content, strict=True):
        best = row_V.topk(4)
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [one.token for one in token.top_logprobs] == [
            tiny_tokenizer().decode([i]) for i in best.indices.tolist()
        ]
    plain = client.chat.completions.create(**ask).choices[0]
    assert [one.logprob for one in plain.logprobs.content] == pytest.approx(
        [one.logprob for one in found.logprobs.content], abs=1e-4
    )
    assert all(one.top_logprobs == [] for one in plain.logprobs.content)


def test_an_echo_is_part_of_a_stream(client):
    ask = {"model": "m", "prompt": TEXT, "echo": True, "seed": 3, "logprobs": 1}
    whole = client.completions.create(**ask).choices[0]
    parts = [part.choices[0] for part in client.completions.create(**ask, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    assert parts[-1].logprobs == whole.logprobs


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_values_out_of_range_are_errors_that_name_the_parameter(client, options, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="m", prompt=TEXT, **options)
    assert raised.value.param == param


def test_most_likely_tokens_need_logprobs(client):
    with pytest.raises(openai.BadRequestError, match="requires logprobs=true"):
        client.chat.completions.create(model="m", messages=HELLO, top_logprobs=2)


def test_an_endpoint_without_a_scorer_rejects_what_needs_it_and_echoes_text():
    with served() as (endpoint, _), OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as client:
        for name, options in (("top_logprobs", {"logprobs": 2}), ("echo", {"logprobs": 0, "echo": True})):
            with pytest.raises(openai.BadRequestError) as raised:
                client.completions.create(model="m", prompt=TEXT, **options)
            assert (raised.value.param, raised.value.code) == (name, "unsupported_parameter")
        assert client.completions.create(model="m", prompt=TEXT, echo=True).choices[0].text.startswith(TEXT)


def test_long_texts_are_scored_in_chunks(monkeypatch):
    engine = tiny_engine()
    ids = torch.randint(3, 90, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = Scorer(engine.forward).score(ids, 3, 1.0)
    monkeypatch.setattr("realign.endpoint.scoring._CHUNK", 7)
    chunked = Scorer(engine.forward).score(ids, 3, 1.0)
    assert chunked.logprobs[1:] == pytest.approx(whole.logprobs[1:], abs=1e-5)
    assert [[i for i, _ in row] for row in chunked.top] == [[i for i, _ in row] for row in whole.top]
    assert [len(row) for row in whole.top] == [0, *[3] * 49]


def test_no_more_likely_tokens_are_asked_for_than_the_vocabulary_has():
    asked = []
    scorer = SimpleNamespace(score=lambda ids, top, temperature: asked.append(top))
    backend = ServedPolicy(None, SimpleNamespace(tokenizer=range(5)), GenerationConfig(), scorer=scorer)
    for top in (3, 20):
        Session(backend, "p/0").score([1, 2], Parameters(logprobs=True, top_logprobs=top))
    assert asked == [3, 5]
