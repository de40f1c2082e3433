"""What processes hold over time: memory and open files, and whether that grows."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

EVERY_S = 5.0
WARM_S = 60.0  # a process is left alone for so long: caches fill, and the first plans are made
MOST_MIB = 16.0  # by which memory may grow
MOST_FILES = 8


@dataclass
class Held:
    """Of one process."""

    name: str
    t_s: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """For how long it was watched, once warm."""
        return max(0.0, self.t_s[-1] - self.t_s[0] - WARM_S) if self.t_s else 0.0

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Memory (MiB) and open files, in the first third of the time once warm, and in the last third."""
        warm = [i for i, t in enumerate(self.t_s) if t >= self.t_s[0] + WARM_S] or list(range(len(self.t_s)))
        third = max(1, len(warm) // 3)
        parts = warm[:third], warm[-third:]
        first, last = (
            (statistics.median(self.mib[i] for i in part), statistics.median(self.files[i] for i in part))
            for part in parts
        )
        return first, last

    def __str__(self) -> str:
        (mib, files), (mib_then, files_then) = self.ends()
        return (
            f"{self.name}, {self.seconds:.0f} s once warm: {mib:.0f} -> {mib_then:.0f} MiB, "
            f"{files:.0f} -> {files_then:.0f} open files"
        )


def growth(held: Sequence[Held], *, least_s: float) -> list[str]:
    """Which processes hold more and more; those that were watched for less than `least_s` say nothing."""
    found = []
    judged = [one for one in held if one.seconds >= least_s]
    ranks = [one for one in judged if one.name.startswith("rank")]
    for one in judged:
        (mib, files), (mib_then, files_then) = one.ends()
        if mib_then > mib + MOST_MIB or files_then > files + MOST_FILES:
            found.append(f"{one} grows")
    return found if ranks else [*found, "no rank lived long enough to be judged"]


class Watcher:
    """Looks at the job's processes every few seconds: those with a diary, and the launcher.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._began = folder, time.monotonic()
        self._by_process: dict[tuple[int, str], Held] = {}  # numbers are used again
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def held(self) -> list[Held]:
        """What each has held."""
        return [one for one in self._by_process.values() if one.t_s]

    def close(self) -> None:
        """Looks no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            pids = {int(path.stem.split("-")[1]): "rank" for path in self._folder.glob("process-*.jsonl")}
            for pid, kind in {**pids, **dict.fromkeys(_launchers(self._folder), "launcher")}.items():
                self._look(pid, kind)

    def _look(self, pid: int, kind: str) -> None:
        try:
            began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except (OSError, IndexError):
            return
        if not pages:  # it has ended, and nobody has asked for its status yet
            return
        held = self._by_process.setdefault((pid, began), Held(name=f"{kind} {pid}"))
        held.t_s.append(time.monotonic() - self._began)
        held.mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        held.files.append(files)


def _launchers(folder: Path) -> list[int]:
    """The processes of horovodrun that start this job's ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        launches = any(word.endswith(b"horovodrun") for word in words[:2])
        if launches and str(folder / "discover").encode() in words:
            found.append(int(path.parent.name))
    return found


def draw(held: Sequence[Held], path: Path) -> None:
    """Memory and open files of each process over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5))
    for one in held:
        style = {"color": "black", "linestyle": "--"} if one.name.startswith("launcher") else {}
        minutes = [t / 60 for t in one.t_s]
        above.plot(minutes, one.mib, linewidth=1, **style)
        below.plot(minutes, one.files, linewidth=1, **style)
    above.set_ylabel("memory (MiB)")
    below.set_ylabel("open files")
    below.set_xlabel("minutes; a line for each process, the launcher's dashed")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
