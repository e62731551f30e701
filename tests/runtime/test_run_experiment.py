from typing import Any

import pytest

from realign.config import ConfigError, build_experiment, compose
from realign.runtime import Local, Placement, Ray, RuntimeSpec

RUN = ["experiment=grpo_arithmetic", "models.actor.path=nowhere"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement_timeout_s": 0}, "placement_timeout_s=0: must be above 0 and finite"),
        ({"placement": None}, "placement must not be null; valid: one of colocated, separate"),
        ({"placement": "together"}, r"placement='together': unknown choice \(valid: colocated, separate\)"),
        ({"max_recoveries": -1}, "max_recoveries=-1: must be at least 0"),
    ],
)
def test_a_wrong_setting_of_ray_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ray(**fields)


@pytest.mark.parametrize(
    ("words", "runtime"),
    [
        ([], Local()),
        (["runtime=local", "runtime.rpc_timeout_minutes=5"], Local(5)),
        (["runtime=ray", "runtime.placement=separate"], Ray(placement=Placement.separate)),
        (["runtime=ray", "+runtime.placement.actor.devices=2"], Ray(placement={"actor": {"devices": 2}})),
    ],
)
def test_the_group_chooses_and_the_record_reads_back(words: list[str], runtime: RuntimeSpec) -> None:
    experiment = build_experiment(compose([*RUN, *words]))
    assert experiment.runtime == runtime
    config = compose(RUN)
    config.runtime = experiment.resolved["runtime"]
    assert build_experiment(config).runtime == runtime


@pytest.mark.parametrize("word", ["placement=separate", "address=auto", "placement_timeout_s=9", "max_recoveries=1"])
def test_a_local_run_has_no_settings_of_a_cluster(word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^unknown key 'runtime\.{key}': it is a setting of Ray, not of Local$"):
        build_experiment(compose([*RUN, f"runtime.{word}"]))
