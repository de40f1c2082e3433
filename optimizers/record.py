"""What a balancer and what belongs to it write to the trace of a run, where there is one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.algorithm import Choice
from hvd_hetero.policy.ladder import Move
from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.replan import Plan

from .timesheet import Entry


class Record:
    """Tells a trace what happens on this rank; without a trace, nobody."""

    def __init__(self, trace: Any) -> None:
        self.start(trace)

    def start(self, trace: Any) -> None:
        """This trace is told from here on."""
        self.trace = trace
        self._told: deque[Plan] = deque(maxlen=8)  # more than `plans` is ever told of at once

    def event(self, kind: str, /, **fields: Any) -> None:
        if self.trace is not None:
            self.trace.event(kind, **fields)

    def flush(self) -> None:
        """Writes what is known: a process may be killed without a word once its work is done, as Ray's are."""
        if self.trace is not None:
            self.trace.flush()

    def limits(self, bound: Bound, micro_batch: int | None) -> None:
        """What this rank's shares may be, and the most samples of one of its passes."""
        self.event("limits", **asdict(bound), micro_batch=micro_batch)

    def plans(self, plans: Sequence[Plan]) -> None:
        """Tells of those that it was not told yet."""
        if self.trace is not None:
            for plan in plans:
                if plan not in self._told:
                    self._told.append(plan)
                    self.trace.plan(plan)

    def step(self, *, step: int, wait_s: float, bytes_sent: int, share: int) -> Callable[[Entry], None]:
        """A step ends now; the rest of it is told to what this returns."""
        trace = self.trace
        if trace is None:
            return _nobody
        t_s = trace.now()

        def tell(entry: Entry) -> None:
            trace.step(
                step=step, samples=entry.samples, data_s=entry.data_s, compute_s=entry.compute_s, wait_s=wait_s,
                bytes=bytes_sent, share=share, extra_s=entry.extra_s, loading_s=entry.loading_s, t_s=t_s,
            )  # fmt: skip

        return tell

    def route(self, bucket: str, choice: Choice) -> None:
        self.event("route", bucket=bucket, **asdict(choice))

    def moved(self, move: Move, *, step: int) -> None:
        self.event("rung", step=step, **asdict(move))

    def waits(self, engine: Engine) -> None:
        """Tells of long waits from here on."""
        if self.trace is not None:
            engine.hear_waits(self._waited)

    def _waited(self, **what: Any) -> None:
        self.event("wait", **what)
        self.trace.flush()  # it may be the last word

    def ranks(self, engine: Engine, *, step: int) -> None:
        """The ranks are others now: nothing was told yet in this one's file."""
        if self.trace is not None:
            self.trace.restart(engine.rank)
            self.trace.event("ranks", rank=engine.rank, size=engine.size, step=step)
            self._told.clear()


def _nobody(entry: Entry) -> None:
    """Nothing is recorded."""
