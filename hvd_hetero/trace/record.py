"""Writes the record of a run: one file of JSON lines per rank in the run's folder, such as `rank-00003.jsonl`.

The first line is a header that names the fields of a step. A step is an array in that order, all else is an object:

    {"format": 1, "rank": 3, "host": "b", "fields": ["step", "t_s", ...]}
    [12,31.06250,64,0.0012,0.1467,0.0034,1884160,64]
    {"plan": {"version": 1, "step": 14, "shares": [32, 16, 8, 8], ...}, "t_s": 31.07}
    {"event": "loss is not finite", "t_s": 40.2, "fields": {"loss": "nan"}}
    {"dropped": 17, "t_s": 52.0}

Training goes on whatever happens to the file: lines that cannot be written are dropped, and their number is recorded.
If the file exists (a resumed run), it is continued with another header.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import math
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hvd_hetero.engine import script
from hvd_hetero.policy.replan import Plan

from .entry import Step

FORMAT = 1
FIELDS = Step._fields
LINE = "[%d,%.5f,%d,%.5g,%.5g,%.5g,%d,%d,%.4g,%.4g]\n"
KEPT_LINES = 4096            # at most so many lines wait in memory for the next flush
MOST_BYTES = 1 << 28        # the largest file of a rank: some millions of steps
ROOM_TO_END_BYTES = 256      # kept free in a bounded file for the line with the number of dropped ones


def file_name(rank: int) -> str:
    """The name of a rank's file in the folder of the run."""
    return f"rank-{rank:05d}.jsonl"


