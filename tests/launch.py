"""Starting real ranks from a test: the real `horovodrun`, a time limit, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Launched:
    """How a job ended, and what its ranks printed."""

    returncode: int
    output: str


def elastic_hosts(folder: Path, ranks: int = 3) -> tuple[str, ...]:
    """Options of an elastic job of two ranks on one host and the others, if any, on a second one, which soon comes back
    after it was given up: with one slot, once there is a file `died` in the folder."""
    script = folder / "hosts.sh"
    before = f"echo 127.0.0.1:{ranks - 2}" if ranks > 2 else ":"
    script.write_text(
        f"#!/bin/sh\necho localhost:2\n"
        f"if [ -e {folder}/died ]; then echo 127.0.0.1:1; touch {folder}/told; else {before}; fi\n"
    )
    script.chmod(0o755)
    most = str(max(ranks, 3))
    return ("--min-np", "2", "--max-np", most, "--host-discovery-script", str(script), "--reset-limit", "5",
            "--blacklist-cooldown-range", "1", "2", "--network-interfaces", "lo")  # fmt: skip


def python_path(worker: str, *, keras: bool = False) -> str:
    """The variable of which one of our workers starts quickly: see `workers/quick`."""
    chosen = [WORKERS / "without"] if keras else []
    if not worker.endswith("end_worker.py"):  # which ends as a user's script does
        chosen.append(WORKERS / "quick")
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, chosen), *([before] if before else [])])


def horovodrun(
    ranks: int,
    worker: str | Path,
    *arguments: str,
    controller: str = "gloo",
    options: tuple[str, ...] = (),
    timeout_s: float = 240,
    **env: str,
) -> Launched:
    """Runs `tests/workers/WORKER ARGUMENTS` on `ranks` ranks of this host; fails the test when it does not end.

    `options` are further ones of horovodrun's own.
    """
    binaries = Path(sys.executable).parent
    command = [sys.executable, str(binaries / "horovodrun"), "-np", str(ranks), f"--{controller}", "--disable-cache"]
    command += options
    if controller == "mpi":
        # Open MPI spins while it waits, which on two cores would starve the ranks that compute.
        command += ["--mpi-args=--mca mpi_yield_when_idle 1 --oversubscribe"]
    command += [sys.executable, str(WORKERS / worker), *arguments]
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}", **env}
    if (WORKERS / worker).parent == WORKERS:
        environment["PYTHONPATH"] = python_path(str(worker), keras="KERAS_BACKEND" in env)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # horovodrun ends its ranks, which are in process groups of their own
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        raise AssertionError(f"did not end within {timeout_s} s:\n{output[-6000:]}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Launched(process.returncode, output)
