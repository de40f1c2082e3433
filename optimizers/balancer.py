"""The balancer: who takes how many samples of each global batch, measured and re-planned as the job runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from hvd_hetero.engine.port import Engine
from hvd_hetero.policy.ladder import Move
from hvd_hetero.policy.replan import Plan, ReplanRule

from . import control
from .agreement import Terms, agree
from .attachment import Attached, withdraw
from .departure import Departure
from .horizon import Horizon
from .ladder import Ladder
from .meter import Stopwatch
from .noise import NoiseMeter
from .planner import Planner
from .timesheet import Timesheet


class Balancer:
    """Shares of a global batch in proportion to what each rank can do, from measured compute times.

    Constructing one is a collective call, with the same arguments on all ranks where they concern all (a difference
    raises on every rank, naming it).

    Args:
        engine: the ranks that share the global batch.
        global_batch_size: samples of one optimizer step over all ranks; it never changes, so neither does what is
            learned, nor the right learning rate.
        min_share, max_share: bounds for *this* rank, in samples; `max_share` is what its memory holds.
        quantum: this rank's share is a multiple of it.
        max_micro_batch: the most samples of one forward and backward pass on this rank, for `micro_batches`.
        shares: the first plan (default: equal shares).
        adaptive: False keeps the first plan for good.
        rule: when a new plan pays.
        stopwatch: measures compute.

    Raises:
        ValueError: on every rank, when the arguments are wrong on any rank or differ between ranks.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        global_batch_size: int,
        min_share: int = 1,
        max_share: int | None = None,
        quantum: int = 1,
        max_micro_batch: int | None = None,
        shares: Sequence[int] | None = None,
        adaptive: bool = True,
        rule: ReplanRule | None = None,
        stopwatch: Stopwatch | None = None,
        trace: Any = None,
    ) -> None:
        self.engine = engine
        self._asked = Terms(
            global_batch_size=global_batch_size,
            min_share=min_share,
            max_share=max_share,
            quantum=quantum,
            max_micro_batch=max_micro_batch,
            shares=None if shares is None else tuple(shares),
            adaptive=adaptive,
            identity=engine.identity,
        )
        self._rule = rule or ReplanRule()
        self.timesheet = Timesheet(stopwatch)
        self.trace = trace
        self.lookahead = 0  # batches that this rank may deal before they are used
        self.step = -1  # index of the global batch begun last, counted over all epochs
        self.dependents: list[Any] = []  # what else keeps a state as the job goes on: samplers, learning rates
        self.departure = Departure()
        self._settle()
        if trace is not None:
            trace.plan(self.plan)
            engine.hear_waits(self._waited)
        engine.remember(self.rebuild)

    def _settle(self) -> None:
        """Begins on the ranks that there are. A collective call."""
        self.rank, self.size = self.engine.rank, self.engine.size
        self.name = self.engine.unique("balancer")
        self.terms = agree(self.engine, self._asked, name=f"hvd_hetero.{self.name}.terms")
        self.adaptive = self.terms.adaptive and self.size > 1
        self.planner = Planner(self.terms, self._rule)
        self._horizon = Horizon(self.step)
        self._said: dict[str, Any] = {}  # in the last exchange, of what is said again where there is nothing new
        self.ladder = Ladder(self.plan.shares, tell=self._moved)
        self.count_now: float | None = None
        self.last_pass = True  # False while micro-batches are to follow
        self._exchanges: list[Attached] = []
        self.keepers: list[Any] = []  # what keeps something back from step to step: see `Weighing`
        self._listeners: list[Callable[[], None]] = []
        self.timesheet.restart()
        self.departure.restart()
        self.entered = float(self.global_batch_size)  # samples of the last global batch that all have heard of
        self.staleness = 0.0  # of this rank in the last merge, in merges; a strategy that merges late sets it
        self.mean_staleness = 0.0  # over all ranks, as all of them have heard it

    def rebuild(self) -> None:
        """Goes on with the ranks that there are now: those known keep their measurements. A collective call."""
        state = self.state_dict()
        if self._asked.shares is not None and len(self._asked.shares) != self.engine.size:
            self._asked = replace(self._asked, shares=None)
        self._settle()
        self.load_state_dict(state)
        if self.trace is not None:
            self.trace.restart(self.rank)
            self.trace.event("ranks", rank=self.rank, size=self.size, step=self.step)
            self.trace.plan(self.plan)

    def _moved(self, move: Move) -> None:
        if self.trace is not None:
            self.trace.event("rung", step=self.step, **asdict(move))

    def _waited(self, **what: Any) -> None:
        self.trace.event("wait", **what)
        self.trace.flush()  # it may be the last word

    # What a script asks ---------------------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._asked.global_batch_size

    @property
    def plan(self) -> Plan:
        """The plan of the batch begun last."""
        return self.planner.plan_at(max(self.step, 0))

    @property
    def plans(self) -> Sequence[Plan]:
        """All plans so far, and one that is yet to hold, oldest first."""
        return tuple(self.planner.plans)

    @property
    def share(self) -> int:
        """This rank's samples of the next global batch."""
        return self.plan_at(self.step + 1).shares[self.rank]

    def plan_at(self, step: int) -> Plan:
        """The plan that holds for global batch `step`."""
        return self.planner.plan_at(step)

    def deal(self, step: int) -> Plan:
        """The plan for global batch `step`, which is being dealt: no later plan will change it. See `Horizon`."""
        with self._horizon.reaching(step):
            return self.plan_at(step)

    def begin(self, samples: int) -> None:
        """Starts a global batch of which this rank has `samples`; `BalancedDataLoader` calls it for each batch."""
        self._begin(samples)
        self.timesheet.run()

    def _begin(self, samples: int) -> None:
        if samples < 0:
            raise ValueError(f"samples: expected 0 or more. Received: {samples}.")
        self.step += 1
        self.timesheet.begin(samples)
        self.last_pass = True
        for exchange in self._exchanges:
            exchange.on_begin()
        self._set_count(float(samples))

    def end_epoch(self) -> None:
        """Says that the samples of an epoch are used up; `BalancedDataLoader` does."""
        for exchange in self._exchanges:
            exchange.on_epoch_end()

    def begin_unseen(self) -> bool:
        """Whether a batch begins that nothing announced: never, for a balancer that is told of its batches."""
        return False

    def count(self, terms: float) -> None:
        """Says, before `backward()`, over how many loss terms this rank's loss is a mean.

        Needed only when that is not the number of samples: unmasked tokens, for instance.
        """
        terms = float(terms)
        if not 0 <= terms < float("inf"):
            raise ValueError(f"terms: expected a number of loss terms, 0 or more. Received: {terms}.")
        self._set_count(terms)

    def _set_count(self, terms: float) -> None:
        for exchange in self._exchanges:
            exchange.on_count(terms)
        self.count_now = terms
        if not self.timesheet.running:
            self.timesheet.run()

    def fail(self) -> None:
        """Tells all ranks, in the exchange they wait in, that this one cannot go on; they raise `PeerError`."""
        self.departure.fail()
        self.step += 1
        withdraw(self._exchanges, self.timesheet.usual_step_s or 0.0)
        self.unheard()

    def stop(self, error: Exception) -> None:
        """Ends the job at this rank's next exchange: it raises `error` there, and the others `PeerError`.

        For who finds an error while the rank still trains on what was loaded before; `fail` is for the rank itself.
        """
        self.departure.fail(error)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Ranks that were told to end, from a step on by which all ranks have heard it; the same on all ranks."""
        return self.departure.leaving(self.step)

    def leave(self) -> None:
        """Tells all ranks, with the next exchange, that this one was told to end: see `leaving`."""
        self.departure.leaves = True

    # What the exchange asks -----------------------------------------------------------------------------------------

    def attach(self, exchange: Attached) -> int:
        """The number of exchanges attached before; number 0 leads: it carries measurements and plans."""
        self._exchanges.append(exchange)
        return len(self._exchanges) - 1

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after each exchange that leads: what it reads here is then the same on all ranks."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def measure_with(self, stopwatch: Stopwatch) -> None:
        """Measures compute with what suits the device, unless the constructor was told."""
        self.timesheet.measure_with(stopwatch)

    def pause(self) -> None:
        """Compute ends (gradients are ready); what follows is waiting."""
        self.timesheet.pause()

    def resume(self) -> None:
        """Compute goes on: the update, or another backward pass."""
        self.timesheet.run()

    def outgoing(
        self,
        *,
        leads: bool,
        count: float,
        noise: NoiseMeter | None = None,
        ahead: int = 0,
        answers: int = 1,
        look: control.Look | None = None,
    ) -> list[float]:
        """This rank's control vector. Before it hears the answer – or so many `answers`, since it says the next ones
        in advance – it begins at most `ahead` further batches."""
        samples, seconds = self.timesheet.reported if leads else (0.0, 0.0)
        dealt_ahead = 0
        if leads:
            dealt_ahead = self._horizon.said(self.step, lookahead=self.lookahead, ahead=ahead, answers=answers)
            self._said = {"samples": samples, "dealt_ahead": dealt_ahead, "staleness": self.staleness}
        return control.pack(
            ranks=self.size,
            rank=self.rank,
            count=count,
            compute_s=seconds,
            samples=samples,
            dealt_ahead=dealt_ahead,
            staleness=self.staleness if leads else 0.0,
            failed=self.departure.failed,
            leaves=self.departure.leaves,
            look=look,
            ran=self.timesheet.take_stops() if leads else None,
            announcement=self.planner.announcement if leads and self.rank == 0 else None,
            norms=None if noise is None else noise.outgoing(),
        )

    def outgoing_in_advance(self) -> list[float]:
        """The control vector of a rank that has nothing to say beyond what it said last."""
        return control.pack(
            ranks=self.size, rank=self.rank, count=0.0, compute_s=0.0, failed=False, announcement=None, **self._said
        )

    def incoming(
        self,
        total: Sequence[float],
        *,
        leads: bool,
        noise: NoiseMeter | None = None,
        step: int | None = None,
        ahead: int = 0,
    ) -> control.Report:
        """What all ranks said, once it is taken in: measurements, a plan, a failure.

        Where ranks are not all at the same batch, `step` is that of the foremost one when it spoke, and no rank begins
        more than `ahead` further ones before it hears this: a plan holds for later ones.
        """
        together = step is None
        step = self.step if step is None else step
        report = control.unpack(total, ranks=self.size)
        if leads:
            self._hear(report, step, ahead)
        if report.failed:
            self.unheard()  # no further answer will be taken in
            self.departure.hear_failed([self.engine.ranks[rank] for rank in report.failed], self.step)
        if leads:
            self.entered, self.mean_staleness = sum(report.samples) or self.entered, report.staleness
            self.departure.hear_leaving(report.leaving, step + ahead)
        if noise is not None:
            noise.incoming(report.norms, self.entered)
        if not leads:
            return report
        self.planner.observe(step - 1, report.samples, report.compute_s)
        self.planner.steadiness.hear(step - 1, report.ran)
        if self.planner.selection is not None:
            whole_s = self.timesheet.last_step_s if together else None
            self.planner.selection.hear(compute_s=report.compute_s, step_s=whole_s)
        looks = self.rank == 0 and (self.adaptive or self.planner.selection is not None)
        if report.announcement is None and looks:
            self.planner.look(step, measured_step_s=self.timesheet.usual_step_s)
        for listener in self._listeners:
            listener()
        return report

    def _hear(self, report: control.Report, step: int, ahead: int) -> None:
        """Takes in a plan, if there is one, and lets dealing go on."""
        with self._horizon.heard():
            if report.announcement is not None:
                dealt_ahead = ahead + max(report.dealt_ahead)
                plan = self.planner.accept(report.announcement, step, dealt_ahead=dealt_ahead)
                if plan is None:
                    return
                if self.trace is not None:
                    self.trace.plan(plan)
                self.ladder.hear_shares(plan.shares, plan.reason)

    def unheard(self) -> None:
        """Says that the exchange failed: no answer will come."""
        self._horizon.unheard()

    def discard(self) -> None:
        """Says that the present step's time tells nothing of its samples: compilation was in it, for instance."""
        self.timesheet.discard()

    def finished(self, *, wait_s: float, bytes_sent: int) -> None:
        """Ends a step, after the update: its compute time goes out with the next gradient."""
        self.pause()
        entry = self.timesheet.end()
        if self.trace is not None:
            self.trace.step(
                step=self.step,
                samples=entry.samples,
                data_s=entry.data_s,
                compute_s=entry.compute_s,
                wait_s=wait_s,
                bytes=bytes_sent,
                share=self.plan.shares[self.rank],
            )
        self.resume()

    # State ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plans, measurements and the step, as plain numbers."""
        return {"global_batch_size": self.global_batch_size, "step": self.step, "planner": self.planner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`. On another number of ranks the plan starts anew; the step stays."""
        if state["global_batch_size"] != self.global_batch_size:
            raise ValueError(
                f"Expected the state of a balancer of global batch {self.global_batch_size}. Received: one of "
                f"{state['global_batch_size']}."
            )
        self.step = int(state["step"])
        self._horizon = Horizon(self.step)
        self.planner.load_state_dict(state["planner"], self.step)
        self.ladder = Ladder(self.planner.plans[-1].shares, tell=self._moved)
