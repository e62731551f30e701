from typing import Any

import pytest

from realign.runtime import RuntimeSpec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement_timeout_s": 0}, "placement_timeout_s must be above 0, and finite, found 0"),
        ({"rpc_timeout_minutes": -1}, "rpc_timeout_minutes must be above 0, and finite, found -1"),
        ({"rpc_timeout_minutes": float("inf")}, "rpc_timeout_minutes must be above 0, and finite, found inf"),
        ({"placement": None}, "placement must be colocated, separate or a mapping of roles, found None"),
        ({"max_recoveries": -1}, "max_recoveries must be at least 0, found -1"),
        ({"placement": {"actor": {"devices": 2}}}, "placement has no effect with kind=local; choose runtime=ray"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuntimeSpec(**fields)
