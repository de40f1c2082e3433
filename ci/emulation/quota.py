"""Ways to hold the processes of a rank to a share of a core: cgroup quotas, or stopping and continuing them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from . import leftovers

KERNEL_MINIMUM_US = 1_000  # neither a quota nor a period may be shorter
DUTY_TICK_S = 0.004
REFRESH_S = 0.25


class Quota(Protocol):
    """Holds processes to the shares of emulated ranks; `tick` wants calling every `tick_s` seconds (None: never)."""

    tick_s: float | None

    def hold(self, rank: int, pid: int) -> None: ...
    def release(self, rank: int, pid: int) -> None: ...
    def set_cores(self, rank: int, cores: float) -> None: ...
    def stop(self, rank: int, stopped: bool) -> None: ...
    def tick(self) -> None: ...
    def close(self) -> None: ...


class CgroupQuota:
    """The kernel's own limit: one group with a CPU quota for each rank, and one without for those let go."""

    tick_s: float | None = None

    def __init__(self, kind: str, root: Path, name: str, cores: Sequence[float], period_us: int) -> None:
        self._first = kind == "cgroup1"
        self._period = period_us
        self._top = root / name
        self._top.mkdir()
        if not self._first:
            with contextlib.suppress(OSError):  # already on, as a rule
                (root / "cgroup.subtree_control").write_text("+cpu")
            (self._top / "cgroup.subtree_control").write_text("+cpu")
        # One group has one group's weight beside every single process outside it: make up for the number of ranks.
        weight = ("cpu.shares", 1024, 262_144) if self._first else ("cpu.weight", 100, 10_000)
        (self._top / weight[0]).write_text(str(min(weight[1] * len(cores), weight[2])))
        (self._top / "free").mkdir()  # not the top itself: in version 2 only leaves may hold processes
        for rank, share in enumerate(cores):
            self._group(rank).mkdir()
            self.set_cores(rank, share)

    def hold(self, rank: int, pid: int) -> None:
        self._move(pid, self._group(rank))

    def release(self, rank: int, pid: int) -> None:
        self._move(pid, self._top / "free")

    def set_cores(self, rank: int, cores: float) -> None:
        quota = round(cores * self._period)
        if self._first:
            (self._group(rank) / "cpu.cfs_period_us").write_text(str(self._period))
            (self._group(rank) / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._group(rank) / "cpu.max").write_text(f"{quota} {self._period}")

    def stop(self, rank: int, stopped: bool) -> None:
        for pid in (self._group(rank) / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGSTOP if stopped else signal.SIGCONT)

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass  # leftovers.remove takes the groups away once their processes are gone

    def _group(self, rank: int) -> Path:
        return self._top / f"rank{rank}"

    @staticmethod
    def _move(pid: int, group: Path) -> None:
        (group / "cgroup.procs").write_text(str(pid))  # all its threads, and the children it will have
        for child in leftovers.descendants(pid)[1:]:
            with contextlib.suppress(OSError):  # gone in the meantime
                (group / "cgroup.procs").write_text(str(child))


