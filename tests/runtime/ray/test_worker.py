from __future__ import annotations

import pickle
import warnings

import torch

from realign.errors import DataError
from realign.runtime.ray import workers as worker


def raises(error):
    raise error


def test_an_error_of_realign_is_sent_as_it_is_and_a_bug_as_its_traceback():
    ours = worker._answer(lambda: raises(DataError("row 3 has no prompt"))).failure
    sent = pickle.loads(ours.error)
    assert (type(sent), str(sent)) == (DataError, "row 3 has no prompt")
    bug = worker._answer(lambda: torch.ones(2) @ torch.ones(3)).failure
    assert (bug.kind, bug.error) == ("RuntimeError", None)
    assert "torch.ones(2) @ torch.ones(3)" in bug.traceback


def test_user_warnings_are_sent_with_the_reply():
    def action():
        warnings.warn("look", stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return torch.ones(2).sum()

    reply = worker._answer(action)
    assert reply.failure is None
    assert reply.seconds > 0
    assert [(w.text, w.category) for w in reply.warned] == [("look", UserWarning)]
