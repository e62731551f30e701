"""Compare `SequenceSample` with a naive model: one list of sequences per prompt and key."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import GenerationConfig, Lengths, MicroBatchSpec, SequenceSample, part_sizes
from realign.api.sample import IMAGE_KEYS, shard, with_response_index
from realign.api.sampler import requests_of
from realign.functional.normalization import Scope, normalize
from tests.images import image_prompts, image_sample

DTYPES = {
    "input_ids": torch.int64,
    "loss_mask": torch.bool,
    "short": torch.float32,
    "embedding": torch.float64,
    "rewards": torch.float32,
    "prompt_ids": torch.int32,
    "free": torch.int64,
}
Groups = list[list[list[Any]]]


@dataclass
class Naive:
    """Expected contents of a sample, as plain lists."""

    ids: list[str]
    data: dict[str, Groups]
    row: list[dict[str, int]]

    def sample(self) -> SequenceSample:
        packed = {k: [[torch.tensor(s, dtype=DTYPES[k]) for s in g] for g in v] for k, v in self.data.items()}
        packed["embedding"] = [[t.reshape(len(t), 2) for t in group] for group in packed["embedding"]]
        return SequenceSample.from_sequences(self.ids, packed, {"row": self.row})

    def at(self, prompts: list[int]) -> Naive:
        return Naive(
            [self.ids[p] for p in prompts],
            {k: [v[p] for p in prompts] for k, v in self.data.items()},
            [self.row[p] for p in prompts],
        )


def content(sample: SequenceSample, key: str) -> Groups:
    flat = [x.tolist() for x in sample.sequences(key)]
    bounds = sample.lengths[key].sequence_starts.tolist()
    return [flat[a:b] for a, b in pairwise(bounds)]


def assert_holds(sample: SequenceSample, naive: Naive) -> None:
    assert list(sample.ids) == naive.ids
    assert sample.keys == {*naive.data, "row"}
    for key, groups in naive.data.items():
        assert content(sample, key) == groups, key
        if any(map(len, groups)):
            assert sample[key].dtype == DTYPES[key], key
    assert list(sample.metadata["row"]) == naive.row


@st.composite
def naive_batches(draw: st.DrawFn, min_prompts: int = 0, max_length: int = 5) -> Naive:
    """Draw ragged groups of any number of sequences, including empty groups and sequences, with keys of all kinds of
    lengths."""
    n = draw(st.integers(min_prompts, 5))
    cut = [draw(st.lists(st.integers(0, max_length), max_size=4)) for _ in range(n)]
    free = [draw(st.lists(st.integers(0, 3), max_size=3)) for _ in range(n)]
    number = iter(range(10_000))
    data: dict[str, Groups] = {
        "input_ids": [[[next(number) for _ in range(length)] for length in group] for group in cut],
        "loss_mask": [[[next(number) % 3 == 0 for _ in range(length)] for length in group] for group in cut],
        "short": [[[float(next(number)) for _ in range(length - 1)] for length in group] for group in cut],
        "embedding": [[[[float(next(number)), -1.0] for _ in range(length)] for length in group] for group in cut],
        "rewards": [[[float(next(number))] for _ in group] for group in cut],
        "prompt_ids": [[[next(number) for _ in range(draw(st.integers(0, 3)))]] for _ in cut],
        "free": [[[next(number) for _ in range(length)] for length in group] for group in free],
    }
    return Naive([f"q{i}" for i in range(n)], data, [{"row": i} for i in range(n)])


@settings(deadline=None)
@given(naive_batches())
def test_a_sample_holds_what_it_was_built_from(naive: Naive) -> None:
    sample = naive.sample()
    assert_holds(sample, naive)
    assert len(sample) == len(naive.ids)
    for key, groups in naive.data.items():
        sizes = [len(sequence) for group in groups for sequence in group]
        assert sample.cu_seqlens(key).tolist() == [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        assert sample.cu_seqlens(key).dtype == torch.int32
        assert sample.group_index(key).tolist() == [p for p, group in enumerate(groups) for _ in group]
        assert sample[key] is sample.get(key)
    assert sample.n_sequences == sum(map(len, naive.data["input_ids"]))


@settings(deadline=None)
@given(naive_batches(), st.data())
def test_take_gives_any_prompts_in_any_order(naive: Naive, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(naive.ids))))[: data.draw(st.integers(0, len(naive.ids)))]
    assert_holds(naive.sample().take(order), naive.at(order))
    assert_holds(naive.sample().take(np.array(order, dtype=np.int32)), naive.at(order))


@settings(deadline=None)
@given(naive_batches(min_prompts=1), st.data())
def test_gather_joins_what_was_cut(naive: Naive, data: st.DataObject) -> None:
    sample = naive.sample()
    assert_holds(SequenceSample.gather(sample.unpack()), naive)
    for i, part in enumerate(sample.unpack()):
        assert_holds(part, naive.at([i]))
    chunks = sample.chunks(data.draw(st.integers(1, len(naive.ids))))
    assert_holds(SequenceSample.gather(chunks), naive)
    order = data.draw(st.permutations(range(len(chunks))))
    ids = [i for c in order for i in chunks[c].ids]
    assert_holds(SequenceSample.gather([chunks[c] for c in order]), naive.at([naive.ids.index(i) for i in ids]))


@settings(deadline=None)
@given(naive_batches(min_prompts=1), st.data())
def test_trap_d11_chunks_use_every_prompt_exactly_once(naive: Naive, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(naive.ids)))
    chunks = naive.sample().chunks(n)
    assert [i for chunk in chunks for i in chunk.ids] == naive.ids
    assert len(chunks) == n
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1


@pytest.mark.parametrize("n", [0, 3])
def test_trap_d11_fewer_prompts_than_parts_is_an_error(n: int) -> None:
    with pytest.raises(ValueError, match=f"cannot split 2 prompts into {n} parts"):
        example().chunks(n)


@settings(deadline=None)
@given(naive_batches(), st.integers(5, 40), st.integers(1, 4))
def test_microbatches_hold_their_sequences_and_restore_puts_them_back(naive: Naive, limit: int, n: int) -> None:
    sample = naive.sample().select(["input_ids", "loss_mask", "short", "embedding", "rewards", "prompt_ids", "row"])
    batches = sample.split(MicroBatchSpec(limit, n))
    flat = {k: [s for group in naive.data[k] for s in group] for k in sample.data}
    owner = sample.group_index().tolist()
    for plan, part in zip(batches.plan, batches, strict=True):
        prompts = sorted({owner[s] for s in plan})
        assert list(part.ids) == [naive.ids[p] for p in prompts]
        assert part.metadata["row"] == tuple(naive.row[p] for p in prompts)
        assert content(part, "prompt_ids") == [naive.data["prompt_ids"][p] for p in prompts]
        for key in ("input_ids", "loss_mask", "short", "embedding", "rewards"):
            assert [x.tolist() for x in part.sequences(key)] == [flat[key][s] for s in plan]
            assert part.group_index(key).tolist() == [prompts.index(owner[s]) for s in plan]
    results = [part.select(["short", "embedding", "rewards"]) for part in batches]
    restored = batches.restore(results)
    assert restored.ids == sample.ids
    for key in restored.data:
        assert content(restored, key) == naive.data[key]
        assert restored.lengths[key] == sample.lengths[key]


@settings(deadline=None)
@given(naive_batches(), st.data())
def test_take_sequences_keeps_only_these(naive: Naive, data: st.DataObject) -> None:
    sample = naive.sample().select(["input_ids", "short", "rewards", "prompt_ids", "row"])
    n = sample.n_sequences
    chosen = sorted(data.draw(st.lists(st.integers(0, n - 1), unique=True) if n else st.just([])))
    taken = sample.take_sequences(chosen)
    owner = sample.group_index().tolist()
    assert list(taken.ids) == [naive.ids[p] for p in sorted({owner[s] for s in chosen})]
    for key in ("input_ids", "short", "rewards"):
        flat = [s for group in naive.data[key] for s in group]
        assert [x.tolist() for x in taken.sequences(key)] == [flat[s] for s in chosen]


@settings(deadline=None)
@given(naive_batches())
def test_pickling_keeps_everything(naive: Naive) -> None:
    sample = naive.sample()
    for made in (pickle.loads(pickle.dumps(sample)), copy.deepcopy(sample)):
        assert_holds(made, naive)
        assert made.lengths["input_ids"] is made.lengths["loss_mask"]
        with pytest.raises(TypeError):
            made.data["x"] = torch.zeros(1)


def example() -> SequenceSample:
    """Return two prompts: "a" with sequences of 2 and 1 tokens, and "b" with one sequence of 3 tokens."""
    return SequenceSample.from_sequences(
        ["a", "b"], {"input_ids": [[[1, 2], [3]], [[4, 5, 6]]]}, {"row": [{"n": 1}, {"n": 2}]}
    )


def test_keys_are_added_by_token_by_sequence_and_by_lengths_of_their_own() -> None:
    sample = example().with_tokens(x=torch.arange(6), y=[[[1.0, 2.0], [3.0]], [[4.0, 5.0, 6.0]]])
    sample = sample.with_sequences(score=torch.tensor([0.5, 1.0, 1.5]), name=[[[7], [8]], [[9]]])
    sample = sample.with_data({"prompt_ids": [[[1, 1]], [[2]]]}, lengths=Lengths.of([[2], [1]]))
    sample = sample.with_data({"other": torch.zeros(3, 4)}, like="prompt_ids").with_metadata(tag=["s", "t"])
    assert content(sample, "x") == [[[0, 1], [2]], [[3, 4, 5]]]
    assert content(sample, "y") == [[[1.0, 2.0], [3.0]], [[4.0, 5.0, 6.0]]]
    assert content(sample, "score") == [[[0.5], [1.0]], [[1.5]]]
    assert content(sample, "name") == [[[7], [8]], [[9]]]
    assert content(sample, "prompt_ids") == [[[1, 1]], [[2]]]
    assert sample["other"].shape == (3, 4)
    assert sample.metadata["tag"] == ("s", "t")
    assert sample.with_tokens(x=torch.ones(6))["x"].tolist() == [1.0] * 6
    assert "x" in sample
    assert "row" in sample
    assert sample.get("absent") is None
    assert example().keys == {"input_ids", "row"}


def test_trap_a8_an_optional_key_on_some_samples_only() -> None:
    first, second = example().unpack()
    with pytest.raises(ValueError, match="key 'versions' is missing for ids 'b', but present for others"):
        SequenceSample.gather([first.with_tokens(versions=torch.zeros(3)), second])
    with pytest.raises(ValueError, match="key 'versions' is missing for ids 'a', but present for others"):
        SequenceSample.gather([first, second.with_tokens(versions=torch.zeros(3))])
    with pytest.raises(ValueError, match="key 'note' is missing for ids 'b'"):
        SequenceSample.gather([first.with_metadata(note=["x"]), second])
    with pytest.raises(ValueError, match="key 'note' is metadata for some of the ids 'a', 'b' and a tensor for others"):
        SequenceSample.gather([first.with_metadata(note=["x"]), second.with_tokens(note=torch.zeros(3))])


def test_trap_a14_empty_sequences_and_prompts_without_sequences() -> None:
    sample = SequenceSample.from_sequences(["a", "b", "c"], {"input_ids": [[[], [1]], [], [[]]]})
    sample = sample.with_sequences(rewards=torch.tensor([1.0, 2.0, 3.0]))
    assert sample.cu_seqlens().tolist() == [0, 0, 1, 1]
    assert sample.group_index().tolist() == [0, 0, 2]
    batches = sample.split(MicroBatchSpec(n_microbatches=5))
    assert [mb.ids for mb in batches] == [("a",), ("c",)]
    restored = batches.restore([mb.select(["rewards"]) for mb in batches])
    assert content(restored, "rewards") == [[[1.0], [2.0]], [], [[3.0]]]
    nothing = sample.take([])
    assert nothing.ids == ()
    assert nothing["input_ids"].tolist() == []
    assert nothing.sequences() == ()
    assert nothing.cu_seqlens().tolist() == [0]


@settings(deadline=None)
@given(naive_batches(min_prompts=1), st.data())
def test_trap_e6_the_order_of_prompts_does_not_matter(naive: Naive, data: st.DataObject) -> None:
    """Prompts with the same text and different ids are separate groups at any position."""
    naive.data["prompt_ids"] = [[[1, 2]] for _ in naive.ids]
    sample = naive.sample()
    order = data.draw(st.permutations(range(len(naive.ids))))

    def advantages(batch: SequenceSample) -> dict[str, Groups]:
        rewards_S = batch["rewards"]
        mask_S = torch.ones_like(rewards_S, dtype=torch.bool)
        normal_S = normalize(rewards_S, batch.group_index(), mask_S, mean=Scope.group, std=Scope.group)
        scored = batch.with_sequences(adv=normal_S)
        return dict(zip(batch.ids, content(scored, "adv"), strict=True))

    assert advantages(sample.take(order)) == advantages(sample)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda s: s.with_tokens(x=torch.zeros(4)),
            "key 'x' has 4 rows, but its lengths sum to 6. Id 'b' should end at row 6",
        ),
        (
            lambda s: s.with_tokens(x=torch.zeros(3)),
            "key 'x' has 3 rows, but its lengths sum to 6. Id 'b' should end at row 6",
        ),
        (
            lambda s: s.with_tokens(x=torch.zeros(2)),
            "key 'x' has 2 rows, but its lengths sum to 6. Id 'a' should end at row 3",
        ),
        (
            lambda s: s.with_tokens(x=torch.zeros(7)),
            "key 'x' has 7 rows, but its lengths sum to 6. Id 'b' should end at row 6",
        ),
        (lambda s: s.with_tokens(x=torch.tensor(1.0)), "key 'x' must be a packed tensor, found a tensor without dim"),
        (lambda s: s.with_tokens(x=[[[1, 2], [3]], [[4, 5]]]), r"key 'x', id 'b': lengths \[2\], expected \[3\]"),
        (lambda s: s.with_tokens(x=[[[1, 2, 3]], [[4, 5, 6]]]), r"'x', id 'a': lengths \[3\], expected \[2, 1\]"),
        (lambda s: s.with_tokens(x=[[[1, 2], [3]]]), "key 'x' has sequences of 1 prompts, expected 2"),
        (lambda s: s.with_sequences(x=torch.zeros(2)), "key 'x' has 2 rows, but its lengths sum to 3"),
        (lambda s: s.with_sequences(x=[0.5, 1.0]), "key 'x', id 'a': found float, expected a list of sequences"),
        (lambda s: s.with_sequences(x=[[0.5, 1.0], [1.5]]), "key 'x', id 'a': found float, expected tensors or lists"),
        (lambda s: s.with_sequences(x=[[["y"], [0]], [[1]]]), "key 'x', id 'a': found list, expected tensors or lists"),
        (lambda s: s.with_tokens(row=torch.zeros(6)), "key 'row' is in both data and metadata"),
        (lambda s: s.with_metadata(input_ids=[0, 1]), "key 'input_ids' is in both data and metadata"),
        (lambda s: s.with_metadata(tag=[1]), "metadata 'tag' has 1 entries for 2 ids"),
        (lambda s: s.with_data({"x": torch.zeros(6)}), "either `like` .* or `lengths`"),
        (
            lambda s: s.with_data({"x": torch.zeros(6)}, like="inputids"),
            "no packed key 'inputids'; did you mean 'input_ids'",
        ),
        (lambda s: s.with_data({"x": torch.zeros(1)}, lengths=Lengths.of([[1]])), "lengths of 1 prompts, expected 2"),
        (
            lambda s: s.with_data({"x": torch.zeros(6)}, lengths=[[2, 1], [3]]),
            "lengths of key 'x' must be Lengths, found list",
        ),
        (lambda s: s["input_id"], r"no packed key 'input_id'; did you mean 'input_ids'\? \(keys: input_ids\)"),
        (lambda s: s["row"], "key 'row' is metadata, .* Read it from `.metadata`"),
        (lambda s: s.select(["input_ids", "rows"]), "no packed key 'rows'"),
        (lambda s: s.rename({"inputs": "x"}), "no packed key 'inputs'"),
        (lambda s: s.rename({"input_ids": "row"}), "gives two keys the same name"),
        (lambda s: s.merge(s.take([1, 0])), "same ids in the same order. Found 'a', 'b' and 'b', 'a'"),
        (lambda s: s.merge(s.select(["row"])), "merge: key 'row' is in both samples"),
        (lambda s: s.take([0, 2]), "take: prompts must be indices from 0 to 1, found 0 to 2"),
        (lambda s: s.take([-1]), "take: prompts must be indices from 0 to 1, found -1 to -1"),
        (lambda s: s.take([True, False]), "take: prompts must be a list of integers, found bool"),
        (lambda s: s.take([1, 1]), "Duplicate id 'b' .2 occurrences.. Ids must be unique"),
        (lambda s: s.take_sequences([1, 0]), r"indices must be strictly ascending, found \[1, 0\]"),
        (lambda s: s.take_sequences([3]), "take_sequences: sequences must be indices from 0 to 2, found 3 to 3"),
        (lambda s: SequenceSample.gather([s, s]), "Duplicate id 'a' .2 occurrences."),
        (lambda s: SequenceSample.gather([]), "gather needs at least one sample"),
        (lambda s: SequenceSample(s.ids, dict(s.data)), r"keys with data \['input_ids'\] and keys with lengths \[\]"),
        (
            lambda s: SequenceSample(s.ids, {"x": [1]}, {"x": Lengths.of([[1], []])}),
            "must be a packed tensor, found li",
        ),
    ],
)
def test_a_bad_sample_is_refused_by_name(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(example())


def test_a_cut_group_keeps_its_prompt_and_refuses_what_cannot_be_cut() -> None:
    sample = SequenceSample.from_sequences(
        ["a"], {"input_ids": [[[1, 2], [3, 4], [5]]], "prompt_ids": [[[9]]], "pairs": [[[1], [2]]]}
    )
    with pytest.raises(ValueError, match="key 'pairs', id 'a': 2 sequences cannot be split like the 3 of 'input_ids'"):
        sample.split(MicroBatchSpec(4))
    batches = sample.select(["input_ids", "prompt_ids"]).split(MicroBatchSpec(4))
    assert [mb["input_ids"].tolist() for mb in batches] == [[1, 2, 5], [3, 4]]
    assert [mb["prompt_ids"].tolist() for mb in batches] == [[9], [9]]
    assert [mb.ids for mb in batches] == [("a",), ("a",)]


def test_nothing_of_a_sample_can_be_replaced() -> None:
    sample = example()
    with pytest.raises(FrozenInstanceError):
        sample.ids = ("c",)  # type: ignore[misc]
    for mapping in (sample.data, sample.lengths, sample.metadata):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["x"] = None  # type: ignore[index]
    source = {"x": torch.zeros(2)}
    built = SequenceSample(["a"], source, {"x": Lengths.of([[2]])}, {"row": [1]})  # type: ignore[arg-type, dict-item]
    source["y"] = torch.zeros(1)
    assert built.keys == {"x", "row"}
    assert built.ids == ("a",)
    assert built.metadata["row"] == (1,)


def test_minibatches_deal_every_prompt_out_once_in_an_order_that_the_generator_draws():
    data = SequenceSample.from_sequences(range(7), {"input_ids": [[[i]] for i in range(7)]})
    parts = data.minibatches(3, np.random.default_rng(0))
    assert sorted(i for part in parts for i in part.ids) == list(range(7))
    assert {len(part) for part in parts} == {2, 3}
    assert part_sizes(7, 3) == "2 or 3"
    assert part_sizes(6, 3) == "2"
    again = data.minibatches(3, np.random.default_rng(0))
    assert [part.ids for part in again] == [part.ids for part in parts]
    assert [part.ids for part in data.minibatches(3, np.random.default_rng(1))] != [part.ids for part in parts]


SIZES = [[(2, 3)], [], [(3, 3), (1, 2)], [(2, 2)]]
RESPONSES = [[4, 2, 3], [5], [1, 6], [3, 3]]


@pytest.fixture
def data():
    return image_sample(SIZES, RESPONSES)


def images_of(sample):
    """Return patches and grids of each prompt by id, as lists."""
    parts = zip(sample.ids, *(sample.sequences(key) for key in IMAGE_KEYS), strict=True)
    return {i: (pixels.tolist(), grids.tolist()) for i, pixels, grids in parts}


def assert_same_images(part, whole):
    images, wanted = images_of(part), images_of(whole)
    assert images == {i: wanted[i] for i in part.ids}


def equal(a, b):
    return a.ids == b.ids and a.lengths == b.lengths and all(torch.equal(a[key], b[key]) for key in a.keys)


@pytest.mark.parametrize("budget", [32, 40, 100])
def test_micro_batches_with_a_part_of_a_group_have_the_images_of_its_prompt(data, budget):
    batches = data.split(MicroBatchSpec(max_tokens_per_microbatch=budget))
    for part in batches:
        assert_same_images(part, data)
    assert len(batches) > 1 or budget == 100


@pytest.mark.parametrize("ranks", [2, 6])
def test_shards_for_ranks_have_the_images_of_their_prompts(data, ranks):
    parts = shard(data, ranks, "input_ids")
    for part in parts:
        assert_same_images(part, data)
    assert equal(parts.restore(list(parts)), data)


def test_requests_with_images_are_rejected():
    with pytest.raises(ValueError, match="the prompts have images"):
        requests_of(image_prompts(SIZES), GenerationConfig(), 0)
    assert len(requests_of(image_prompts([[], []]), GenerationConfig(n=2), 0)) == 4


NESTED = st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=12)


def batch(nested: list[list[int]]) -> SequenceSample:
    """Return prompts p0, p1, ... with distinct tokens, one number per sequence and one per prompt."""
    n_tokens = sum(map(sum, nested))
    tokens = iter(torch.arange(n_tokens).split([n for group in nested for n in group] or [0]))
    data = {"input_ids": [[next(tokens) for _ in group] for group in nested]}
    ids = [f"p{i}" for i in range(len(nested))]
    whole = SequenceSample.from_sequences(ids, data, {"row": [{"at": i} for i in range(len(nested))]})
    return whole.with_sequences(score=torch.arange(float(whole.n_sequences)))


def same(a: SequenceSample, b: SequenceSample) -> bool:
    return (
        a.ids == b.ids
        and a.data.keys() == b.data.keys()
        and all(a.lengths[k] == b.lengths[k] and torch.equal(a[k], b[k]) for k in a.data)
        and a.metadata == b.metadata
    )


@settings(deadline=None)
@given(NESTED, st.integers(1, 6))
def test_every_prompt_stands_whole_in_one_part_and_comes_back(nested: list[list[int]], n: int) -> None:
    whole = batch(nested)
    parts = shard(whole, n, "input_ids")
    assert len(parts) == n
    assert sorted(i for part in parts for i in part.ids) == sorted(whole.ids)
    assert all(same(part, whole.take([whole.ids.index(i) for i in part.ids])) for part in parts)
    assert same(parts.restore(list(parts)), whole)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="n=0: a batch needs at least 1 rank"):
        shard(batch([[1]]), 0, "input_ids")
    with pytest.raises(ValueError, match=r"no packed key 'prompt_ids' to shard by \(keys: input_ids, score\)"):
        shard(batch([[1]]), 2, "prompt_ids")


def numbered() -> SequenceSample:
    sample = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1], [2, 3], [4]], [[5]]]})
    return with_response_index(sample).with_sequences(episode=torch.tensor([0, 1, 1, 1]))


def test_tokens_keep_what_says_whose_they_are_through_every_selection():
    sample = numbered().with_tokens(other=torch.zeros(5))
    assert sample["response_index"].tolist() == [0, 1, 2, 0]
    left = sample.take_sequences([0, 2, 3]).select(["input_ids"])
    assert left.keys == {"input_ids", "response_index", "episode"}
    assert left["response_index"].tolist() == [0, 2, 0]
    assert with_response_index(left)["response_index"].tolist() == [0, 2, 0]  # never numbered again
    assert sample.select(["other"]).keys == {"other"}
    assert with_response_index(sample.take([]).select(["input_ids"]))["response_index"].tolist() == []
