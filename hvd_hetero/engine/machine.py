"""Reads from Linux's /proc and cgroups the processor, the cores and the memory that this process may use.

Functions take texts, or files under a given `root`, so that a test can describe any machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

# what /proc/cpuinfo calls the model on x86, on ARM boards, on MIPS and on POWER
_MODEL_KEYS = ("model name", "Model", "Hardware", "cpu model", "cpu")
# cgroup v1 writes "no limit" as the largest multiple of the page size below 2^63
_NO_LIMIT_BYTES = 1 << 60


def cpu_model(cpuinfo: str) -> str | None:
    """The model of the processor in the text of /proc/cpuinfo; None where it names none (ARM servers)."""
    facts: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, found, value = line.partition(":")
        if found:
            facts.setdefault(key.strip(), " ".join(value.split()))
    return next((facts[key] for key in _MODEL_KEYS if facts.get(key)), None)


def memory_bytes(meminfo: str) -> int | None:
    """The machine's memory in the text of /proc/meminfo."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def listed(text: str) -> tuple[int, ...]:
    """The numbers in a list as the kernel writes it: "0-2,8" is 0, 1, 2, 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def listing(numbers: set[int]) -> str:
    """Returns a list of these numbers as the kernel writes it, such as "0-2,8"; the inverse of `listed`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def cgroup_folders(controller: str, mountinfo: str, cgroup: str, root: Path) -> Iterator[Path]:
    """The folders, from this process's cgroup up to the mount, that hold `controller`'s limits; v1 and v2.

    `mountinfo` and `cgroup` are the texts of /proc/self/mountinfo and /proc/self/cgroup. A limit of a parent holds for
    its children too. In a container, the path may be one that only the host sees: then the mount itself is ours.
    """
    paths = {}      # controller → path; the controller of v2 is ""
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        paths.update(dict.fromkeys(names.split(","), path))
    for line in mountinfo.splitlines():
        before, found, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if not found or len(fields) < 5 or not kind:
            continue
        if kind[0] == "cgroup2" and "" in paths:
            path = paths[""]
        elif kind[0] == "cgroup" and controller in paths and controller in kind[-1].split(","):
            path = paths[controller]
        else:
            continue
        mount_root, place = fields[3], root / fields[4].lstrip("/")
        above = mount_root.rstrip("/")
        inside = path[len(above):] if f"{path}/".startswith(f"{above}/") else ""
        folder = place / inside.strip("/")
        while folder != place:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield place


def cpu_quota_cores(folders: Iterator[Path]) -> float | None:
    """The lowest CPU quota of these cgroups, in cores, maybe a fraction; None if there is none."""
    return _tightest(folders, _quota)


class CpuQuota:
    """The CPU quota of this process. It is read anew at each call, as an orchestrator may change it, or move the
    process to another cgroup. `root` is the folder that contains /proc and /sys."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        mounts = read(root / "proc/self/mountinfo").splitlines()
        self._mounts = "\n".join(line for line in mounts if " - cgroup" in line)

    def cores(self) -> float | None:
        """The present quota in cores, maybe a fraction; None if there is none."""
        here = read(self._root / "proc/self/cgroup")
        return cpu_quota_cores(cgroup_folders("cpu", self._mounts, here, self._root))


class Crowding:
    """How much others hold up a thread of this process, of that number, on the cores that it may use. `root` is the
    folder that contains /proc."""

    def __init__(self, number: int, root: Path = Path("/")) -> None:
        self._file = root / f"proc/self/task/{number}/schedstat"
        self._before = 0, 0

    def slowness(self) -> float | None:
        """Wall time per processor time of what the thread has run since the last call, or the first time since it
        began: 1 if it always got a core at once, 2 if it waited for one as long as it ran. None where Linux does not
        tell, or if it has not run. (Linux's Documentation/scheduler/sched-stats.rst has the fields.)"""
        (ran_before, waited_before), (ran, waited) = self._before, self._times()
        if ran <= ran_before:
            return None
        self._before = ran, waited
        return 1.0 + (waited - waited_before) / (ran - ran_before)

    def _times(self) -> tuple[int, int]:
        """Nanoseconds that the thread has run, and that it has waited for a core."""
        words = read(self._file).split()
        return (int(words[0]), int(words[1])) if len(words) > 1 and all(map(str.isdigit, words)) else (0, 0)


def threads() -> set[int]:
    """The numbers of this process's present threads, whoever made them."""
    with contextlib.suppress(OSError):
        return {int(name) for name in os.listdir("/proc/self/task")}
    return set()


class ThreadClock:
    """The processor time of some threads of this process, of those numbers."""

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self.numbers = frozenset(numbers)
        # Linux makes a thread's clock of the complement of its number, and three bits: "a thread", "time it has run".
        self._clocks = [(~number << 3) | 0b110 for number in self.numbers]

    def seconds(self) -> float:
        """The seconds that they have run, all together; may be called from any thread. A thread that has ended counts
        for none."""
        total = 0.0
        for clock in self._clocks:
            with contextlib.suppress(OSError):
                total += time.clock_gettime(clock)
        return total


def memory_limit_bytes(folders: Iterator[Path]) -> int | None:
    """The lowest memory limit of these cgroups, in bytes; None if there is none."""
    found = _tightest(folders, _memory_limit)
    return None if found is None else int(found)


def _tightest(folders: Iterator[Path], limit: Callable[[Path], float | None]) -> float | None:
    limits = (limit(folder) for folder in folders)
    return min((found for found in limits if found is not None), default=None)


def _quota(folder: Path) -> float | None:
    words = read(folder / "cpu.max").split()        # v2: "50000 100000" or "max 100000"
    if len(words) != 2:                             # v1: two files, and -1 for no limit
        words = [read(folder / "cpu.cfs_quota_us").strip(), read(folder / "cpu.cfs_period_us").strip()]
    if not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        word = read(folder / name).strip()
        if word.isdigit():
            return int(word) if int(word) < _NO_LIMIT_BYTES else None
    return None


def read(path: Path) -> str:
    """The text of a file, "" where it cannot be read: not every system has every file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
