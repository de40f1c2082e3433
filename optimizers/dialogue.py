"""What one rank tells the others with each exchange of gradients, and what it takes in of what all of them said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.replan import Plan

from . import control
from .departure import Departure
from .horizon import Horizon
from .links import Links
from .noise import NoiseMeter
from .planner import Planner
from .timesheet import Timesheet


class Place(Protocol):
    """The position of a rank in the sequence of global batches."""

    step: int
    """Index of the global batch begun last."""
    lookahead: int
    """Batches that this rank may deal before they are used."""


class Dialogue:
    """One rank's part of it, as long as the ranks are these.

    Args:
        place: where this rank is, at any time.
        replans: whether shares may change.
        entered: samples of a global batch, until one is heard of.
        told: is called with each new plan.

    Attributes:
        horizon: how far this rank has dealt.
        links: whether they have changed.
        entered: samples of the last global batch that all have heard of.
        steps: updates of the model that the last exchange was about: those of the foremost rank, where ranks make
            steps apart.
        staleness: of this rank in the last merge, in merges; a strategy that merges late sets it.
        mean_staleness: over all ranks, as all of them have heard it.
    """

    def __init__(
        self,
        engine: Engine,
        place: Place,
        *,
        planner: Planner,
        timesheet: Timesheet,
        departure: Departure,
        replans: bool,
        entered: float,
        told: Callable[[Plan], None],
    ) -> None:
        self._engine, self._place = engine, place
        self._planner, self._timesheet, self._departure = planner, timesheet, departure
        self._replans, self._told = replans, told
        self._said: dict[str, Any] = {}  # in the last exchange, of what is said again where there is nothing new
        self._listeners: list[Callable[[], None]] = []
        self.entered, self.steps, self.staleness, self.mean_staleness = entered, 1, 0.0, 0.0
        self.horizon, self.links = Horizon(place.step), Links()
        engine.on_change(self.unheard)

    def restart(self) -> None:
        """Goes on from another batch: no answer comes to what was said before it."""
        before, self.horizon = self.horizon, Horizon(self._place.step)
        before.unheard()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after each exchange that leads: what it reads here is then the same on all ranks."""
        if listener not in self._listeners:
            self._listeners.append(listener)

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
        look: control.Look | None = None,
        batch: int | None = None,
        origin: int | None = None,
        lays_out: bool = False,
        chooses: bool = False,
    ) -> list[float]:
        """This rank's control vector. Before it hears the answer – or so many `answers`, since it says the next ones
        in advance – it begins at most `ahead` further batches. `measured`: samples and seconds of its batches, where
        they are not those of the last one. `batch`: the one that it is at, where ranks have to be at the same one;
        `origin`: where that was dealt. `lays_out`, `chooses`: whether it wants all to lay out their buckets anew, or to
        choose anew how these travel."""
        samples, seconds = measured or (self._timesheet.reported if leads else (0.0, 0.0))
        dealt_ahead = 0
        if leads:
            place = self._place
            dealt_ahead = self.horizon.said(place.step, lookahead=place.lookahead, ahead=ahead, answers=answers)
            self._said = {
                "samples": samples, "dealt_ahead": dealt_ahead, "staleness": self.staleness,
                "loading_s": self._timesheet.loading_s,
            }  # fmt: skip
        return control.pack(
            ranks=self._engine.size,
            rank=self._engine.rank,
            count=count,
            compute_s=seconds,
            loading_s=self._timesheet.loading_s if leads or measured else 0.0,  # what was measured needs it
            samples=samples,
            dealt_ahead=dealt_ahead,
            staleness=self.staleness if leads else 0.0,
            failed=self._departure.failed,
            leaves=self._departure.leaving.said,
            stops=self._departure.stopping.said,
            lays_out=lays_out,
            chooses=chooses,
            look=look,
            ran=self._timesheet.take_stops() if leads else None,
            announcement=self._planner.announcement if leads and self._engine.rank == 0 else None,
            norms=None if noise is None else noise.outgoing(),
            batch=batch,
            origin=origin,
        )

    def outgoing_in_advance(self) -> list[float]:
        """The control vector of a rank that has nothing to say beyond what it said last."""
        return control.pack(
            ranks=self._engine.size, rank=self._engine.rank, count=0.0, compute_s=0.0, failed=False, announcement=None,
            **self._said,
        )  # fmt: skip

    # From all -------------------------------------------------------------------------------------------------------

    def incoming(
        self,
        total: Sequence[float],
        *,
        leads: bool,
        noise: NoiseMeter | None = None,
        step: int | None = None,
        ahead: int = 0,
        steps: int = 1,
    ) -> control.Report:
        """What all ranks said, once it is taken in: measurements, a plan, a failure.

        Where ranks are not all at the same batch, `step` is that of the foremost one when it spoke, and no rank begins
        more than `ahead` further ones before it hears this: a plan holds for later ones. `steps`: see the attribute.
        """
        together = step is None
        step = self._place.step if step is None else step
        report = control.unpack(total, ranks=self._engine.size)
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
        return report

    def hear_failed(self, report: control.Report) -> None:
        """Takes in who could not go on, also from what else ranks exchange.

        Raises:
            PeerError, Exception: see `Departure.hear_failed`.
        """
        if report.failed:
            self.unheard()  # no further answer will be taken in
            self._departure.hear_failed([self._engine.ranks[rank] for rank in report.failed], self._place.step)

    def _hear_plan(self, report: control.Report, step: int, ahead: int) -> None:
        """Takes in a plan, if there is one, and lets dealing go on."""
        with self.horizon.heard():
            if report.announcement is not None:
                dealt_ahead = ahead + max(report.dealt_ahead)
                plan = self._planner.accept(report.announcement, step, dealt_ahead=dealt_ahead)
                if plan is not None:
                    self._told(plan)

    def _hear_speeds(self, report: control.Report, step: int, *, together: bool) -> None:
        """Takes in what each rank needed; rank 0 looks whether another plan pays."""
        planner, busy_s = self._planner, report.busy_s
        planner.observe(step - 1, report.samples, report.compute_s, report.loading_s)
        planner.steadiness.hear(step - 1, report.ran)
        if planner.selection is not None:
            whole_s = self._timesheet.last_step_s if together else None
            planner.selection.hear(busy_s=busy_s, step_s=whole_s)
        self.links.hear(step, busy_s=busy_s, together=together)
        looks = self._engine.rank == 0 and (self._replans or planner.selection is not None)
        if report.announcement is None and looks:
            with self._timesheet.aside():
                planner.look(step, measured_step_s=self._timesheet.usual_step_s)

    def unheard(self) -> None:
        """Says that the exchange failed: no answer will come."""
        self.horizon.unheard()
