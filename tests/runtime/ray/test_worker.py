from __future__ import annotations

import pickle
import warnings

import torch

from realign.api import MicroBatchSpec
from realign.runtime.ray import worker


def test_an_error_on_purpose_is_sent_as_it_is_and_a_bug_as_its_traceback():
    ours = worker._answer(lambda: MicroBatchSpec(n_microbatches=0)).failure
    assert str(pickle.loads(ours.error)) == "n_microbatches=0: must be at least 1"
    bug = worker._answer(lambda: torch.ones(2) @ torch.ones(3)).failure
    assert (bug.kind, bug.error) == ("RuntimeError", None)
    assert "torch.ones(2) @ torch.ones(3)" in bug.traceback


def test_warnings_for_people_are_sent_along():
    def action():
        warnings.warn("look", stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return torch.ones(2).sum()

    reply = worker._answer(action)
    assert reply.failure is None
    assert reply.seconds > 0
    assert [(w.text, w.category) for w in reply.warned] == [("look", UserWarning)]
