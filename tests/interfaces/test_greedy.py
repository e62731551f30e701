from __future__ import annotations

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample
from realign.interfaces.greedy import GreedyInterface
from realign.testing import BigramEngine

PROMPTS = SequenceSample.from_sequences("abc", {"prompt_ids": [[[1, 4]], [[2]], [[7, 7, 7]]]})


def answers(engine: BigramEngine, generation: GenerationConfig) -> SequenceSample:
    model = Model("baseline", engine, seed=5)
    data = PROMPTS.with_metadata(row=[{}] * 3)
    return GreedyInterface(generation).generate(model, data, MicroBatchSpec())


def most_likely(engine: BigramEngine, prompt: list[int], limit: int, fixed_length: bool) -> list[int]:
    """The chain of most likely tokens, one after another; 0 is the end token."""
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(max(range(11), key=lambda v: float(engine.logits_VV[tokens[-1], v])))
        if tokens[-1] == 0 and not fixed_length:
            break
    return tokens


def test_every_prompt_gets_its_most_likely_answer_whatever_the_actor_samples():
    engine = BigramEngine(seed=3)
    engine.logits_VV[7, 0] = 9.0  # this answer ends at once
    for fixed_length in (False, True):
        sampler = GenerationConfig(n=4, max_new_tokens=5, temperature=0.7, fixed_length=fixed_length)
        out = answers(engine, sampler)
        assert (out.ids, out.keys) == (PROMPTS.ids, {"input_ids", "prompt_mask"})
        expected = [most_likely(engine, p, 5, fixed_length) for p in ([1, 4], [2], [7, 7, 7])]
        assert [x.tolist() for x in out.sequences("input_ids")] == expected
        assert [int(mask.sum()) for mask in out.sequences("prompt_mask")] == [2, 1, 3]
        assert out.lengths["input_ids"].counts.tolist() == [1, 1, 1]


def test_the_answer_follows_the_weights_of_the_moment_and_no_seed():
    engine, sampler = BigramEngine(seed=3), GenerationConfig(max_new_tokens=3, fixed_length=True)
    before = answers(engine, sampler)["input_ids"].tolist()
    later = Model("baseline", engine, seed=6, version=9)
    again = GreedyInterface(sampler).generate(later, PROMPTS, MicroBatchSpec())
    assert again["input_ids"].tolist() == before
    engine.logits_VV[:, 10] += 100.0
    assert answers(engine, sampler)["input_ids"].tolist() == [1, 4, 10, 10, 10, 2, 10, 10, 10, 7, 7, 7, 10, 10, 10]
