"""Options of `realign plan`, such as `plan.devices=16`, and the devices that a plan can use.

Devices have peak rates from data sheets, and assumptions that data sheets do not contain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from realign.errors import SettingsError
from realign.settings import Count, NonNegative, NonNegativeInt, Positive, Settings


@dataclass(frozen=True)
class Accelerator:
    """Peak rates of a device. Defaults: NVIDIA's data sheet of the H100 SXM5 (dense bf16, HBM3), in a DGX H100."""

    flops: float = 989e12
    bandwidth: float = 3.35e12
    """Memory bandwidth in bytes per second."""
    memory: float = 80e9
    link: float = 50e9
    """Bandwidth to other nodes in bytes per second: one port of 400 Gb/s per device."""
    node_link: float = 450e9
    """Bandwidth to other devices of the node in bytes per second, in one direction."""


@dataclass(frozen=True)
class Assumed:
    """Assumptions that data sheets do not contain."""

    bandwidth_used: float = 0.7
    """Fraction of the memory bandwidth used in decoding."""
    flops_used: float = 0.4
    """Fraction of the peak FLOP/s used in training and prefill."""
    decode_call_s: float = 0.003
    """Seconds of a decoding step besides memory reads: launches, sampling and scheduling."""
    train_call_s: float = 2.0
    """Seconds of a training step besides its tokens: splitting, final reductions and the optimizer."""
    sync_call_s: float = 1.0
    """Seconds of a weight update besides the transfer."""
    link_used: float = 0.5
    """Fraction of the link bandwidth used by weight transfers."""
    learning: float = 6.0
    """Floating-point operations per weight and token of a training step."""
    proximal: float = 2.0
    """Additional operations where responses may be stale: a forward pass for the proximal log-probs."""
    slots: int = 256
    """Maximum number of rows of an engine. The KV cache may limit it further."""
    in_process_layer_s: float = 0.0005
    """Additional seconds per layer of a decoding step of the in-process sampler, which launches every operator."""
    tensor_parallel_layer_s: float = 0.00004
    """Additional seconds per layer of a decoding step with tensor parallelism: two reductions."""
    collective_s: float = 0.00005
    """Seconds of a collective operation on one layer besides the transfer, between ranks of a sharded model."""
    host_rate: float = 1e9
    """Bytes per second of a weight update through Ray or through a folder, both of which use host memory."""
    memory_used: float = 0.9
    """Fraction of the device memory that a plan may use."""


@dataclass(frozen=True)
class Device:
    """A kind of device: its peak rates, and what is assumed about it."""

    accelerator: Accelerator
    assumed: Assumed = Assumed()
    source: str = ""
    """Source of the rates."""
    sizes_cache: bool = True
    """Whether the KV cache of the in-process sampler grows with the free memory, as on a GPU."""


CPU_CORE = Device(
    Accelerator(flops=8e10, bandwidth=1e10, memory=8e9, link=1e9, node_link=4e9),
    Assumed(
        decode_call_s=0.001,
        train_call_s=0.02,
        sync_call_s=0.01,
        in_process_layer_s=0.0,
        tensor_parallel_layer_s=0.0005,
        collective_s=0.01,
    ),
    "assumed, one core with AVX2 and fp32",
    sizes_cache=False,
)
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "a100": Device(Accelerator(312e12, 2.04e12, 80e9, 25e9, 300e9), source="NVIDIA A100 SXM 80 GB, DGX A100"),
        "h100": Device(Accelerator(), source="NVIDIA H100 SXM5, DGX H100"),
        "h200": Device(Accelerator(989e12, 4.8e12, 141e9, 50e9, 450e9), source="NVIDIA H200 SXM, DGX H200"),
        "b200": Device(Accelerator(2250e12, 8e12, 180e9, 50e9, 900e9), source="NVIDIA B200, DGX B200"),
        "l40s": Device(Accelerator(362e12, 0.864e12, 48e9, 25e9, 32e9), source="NVIDIA L40S, PCIe 4.0 x16"),
        "mi300x": Device(Accelerator(1307e12, 5.3e12, 192e9, 50e9, 448e9), source="AMD Instinct MI300X"),
        "cpu": CPU_CORE,
    }
)
"""Devices by name. One device is one accelerator, or one core of a CPU."""


class DeviceKind(StrEnum):
    """Names of devices, see `DEVICES`."""

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


__all__ = ["CPU_CORE", "DEVICES", "Accelerator", "Assumed", "Device", "DeviceKind", "PlanOptions"]