def _json(value: object) -> str:
    """`value` as JSON text; objects that JSON cannot hold are written as their `repr`."""
    try:
        return json.dumps(value, default=repr, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(repr(value))


def trace_of(folder: str | os.PathLike[str] | None, *, rank: int, clock: Callable[[], float],
             host: str = "") -> Trace | None:
    """Opens this rank's trace in the run's `folder`, to be closed when the process ends; None without a folder."""
    if folder is None:
        return None
    trace = Trace(folder, rank=rank, clock=clock, host=host, max_bytes=MOST_BYTES)
    atexit.register(functools.partial(_close, weakref.ref(trace)))
    return trace


def _close(trace: weakref.ref[Trace]) -> None:
    if (found := trace()) is not None:
        found.close()


class Trace:
    """Writes one rank's record of a run, buffered in memory and flushed about every `flush_every_s` seconds.

    A balancer's `Record` calls it. Calls from several threads are allowed.

    Args:
        folder: the run's folder, created if missing; the same for all ranks.
        rank: the rank whose record this is.
        clock: returns seconds since the epoch; called once per entry. Not those since the host was started: another
            process on another host may continue the file.
        host: the name of the rank's host, for readers of reports.
        flush_every_s: seconds of the record that may be lost in a crash.
        max_bytes: the size that the file may have; what goes beyond is dropped and counted. Steps use at most seven
            eighths of it, the rest is for plans and events. None: no limit.

    Attributes:
        path: the present file.
        dropped: number of entries dropped so far.

    Raises:
        ValueError: `rank` or `flush_every_s` is negative, or `max_bytes` less than 4096.
    """

    def __init__(self, folder: str | os.PathLike[str], *, rank: int, clock: Callable[[], float],
                 host: str = "", flush_every_s: float = 1.0, max_bytes: int | None = None) -> None:
        if rank < 0 or not flush_every_s >= 0.0:
            raise ValueError(f"rank and flush_every_s: expected 0 or more. Received: {rank} and {flush_every_s}.")
        if max_bytes is not None and max_bytes < 4096:
            raise ValueError(f"max_bytes: expected at least 4096, or None. Received: {max_bytes}.")
        self._folder = os.path.abspath(folder)
        self.path = os.path.join(self._folder, file_name(rank))
        self.dropped = 0
        self._told = 0       # number of dropped lines that the file tells of
        self._clock, self._host, self._flush_every_s = clock, host, flush_every_s
        self._most = math.inf if max_bytes is None else max_bytes
        self._used = 0       # bytes in the file and in the buffer
        self._file: io.FileIO | None = None
        self._torn = False   # whether the file ends in the middle of a line
        self._closed = self._warned = False
        self._lock = threading.Lock()
        self._last_flush_s = clock()
        self._header = self._header_of(rank)
        self._lines: list[str] = []
        self.flush()

    def _header_of(self, rank: int) -> str:
        """The header line of a session that begins now."""
        header = {"format": FORMAT, "rank": rank, "host": self._host, "t_s": self._last_flush_s, "fields": FIELDS}
        return json.dumps(header) + "\n"

    def restart(self, rank: int) -> None:
        """Begins a new session in the file of `rank`, which this process is after an elastic reset.

        The run goes on from its last commit, so for readers the new steps replace those recorded since.
        """
        self.flush()
        with self._lock:
            path = os.path.join(self._folder, file_name(rank))
            if path != self.path and self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file, self._used = None, 0
            self.path, self._header = path, self._header_of(rank)
            if self._file is not None:
                self._used += len(self._header)
                if self._used > self._most - ROOM_TO_END_BYTES:  # no room is left, not even for the header
                    self._header, self._used = "", int(self._most)
        self.flush()

    def step(self, *, step: int, samples: int, data_s: float = 0.0, compute_s: float = 0.0, wait_s: float = 0.0,
             bytes: int = 0, share: int = 0, extra_s: float = 0.0, loading_s: float = 0.0,
             t_s: float | None = None) -> None:
        """Records one step.

        Args:
            step: index of its global batch.
            samples, share: this rank's samples, and its share by the plan.
            data_s, compute_s: seconds waited for data, and computed.
            wait_s: seconds waited for the exchange, and for others in what the script sends itself since the last step.
            bytes: bytes that this rank sent.
            extra_s: seconds that its samples take beyond `compute_s` in the long run, which plans add: loading them in
                the training process, what is done after each step, serving the communication, and a CPU quota.
            loading_s: the least seconds that loading its samples takes while the rank computes; 0: not known.
            t_s: when the step ended, in seconds since the epoch; None: now.
        """
        now = self._clock() if t_s is None else t_s
        line = LINE % (step, now, samples, data_s, compute_s, wait_s, bytes, share, extra_s, loading_s)
        if "n" in line:      # nan or inf, which JSON does not know
            line = line.replace("nan", "null").replace("-inf", "null").replace("inf", "null")
        self._add(line, now, room=0.875)

    def now(self) -> float:
        """The present time, in seconds since the epoch."""
        return self._clock()

    def plan(self, plan: Plan) -> None:
        """Records a new plan."""
        now = self._clock()
        self._add(json.dumps({"plan": asdict(plan), "t_s": now}, default=repr) + "\n", now)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Records an event of this kind. Values that JSON cannot hold are recorded as their `repr`."""
        now = self._clock()
        written = ", ".join(f"{json.dumps(name)}: {_json(value)}" for name, value in fields.items())
        self._add(f'{{"event": {json.dumps(kind)}, "t_s": {now}, "fields": {{{written}}}}}\n', now)

    def flush(self) -> None:
        """Writes the buffered lines. Lines that the file does not take are dropped and counted, with one warning."""
        if not self._closed:
            self._flush()

    def _flush(self) -> None:
        """Writes the header once, then the buffered lines and how many lines were dropped since this was last told."""
        with self._lock:
            lines, self._lines = self._lines, []
            dropped, telling = self.dropped, 0
            if dropped > self._told and (self._closed or (lines and self._used < self._most - ROOM_TO_END_BYTES)):
                lines.append(json.dumps({"dropped": dropped - self._told, "t_s": self._last_flush_s}) + "\n")
                self._used, telling = self._used + len(lines[-1]), 1
            try:
                self._write("".join([self._header, *lines]).encode())
                self._header, self._told = "", dropped if telling else self._told
            except OSError as error:
                self.dropped += len(lines) - telling
                if not self._warned:
                    script.warn(f"Expected to write the trace to {self.path}. Received: {error}. Training goes on; "
                                "what cannot be written is dropped.", RuntimeWarning)
                self._warned = True

    def close(self) -> None:
        """Writes the buffered lines and closes the file. What is recorded afterwards is dropped."""
        if self._closed:
            return
        self._closed = True
        self._flush()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):  # its balancer is gone
            self.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add(self, line: str, now: float, room: float = 1.0) -> None:
        """Buffers a line, unless more than the part `room` of the file would be used; flushes if it is time."""
        with self._lock:
            if self._closed or self._used + len(line) > room * self._most - ROOM_TO_END_BYTES:
                self.dropped += 1
            else:
                self._lines.append(line)
                self._used += len(line)
        if not 0.0 <= now - self._last_flush_s < self._flush_every_s or len(self._lines) >= KEPT_LINES:
            self._last_flush_s = now
            if not self._closed:
                self.flush()

    def _write(self, data: bytes) -> None:
        """Appends `data` to the file, on a new line if the last write broke off within one. Raises OSError."""
        if not data:
            return
        if self._file is None:
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            file = io.FileIO(self.path, "ab")      # unbuffered: a failed write leaves nothing behind in it
            if file.tell() + len(self._header) > self._most - ROOM_TO_END_BYTES:
                file.close()
                raise OSError(f"a file of {self._most} bytes, max_bytes, from earlier runs")
            self._file, self._torn = file, file.tell() > 0
            self._used += file.tell() + len(self._header)
        view = memoryview(b"\n" + data if self._torn else data)
        while view:
            self._torn = True
            view = view[self._file.write(view):]
        self._torn = False
