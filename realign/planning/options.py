"""Options of `realign plan`, such as `plan.devices=16`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from realign.errors import SettingsError
from realign.planning.devices import DEVICES, Device
from realign.settings import Count, NonNegative, NonNegativeInt, Positive, Settings


class DeviceKind(StrEnum):
    """Names of devices, see `realign.planning.devices`."""

    a100 = "a100"
    h100 = "h100"
    h200 = "h200"
    b200 = "b200"
    l40s = "l40s"
    mi300x = "mi300x"
    cpu = "cpu"


@dataclass
class PlanOptions(Settings):
    """Cluster, lengths and limits of a plan."""

    devices: Count = 8
    """Number of devices of all nodes. A device is an accelerator, or one core with device=cpu."""
    nodes: Count = 1
    """Number of nodes, which have the same number of devices."""
    device: DeviceKind = DeviceKind.h100
    """Kind of the devices: a100 | h100 | h200 | b200 | l40s | mi300x | cpu."""
    memory_gb: Positive | None = None
    """Memory of a device in GB (1e9 bytes); null: from the data sheet of the device."""
    max_staleness: NonNegativeInt = 4
    """Largest value of `rollout.max_staleness` to consider."""
    prompt_tokens: Positive = 256.0
    """Mean tokens of a prompt. With `runs`, the runs determine it."""
    response_tokens: Positive | None = None
    """Mean tokens of a response; null: half of the longest response, or the mean of `runs`."""
    length_sigma: NonNegative = 0.6
    """Standard deviation of the logarithm of response lengths; 0 for equal lengths."""
    reward_s: NonNegative = 0.0
    """Seconds to score one response. With `runs`, the runs determine it."""
    reward_workers: Count | None = None
    """Responses that are scored concurrently; null: all."""
    runs: list[str] | str = field(default_factory=list)
    """Folder of a run of this experiment in one process with rollout=sync, or a list of them. Their metrics.jsonl
    calibrates the costs."""
    show: Count = 5
    """Number of plans to print."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.devices % self.nodes:
            raise SettingsError(f"nodes={self.nodes}: must divide devices={self.devices}")

    @property
    def folders(self) -> list[str]:
        """Return the folders of `runs`."""
        return [self.runs] if isinstance(self.runs, str) else self.runs

    @property
    def devices_per_node(self) -> int:
        """Return the number of devices of a node."""
        return self.devices // self.nodes

    def described_device(self) -> Device:
        """Return the device, with the memory of `memory_gb`."""
        device = DEVICES[self.device]
        if self.memory_gb is None:
            return device
        return replace(device, accelerator=replace(device.accelerator, memory=1e9 * self.memory_gb))

    def mean_response(self, longest: int) -> float:
        """Return the mean tokens of a response, at most `longest`."""
        return min(float(longest), longest / 2 if self.response_tokens is None else self.response_tokens)


__all__ = ["DeviceKind", "PlanOptions"]
