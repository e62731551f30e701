"""Log-probs of the most likely tokens, over real sockets."""

from __future__ import annotations

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM

from realign.cli.serve import serve_of
from realign.endpoint.scoring import Scorer
from tests.endpoint.scripted import HELLO, KEY
from tests.tiny import save_tiny, tiny_engine, tiny_tokenizer


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
        with OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0) as openai_client:
            yield openai_client


def reference(folder: str, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probs [T - 1, V] that transformers computes for tokens 1 to T - 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1] / temperature, -1)


def test_the_most_likely_tokens_of_a_chat_are_those_of_the_softmax_at_its_temperature(folder, client):
    extra = {"return_token_ids": True}
    ask = {"model": "m", "messages": HELLO, "logprobs": True, "temperature": 0.5, "seed": 1, "extra_body": extra}
    choice = client.chat.completions.create(**ask, top_logprobs=4).choices[0]
    given = len(choice.prompt_token_ids)
    expected_TV = reference(folder, [*choice.prompt_token_ids, *choice.token_ids], 0.5)[given - 1 :]
    assert len(choice.logprobs.content) == len(choice.token_ids)
    for row_V, token in zip(expected_TV, choice.logprobs.content, strict=True):
        best = row_V.topk(4)
        assert [one.logprob for one in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert [one.token for one in token.top_logprobs] == [
            tiny_tokenizer().decode([i]) for i in best.indices.tolist()
        ]
    plain = client.chat.completions.create(**ask).choices[0]
    assert [one.logprob for one in plain.logprobs.content] == pytest.approx(
        [one.logprob for one in choice.logprobs.content], abs=1e-4
    )
    assert all(one.top_logprobs == [] for one in plain.logprobs.content)


def test_long_texts_are_scored_in_chunks(monkeypatch):
    engine = tiny_engine()
    ids = torch.randint(3, 90, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = Scorer(engine.forward).score(ids[:20], ids[20:], 3, 1.0)
    monkeypatch.setattr("realign.endpoint.scoring._CHUNK", 7)
    chunked = Scorer(engine.forward).score(ids[:20], ids[20:], 3, 1.0)
    assert chunked.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert [[i for i, _ in row] for row in chunked.top] == [[i for i, _ in row] for row in whole.top]
    assert [len(row) for row in whole.top] == [3] * 30
