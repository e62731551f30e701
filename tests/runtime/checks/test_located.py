from __future__ import annotations

import pytest

from realign.errors import DataError
from realign.runtime.checks.located import located


def test_a_user_error_starts_with_the_key_and_keeps_its_class():
    with pytest.raises(DataError, match=r"^data: no such file$"), located("data"):
        raise DataError("no such file")


def test_any_other_error_keeps_its_message_and_gets_the_key_as_a_note():
    with pytest.raises(ValueError, match=r"^bad shape") as raised, located("interfaces.actor"):
        raise ValueError("bad shape")
    assert raised.value.__notes__ == ["while calling interfaces.actor"]
