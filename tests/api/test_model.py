"""Test generation settings, seeds, and the default behavior of interfaces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realign.api import GenerationConfig, MicroBatchSpec, Model, ModelInterface, SequenceSample, derive_seed
from realign.api.interface import METHODS, implements


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens=4: must be at most max_new_tokens=3"),
        (
            {"temperature": 0.0},
            r"temperature=0(\.0)?: must be at least 0.01 and finite",
        ),
        ({"stop_token_ids": [2, -1]}, r"stop_token_ids\[1\]=-1: must be at least 0"),
        ({"stop_strings": ["x", ""]}, "stop_strings: contains an empty string"),
    ],
)
def test_settings_are_checked_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.01, "top_p": 1.0, "n": 1, "max_new_tokens": 1, "min_new_tokens": 1, "fixed_length": True},
        {"stop_token_ids": [], "stop_strings": ["\n"], "temperature": 2.0},
        {"stop_token_ids": [0], "fixed_length": True},
    ],
)
def test_settings_at_the_edge_that_leave_the_distribution_alone(settings: dict[str, Any]) -> None:
    assert GenerationConfig(**settings).distortions() == []


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ({"greedy": True}, ["greedy=True"]),
        ({"top_k": 5}, ["top_k=5"]),
        ({"top_p": 0.9}, ["top_p=0.9"]),
        ({"min_new_tokens": 2}, ["min_new_tokens=2"]),
        ({"top_k": 1, "top_p": 0.5, "greedy": True}, ["greedy=True", "top_k=1", "top_p=0.5"]),
    ],
)
def test_trap_b4_settings_that_distort_the_distribution_are_listed(settings: dict[str, Any], listed: list[str]) -> None:
    assert GenerationConfig(**settings).distortions() == listed


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0,), 7520536977032167579),
        ((0, "actor", "generate", 0), 495410702917157397),
        ((1, "actor", "generate", 0), 7929838740149267790),
        ((0, "actor", "generate", 1), 6716300752921429137),
        ((2**63, "épreuve", -1), 5806234481491241196),
    ],
)
def test_seeds_never_drift(parts: tuple[Any, ...], seed: int) -> None:
    assert derive_seed(*parts) == seed


PARTS = st.lists(st.one_of(st.text(max_size=4), st.integers()), max_size=4)


@settings(deadline=None)
@given(st.integers(), PARTS, st.integers(), PARTS)
def test_another_use_has_another_seed(a: int, some: list[str | int], b: int, other: list[str | int]) -> None:
    assert 0 <= derive_seed(a, *some) < 2**63
    assert (derive_seed(a, *some) == derive_seed(b, *other)) == ((a, some) == (b, other))


@dataclass
class CountingEngine:
    """Records the version passed to each call of `start_step`."""

    versions: list[int] = field(default_factory=list)

    def start_step(self, version: int) -> None:
        self.versions.append(version)


def test_a_model_counts_its_steps_and_derives_seeds_from_them() -> None:
    engine = CountingEngine()
    model = Model("actor", engine, seed=5)  # type: ignore[arg-type]
    seeds = [model.call_seed("generate")]
    for _ in range(2):
        model.publish_weights()
        seeds.append(model.call_seed("generate"))
    assert engine.versions == [1, 2]
    assert seeds == [derive_seed(5, "actor", "generate", version) for version in range(3)]
    assert model.call_seed("minibatches") not in seeds
    assert model.engine is engine


class Scorer(ModelInterface):
    """Implements only `inference`."""

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        return data


def test_an_interface_implements_what_it_overrides() -> None:
    assert [method for method in METHODS if implements(Scorer, method)] == ["inference"]
    model, data = Model("m", None), SequenceSample(())
    assert Scorer().inference(model, data, MicroBatchSpec()) is data
    for method in ("generate", "train_step"):
        with pytest.raises(NotImplementedError, match=f"Scorer does not implement {method}"):
            getattr(Scorer(), method)(model, data, MicroBatchSpec())


def test_an_interface_without_state_takes_none() -> None:
    scorer = Scorer()
    assert scorer.state_dict() == {}
    scorer.load_state_dict({})
    scorer.close()
    with pytest.raises(ValueError, match=r"Scorer has no state, but the checkpoint contains \['kl'\]"):
        scorer.load_state_dict({"kl": 1})
