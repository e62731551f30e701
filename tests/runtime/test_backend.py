from typing import Any

import pytest

from realign.runtime import RuntimeSpec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement_timeout_s": 0}, "placement_timeout_s=0: must be above 0 and finite"),
        ({"rpc_timeout_minutes": -1}, "rpc_timeout_minutes=-1: must be above 0 and finite"),
        ({"rpc_timeout_minutes": float("inf")}, "rpc_timeout_minutes=inf: must be above 0 and finite"),
        ({"placement": None}, "placement must be colocated, separate or a mapping of roles, found None"),
        ({"max_recoveries": -1}, "max_recoveries=-1: must be at least 0"),
        ({"placement": {"actor": {"devices": 2}}}, "placement has no effect with kind=local; choose runtime=ray"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RuntimeSpec(**fields)
