"""The balancer: who takes how many samples of each global batch, measured and re-planned as the job runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_hetero.engine.environment import is_elastic
from hvd_hetero.engine.port import Engine
from hvd_hetero.engine.stopwatch import Stopwatch
from hvd_hetero.policy.ladder import Move
from hvd_hetero.policy.replan import Plan, ReplanRule

from .accumulated_gradients import AccumulatedGradients
from .agreement import BalancerArguments, agree, without_stale_shares
from .argument import check_state, check_whole, number_of
from .attachment import Exchanges
from .batch_order import BatchOrder
from .count_warnings import CountWarnings
from .departure import Departure, Flag
from .dialogue import Dialogue
from .ladder import Ladder
from .place import Places
from .planner import Planner
from .progress import BatchProgress
from .record import Record
from .stateful_parts import StatefulParts
from .step_timer import StepTimer
from .strategies import StrategyRegistry
from .unsent_state import UnsentState
from .unused_balancer import deals, ends

LOOK_CLOCK = time.perf_counter  # measures how long the planner's search for a better plan takes


class Balancer:
    """Splits each global batch into shares that all ranks compute in the same time, from measured step times.

    Constructing one is a collective call. `global_batch_size`, `shares`, `adaptive` and `rule` have to be the same on
    all ranks; otherwise all ranks raise, and the error names the difference.

    Args:
        engine: the ranks that share the global batch.
        global_batch_size: samples of one optimizer step over all ranks; it never changes, so what is learned and the
            right learning rate do not change either.
        min_share, max_share: bounds for *this* rank, in samples; `max_share` is what its memory holds.
        quantum: this rank's share is a multiple of it.
        max_micro_batch: the most samples of one forward and backward pass on this rank, for `micro_batches`.
        shares: the shares of the first plan, by rank (default: equal ones).
        adaptive: False keeps the first plan for good.
        rule: an `hvd.ReplanRule`, which decides when a new plan pays.
        stopwatch: measures compute; None: a wall clock, until an optimizer passes one that suits its device.
        trace: an object that records this rank's steps, plans and events; None for no record.

    Attributes:
        engine: the ranks that share the global batch.
        step: index of the global batch begun last, counted over all epochs; -1 before the first.
        lookahead: how many batches this rank may deal before they are used.
        origin: a number that stands for where in its epoch the loader dealt that batch; None: not told.

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
        self._asked = BalancerArguments(
            global_batch_size=global_batch_size,
            min_share=min_share,
            max_share=max_share,
            quantum=quantum,
            max_micro_batch=max_micro_batch,
            shares=tuple(shares) if isinstance(shares, Iterable) else shares,
            adaptive=adaptive,
            identity=engine.identity,
            kind=engine.kind,
            rule=ReplanRule() if rule is None else rule,
        )
        self.step_timer = StepTimer(
            stopwatch, serving_s=engine.serving_s, quota_cores=engine.quota_cores, crowding=engine.crowding,
            spins=engine.spins,
        )  # fmt: skip
        self.record = Record(trace)
        self.lookahead = 0
        self.step = -1
        self.origin: int | None = None
        self.batch_order = BatchOrder()
        self.count_warnings = CountWarnings()
        self.stateful_parts = StatefulParts()
        self.departure = Departure()
        self.strategies = StrategyRegistry()
        self._start(others=is_elastic())
        self._introduce()
        self.record.waits(engine)
        engine.during_waits(self.step_timer.waiting)
        engine.on_reset_end(self.rebuild)

    def _start(self, *, others: bool) -> None:
        """Makes all that depends on which ranks there are. A collective call.

        Args:
            others: whether they may be others than `shares` was given for, as in an elastic job.
        """
        self.rank, self.size = self.engine.rank, self.engine.size
        self.name = self.engine.unique("balancer")
        asked = without_stale_shares(self.engine, self._asked) if others else self._asked
        self.arguments = agree(self.engine, asked, name=f"hvd_hetero.{self.name}.terms")
        self.adaptive = self.arguments.adaptive and self.size > 1
        self.planner = Planner(self.arguments, clock=LOOK_CLOCK)
        self.ladder = Ladder(self.plan.shares, tell=self._moved)
        self.progress = BatchProgress()
        self.exchanges = Exchanges(self.begin_if_unannounced)
        self._wait_s, self._bytes_sent = 0.0, 0  # summed over the exchanges since the last step ended
        # By optimizer or tape: residuals, and gradients that are accumulated before an exchange over several batches.
        self.keepers = Places(lambda: UnsentState(messages={"samples": self.step_timer}))
        self.sums = Places(AccumulatedGradients)
        self.strategies.restart()
        self.step_timer.restart()
        self.departure.restart()
        self.dialogue = Dialogue(
            self.engine,
            self,
            planner=self.planner,
            step_timer=self.step_timer,
            departure=self.departure,
            replans=self.adaptive,
            entered=float(self.global_batch_size),
            told=self._hear,
        )

    def rebuild(self) -> None:
        """Goes on after an elastic reset. Ranks that were there before keep their measurements. A collective call."""
        state = self.state_dict()
        self._start(others=True)
        self._load(state)
        self.record.ranks(self.engine, step=self.step)
        self._introduce()

    def _introduce(self) -> None:
        """Tells the trace this rank's limits and the plans that hold now."""
        self.record.limits(self.arguments.bounds[self.rank], self.arguments.micro_caps[self.rank])
        self.record.plans(self.plans_ahead)

    def _hear(self, plan: Plan) -> None:
        """Passes a new plan, which all ranks have received, on to the trace and the ladder."""
        self.record.plans((plan,))
        self.ladder.hear_shares(plan.shares, plan.reason)

    def _moved(self, move: Move) -> None:
        self.record.moved(move, step=self.step)

    # What a script asks ---------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Any:
        """The object that records this rank's steps, plans and events; None for no record. What is no such object
        raises TypeError."""
        return self.record.trace

    @trace.setter
    def trace(self, trace: Any) -> None:
        if trace is not None and not hasattr(trace, "event"):
            raise TypeError(
                f"trace: expected an hvd_hetero.trace.Trace, or None. Received: {trace!r}. A folder is what "
                "Balancer(run=...) takes."
            )
        self.record.start(trace)
        self._introduce()

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self._asked.global_batch_size

    @property
    def plan(self) -> Plan:
        """The plan of the batch begun last: `shares`, `reason`, and with `strategy="auto"` the `strategy` chosen."""
        return self.planner.plan_at(self.step)

    @property
    def plans(self) -> Sequence[Plan]:
        """The plans of the last few thousand batches, oldest first; the last may be one that does not hold yet.

        Older ones are dropped, except the first of all, and those that gave a rank no more samples, or samples again. A
        trace has all.
        """
        return tuple(self.planner.plans)

    @property
    def plans_ahead(self) -> Sequence[Plan]:
        """The plan of the batch begun last, and those that follow it, if there are any."""
        return tuple(self.planner.plans[self.planner.plans.index(self.plan) :])

    @property
    def batch(self) -> int | None:
        """Index of the global batch begun last, for the check that all ranks exchange gradients of the same batch; None
        without such a check, where batches are not announced (`EqualWeights`)."""
        return self.step

    @property
    def share(self) -> int:
        """This rank's samples of the next global batch."""
        return self.plan_at(self.step + 1).shares[self.rank]

    @property
    def samples(self) -> int:
        """This rank's samples of the global batch begun last."""
        return self.progress.samples

    def __repr__(self) -> str:
        shares = ":".join(map(str, self.plan.shares))
        return f"Balancer(global_batch_size={self.global_batch_size}, shares={shares}, step={self.step})"

    def plan_at(self, step: int) -> Plan:
        """The plan that holds for global batch `step`."""
        return self.planner.plan_at(step)

    def deal(self, step: int) -> Plan:
        """Returns the plan for global batch `step`, whose samples are being dealt: no later plan will change it.

        May wait for an exchange under way to end, which may bring a new plan: see `DealingHorizon`.
        """
        deals(self)
        with self.dialogue.horizon.reaching(step):
            return self.plan_at(step)

    def begin(self, samples: int, *, whole: int | None = None) -> None:
        """Starts a global batch of which this rank has `samples`; `BalancedDataLoader` calls it for each batch.

        Args:
            whole: samples of the batch over all ranks; None: not known. Codecs with error feedback scale by it what
                they have kept back, and estimate it otherwise, as if all ranks had `samples` by their shares.

        Raises:
            ValueError: `samples` is no integer of at least 0, or `whole` none of at least 1 and of `samples`.
        """
        self.step_timer.before_batch()
        self.batch_order.any_begins()
        self._begin(samples, whole)
        self.step_timer.run()

    def _begin(self, samples: int, whole: int | None = None) -> None:
        check_whole("samples", samples, least=0)
        check_whole("whole", whole, least=max(1, samples), optional=True)
        self.departure.check()
        self.count_warnings.begins(self.progress.backward_passes)
        self.step += 1
        self.progress.begin_batch(samples, whole)
        self.step_timer.begin(samples)
        self.exchanges.on_begin()
        self.progress.begin_part()
        self._set_count(float(samples))

    def end_epoch(self) -> None:
        """Ends an epoch, whose samples have all been used; `BalancedDataLoader` calls it."""
        ends(self)
        self.exchanges.on_epoch_end()
        self.step_timer.read()
        self.record.flush()

    def begin_if_unannounced(self) -> bool:
        """Begins the batch that present gradients are of, where `begin` was not called for it; returns whether it did.

        Always False here, as `begin` is called for each batch; `EqualWeights` and the Keras balancer override it.
        """
        return False

    def count(self, terms: float) -> None:
        """Sets how many loss terms this rank's loss is a mean over, before its gradient is computed.

        Needed only when that is not the number of samples: unmasked tokens, for instance.

        Raises:
            TypeError: `terms` is no number.
            ValueError: `terms` is negative or not finite.
        """
        terms = number_of("terms", terms)
        if not 0 <= terms < float("inf"):
            raise ValueError(f"terms: expected a number of loss terms, 0 or more. Received: {terms}.")
        self.count_warnings.said(terms, self.progress.backward_passes)
        self._set_count(terms)

    def _set_count(self, terms: float) -> None:
        self.exchanges.on_count()
        self.progress.count(terms)
        if not self.step_timer.running:
            self.step_timer.run()

    def _begin_micro_batch(self, terms: float, *, first: bool) -> None:
        """Begins a micro-batch of the present batch; `first`: the first one. Its loss is a mean over `terms` terms."""
        self.progress.begin_micro_batch(first=first)
        self._set_count(terms)
        self.progress.begin_part()

    def fail(self) -> None:
        """Tells all ranks that this one cannot go on: they raise `PeerError` in the exchange that they wait in.

        Waits for that for a limited time, and has no effect if the other processes have ended already.
        """
        self.departure.fail()
        self.departure.final = True
        self.step += 1
        with contextlib.suppress(Exception):  # ranks that are gone need not be told
            self.exchanges.on_begin()  # the other ranks have begun this batch as well
            ended = self.exchanges.withdraw(self.step_timer.usual_step_s or 0.0)
            self.departure.final = not ended or self.planner.is_local(self.step)
        self.dialogue.unheard()

    def fail_at_exchange(self, error: Exception) -> None:
        """Makes the next exchange raise `error` on this rank, and `PeerError` on the others.

        For an error in a thread that loads data ahead, while the rank still trains on batches loaded before; `fail` is
        for an error in the training loop itself. To stop training without an error: `ask_to_stop`.
        """
        self.departure.fail(error)

    @property
    def leaving(self) -> tuple[int, ...]:
        """Ranks whose process was told to end. A rank appears here at the same step on all ranks, once all know."""
        return self.departure.leaving.by(self.step)

    def leave(self) -> None:
        """Tells all ranks, with the next exchange, that this process was told to end: see `leaving`."""
        self.departure.leaving.said = True

    @property
    def stopping(self) -> tuple[int, ...]:
        """Ranks that ask all ranks to stop training. A rank appears here at the same step on all ranks, once all know,
        so that a loop that looks here stops after the same step everywhere."""
        return self.departure.stopping.by(self.step)

    def ask_to_stop(self) -> None:
        """Asks all ranks, with the next exchange, to stop training: see `stopping`."""
        self.departure.stopping.said = True

    def go_on(self) -> None:
        """Forgets which ranks asked to stop, before training begins anew. All ranks call it."""
        self.departure.stopping = Flag()

    # What the exchange asks -----------------------------------------------------------------------------------------

    def exchanged(self, *, wait_s: float, bytes_sent: int, leads: bool) -> None:
        """Notes what an exchange took, after the update; with the exchange that leads, a step ends.

        Args:
            wait_s: seconds that this rank waited for communication in it; other waits are added here.
            bytes_sent: bytes that it has sent.
            leads: whether the exchange leads. The step's compute time is then sent with the next gradients.
        """
        self._wait_s += wait_s
        self._bytes_sent += bytes_sent
        if leads:
            self.step_timer.pause()
            self.step_timer.end(self.record.step(
                step=self.step, wait_s=self._wait_s + self.step_timer.take_waited_s(), bytes_sent=self._bytes_sent,
                share=self.plan.shares[self.rank],
            ))  # fmt: skip
            self.step_timer.run()
            self._wait_s, self._bytes_sent = 0.0, 0

    # State ----------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Balancer:
        """Returns the balancer itself: a copied model keeps it, as the other ranks would know nothing of a copy."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "Expected a balancer to stay in its process, whose rank it is. Received: one to pickle, as within a model "
            "or its hyperparameters. Save its state_dict(), and make a new one."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns plans, measurements, the step, and the state of local strategies: plain numbers, except for an outer
        momentum, which is arrays."""
        return {
            "global_batch_size": self.global_batch_size,
            "step": self.step,
            "planner": self.planner.state_dict(),
            "strategies": self.strategies.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`. On other ranks than those that saved it, a new plan is made from what is known of them.

        Raises:
            TypeError, ValueError: `state` is not that of a balancer, or of another global batch size.
        """
        before = self.step
        self._load(state)
        if self.step < before:  # within a job, as by a script's own `state.restore()`
            self.step_timer.read()  # what it tells is of the steps before
            self.record.go_back(self.rank)
        self.record.plans(self.plans_ahead)

    def _load(self, state: dict[str, Any]) -> None:
        check_state(state, "global_batch_size", "step", "planner", "strategies", of="a balancer")
        if state["global_batch_size"] != self.global_batch_size:
            raise ValueError(
                f"Expected the state of a balancer of global batch {self.global_batch_size}. Received: one of "
                f"{state['global_batch_size']}. A job that goes on keeps its global batch, on other ranks as well: "
                "let it be a constant, and no multiple of hvd.size()."
            )
        self.step = int(state["step"])
        self.dialogue.restart()
        self.planner.load_state_dict(state["planner"], self.step)
        self.step_timer.resume_loading(self.planner.loading.seconds[self.rank])
        self.strategies.load_state_dict(state["strategies"])
        self.ladder = Ladder(self.planner.plans[-1].shares, tell=self._moved)


def check_balancer(balancer: Any) -> None:
    """Raises TypeError for a `balancer=` that is none."""
    if not isinstance(balancer, Balancer):
        raise TypeError(f"balancer: expected an hvd.Balancer. Received: {balancer!r}.")
