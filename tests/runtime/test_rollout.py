import pytest

from realign.config import ConfigError, build_experiment, compose
from realign.runtime import RolloutSpec

RUN = ["experiment=grpo_arithmetic", "models.actor.path=nowhere"]


def test_staleness_is_not_negative() -> None:
    with pytest.raises(ValueError, match="max_staleness=-1: must be at least 0"):
        RolloutSpec(max_staleness=-1)


@pytest.mark.parametrize("word", ["max_staleness=2", "on_update=keep"])
def test_what_belongs_to_sampling_ahead_is_refused_without_it(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.{word} has no effect with mode=sync; choose rollout=async"):
        build_experiment(compose([*RUN, f"rollout.{word}"]))
    assert build_experiment(compose([*RUN, "rollout.max_staleness=1"])).rollout.max_staleness == 1  # the default


def test_the_group_sets_the_mode_and_the_record_reads_back() -> None:
    experiment = build_experiment(compose([*RUN, "rollout=async", "rollout.max_staleness=3"]))
    assert (experiment.rollout.mode.value, experiment.rollout.max_staleness) == ("async", 3)
    assert experiment.resolved["rollout"]["mode"] == "async"
    assert build_experiment(compose(RUN)).rollout.mode.value == "sync"
