"""Servers whose weights are not those that they were given."""

import pytest
import torch

from realign.api import GenerationConfig, Request
from realign.errors import ConfigError
from realign.samplers.servers.vllm import Vllm
from tests.samplers.servers.fake_server import FakeServer, Scoring, random_table

WORDS = range(12)
REQUEST = Request("a", 0, torch.tensor([1, 2]), GenerationConfig(max_new_tokens=5), 3)


def scoring(seed, base=0, share=0.0):
    table = random_table(seed).logits_VV
    return Scoring((1 - share) * table + share * random_table(base).logits_VV)


class Forgetful(FakeServer):
    """A server that updates only the first rows of its weights."""

    rows = 12

    def load(self, folder):
        before = self.logits_VV.clone()
        super().load(folder)
        with self.changed:
            self.logits_VV = torch.cat([self.logits_VV[: self.rows], before[self.rows :]])


@pytest.fixture
def server():
    started = Forgetful("vllm", random_table(5))
    yield started
    started.close()


def opened(server, weights=None, **settings):
    return Vllm(urls=[server.url], **settings).open("actor", weights or scoring(0), WORDS)


def test_weights_are_compared_after_each_update(server):
    sampler = opened(server)
    for version in (1, 2):
        sampler.update(scoring(version), version)
    scores = [body for _, body in server.requests if body.get("prompt_logprobs") is not None]
    assert len(scores) == 3
    assert set(scores[0]["prompt"]) == set(WORDS)
    sampler.close()


def test_a_server_that_keeps_some_of_the_old_weights_ends_the_run(server):
    sampler = opened(server)
    server.rows = 8
    sampler.update(scoring(1), 1)  # the step that trained these weights is complete
    with pytest.raises(ConfigError, match=r"actor.sampler: the server at .* does not have the weights .* untie=true"):
        sampler.submit(REQUEST)
    sampler.close()


def constant(choice):
    choice["logprobs"]["token_logprobs"] = [0.0] * len(choice["token_ids"])


def exchanged(choice):
    choice["token_ids"] = [5] * len(choice["token_ids"])


def lies(how):
    """Return a change of all answers with sampled tokens, but not of those with scores."""

    def tamper(path, body, reply):
        if path == "/v1/completions" and body.get("prompt_logprobs") is None:
            how(reply[1]["choices"][0])
        return reply

    return tamper


@pytest.mark.parametrize(("how", "sharpness"), [(constant, 1), (exchanged, 4)])
@pytest.mark.parametrize("when", ["at the start", "later", "awake"])
def test_a_server_that_returns_other_tokens_or_log_probs_than_it_sampled_ends_the_run(server, how, sharpness, when):
    """Its scores of the fixed text are right. Log-probs of tokens differ if the weights are sharp."""
    first, second = (Scoring(sharpness * scoring(seed).logits_VV) for seed in (0, 1))
    message = r"actor.sampler: the server at .* does not return what it samples: .* by \d.* nats on average"
    if when == "at the start":
        server.tamper = lies(how)
        with pytest.raises(ConfigError, match=message):
            opened(server, first)
        return
    sampler = opened(server, first, sleep_level=2 if when == "awake" else 0)
    server.tamper = lies(how)
    if when == "awake":
        sampler.sleep()
        sampler.update(second, 1)
        with pytest.raises(ConfigError, match=message):
            sampler.wake()
    else:
        with pytest.raises(ConfigError, match=message):
            sampler.update(second, 1)
    sampler.close()


def test_a_sampled_response_may_differ_by_rounding_and_by_single_tokens(server):
    """Other kernels and other choices of experts change some log-probs by more than a nat."""

    def rounded(choice):
        logprobs = choice["logprobs"]["token_logprobs"]
        choice["logprobs"]["token_logprobs"] = [x - 0.3 - 4 * (i == 3) for i, x in enumerate(logprobs)]

    server.tamper = lies(rounded)
    sampler = opened(server)
    sampler.update(scoring(1), 1)
    sampler.close()


def test_another_model_is_rejected_at_the_start(server):
    server.rows = 0
    with pytest.raises(ConfigError, match=r"computes other log-probs than the trainer: the mean difference is \d"):
        opened(server)
