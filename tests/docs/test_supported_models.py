"""Test the page of supported models: it is generated from its table, which has every family of transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("supported_models", DOCS / "supported_models.py")
supported_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supported_models)
FAMILIES = supported_models.read()


def test_every_family_of_transformers_is_in_the_table_once_in_order():
    assert list(FAMILIES) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_page_is_generated_from_the_table():
    assert supported_models.PAGE.read_text(encoding="utf-8") == supported_models.render(FAMILIES), (
        "run python docs/supported_models.py"
    )
