"""The elastic job that `ci/chaos` and `ci/soak` run on an emulated cluster, seen from outside."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from chaos_report import read_diaries
from emulation import Cluster, EmulatedRank, Finished
from fault import Process

HERE = Path(__file__).resolve().parent
WORKERS = {"torch": "chaos_worker.py", "keras": "chaos_keras_worker.py"}
NODES = {0: 2, 1: 2, 2: 1}  # slots; the last one comes and goes
# The others wait for so long for a new process to come, which loads its framework first.
GLOO_TIMEOUT_S = {"torch": 10, "keras": 30}
PATIENCE_S = 120.0  # for a recovery
TAIL_BYTES = 4096  # of a diary


def emulated_ranks() -> list[EmulatedRank]:
    """One for each slot."""
    return [EmulatedRank(cores=1.0, node=node) for node, slots in NODES.items() for _ in range(slots)]


class Job:
    """An elastic job, from its start. It goes on until it is told that it is enough.

    Args:
        folder: where its processes write, and where a file `hosts` says which hosts there are.
        framework: "torch" or "keras".
        topology: of DistributedOptimizer.
        timeout_s: it is ended after so long.
    """

    def __init__(self, cluster: Cluster, folder: Path, *, framework: str, topology: str, timeout_s: float) -> None:
        self._cluster, self._folder, self._framework = cluster, folder, framework
        self._command = [sys.executable, str(HERE / WORKERS[framework]), str(folder), topology]
        self._timeout_s = timeout_s
        self._finished: Finished | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        script = self._folder / "discover"
        script.write_text(f"#!/bin/sh\ncat {self._folder}/hosts\n")
        script.chmod(0o755)
        self._finished = self._cluster.horovodrun(
            self._command,
            env={
                "KERAS_BACKEND": "tensorflow",
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "CHAOS_HOSTS": ",".join(self._cluster.network.names),
                "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_S[self._framework]),
                "HOROVOD_ELASTIC_TIMEOUT": "90",
            },
            timeout_s=self._timeout_s,
            arguments=("-np", "4", "--host-discovery-script", str(script), "--min-np", "2", "--max-np", "5",
                       "--blacklist-cooldown-range", "1", "3"),
        )  # fmt: skip

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def recovered(self, *, since: float) -> bool:
        """Waits until it has committed twice since a time: what was under way then is over. Whether it has."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.runs:
            entries = read_diaries(self._folder, tail_bytes=TAIL_BYTES)
            commits = [e for e in entries if e["kind"] == "commit" and e["rank"] == 0 and e["t_s"] > since]
            if len(commits) >= 2:
                return True
            time.sleep(0.3)
        return False

    def processes(self) -> list[Process]:
        """The processes of its ranks."""
        latest = {entry["pid"]: entry for entry in read_diaries(self._folder, tail_bytes=TAIL_BYTES)}
        names = self._cluster.network.names
        return [
            Process(pid=pid, rank=entry["rank"], node=names.index(entry["host"]))
            for pid, entry in latest.items()
            if _lives(pid)
        ]

    def end(self) -> Finished | None:
        """Tells it that it is enough; how it ended, or None where it hangs."""
        (self._folder / "enough").touch()
        self._thread.join(2 * PATIENCE_S)
        return self._finished


def how(finished: Finished | None) -> str:
    """What is wrong with how a job ended, or ""."""
    if finished is None or finished.timed_out:
        return "hangs"
    return f"ended with status {finished.returncode}" if finished.returncode else ""


def _lives(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
