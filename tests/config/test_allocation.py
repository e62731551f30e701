"""Allocation strings of AReaL, in the forms of its `areal/api/alloc_mode.py` and of realhf."""

from __future__ import annotations

import shlex

import pytest

from realign.config.aliases import translate
from realign.config.composition import compose
from realign.errors import ConfigError

FILES = ["experiment=grpo", "models.actor.path=m", "data.path=d.jsonl", "interfaces.reward.function=r.py:score"]


@pytest.mark.parametrize(
    ("value", "ranks", "sharding", "sampler"),
    [
        ("d4", 4, {}, {}),
        ("fsdp:d2t2", 4, {"tensor": 2}, {}),
        ("sglang.d4p1t1+d4p1t1", 4, {}, {"servers": 4, "devices": ["4", "5", "6", "7"]}),
        ("sglang:d2t2+fsdp:d2c2", 4, {"context": 2}, {"servers": 2, "devices": ["4,5", "6,7"], "tensor": 2}),
        ("vllm.d1m2p2+d2m2", 4, {"tensor": 2}, {"servers": 1, "devices": ["4,5,6,7"], "tensor": 2, "pipeline": 2}),
        ("sglang[rollout]:d2+megatron[actor]:d4e2", 4, {"expert": 2}, {"servers": 2, "devices": ["4", "5"]}),
        ("sglang:d2|fsdp:d2", 2, {}, {"servers": 2, "sleep_level": 1}),
    ],
)
def test_seed_e9_an_allocation_string_is_answered_with_settings_that_compose(value, ranks, sharding, sampler):
    with pytest.raises(ConfigError) as caught:
        translate([*FILES, f"allocation_mode={value}"])
    words = shlex.split(str(caught.value).split("`")[1])
    start = words.index("torchrun")
    assert words[start : start + 5] == ["torchrun", "--nproc-per-node", str(ranks), "-m", "realign"]
    visible = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(ranks)))}"] if "devices" in sampler else []
    assert words[:start] == visible
    actor = compose([*FILES, *words[start + 5 :]]).models["actor"]
    assert {name: n for name, n in actor.get("sharding", {}).items() if n != 1 and isinstance(n, int)} == sharding
    if sampler:
        own = actor["sampler"]
        flags = [f"--{name}-parallel-size {sampler[name]}" for name in ("tensor", "pipeline") if name in sampler]
        assert own.get("arguments", "") == " ".join(flags)
        assert own["servers"] == sampler["servers"]
        assert own.get("devices", []) == sampler.get("devices", [])
        assert own.get("sleep_level", 0) == sampler.get("sleep_level", 0)
    else:
        assert "sampler" not in actor


def test_backends_of_roles_are_answered_too_and_paths_are_not_read_as_allocations():
    with pytest.raises(ConfigError, match=r"--nproc-per-node 4 -m realign models\.actor\.sharding\.tensor=2` means"):
        translate([*FILES, "actor.backend=fsdp:d2t2"])
    assert "models.actor.path=t5" in translate(["experiment=grpo", "actor.path=t5"])[0]
