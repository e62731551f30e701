from __future__ import annotations

import pytest
import torch

from realign.api import GenerationConfig, Model, Request, SequenceSample
from realign.api.sampler import (
    Completion,
    requests_of,
    sample_of,
)
from realign.testing import SAMPLER_CHECKS, BigramEngine, check_sampler
from tests.table_sampler import CONFIG, TableSampler, prompts


def table(**settings) -> TableSampler:
    return TableSampler(BigramEngine(seed=0).logits_VV, **settings)


@pytest.mark.parametrize("name", SAMPLER_CHECKS)
@pytest.mark.parametrize("bitwise", [True, False])
def test_a_sampler_in_pure_python_meets_the_contract(name, bitwise):
    check_sampler(lambda: table(bitwise=bitwise), prompts(), CONFIG, BigramEngine(seed=1), only=name)


class NoVersions(TableSampler):
    def generate(self, data, config, *, seed):
        out = super().generate(data, config, seed=seed)
        return out.select(out.keys - {"versions"})


class ByOrder(TableSampler):
    def submit(self, request):
        self.count = getattr(self, "count", 0) + 1
        return super().submit(Request(request.id, self.count, request.prompt_ids, request.config, request.seed))


class NeverPauses(TableSampler):
    def pause(self):
        pass


class ForgetsVersion(TableSampler):
    def update(self, source, version):
        super().update(source, 0)


class KeepsWeights(TableSampler):
    def update(self, source, version):
        self.version = version


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoVersions, "generate returns keys"),
        (ByOrder, "equal calls of generate differ"),
        (NeverPauses, "an unfinished response cannot be canceled|paused"),
        (ForgetsVersion, "version is not 1 after an update to version 1"),
        (KeepsWeights, "an update does not change the log-probs"),
    ],
)
def test_a_sampler_that_breaks_the_contract_is_found(kind, message):
    config = GenerationConfig(n=3, max_new_tokens=6, fixed_length=True)
    with pytest.raises(AssertionError, match=message):
        check_sampler(lambda: kind(BigramEngine(seed=0).logits_VV), prompts(), config, BigramEngine(seed=1))


def test_requests_are_the_responses_of_a_call_prompt_after_prompt():
    requests = requests_of(prompts("ab"), CONFIG, 7)
    assert [(r.id, r.response_index, r.seed) for r in requests] == [(i, j, 7) for i in "ab" for j in range(3)]
    two = SequenceSample.from_sequences(["a"], {"prompt_ids": [[[1], [2]]]})
    with pytest.raises(ValueError, match="id 'a' has 2 sequences of 'prompt_ids'"):
        requests_of(two, CONFIG, 0)
    with pytest.raises(ValueError, match="id 'a' has an empty prompt"):
        requests_of(SequenceSample.from_sequences(["a"], {"prompt_ids": [[[]]]}), CONFIG, 0)


def completion(*ids: int, truncated: bool = False) -> Completion:
    n = len(ids)
    return Completion(torch.tensor(ids), torch.full((n,), -0.5), torch.full((n,), 4, dtype=torch.int32), truncated)


def test_responses_are_put_behind_their_prompts():
    data = SequenceSample.from_sequences(["a", "b"], {"prompt_ids": [[[5, 6]], [[7]]]})
    out = sample_of(data, [completion(1), completion(2, 3, truncated=True), completion(4), completion(0)], 2)
    assert [x.tolist() for x in out.sequences()] == [[5, 6, 1], [5, 6, 2, 3], [7, 4], [7, 0]]
    assert out["versions"].tolist() == [-1, -1, 4, -1, -1, 4, 4, -1, 4, -1, 4]
    assert out["logprobs"].tolist() == [0, 0, -0.5, 0, 0, -0.5, -0.5, 0, -0.5, 0, -0.5]
    assert torch.equal(out["loss_mask"], out["versions"] == 4)
    assert out["truncated"].tolist() == [False, True, False, False]
    assert len(sample_of(data.take([]), [], 2)) == 0


def test_a_model_samples_with_its_engine_at_its_version_or_with_its_external_sampler():
    model = Model("actor", BigramEngine(), version=7)
    out = model.sampler.generate(prompts(), CONFIG, seed=0)
    assert set(out["versions"].tolist()) == {-1, 7}
    model.publish_weights()
    assert model.sampler.version == 8
    sampler = table()
    model.external_sampler, model.background_sampler = sampler, (background := table())
    assert model.sampler is sampler
    model.engine.logits_VV.zero_()
    model.publish_weights(11)
    for copy in (sampler, background):
        assert (copy.version, copy.updates) == (11, [11])
        assert not copy.logits_VV.any()
        copy.close()
    with pytest.raises(ValueError, match="role 'rule' has no model"):
        _ = Model("rule", None).sampler


def test_the_seed_of_a_response_follows_from_seed_id_and_index():
    ids = torch.tensor([1])
    seeds = {
        Request(i, j, ids, CONFIG, seed).response_seed for i in ("a", "b", 1) for j in range(3) for seed in range(2)
    }
    assert len(seeds) == 18
    assert Request("1", 0, ids, CONFIG, 0).response_seed == Request(1, 0, ids, CONFIG, 0).response_seed
    assert all(0 <= seed < 2**63 for seed in seeds)
