"""What tests simulate: an engine whose transfers take simulated time (`World(n)` with a virtual clock for each rank),
a stopwatch of a rank of a given speed, and the traces of ranks that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvd_hetero.engine.device import Device
from hvd_hetero.engine.local import LocalEngine
from hvd_hetero.policy.link import Link
from hvd_hetero.trace import Run, Trace, read

SMALL_COLLECTIVE_S = 2e-4


@dataclass
class Network:
    """`link(a, b)` joins ranks a and b; transfers between the same two hosts share one wire where `shared`."""

    hosts: tuple[str, ...]
    link: Callable[[int, int], Link]
    shared: bool = True
    late_s: tuple[float, ...] = ()      # by rank: how late it notices the end of a small collective
    noise: float = 0.0
    stall_s: float = 0.0                # added to every other transfer
    clocks_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clocks_s = [100.0 * rank for rank in range(len(self.hosts))]      # clocks of ranks have nothing in common
        self.late_s = self.late_s or (0.0,) * len(self.hosts)

    def device(self, rank: int) -> Device:
        return Device(host_name=self.hosts[rank], host=self.hosts[rank], machine=self.hosts[rank], cpu="simulated",
                      cores=2.0, affinity="0-1", numa_nodes=1, memory_bytes=1 << 30, notes=("simulated",))

    def time_s(self, sent: np.ndarray, rank: int) -> float:
        """Seconds that `rank` is busy when `sent[a, b]` bytes go from a to b."""
        partners = np.flatnonzero(sent[rank])
        if not len(partners):
            return SMALL_COLLECTIVE_S
        (partner,) = partners
        assert sent[partner, rank] == sent[rank, partner], "both directions at once"
        link = self.link(min(rank, partner), max(rank, partner))
        hosts = {self.hosts[rank], self.hosts[partner]}
        users = sum({self.hosts[a], self.hosts[b]} == hosts for a, b in np.argwhere(sent)) / 2
        crossing = self.shared and len(hosts) > 1
        return link.latency_s + sent[rank, partner] * (users if crossing else 1.0) / link.bandwidth_bytes_per_s


class _Timed:
    """A handle whose wait moves the rank's clock to where the simulation says that the operation ends."""

    def __init__(self, engine: SimulatedEngine, handle: Any, clock: Any, sent: bool) -> None:
        self._engine, self._handle, self._clock, self._sent = engine, handle, clock, sent

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> Any:
        engine, network = self._engine, self._engine.network
        result, table = self._handle.wait(), self._clock.wait()
        # All ranks have to be there before it begins; then each is busy for a time of its own.
        waited_s = float(np.max(table[:, 0]) - table[engine.rank, 0])
        if self._sent:
            busy_s = network.time_s(table[:, 1:], engine.rank) * (1 + network.noise * engine.random.exponential())
            if table[:, 1:].any():
                busy_s += network.stall_s * (len(engine.calls) // 2 % 2)      # start and transfer alternate
        else:
            busy_s = SMALL_COLLECTIVE_S + network.late_s[engine.rank]
        network.clocks_s[engine.rank] += waited_s + busy_s
        return result


class SimulatedEngine:
    """`inner`, with times. Starts of ranks are compared on clocks without their offsets."""

    def __init__(self, inner: LocalEngine, network: Network) -> None:
        self.inner, self.network = inner, network
        self.random = np.random.default_rng(inner.rank)
        self.failure = inner.failure
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def clock(self) -> float:
        return self.network.clocks_s[self.inner.rank]

    def _timed(self, handle: Any, name: str, splits: Any = None) -> _Timed:
        self.calls.append(name)
        since_start_s = self.clock() - 100.0 * self.inner.rank
        row = np.array([[since_start_s, *(splits if splits is not None else [0] * self.inner.size)]], dtype=float)
        return _Timed(self, handle, self.inner.allgather_async(row, name=f"{name}/clock"), splits is not None)

    def allreduce_async(self, array: Any, *, name: str, op: Any = "sum") -> _Timed:
        return self._timed(self.inner.allreduce_async(array, name=name, op=op), name)

    def allgather_async(self, array: Any, *, name: str) -> _Timed:
        return self._timed(self.inner.allgather_async(array, name=name), name)

    def alltoall_async(self, array: Any, *, splits: Any, name: str) -> _Timed:
        return self._timed(self.inner.alltoall_async(array, splits=splits, name=name), name, splits)


class Speed:
    """A stopwatch of a rank whose speed the test sets; it is told the samples of each step."""

    def __init__(self, seconds_per_sample: float) -> None:
        self.seconds_per_sample, self.samples = seconds_per_sample, 0.0

    def mark(self) -> int:
        return 0

    def passed(self, mark: int) -> bool:
        return True

    def seconds(self, start: int, end: int) -> float:
        # Two segments a step, compute and update; the second is the overhead.
        part, self.samples = self.samples * self.seconds_per_sample, 0.0
        return part or 0.001


class RecordedRanks:
    """Ranks that step together, as their traces in `folder` tell: a step ends for all when the last has come, and the
    exchange is over."""

    def __init__(self, folder, size: int) -> None:
        self.now, self.folder = 1000.0, folder
        self.traces = [Trace(folder, rank=rank, clock=lambda: self.now, host=f"host{rank}") for rank in range(size)]
        self.waits: list[list[float]] = [[] for _ in range(size)]

    def step(
        self, step: int, *, compute, data=None, rest=None, shares=None, extra=None, loading=None,
        exchange: float = 0.01, batches: int = 1,
    ) -> None:  # fmt: skip
        """What each rank does in a step, in seconds; `loading`, for which it waits in `data`, others do beside it. The
        last of its `batches` has the number `step`."""
        size = len(self.traces)
        data, rest, shares = data or [0.0] * size, rest or [0.0] * size, shares or [4] * size
        extra, loading = extra or [0.0] * size, loading or [0.0] * size
        busy = [a + b + c for a, b, c in zip(compute, data, rest, strict=True)]
        self.now += max(busy) + exchange
        for rank, trace in enumerate(self.traces):
            self.waits[rank].append(max(busy) - busy[rank] + exchange)
            trace.step(step=step, samples=batches * shares[rank], compute_s=compute[rank], data_s=data[rank], bytes=100,
                       wait_s=self.waits[rank][-1], share=shares[rank], extra_s=extra[rank],
                       loading_s=loading[rank])

    def read(self) -> Run:
        """The run so far."""
        for trace in self.traces:
            trace.flush()
        return read(self.folder)
