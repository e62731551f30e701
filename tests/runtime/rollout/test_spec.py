import pytest

from realign.config import ConfigError, build_experiment, compose
from realign.config.experiment import as_node
from realign.runtime import Async, OnUpdate
from realign.runtime.rollout.spec import RolloutSpec, Sync

RUN = ["experiment=grpo_arithmetic", "models.actor.path=nowhere"]


@pytest.mark.parametrize("word", ["max_staleness=1", "on_update=keep"])
def test_a_synchronous_rollout_has_no_settings(word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^unknown key 'rollout\.{key}': it is a setting of Async, not of Sync$"):
        build_experiment(compose([*RUN, f"rollout.{word}"]))


@pytest.mark.parametrize(
    ("words", "rollout"),
    [
        ([], Sync()),
        (["rollout=sync"], Sync()),
        (["rollout=async"], Async(1, OnUpdate.recompute)),
        (["rollout=async", "rollout.max_staleness=3", "rollout.on_update=keep"], Async(3, OnUpdate.keep)),
    ],
)
def test_the_group_chooses_and_the_record_reads_back(words: list[str], rollout: RolloutSpec) -> None:
    experiment = build_experiment(compose([*RUN, *words]))
    assert experiment.rollout == rollout
    config = compose(RUN)
    config.rollout = experiment.resolved["rollout"]
    assert config.rollout == as_node(rollout)
    assert build_experiment(config).rollout == rollout


def test_only_async_samples_ahead_and_the_launch_table_tells_how() -> None:
    assert (Sync().ahead, Async().ahead) == (False, True)
    assert Sync().describe() == "in the step that trains on them"
    assert Async(0).describe() == "by a copy of the policy, in the step that trains on them"
    assert "at most 2 versions" in Async(2).describe()
    assert "KV cache recomputed when the weights change" in Async(2).describe()
    assert "KV cache kept when the weights change" in Async(2, OnUpdate.keep).describe()
