"""Test that errors of transformers become one line, with a class that the command line reports."""

from __future__ import annotations

import pytest

from realign.engines.files.model_folder import readable
from realign.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("\nfirst\nsecond"), "models.x: first"),
        (OSError("offline"), "models.x: OSError: offline"),
        (KeyError("x"), "models.x: KeyError: 'x'"),
        (
            ValueError("pass trust_remote_code"),
            "models.x: pass trust_remote_code Set trust_remote_code=true of this role",
        ),
    ],
)
def test_an_error_of_transformers_becomes_one_line_with_the_original_as_cause(error, message):
    with pytest.raises(DataError) as caught, readable("models.x"):
        raise error
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_an_error_of_realign_keeps_its_class_and_gets_the_key():
    with pytest.raises(ConfigError, match=r"^models\.x\.trains: layers=4: too many$"), readable("models.x.trains"):
        raise ConfigError("layers=4: too many")


def test_other_exceptions_of_a_library_are_named_by_their_class():
    with pytest.raises(DataError, match=r"^models\.x: ZeroDivisionError: division by zero$"), readable("models.x"):
        raise ZeroDivisionError("division by zero")
