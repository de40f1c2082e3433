"""Fills one rank's control vector for each exchange of gradients or merge, and takes in the sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.replan import Plan

from . import control
from .departure import Departure
from .horizon import DealingHorizon
from .link_monitor import LinkMonitor
from .noise import NoiseMeter
from .planner import Planner
from .step_timer import StepTimer


class Position(Protocol):
    """The position of a rank in the sequence of global batches."""

    step: int
    """Index of the global batch that this rank has begun last."""
    lookahead: int
    """The number of batches that this rank may deal (draw from its data) before training uses them."""


class Dialogue:
    """Sends one rank's measurements, plans and flags in its control vectors, and takes in those of all ranks.

    A balancer has one, and makes a new one after an elastic reset. Optimizers call `outgoing` right before they send
    gradients, and `incoming` with the sum that comes back.

    Args:
        engine: the ranks that exchange gradients.
        position: the position of this rank in the sequence of global batches; it is read anew at each exchange.
        planner: rank 0's announces plans; all ranks' accept them.
        step_timer: this rank's measurements.
        departure: failures, and the flags of ranks that leave or ask to stop.
        replans: whether shares may change.
        entered: samples of a global batch, for `entered` until the first exchange.
        told: is called with each new plan.

    Attributes:
        horizon: how far this rank has dealt batches, and may deal on.
        links: watches whether links have changed.
        entered: samples of a global batch over all ranks, as reported in the last exchange that leads.
        steps: updates of the model that the last such exchange stands for: 1, or, in local SGD, the number of updates
            that the foremost rank has made since the merge before.
        staleness: staleness of this rank's model in the last merge, in merges; local SGD sets it.
        mean_staleness: the mean of it over all ranks, the same on all of them.
    """

    def __init__(
        self,
        engine: Engine,
        position: Position,
        *,
        planner: Planner,
        step_timer: StepTimer,
        departure: Departure,
        replans: bool,
        entered: float,
        told: Callable[[Plan], None],
    ) -> None:
        self._engine, self._position = engine, position
        self._planner, self._step_timer, self._departure = planner, step_timer, departure
        self._replans, self._told = replans, told
        self._said: dict[str, Any] = {}  # what `outgoing` sent last, for `outgoing_in_advance` to repeat
        self._listeners: list[Callable[[], None]] = []
        self.entered, self.steps, self.staleness, self.mean_staleness = entered, 1, 0.0, 0.0
        self.horizon, self.links = DealingHorizon(position.step), LinkMonitor()
        engine.on_reset_begin(self.unheard)

    def restart(self) -> None:
        """Goes on from another global batch, after a state was loaded; gives up exchanges under way."""
        before, self.horizon = self.horizon, DealingHorizon(self._position.step)
        before.lift()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Makes `listener` be called after each exchange that leads. The attributes `entered`, `steps` and
        `mean_staleness` are then the same on all ranks."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Makes `listener` be called no more, and no longer keeps it alive."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    # To the others --------------------------------------------------------------------------------------------------

    def outgoing(
        self,
        *,
        leads: bool,
        count: float,
        measured: tuple[float, float] | None = None,
        noise: NoiseMeter | None = None,
        ahead: int = 0,
        answers: int = 1,
        comparison: control.ParameterComparison | None = None,
        batch: int | None = None,
        origin: int | None = None,
        lays_out: bool = False,
        chooses: bool = False,
    ) -> list[float]:
        """Returns this rank's control vector for an exchange; see `control`.

        If the exchange leads, dealing stops at what the vector says, until `incoming` was called `answers` times.

        Args:
            leads: whether the vector carries measurements, plans and staleness.
            count: this rank's loss terms; in a merge, its samples.
            measured: samples per batch of this rank, and seconds of compute per batch; None: those of the last
                step, if the exchange leads.
            noise: the norms of the last gradient, if they are sent.
            ahead: how many further batches this rank may begin before it takes in the result of this exchange.
            answers: exchanges that end before this rank sends its next own vector. More than 1 in a merge after which
                it misses some: see `outgoing_in_advance`.
            comparison: the hash of the parameters, if they are compared.
            batch: index of this rank's global batch, where all ranks have to be at the same one.
            origin: a number that stands for where in its epoch the loader dealt that batch.
            lays_out: whether this rank asks all to lay out their buckets anew.
            chooses: whether this rank asks all to choose anew how buckets travel.
        """
        samples, seconds = measured or (self._step_timer.reported if leads else (0.0, 0.0))
        dealt_ahead = 0
        if leads:
            position = self._position
            dealt_ahead = self.horizon.said(position.step, lookahead=position.lookahead, ahead=ahead, answers=answers)
            self._said = {
                "samples": samples, "dealt_ahead": dealt_ahead, "staleness": self.staleness,
                "loading_s": self._step_timer.loading_s,
            }  # fmt: skip
        return control.pack(
            ranks=self._engine.size,
            rank=self._engine.rank,
            count=count,
            compute_s=seconds,
            loading_s=self._step_timer.loading_s if leads or measured else 0.0,  # `Report.busy_s` needs both times
            samples=samples,
            dealt_ahead=dealt_ahead,
            staleness=self.staleness if leads else 0.0,
            failed=self._departure.failed,
            leaves=self._departure.leaving.said,
            stops=self._departure.stopping.said,
            lays_out=lays_out,
            chooses=chooses,
            comparison=comparison,
            stop_sums=self._step_timer.take_stops() if leads else None,
            announcement=self._planner.announcement if leads and self._engine.rank == 0 else None,
            norms=None if noise is None else noise.outgoing(),
            batch=batch,
            origin=origin,
        )

    def outgoing_in_advance(self) -> list[float]:
        """Returns the control vector for a merge that this rank misses, sent ahead of time.

        It repeats samples, batches dealt ahead, staleness and loading time of the last `outgoing` that led.
        """
        return control.pack(
            ranks=self._engine.size, rank=self._engine.rank, count=0.0, compute_s=0.0, failed=False, announcement=None,
            **self._said,
        )  # fmt: skip

    # From all -------------------------------------------------------------------------------------------------------

    def incoming(
        self,
        report: control.Report,
        *,
        leads: bool,
        noise: NoiseMeter | None = None,
        step: int | None = None,
        ahead: int = 0,
        steps: int = 1,
    ) -> None:
        """Takes in the measurements, plan, flags and failures of all ranks.

        Args:
            report: the sum of all ranks' control vectors, unpacked.
            leads: whether they carry measurements, plans and staleness.
            noise: takes in the norms of the last gradient, if they were sent.
            step: in a merge, the global batch of the foremost rank when it sent its vector; None: all ranks are at the
                batch of `position`. A new plan holds only for batches beyond `step + ahead`.
            ahead: how many batches a rank may begin after sending its vector, before it takes in this.
            steps: the attribute `steps`.

        Raises:
            PeerError, Exception: a rank has failed: see `Departure.hear_failed`.
        """
        together = step is None
        step = self._position.step if step is None else step
        if leads:
            self._hear_plan(report, step, ahead)
        self.hear_failed(report)
        if leads:
            self.entered, self.steps = sum(report.samples) or self.entered, steps
            self.mean_staleness = report.staleness
            self._departure.leaving.hear(report.leaving, step + ahead)
            self._departure.stopping.hear(report.stopping, step + ahead)
        if noise is not None:
            noise.incoming(report.norms, self.entered)
        if leads:
            self._hear_speeds(report, step, together=together)
            for listener in self._listeners:
                listener()

    def hear_failed(self, report: control.Report) -> None:
        """Raises if a rank could not go on. Merges of fragments other than the first call it without `incoming`.

        Raises:
            PeerError, Exception: see `Departure.hear_failed`.
        """
        if report.failed:
            self.unheard()  # no result of another exchange will be taken in
            ranks = [self._engine.ranks[rank] for rank in report.failed]
            if self._engine.rank not in report.failed:
                self._engine.end_after(ranks)
            self._departure.hear_failed(ranks, self._position.step)

    def _hear_plan(self, report: control.Report, step: int, ahead: int) -> None:
        """Takes in a plan, if the exchange brought one, and lets dealing go on. The plan holds for batches beyond the
        last one that any rank may have dealt."""
        with self.horizon.heard():
            if report.announcement is not None:
                dealt_ahead = ahead + max(report.dealt_ahead)
                plan = self._planner.accept(report.announcement, step, dealt_ahead=dealt_ahead)
                if plan is not None:
                    self._told(plan)

    def _hear_speeds(self, report: control.Report, step: int, *, together: bool) -> None:
        """Takes in each rank's samples and times for the batch before `step`; rank 0 looks whether a new plan pays.
        `together`: all ranks are at the same batch, so that the time of this rank's step is that of all."""
        planner, busy_s, dealt_ahead = self._planner, report.busy_s, max(report.dealt_ahead)
        planner.observe(step - 1, report.samples, report.compute_s, report.loading_s, dealt_ahead=dealt_ahead)
        planner.steadiness.hear(step - 1, report.stop_sums)
        if planner.strategy_selector is not None:
            whole_s = self._step_timer.last_step_s if together else None
            planner.strategy_selector.hear(busy_s=busy_s, step_s=whole_s)
        self.links.hear(step, busy_s=busy_s, together=together)
        looks = self._engine.rank == 0 and (self._replans or planner.strategy_selector is not None)
        if report.announcement is None and looks:
            with self._step_timer.aside():
                planner.look(step, measured_step_s=self._step_timer.usual_step_s, dealt_ahead=dealt_ahead)

    def unheard(self) -> None:
        """Lets dealing go on after an exchange that failed, whose result will never come."""
        self.horizon.lift()
