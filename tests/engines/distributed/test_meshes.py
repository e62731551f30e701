"""Test that results do not depend on the mesh: each dimension, and combinations of them, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realign.engines.distributed.sharding import Sharding
from tests.engines.distributed import scenarios
from tests.engines.distributed.comparisons import Alone, assert_same
from tests.engines.distributed.run_ranks import run_ranks
from tests.families import family_model
from tests.grids import in_turn
from tests.tiny import save_tiny, tiny_tokenizer

PAIRS = {"replicate": Sharding(replicate=2), "context": Sharding(context=2), "pipeline": Sharding(pipeline=2)}
"""A dimension each, on two ranks."""
FOURS = {
    "replicate": Sharding(replicate=2),
    "context": Sharding(context=2),
    "context alone": Sharding(context=4, reduce_once=True),
    "replicate, context": Sharding(replicate=2, context=2),
}
"""Meshes of four ranks; what they leave are ranks of `shard`."""
DENSE = {
    "replicate, tensor": Sharding(replicate=2, tensor=2),
    "context, tensor": Sharding(context=2, tensor=2),
    "pipeline, tensor": Sharding(pipeline=2, tensor=2),
}
"""Further meshes, for models that tensor parallelism can split."""
PIPELINES = {
    "pipeline": Sharding(pipeline=2),
    "pipeline, context": Sharding(pipeline=2, context=2),
    "pipeline, replicate": Sharding(pipeline=2, replicate=2, reduce_once=True),
}
IN_STAGES = tuple(name for name in scenarios.ON_MESHES if name not in ("replayed", "trained layers"))
"""What a pipeline supports: it can neither replay choices of experts nor leave a stage without weights to train."""
OF_EXPERTS = ("balanced experts", "balanced experts, recomputed", "routing biases", "replayed")
OF_DENSE = ("gradient", "grpo", "ppo", "dpo", "value head", "checkpointing")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    scenarios.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(lambda name: scenarios.ON_MESHES[name](folder))


def check(results: dict[str, Any], alone: Alone) -> None:
    """Compare gradients with a relative tolerance of 1e-5, and all else as `assert_same` does."""
    for name, result in results.items():
        if name != "gradient":
            assert_same(result, alone[name], name)
            continue
        assert result.keys() == alone[name].keys()
        for key, expected in alone[name].items():
            error = (result[key] - expected).norm() / expected.norm()
            assert error < 1e-5, (key, float(error))


@pytest.mark.parametrize("dimension", PAIRS)
def test_a_dimension_gives_the_gradients_and_weights_of_one_process(folder: Path, alone: Alone, dimension: str) -> None:
    for results in run_ranks(2, scenarios.on_mesh, folder, PAIRS[dimension], ("gradient", "gspo")):
        check(results, alone)


def test_models_whose_sequences_cannot_be_divided_are_refused_on_every_rank(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    save_tiny(tmp_path / "dynamic rope", family="llama", rope_parameters=rope)
    save_tiny(tmp_path / "three heads", family="llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    family_model("falcon_h1").save_pretrained(tmp_path / "recurrent")
    tiny_tokenizer().save_pretrained(tmp_path / "recurrent")
    key = "models.actor.sharding.context=2"
    expected = {
        "dynamic rope": f"{key}: model family 'llama' changes its rotary positions for the longest sequence. Remove "
        "this key.",
        "recurrent": f"{key}: the model has recurrent layers, which need whole sequences. Remove this key.",
        "three heads": f"{key}: must divide the number of attention heads (3)",
    }
    assert run_ranks(2, scenarios.refused_contexts, tmp_path) == [expected, expected]


@pytest.mark.parametrize(
    ("mesh", "names"),
    in_turn(tuple(FOURS), tuple(scenarios.ON_MESHES)),
)
def test_every_algorithm_and_network_trains_on_any_mesh_as_in_one_process(
    folder: Path, alone: Alone, mesh: str, names: tuple[str, ...]
) -> None:
    for results in run_ranks(4, scenarios.on_mesh, folder, FOURS[mesh], names, seconds=600):
        check(results, alone)


@pytest.mark.parametrize(("mesh", "names"), in_turn(tuple(DENSE), OF_DENSE))
def test_tensor_parallelism_combines_with_the_other_dimensions(
    folder: Path, alone: Alone, mesh: str, names: tuple[str, ...]
) -> None:
    for results in run_ranks(4, scenarios.on_mesh, folder, DENSE[mesh], names, seconds=600):
        check(results, alone)


@pytest.mark.parametrize(("mesh", "names"), in_turn(tuple(PIPELINES), IN_STAGES))
def test_every_algorithm_and_network_trains_in_stages_as_in_one_process(
    folder: Path, alone: Alone, mesh: str, names: tuple[str, ...]
) -> None:
    for results in run_ranks(4, scenarios.on_mesh, folder, PIPELINES[mesh], names, seconds=600):
        check(results, alone)


@pytest.mark.slow
def test_stages_between_the_first_and_the_last_train_as_in_one_process(folder: Path, alone: Alone) -> None:
    """The first and the last stage have the tied embeddings of `sft`."""
    names = ("gradient", "sft", "gspo", "calls", "balanced experts, recomputed", "lora")
    for results in run_ranks(3, scenarios.on_mesh, folder, Sharding(pipeline=3), names, seconds=600):
        check(results, alone)


@pytest.mark.slow
def test_ranks_that_divide_tokens_send_them_to_the_ranks_of_their_experts(folder: Path, alone: Alone) -> None:
    for results in run_ranks(4, scenarios.on_mesh, folder, Sharding(context=2, expert=2), OF_EXPERTS, seconds=600):
        check(results, alone)


@pytest.mark.slow
def test_the_ranks_of_a_stage_divide_its_experts(folder: Path, alone: Alone) -> None:
    names = [name for name in OF_EXPERTS if name != "replayed"]
    for results in run_ranks(4, scenarios.on_mesh, folder, Sharding(pipeline=2, expert=2), names, seconds=600):
        check(results, alone)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Sharding(replicate=2, context=2), Sharding(pipeline=2, tensor=2)], ids=str)
def test_a_checkpoint_of_any_mesh_resumes_on_any_other(folder: Path, tmp_path: Path, mesh: Sharding) -> None:
    """Llama has a plan for tensor parallelism, so every dimension takes part."""
    one, four = tmp_path / "mesh of 1", tmp_path / "mesh of 4"
    expected = scenarios.kept(folder, one, {}, "llama")["end"]
    for results in run_ranks(4, scenarios.kept, folder, four, {"one": one}, "llama", mesh):
        assert results["problems"] == []
        for start in ("end", "own", "one"):
            assert_same(results[start], expected, start)
    others = (Sharding(context=2, tensor=2), Sharding(pipeline=2))
    for other in others:
        for results in run_ranks(4, scenarios.resumed_on, other, folder, four):
            assert_same(results, expected)
    assert_same(scenarios.going_on(scenarios.restored(folder, four, "llama")), expected)
