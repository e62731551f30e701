import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.data import PromptData, RowSource, Split, SupervisedData, TextData, batch_indices
from realign.data.combined import PromptsWithPretraining
from realign.data.order import BLOCK, Ramp, SourceChoice, epoch_order
from realign.errors import DataError
from tests.data.text_tokenizer import make_tokenizer

# Test jobs may run in parallel on one machine, so a slow example is not a failure.
unhurried = settings(deadline=None)
sizes = st.integers(1, 20)
seeds = st.integers(0, 2**63 - 1)


def stream(n, batch, steps, seed, shuffle=True):
    return [pair for step in range(steps) for pair in batch_indices(n, batch, step, seed, shuffle)]


@unhurried
@given(sizes, seeds, st.integers(0, 5))
def test_an_epoch_is_a_permutation_and_a_pure_function(n, seed, epoch):
    order = epoch_order(n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))
    assert order.dtype == np.int64
    np.random.seed(seed % 1000)
    assert np.array_equal(epoch_order(n, seed, epoch), order)


@unhurried
@given(sizes, sizes, seeds, st.booleans())
def test_trap_d11_every_row_once_per_epoch_and_none_dropped(n, batch, seed, shuffle):
    """This also holds for a dataset smaller than a batch, and for batch sizes that do not divide it."""
    steps = 3 * n  # batch * steps positions are exactly `3 * batch` epochs
    seen = Counter(stream(n, batch, steps, seed, shuffle))
    assert seen == Counter({(epoch, row): 1 for epoch in range(3 * batch) for row in range(n)})


@unhurried
@given(sizes, sizes, st.integers(0, 30), seeds, st.booleans())
def test_trap_d11_a_batch_is_full_and_its_places_are_distinct(n, batch, step, seed, shuffle):
    pairs = batch_indices(n, batch, step, seed, shuffle)
    assert len(pairs) == batch
    assert len(set(pairs)) == batch
    assert [epoch for epoch, _ in pairs] == [(step * batch + i) // n for i in range(batch)]


@unhurried
@given(st.integers(1, 12), st.integers(1, 12), seeds)
def test_trap_g1_a_step_after_an_epoch_boundary_needs_no_replay(n, batch, seed):
    """The end of the first `batch` epochs is exactly between steps n - 1 and n."""
    whole = stream(n, batch, 2 * n, seed)
    resumed = [pair for step in range(n, 2 * n) for pair in batch_indices(n, batch, step, seed, True)]
    assert resumed == whole[n * batch :]
    assert resumed[0][0] == batch


@pytest.mark.parametrize("bad", [{"n": 0}, {"batch_prompts": 0}, {"step": -1}])
def test_bad_sizes_are_named(bad):
    arguments = {"n": 3, "batch_prompts": 2, "step": 0, "seed": 0, "shuffle": True} | bad
    with pytest.raises(ValueError, match=rf"{next(iter(bad))}=.*: must be at least"):
        batch_indices(**arguments)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 3), st.integers(0, 3))
def test_the_sources_of_a_block_have_their_share_and_ranks_count_earlier_places(weights, seed, block):
    choice = SourceChoice(weights, seed)
    places = [choice.of(place) for place in range((block + 1) * BLOCK)]
    counts = Counter(source for source, _ in places[block * BLOCK :])
    for source, weight in enumerate(weights):
        assert abs(counts[source] - weight / sum(weights) * BLOCK) < 1 + 1e-9
        assert [rank for s, rank in places if s == source] == list(range(sum(s == source for s, _ in places)))


weight_changes = st.builds(Ramp, st.floats(0, 9), st.floats(0, 9), st.integers(1, 3 * BLOCK))


