"""`ProbeResult`: the devices, links and nodes that a probe has measured, the same on every rank; stored as JSON."""

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
class ProbeResult:
    """The devices and links of all ranks, as `probe` has measured them.

    All times are those of collectives through Horovod, so each latency includes Horovod's negotiation of a collective.

    `latency_s` and `bandwidth_bytes_per_s` are symmetric matrices with a row and a column for each rank; their
    diagonals are 0.0 and infinite. Between two hosts one pair of ranks was measured, whose link stands for all pairs of
    the two. `contended` has a row and a column for each of `hosts`. It is the factor by which a transfer between the
    two hosts is slower when several pairs of ranks, as many as the smaller host has ranks, transfer at once; 1.0 means
    that each pair has a link of its own.
    """

    devices: tuple[Device, ...]             # by rank
    core_gflop_per_s: tuple[float, ...]     # by rank: speed of one core, fp32, while all ranks compute
    hosts: tuple[tuple[int, ...], ...]      # the ranks of each host, by host identity
    latency_s: Matrix
    bandwidth_bytes_per_s: Matrix
    contended: Matrix
    empty_s: float                          # seconds that the all-to-all takes when no rank sends anything
    stalled: float                          # fraction of transfers that stalled, and were left out of the links
    topology: Topology                      # nodes; slowest local and cross link, of one pair transferring alone
    seconds: float                          # duration of the measurement
    cached: bool = False                    # whether it was measured by an earlier run on the same hardware

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
        """Each rank's fraction of the global batch with which all ranks would finish at once, by processor speed.

        A rank's speed is the speed of one core times the rank's number of cores, at least 1. Ranks of a machine with
        the same CPU affinity divide its cores evenly, and ranks of a host divide its CPU quota evenly. GPUs are not
        benchmarked.
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
        """Returns the content as a dictionary for JSON; null stands for the infinite bandwidth of a rank to itself."""
        rates = [[None if math.isinf(rate) else rate for rate in row] for row in self.bandwidth_bytes_per_s]
        return {**asdict(self), "bandwidth_bytes_per_s": rates}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> ProbeResult:
        """Makes a result from what `as_dict` returned, also after it was stored as JSON and read again."""
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
