"""Test the declarations of each choice of `trains`. Training is tested in test_lora, test_shared_model and
test_transformers_model."""

from __future__ import annotations

from typing import Any

import pytest

from realign.config import ConfigError
from realign.config.construct import build
from realign.config.experiment import as_node
from realign.engines import All, Lora, OptimizerSpec, TopLayers, Trained, TransformersModel

MODEL = {"_target_": "realign.engines.TransformersModel", "path": "nowhere", "optimizer": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("choice", "fields", "message"),
    [
        (TopLayers, {"layers": 0}, "layers=0: must be at least 1"),
        (Lora, {"rank": 0}, "rank=0: must be at least 1"),
        (Lora, {"alpha": 0}, "alpha=0: must be at least 1"),
        (Lora, {"dropout": 1.0}, "dropout=1.0: must be at least 0 and below 1"),
        (Lora, {"target_modules": []}, r"target_modules=\[\]: must be all-linear or names of layers"),
    ],
)
def test_a_setting_out_of_range_is_named(choice: type[Trained], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        choice(**fields)


@pytest.mark.parametrize(
    ("choice", "word", "keeps_start", "only_adds"),
    [(All(), "all", False, False), (TopLayers(2), "top_layers", True, False), (Lora(), "lora", True, True)],
)
def test_choices_tell_which_weights_stay_as_they_were_loaded(choice, word, keeps_start, only_adds) -> None:
    assert (str(choice), choice.keeps_start, choice.only_adds) == (word, keeps_start, only_adds)


@pytest.mark.parametrize("trains", [All(), TopLayers(2), Lora(rank=4, target_modules=["q_proj"], dropout=0.5)])
def test_the_record_of_a_run_reads_back(trains: Trained) -> None:
    model = TransformersModel("nowhere", optimizer=OptimizerSpec(lr=0.1), trains=trains)
    assert build(as_node(model), TransformersModel, "models.actor") == model


@pytest.mark.parametrize(
    ("trains", "message"),
    [
        ({"layers": 2}, "unknown key 'models.actor.trains.layers': it is a setting of TopLayers, not of All"),
        (
            {"_target_": "realign.engines.TopLayers", "layers": 2, "rank": 4},
            "unknown key 'models.actor.trains.rank': it is a setting of Lora, not of TopLayers",
        ),
        (
            {"_target_": "realign.engines.TopLayers"},
            "models.actor.trains.layers is missing: give it a value (int)",
        ),
        (
            {"_target_": "realign.engines.Trained"},
            "models.actor.trains._target_: Trained is a base class (All, Lora, TopLayers of realign.engines would fit)",
        ),
        (
            {"_target_": "realign.engines.Score"},
            "models.actor.trains._target_: Score is not a Trained (All, Lora, TopLayers of realign.engines would fit)",
        ),
    ],
)
def test_a_choice_has_its_own_settings_only(trains: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        build({**MODEL, "trains": trains}, TransformersModel, "models.actor")
    assert str(error.value).startswith(message)
