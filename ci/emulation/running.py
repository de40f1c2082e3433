"""Runs processes together: their output in one text as it comes, an end for all when one fails or time is up."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

GRACE_S = 3.0
TIMED_OUT = 124  # as timeout(1) says it


@dataclass(frozen=True)
class Finished:
    """How a job ended; the return code is the first failure's (128 + N for signal N, 124 when time was up), else 0."""

    returncode: int
    output: str
    seconds: float
    timed_out: bool
    left: tuple[int, ...] = ()  # processes that still ran a while after the job had ended by itself


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process to start; with a rank its lines are marked as horovodrun marks them, `[1]<stdout>:`."""

    command: Sequence[str]
    env: Mapping[str, str]
    rank: int | None = None


class _Output:
    """Everything the processes print, in the order in which it came."""

    def __init__(self, echo: TextIO | None) -> None:
        self._echo, self._parts, self._lock, self._readers = echo, [], threading.Lock(), []  # type: ignore[var-annotated]

    def read(self, stream: IO[bytes], mark: str) -> None:
        reader = threading.Thread(target=self._pump, args=(stream, mark), daemon=True)
        self._readers.append(reader)
        reader.start()

    def text(self, patience_s: float) -> str:
        for reader in self._readers:
            reader.join(patience_s)
        with self._lock:
            return "".join(self._parts)

    def _pump(self, stream: IO[bytes], mark: str) -> None:
        # With a mark by whole lines, so that ranks do not write into each other's; otherwise as it comes.
        pieces = iter(stream.readline, b"") if mark else iter(lambda: os.read(stream.fileno(), 65536), b"")
        with stream:
            for piece in pieces:
                text = mark + piece.decode(errors="replace")
                with self._lock:
                    self._parts.append(text)
                    if self._echo is not None:
                        with contextlib.suppress(OSError, ValueError):
                            self._echo.write(text)
                            self._echo.flush()


def find_horovodrun(python: str) -> Path:
    """The horovodrun that belongs to this Python: the one beside it."""
    launcher = Path(python).parent / "horovodrun"  # not resolved: a virtual environment's python is a link elsewhere
    if not launcher.is_file():
        raise RuntimeError(
            f"expected horovodrun beside {python}, found none: install Horovod there (`hvd-hetero build-horovod`), "
            "or name the Python that has it"
        )
    return launcher


def run_together(
    processes: Sequence[Process],
    *,
    timeout_s: float,
    kill: Callable[[], None],
    find: Callable[[], Sequence[int]] = tuple,
    echo: TextIO | None = None,
) -> Finished:
    """What came of processes that stand and fall together; `kill` must end them all, and whatever they started, which
    `find` finds."""
    began = time.monotonic()
    left: Sequence[int] = ()
    output, ended, started = _Output(echo), queue.Queue(), []  # type: ignore[var-annotated]
    returncode, timed_out = 0, False
    try:
        for process in processes:
            popen = _start(process, output)
            started.append(popen)
            threading.Thread(target=lambda p=popen: ended.put(p.wait()), daemon=True).start()
        for _ in started:
            try:
                code = ended.get(timeout=max(0.0, began + timeout_s - time.monotonic()))
            except queue.Empty:
                returncode, timed_out = TIMED_OUT, True
                break
            if code != 0:
                returncode = code if code > 0 else 128 - code
                break
        seconds = time.monotonic() - began
        if returncode != 0:
            _ask_to_end(started)
        else:
            give_up = time.monotonic() + GRACE_S
            while (left := find()) and time.monotonic() < give_up:
                time.sleep(0.05)
    finally:
        kill()
    return Finished(returncode, output.text(GRACE_S), seconds, timed_out, tuple(left))


def _start(process: Process, output: _Output) -> subprocess.Popen[bytes]:
    marked = process.rank is not None
    popen = subprocess.Popen(
        list(process.command),
        env=dict(process.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if marked else subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in the terminal reaches us alone, and we decide how the job ends
    )
    for name, stream in (("stdout", popen.stdout), ("stderr", popen.stderr)):
        if stream is not None:
            output.read(stream, f"[{process.rank}]<{name}>:" if marked else "")
    return popen


def _ask_to_end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """A moment to end in good order: a launcher tells its ranks, a rank prints its last words."""
    for popen in started:
        if popen.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(popen.pid, signal.SIGTERM)
    give_up = time.monotonic() + GRACE_S
    while any(popen.poll() is None for popen in started) and time.monotonic() < give_up:
        time.sleep(0.02)
