from __future__ import annotations

import pytest

from realign.api.sampler_spec import SamplerSpec, samples_externally
from realign.engines import InProcessSampling, TransformersModel
from realign.testing import BigramEngine
from tests.samplers import TableSampling


def test_which_model_specs_sample_outside_their_engine():
    assert not samples_externally(object())
    assert not samples_externally(TransformersModel("x", sampler=InProcessSampling(max_slots=3)))
    assert samples_externally(TransformersModel("x", sampler=TableSampling()))
    with pytest.raises(NotImplementedError, match="SamplerSpec does not implement open"):
        SamplerSpec().open("actor", BigramEngine(), None)