@given(st.lists(weight_changes, min_size=1, max_size=4).map(lambda w: [*w, 0.5]), st.integers(0, 9))
def test_the_sources_follow_weights_that_change(weights, seed):
    """Each place draws with the weights at it, so counts of 256 places are within 5 standard deviations."""
    choice = SourceChoice(weights, seed)
    places = [choice.of(place) for place in range(4 * BLOCK)]

    def at(place):
        now = [
            w if isinstance(w, float) else w.first + (w.final - w.first) * min(place / w.prompts, 1) for w in weights
        ]
        return [weight / sum(now) for weight in now]

    for start in range(0, 4 * BLOCK, 256):
        shares = [at(place) for place in range(start, start + 256)]
        for source in range(len(weights)):
            expected = sum(share[source] for share in shares)
            deviation = math.sqrt(sum(share[source] * (1 - share[source]) for share in shares))
            count = sum(s == source for s, _ in places[start : start + 256])
            assert abs(count - expected) <= 5 * deviation + 1
    for source in range(len(weights)):
        ranks = [rank for s, rank in places if s == source]
        assert ranks == list(range(len(ranks)))


@pytest.fixture
def folder(tmp_path):
    for name, n in (("a", 4), ("b", 6)):
        rows = [{"prompt": f"{name}{i}", "response": "x", "text": f"{name}{i} " * 4} for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_weighted_mixture_draws_rows_by_weight(folder):
    sources = [RowSource(f"{folder}/a.jsonl", weight=0.7), RowSource(f"{folder}/b.jsonl", weight=0.3, limit=2)]
    data = SupervisedData(sources)
    assert data.describe_source() == f"{folder}/a.jsonl (weight 0.7), {folder}/b.jsonl (weight 0.3)"
    dataset = data.load(make_tokenizer())
    assert dataset.describe() == "6 rows: a.jsonl 4 (weight 0.7), b.jsonl 2 (weight 0.3)"
    rows = dataset.order(0, True).rows(range(1000))
    assert abs(sum(row < 4 for _, row in rows) - 700) <= 20
    assert len(dataset.sample(rows[:50]).ids) == 50


@pytest.mark.parametrize("streaming", [False, True])
def test_the_weights_of_a_mixture_change_during_training(folder, streaming):
    """The first 1,000 prompts go from source a to source b, in memory and streamed, alone and combined."""
    changes = {"ramp_prompts": 1000}
    sources = [
        RowSource(f"{folder}/a.jsonl", weight=1, final_weight=0, **changes),
        RowSource(f"{folder}/b.jsonl", weight=0, final_weight=2, **changes),
    ]
    data = PromptData(sources, streaming=streaming, max_prompt_tokens=20)
    assert "a.jsonl (weight 1 to 0 over 1,000 prompts), " in data.describe_source()
    dataset = data.load(make_tokenizer())
    order = dataset.order(0, True)
    fractions = []
    for start in range(0, 1500, 100):
        rows = order.rows(range(start, start + 100))
        assert all(text.startswith(("a", "b")) for text in (x["prompt"] for x in dataset.sample(rows).metadata["row"]))
        fractions.append(order.metrics()["data/b.jsonl/fraction"])
    expected = [2 * t / (1 - t + 2 * t) for t in (i / 10 + 0.05 for i in range(10))]
    assert fractions[:10] == pytest.approx(expected, abs=0.15)
    assert fractions[10:] == [1.0] * 5
    if not streaming:
        texts = TextData(f"{folder}/a.jsonl", block_tokens=4).load(make_tokenizer())
        assert PromptsWithPretraining(dataset, texts, 1, 0).order(0, True).rows([3, 999]) == order.rows([3, 999])


def test_parts_are_taken_from_each_source_and_dropped_rows_do_not_count(folder):
    both = [RowSource(f"{folder}/a.jsonl", weight=1), RowSource(f"{folder}/b.jsonl", weight=1)]
    dataset = PromptData(both, split=Split(0, [1, 1])).load(make_tokenizer())
    assert dataset.mixture.sizes == (2, 3)
    with (folder / "a.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "long " * 20}) + "\n")
    assert PromptData(both, max_prompt_tokens=20).load(make_tokenizer()).mixture.sizes == (4, 6)
    (folder / "b.jsonl").write_text(json.dumps({"prompt": "long " * 20}) + "\n")
    with pytest.raises(DataError, match=r"no row is left of .*b\.jsonl"):
        PromptData(both, max_prompt_tokens=20).load(make_tokenizer())
