from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from realign.api import GenerationConfig
from realign.runtime.ray.host import Host
from realign.runtime.ray.proxies import RemoteSampler
from realign.samplers.in_process.background import StreamingEngine
from realign.testing import SAMPLER_CHECKS, check_sampler
from tests.samplers.in_process.rollouts import numbered_prompts, other_engine
from tests.tiny import tiny_engine


class HereGroup:
    """`WorkerGroup` whose workers are in this process. Each worker is called in its own thread."""

    def __init__(self, size: int) -> None:
        self.hosts = [Host(rank, 1) for rank in range(size)]
        for host in self.hosts:
            host._samplers["actor"] = StreamingEngine("actor", tiny_engine())
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.hosts)

    def ask(self, role, verb, parts, *, only=None):
        hosts = self.hosts if only is None else [self.hosts[only]]
        if only is not None:
            self.asked.append(only)
        return [host.ask(role, verb, parts[0]) for host in hosts]

    def kill(self) -> None:
        for host in self.hosts:
            host._samplers["actor"].close()


@pytest.mark.parametrize("name", SAMPLER_CHECKS)
def test_the_remote_sampler_meets_the_contract(name):
    def make():
        return RemoteSampler("actor", HereGroup(2))

    check_sampler(make, numbered_prompts(range(3)), GenerationConfig(n=2, max_new_tokens=10), other_engine(), only=name)


def test_a_call_goes_to_the_worker_that_has_the_fewest():
    group = HereGroup(2)
    sampler = RemoteSampler("actor", group)
    sampler.pause()
    with ThreadPoolExecutor(4) as pool:
        calls = []
        for number in range(4):
            calls.append(
                pool.submit(sampler.generate, numbered_prompts([number]), GenerationConfig(max_new_tokens=4), seed=0)
            )
            while len(group.asked) <= number:
                threading.Event().wait(0.001)
        sampler.resume()
        for call in calls:
            call.result()
    assert group.asked == [0, 1, 0, 1]
    sampler.close()
