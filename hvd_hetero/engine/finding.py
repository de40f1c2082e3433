"""What a probe found: devices, links and nodes, as numbers that every rank holds alike and JSON can hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvd_hetero.policy.topology import Topology

from .device import Device
from .machine import listed

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Devices and links of all ranks. Times are "through Horovod": agreeing on a collective is part of each latency.

    `latency_s` and `bandwidth_bytes_per_s` have a row and a column for each rank and are symmetric; their diagonals are
    0.0 and infinite. One pair of ranks was measured for each two hosts, and stands for all pairs of ranks of the two.
    `contended` has a row and a column for each of `hosts`: how many times slower a transfer between two hosts is when
    as many pairs of ranks as the smaller host has transfer at once; 1.0 means links of their own.
    """

    devices: tuple[Device, ...]             # by rank
    core_gflop_per_s: tuple[float, ...]     # by rank: one core, fp32, while all ranks compute
    hosts: tuple[tuple[int, ...], ...]      # ranks by host identity
    latency_s: Matrix
    bandwidth_bytes_per_s: Matrix
    contended: Matrix
    empty_s: float                          # of the collective that was used, when nobody sends anything
    stalled: float                          # fraction of transfers that were held up, and left out of the links
    topology: Topology                      # with the slowest local and cross link of a pair of ranks alone
    seconds: float                          # that measuring took
    cached: bool = False                    # measured by an earlier run on the same hardware

    def __post_init__(self) -> None:
        ranks, hosts = len(self.devices), len(self.hosts)
        for name, matrix, rows in (("latency_s", self.latency_s, ranks), ("contended", self.contended, hosts),
                                   ("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, ranks)):
            if [len(row) for row in matrix] != [rows] * rows:
                raise ValueError(f"{name}: expected {rows} rows and columns. Received: {matrix}.")
        if len(self.core_gflop_per_s) != ranks or self.topology.size != ranks:
            raise ValueError(f"core_gflop_per_s and topology: expected those of {ranks} ranks. Received: "
                             f"{len(self.core_gflop_per_s)} and {self.topology.size}.")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def shares(self) -> tuple[float, ...]:
        """The fraction of the work that each rank would take for all to end at once, by the speed of its processor.

        A rank's speed is that of a core times the cores it has for itself: those that several ranks of a machine may
        run on are divided among them, and what a quota allows among the ranks of the host. GPUs are not benchmarked.
        """
        users = Counter((device.machine, device.affinity) for device in self.devices)
        neighbours = Counter(device.host for device in self.devices)

        def cores(device: Device) -> float:
            present = len(listed(device.affinity))
            shared = present / users[device.machine, device.affinity]
            return min(shared, device.cores / neighbours[device.host]) if device.cores < present else shared

        speeds = [
            speed * max(1.0, cores(device))
            for speed, device in zip(self.core_gflop_per_s, self.devices, strict=True)
        ]
        return tuple(speed / math.fsum(speeds) for speed in speeds)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON can hold it: null stands for the infinite bandwidth of a rank to itself."""
        rates = [[None if math.isinf(rate) else rate for rate in row] for row in self.bandwidth_bytes_per_s]
        devices = [device.as_dict() for device in self.devices]
        return {**asdict(self), "devices": devices, "bandwidth_bytes_per_s": rates, "topology": self.topology.as_dict()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Probe:
        """What `as_dict` was made from, before or after JSON."""
        rates = [[math.inf if rate is None else rate for rate in row] for row in content["bandwidth_bytes_per_s"]]
        return cls(**{
            **content,
            "devices": tuple(Device.from_dict(device) for device in content["devices"]),
            "core_gflop_per_s": tuple(content["core_gflop_per_s"]),
            "hosts": tuple(map(tuple, content["hosts"])),
            "latency_s": tuple(map(tuple, content["latency_s"])),
            "bandwidth_bytes_per_s": tuple(map(tuple, rates)),
            "contended": tuple(map(tuple, content["contended"])),
            "topology": Topology.from_dict(content["topology"]),
        })