class DutyQuota:
    """The same limit without privileges: each rank earns CPU time as the clock runs, and whoever has used it up is
    stopped until there is some again. Use is what the kernel counted, so that sleeping costs nothing."""

    tick_s: float | None = DUTY_TICK_S

    def __init__(self, cores: Sequence[float], period_us: int) -> None:
        self._cores = dict(enumerate(cores))
        self._burst = max(period_us / 1e6, 2 * DUTY_TICK_S)  # seconds of wall time whose earnings may be kept
        self._roots: dict[int, set[int]] = {rank: set() for rank in self._cores}
        self._used: dict[int, dict[int, float]] = {rank: {} for rank in self._cores}  # of each process, when last seen
        self._credit = dict.fromkeys(self._cores, 0.0)
        self._stopped: set[int] = set()  # ranks
        self._kept_stopped: set[int] = set()  # by request
        self._last = self._refreshed = time.monotonic()

    def hold(self, rank: int, pid: int) -> None:
        cpu_seconds(pid)  # raises when there is no such process
        self._roots[rank].add(pid)
        self._refresh(rank)

    def release(self, rank: int, pid: int) -> None:
        self._signal(rank, signal.SIGCONT)
        self._stopped.discard(rank)
        self._roots[rank].discard(pid)
        self._refresh(rank)

    def set_cores(self, rank: int, cores: float) -> None:
        self._cores[rank] = cores

    def stop(self, rank: int, stopped: bool) -> None:
        (self._kept_stopped.add if stopped else self._kept_stopped.discard)(rank)
        if rank not in self._stopped:  # else it is stopped, and goes on when it has earned some time
            self._signal(rank, signal.SIGSTOP if stopped else signal.SIGCONT)

    def tick(self) -> None:
        """Charges every rank for what it used since the last call, and stops or continues it accordingly."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        if fresh := now - self._refreshed > REFRESH_S:
            self._refreshed = now
        for rank, cores in self._cores.items():
            if not self._roots[rank]:
                continue
            if fresh:
                self._refresh(rank)  # new children
            credit = self._credit[rank] + cores * elapsed - self._spent(rank)
            self._credit[rank] = min(credit, cores * self._burst)
            if credit <= 0 and rank not in self._stopped:
                self._stopped.add(rank)
                self._signal(rank, signal.SIGSTOP)
            elif credit > 0 and rank in self._stopped and rank not in self._kept_stopped:
                self._stopped.discard(rank)
                self._signal(rank, signal.SIGCONT)

    def close(self) -> None:
        for rank in self._cores:
            self._signal(rank, signal.SIGCONT)  # whoever lives on must not stay stopped

    def _spent(self, rank: int) -> float:
        spent = 0.0
        for pid, before in list(self._used[rank].items()):
            try:
                self._used[rank][pid] = now = cpu_seconds(pid)
            except OSError:
                del self._used[rank][pid]
                self._roots[rank].discard(pid)
            else:
                spent += now - before
        return spent

    def _refresh(self, rank: int) -> None:
        pids = {pid for root in self._roots[rank] for pid in leftovers.descendants(root)}
        used = self._used[rank]
        self._used[rank] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                self._used[rank][pid] = used.get(pid, cpu_seconds(pid))

    def _signal(self, rank: int, number: signal.Signals) -> None:
        for pid in self._used[rank]:
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def cpu_seconds(pid: int) -> float:
    """The CPU time of the whole process so far, to the nanosecond (clock_getcpuclockid's formula); OSError: gone."""
    return time.clock_gettime((~pid << 3) | 2)


@functools.cache
def writable_cgroup() -> tuple[str, Path] | None:
    """Kind and root of the cgroup tree in which a quota could really be set just now; None: there is none."""
    for kind, root in leftovers.cgroup_roots():
        name = leftovers.new_name()
        try:
            CgroupQuota(kind, root, name, [0.5], 10_000)
        except OSError:
            continue
        finally:
            leftovers.remove(name)
        return kind, root
    return None


def shown() -> str:
    """The shell's words that show the processes of a node their quotas, as a container does: `ip netns exec` has
    hidden them."""
    found = writable_cgroup()
    if found is None:
        return ""
    kind, root = found
    how = "-t cgroup2"
    if kind == "cgroup1":  # of controllers that are mounted together, all have to be named
        known = {line.split()[0] for line in Path("/proc/cgroups").read_text().splitlines()[1:]}
        mounts = (line.split(" ") for line in Path("/proc/mounts").read_text().splitlines())
        options = next(options for _, where, _, options, *_ in mounts if Path(where) == root)
        how = f"-t cgroup -o {','.join(option for option in options.split(',') if option in known)}"
    return f"{{ mount {how} cgroup /sys/fs/cgroup || true; }} && "
