"""Test the declarations of each choice of `head`. Their computation is tested in test_transformers_model and
test_value_head."""

from __future__ import annotations

from typing import Any

import pytest

from realign.config import ConfigError
from realign.config.construct import build
from realign.engines import TransformersModel
from realign.models import Causal, HeadInit, Score, Value, ValueHead


@pytest.mark.parametrize(
    ("head", "word", "outputs", "is_scalar", "replaces"),
    [
        (Causal(), "causal", {"logprobs"}, False, False),
        (Causal(ValueHead()), "causal", {"logprobs", "values", "scores"}, False, False),
        (Score(), "score", {"values", "scores"}, True, False),
        (Score(HeadInit.normal), "score", {"values", "scores"}, True, True),
        (Value(HeadInit.zero), "value", {"values", "scores"}, True, True),
    ],
)
def test_heads_tell_what_a_model_computes(head, word, outputs, is_scalar, replaces) -> None:
    assert (str(head), head.outputs, head.is_scalar, head.replaces) == (word, outputs, is_scalar, replaces)
    assert TransformersModel("x", head=head).facts().outputs == outputs


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"init": "zero"}, "unknown key 'models.x.head.init': it is a setting of Score and Value, not of Causal"),
        (
            {"_target_": "realign.models.Value", "value_head": {}},
            "unknown key 'models.x.head.value_head': it is a setting of Causal, not of Value",
        ),
    ],
)
def test_a_head_has_its_own_settings_only(head: dict[str, Any], message: str) -> None:
    node = {"_target_": "realign.engines.TransformersModel", "path": "nowhere", "head": head}
    with pytest.raises(ConfigError) as error:
        build(node, TransformersModel, "models.x")
    assert str(error.value) == message
