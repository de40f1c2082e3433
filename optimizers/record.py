"""Writes what happens on one rank to the trace of the run, if there is a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.ladder import Move
from hvd_hetero.policy.partition import Bound
from hvd_hetero.policy.replan import Plan
from hvd_hetero.policy.route_choice import RouteChoice

from .step_timer import Entry


class Record:
    """Writes a balancer's events, plans and steps to a trace. Without a trace, every method does nothing.

    Args:
        trace: a writer of `hvd_hetero.trace`; None for no trace.
    """

    def __init__(self, trace: Any) -> None:
        self.start(trace)

    def start(self, trace: Any) -> None:
        """Writes to `trace` from now on; None: to none."""
        self.trace = trace
        self._told: deque[Plan] = deque(maxlen=8)  # plans written last; `plans` never gets more at once

    def event(self, kind: str, /, **fields: Any) -> None:
        if self.trace is not None:
            self.trace.event(kind, **fields)

    def flush(self) -> None:
        """Writes buffered records to the file, as a process may be killed once its work is done, as Ray's are."""
        if self.trace is not None:
            self.trace.flush()

    def limits(self, bound: Bound, micro_batch: int | None) -> None:
        """Records the bounds of this rank's share, and the most samples of one of its backward passes (None: any)."""
        self.event("limits", **asdict(bound), micro_batch=micro_batch)

    def plans(self, plans: Sequence[Plan]) -> None:
        """Records those of the plans that are not in the trace yet."""
        if self.trace is not None:
            for plan in plans:
                if plan not in self._told:
                    self._told.append(plan)
                    self.trace.plan(plan)

    def step(self, *, step: int, wait_s: float, bytes_sent: int, share: int) -> Callable[[Entry], None]:
        """Records a step that ends now, once its times are known: they may be read later, as of a GPU.

        Args:
            step: the global batch.
            wait_s: seconds that this rank waited for communication.
            bytes_sent: by this rank in the step.
            share: of this rank by the plan, in samples.

        Returns:
            a function to be called with the samples and times of the step, which writes the record.
        """
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

    def route(self, bucket: str, choice: RouteChoice) -> None:
        """Records the route that was chosen for a bucket."""
        self.event("route", bucket=bucket, **asdict(choice))

    def moved(self, move: Move, *, step: int) -> None:
        """Records that a rank takes part more, or less, from batch `step` on: see `policy.ladder`."""
        self.event("rung", step=step, **asdict(move))

    def waits(self, engine: Engine) -> None:
        """Records long waits in operations of `engine` from now on."""
        engine.hear_waits(self._waited)

    def _waited(self, **what: Any) -> None:
        self.event("wait", **what)
        self.flush()  # the process may never go on

    def ranks(self, engine: Engine, *, step: int) -> None:
        """Records this rank's number and how many ranks there are, after an elastic reset. The trace goes on in the
        file of the new number, as `go_back` says."""
        self.go_back(engine.rank)
        self.event("ranks", rank=engine.rank, size=engine.size, step=step)

    def go_back(self, rank: int) -> None:
        """Begins a new session in the file of `rank`: for readers, its steps replace those that were recorded before.
        Plans are written again."""
        if self.trace is not None:
            self.trace.restart(rank)
            self._told.clear()


def _nobody(entry: Entry) -> None:
    """Nothing is recorded."""
