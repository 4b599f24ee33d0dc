"""Models of devices that were not measured: the makers' figures, and the share of them that a model reaches.

| device | peak, memory and links are those of |
|---|---|
| a100, h100, h200, b200 | the SXM modules: NVIDIA's data sheets, products without sparsity, NVLink in one direction |
| 910b | an NPU of Atlas A2: a die in the paper on CloudMatrix384 (arXiv 2506.12708); HCCS links each pair of eight |

An H100 was measured at 798 of its 989 TFLOP/s and at 3.0 of its 3.35 TB/s; attention and small products reach fewer
TFLOP/s. Other devices are assumed to reach the same shares. An NPU was reported to reach 328 TFLOP/s, and 142 of 200
GB/s between hosts. The overhead of a step, the latency of sums and the setup of a handover are assumed to have usual
values.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from pd_cluster.devices.device_kinds import BY_KIND, DeviceKind, Kind
from pd_cluster.errors import ConfigError

GB = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One device's figures, in bytes and seconds. `peak_flops`: for bfloat16."""

    name: str
    kind: DeviceKind
    peak_flops: float
    memory_nbytes: int
    memory_nbytes_per_s: float
    peer_nbytes_per_s: float  # the rate to one other device of its host
    peers_nbytes_per_s: float  # the rate to all others together
    network_nbytes_per_s: float  # the rate to another host
    devices_per_host: int = 8
    flops_share: float = 0.65
    memory_share: float = 0.85
    link_share: float = 0.7
    overhead_s: float = 0.001  # a step's overhead: launches, sampling, and the host's work between steps
    sum_s: float = 20e-6  # the latency of a sum over ranks, of any size
    handover_s: float = 0.002  # the time of the messages before and after the bytes

    @property
    def traits(self) -> Kind:
        return BY_KIND[self.kind]

    @property
    def flops_per_s(self) -> float:
        return self.peak_flops * self.flops_share

    @property
    def read_nbytes_per_s(self) -> float:
        return self.memory_nbytes_per_s * self.memory_share

    def sum_nbytes_per_s(self, num_ranks: int) -> float:
        """Returns the bytes per second that one of these ranks exchanges with the others."""
        return min(self.peers_nbytes_per_s, self.peer_nbytes_per_s * (num_ranks - 1)) * self.link_share

    def link_nbytes_per_s(self, is_one_host: bool) -> float:
        """Returns the bytes per second of a handover between two devices."""
        return (self.peer_nbytes_per_s if is_one_host else self.network_nbytes_per_s) * self.link_share


def _nvlink(name: str, tflops: float, memory_gb: int, memory_gb_per_s: int, nvlink: int, network: int) -> DeviceModel:
    return DeviceModel(
        name=name,
        kind="cuda",
        peak_flops=tflops * 1e12,
        memory_nbytes=memory_gb * GB,
        memory_nbytes_per_s=memory_gb_per_s * GB,
        peer_nbytes_per_s=nvlink * GB,
        peers_nbytes_per_s=nvlink * GB,
        network_nbytes_per_s=network * GB,
    )


DEVICE_MODELS = {
    each.name: each
    for each in (
        _nvlink("a100", 312, 80, 2039, 300, 25),
        _nvlink("h100", 989, 80, 3350, 450, 50),
        _nvlink("h200", 989, 141, 4800, 450, 50),
        _nvlink("b200", 2250, 180, 8000, 900, 50),
        DeviceModel(
            name="910b",
            kind="npu",
            peak_flops=376e12,
            memory_nbytes=64 * GB,
            memory_nbytes_per_s=1600 * GB,
            peer_nbytes_per_s=28 * GB,
            peers_nbytes_per_s=196 * GB,
            network_nbytes_per_s=25 * GB,
        ),
    )
}


def device_model(name: str) -> DeviceModel:
    """Returns the model of a device. Raises a ConfigError that suggests the nearest known name."""
    if (found := DEVICE_MODELS.get(name.lower())) is not None:
        return found
    near = difflib.get_close_matches(name.lower(), DEVICE_MODELS, 1, 0.3)
    hint = f"did you mean {near[0]}?" if near else "measure it with pd-cluster profile, and give --costs"
    raise ConfigError(f"--device {name}: expected one of {', '.join(DEVICE_MODELS)}; {hint}")
