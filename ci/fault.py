"""Faults: what can happen to a job, done to it and undone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from emulation import Cluster

PACE_S = 0.05  # of a process that is made slow: stopped for most of each


@dataclass(frozen=True, kw_only=True)
class Process:
    """A rank's process, as it said of itself."""

    pid: int
    rank: int
    node: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a job for a time."""

    name: str
    seconds: float
    do: Callable[[], None]
    undo: Callable[[], None]


class Faults:
    """The faults that there are on a cluster.

    Args:
        hosts: the file that the discovery script prints.
        disk: the folder of the traces, on a file system of its own; None: not to be had.
    """

    def __init__(self, cluster: Cluster, *, hosts: Path, all_hosts: dict[str, int], disk: Path | None) -> None:
        self._cluster, self._hosts, self._disk = cluster, hosts, disk
        self._all, self._now = dict(all_hosts), dict(all_hosts)
        self._now.popitem()  # one host is to come
        self.write_hosts()

    @property
    def nodes(self) -> list[str]:
        """Their names, by number."""
        return self._cluster.network.names

    def write_hosts(self) -> None:
        """Says which hosts there are now."""
        new = self._hosts.with_suffix(".new")
        new.write_text("".join(f"{name}:{slots}\n" for name, slots in self._now.items()))
        new.rename(self._hosts)

    def draw(self, random_: random.Random, processes: list[Process], *, longest_s: float) -> Fault:
        """One of them, for some of these processes."""
        kinds = [self._kill, self._stop, self._slow, lambda *_: self.add_or_remove()]
        if self._cluster.network.kind == "namespaces":
            kinds.append(self._cut)
        if self._disk is not None:
            kinds.append(self._full)
        return random_.choice(kinds)(random_, processes, longest_s)

    def _kill(self, random_: random.Random, processes: list[Process], longest_s: float) -> Fault:
        one = random_.choice(processes)
        return Fault(name=f"kill rank {one.rank}", seconds=0.0, do=lambda: _signal(one.pid, signal.SIGKILL),
                     undo=lambda: None)  # fmt: skip

    def _stop(self, random_: random.Random, processes: list[Process], longest_s: float) -> Fault:
        one, seconds = random_.choice(processes), random_.uniform(1.0, longest_s)
        return Fault(
            name=f"stop rank {one.rank}", seconds=seconds, do=lambda: _signal(one.pid, signal.SIGSTOP),
            undo=lambda: _signal(one.pid, signal.SIGCONT),
        )  # fmt: skip

    def _slow(self, random_: random.Random, processes: list[Process], longest_s: float) -> Fault:
        one, over = random_.choice(processes), threading.Event()

        def duty() -> None:
            while not over.is_set():
                _signal(one.pid, signal.SIGSTOP)
                time.sleep(0.8 * PACE_S)
                _signal(one.pid, signal.SIGCONT)
                time.sleep(0.2 * PACE_S)

        thread = threading.Thread(target=duty, daemon=True)

        def undo() -> None:
            over.set()
            thread.join()

        seconds = random_.uniform(2.0, longest_s)
        return Fault(name=f"slow rank {one.rank}", seconds=seconds, do=thread.start, undo=undo)

    def add_or_remove(self) -> Fault:
        """The last host comes, or goes where it is there."""
        *_, name = self._all
        here = name in self._now

        def change() -> None:
            if here:
                del self._now[name]
            else:
                self._now[name] = self._all[name]
            self.write_hosts()

        return Fault(name=f"{'remove' if here else 'add'} host {name}", seconds=0.0, do=change, undo=lambda: None)

    def _cut(self, random_: random.Random, processes: list[Process], longest_s: float) -> Fault:
        node = random_.choice(sorted({process.node for process in processes} - {0}) or [1])
        return Fault(
            name=f"cut the link of node{node}", seconds=random_.uniform(1.0, longest_s),
            do=lambda: self._cluster.network.cut(node, down=True),  # type: ignore[attr-defined]
            undo=lambda: self._cluster.network.cut(node, down=False),  # type: ignore[attr-defined]
        )  # fmt: skip

    def _full(self, random_: random.Random, processes: list[Process], longest_s: float) -> Fault:
        assert self._disk is not None
        filler = self._disk / "filler"

        def fill() -> None:
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        return Fault(name="fill the disk under the traces", seconds=random_.uniform(1.0, longest_s), do=fill,
                     undo=filler.unlink)  # fmt: skip


@contextlib.contextmanager
def small_disk(folder: Path, *, kib: int):
    """A file system of so many KiB at `folder`, while the block lasts; None where it is not to be had."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "hvd_hetero", str(folder)], check=False, capture_output=True
    ).returncode
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
