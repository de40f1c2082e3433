"""The balancer of a Keras script."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers import balancer as framework_free
from hvd_hetero.optimizers.argument import check_whole
from hvd_hetero.optimizers.meter import Moment
from hvd_hetero.policy.replan import ReplanRule
from hvd_hetero.trace.own import own_trace

from . import backend
from .factor import Factors

AHEAD = (
    " Where batches are loaded ahead, as fit does with TensorFlow, an optimizer cannot be applied several times to a "
    "batch in a loop of TensorFlow's or with run_eagerly=True: nothing tells of which batch the second time is. Make "
    "one optimizer for each time, or write a loop over the BalancedDataset itself, or with balancer.begin()."
)


class Announced:
    """Batches that were announced and are not in use yet, oldest first.

    Attributes:
        samples: of this rank, for each batch.
        wholes: samples of all ranks, for each batch; None if not known.
        terms: the numbers of loss terms, where they are not the numbers of samples.
        loaded: when each batch was there, if batches are loaded ahead.
        ahead: whether batches are announced while others are in use.
        unseen: whether exchanges begin these batches, and not a script by hand.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self.samples: deque[int] = deque()
        self.wholes: deque[int | None] = deque()
        self.terms: deque[float] = deque()
        self.loaded: deque[Moment] = deque()
        self.ahead = ahead
        self.unseen = False


class Balancer(framework_free.Balancer):
    """Shares of the global batch in proportion to each rank's measured speed; one per training loop.

    Constructing it is a collective call. What a rank needs for its samples is measured from the end of one exchange of
    gradients to the start of the next, without any callback; a step in which something was compiled is left out.

    `BalancedDataset` announces each batch; a custom loop over other data calls `balancer.begin(samples)` before each.
    A batch may have any number of exchanges, except where batches are loaded ahead of their use, as by `fit` with
    TensorFlow: there an optimizer, or tapes with the same arguments, may be used several times in a `train_step`, but
    neither in a loop or a condition that TensorFlow makes (`for _ in tf.range(k)`, `tf.cond`), nor by calling one
    `tf.function` several times, nor with `run_eagerly=True`.

    Args:
        global_batch_size: samples of one optimizer step over all ranks; it never changes, so what is learned and the
            right learning rate do not change either.
        min_share, max_share: bounds for *this* rank, in samples; `max_share` is what its memory holds.
        quantum: this rank's share is a multiple of it.
        shares: the shares of the first plan, by rank (default: equal ones).
        adaptive: False keeps the first plan for good.
        rule: an `hvd.ReplanRule`, which decides when a new plan pays.
        process_set: the ranks that train together (default: all).
        run: a folder for this run's trace, one file per rank; default: `HVD_HETERO_RUN`, or no trace. A second balancer
            has to have one of its own: by default `HVD_HETERO_RUN` with "-2" at the end, and so on.

    Raises:
        ValueError: on every rank, when the arguments are wrong on any rank or differ between ranks.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        min_share: int = 1,
        max_share: int | None = None,
        quantum: int = 1,
        shares: Sequence[int] | None = None,
        adaptive: bool = True,
        rule: ReplanRule | None = None,
        process_set: Any = None,
        run: str | None = None,
        engine: Engine | None = None,
    ) -> None:
        engine = engine if engine is not None else backend.engine(process_set)
        super().__init__(
            engine,
            global_batch_size=global_batch_size,
            min_share=min_share,
            max_share=max_share,
            quantum=quantum,
            shares=shares,
            adaptive=adaptive,
            rule=rule,
            trace=own_trace(run, ranks=engine.ranks, rank=engine.rank),
        )
        self.factors = Factors()  # of the optimizers' learning rates
        # Announced batches, by the dataset that announces them (None: the script). The next batch is of the last queue:
        # that of a dataset which is evaluated within another one's epoch is added after that one's, and removed again.
        self._queues: dict[Any, Announced] = {None: Announced()}
        self._begun: Counter[int] = Counter()  # how many batches have begun, by the id of who announced them
        self._told = False  # whether the script itself has begun the batch that is to be exchanged next
        self._instead = False  # whether it does so for batches that are announced as well

    @property
    def _next(self) -> Announced:
        """The queue of the dataset, or the script, that announces the batch that comes next."""
        return next(reversed(self._queues.values()))

    def announce(self, samples: int, *, whole: int | None = None, by: Any = None) -> None:
        """Says that a batch of `samples` follows those announced before, which has `whole` over all ranks, if that is
        known; may be called from a thread that loads."""
        check_whole("samples", samples, least=0)
        if (queue := self._queues.get(by)) is not None:  # a thread may still load for a fit that was interrupted
            queue.wholes.append(whole)
            queue.samples.append(samples)

    def announce_terms(self, terms: float, *, by: Any = None) -> None:
        """Says over how many loss terms the loss of the next batch announced is a mean, where these are no samples."""
        if (queue := self._queues.get(by)) is not None:
            queue.terms.append(terms)

    def announce_loaded(self, *, by: Any = None) -> None:
        """Says that the next batch announced, which is loaded while others are in use, is there."""
        if (queue := self._queues.get(by)) is not None:
            queue.loaded.append(self.step_timer.loading_meter.now())

    def leave_out(self, by: Any) -> None:
        """Says that nobody trains on what was announced `by` a dataset and has not begun."""
        if (queue := self._queues.get(by)) is not None:
            for announced in (queue.samples, queue.wholes, queue.terms):
                announced.clear()

    def forget(self, *, ahead: bool = False, by: Any = None) -> None:
        """Drops what was announced `by` one whose batches come next: an epoch begins, or a fit was interrupted. The
        time since the last step, in which there may have been a validation, is not measured. `ahead`: batches will be
        announced while others are in use."""
        self._queues.pop(by, None)
        self._queues[by] = Announced(ahead=ahead)
        self._between()
        self.step_timer.run()

    def withdraw(self, by: Any) -> None:
        """Says that what was announced `by` a dataset was no training: what was announced before it comes next."""
        self._queues.pop(by, None)
        self._between()

    def trained(self, by: Any) -> None:
        """Says that what was announced `by` a dataset was trained on: what was announced before it never comes."""
        self._queues = {None: Announced(), **{each: queue for each, queue in self._queues.items() if each is by}}

    def state_dict(self) -> dict[str, Any]:
        """The state of any balancer, and that of the factors of learning rates."""
        return {**super().state_dict(), "factors": self.factors.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state`; what was announced for batches after it is dropped."""
        super().load_state_dict(state)
        self.factors.load_state_dict(state["factors"])
        self._queues = {by: Announced() for by in self._queues}
        self._between()
        self._told = False

    def begun(self, by: Any) -> int:
        """How many batches announced `by` a dataset have begun so far, unseen or by hand. After a fit that was stopped
        there may be some that nobody takes: what a script then begins by hand is none of them."""
        return self._begun[id(by)]

    def _count(self) -> None:
        self._begun[id(next(reversed(self._queues)))] += 1

    def _between(self) -> None:
        """Notes that no batch is in use."""
        self.exchanges.arrivals.end_batch()
        self._instead = False

    def end_epoch(self) -> None:
        """Says that the samples of an epoch are used up: what is exchanged next is of another batch."""
        super().end_epoch()
        self.exchanges.arrivals.end_batch()

    @property
    def idle(self) -> bool:
        """Whether this rank has no sample in the batch whose gradients come next: what it holds is another rank's."""
        with self.exchanges.arrivals.turn:
            return (self._next.samples[0] if self._next_due else self.progress.terms) == 0

    @property
    def terms_due(self) -> float | None:
        """The number of loss terms of the batch whose gradients come next; None: nobody said."""
        with self.exchanges.arrivals.turn:
            return (self._next.terms or self._next.samples)[0] if self._next_due else self.progress.terms

    @property
    def _next_due(self) -> bool:
        """Whether the gradients that come next are of a batch that has not begun. One begins with the first of its
        gradients that are there, when others may be yet to come."""
        return self._may_begin and not self.exchanges.arrivals.incomplete

    @property
    def _may_begin(self) -> bool:
        """Whether the batch to be exchanged next may be one that is announced."""
        return bool(self._next.samples) and not self._told and not self._instead

    def begin(self, samples: int, *, whole: int | None = None) -> None:
        """Starts a global batch of which this rank has `samples`, in a loop without a `BalancedDataset`.

        Raises:
            RuntimeError: within a `tf.function`, which would run it only when it is traced.
        """
        if backend.traces():
            raise RuntimeError(
                "Expected balancer.begin() before each batch. Received: a call within a tf.function, which runs it "
                "once, when it is traced. Call it outside, in the loop that calls the function."
            )
        super().begin(samples, whole=whole)
        self.exchanges.arrivals.end_batch()
        self._told, self._instead = True, bool(self._next.samples)
        if self._instead and not self._next.unseen:
            self._count()

    def begin_if_unannounced(self) -> bool:
        """Begins the next announced batch, unless the script has begun one itself. An exchange calls it, once its
        gradients are there. If no other batch is announced, a further exchange is of the present one.

        Returns:
            Whether an announced batch was begun.

        Raises:
            RuntimeError: nobody said how many samples this batch has.
        """
        if self._told:
            self._told = False
            return False
        if not self._may_begin:
            if self.exchanges.arrivals.started:
                if self._instead or not self._next.ahead:
                    return False
                self.fail()  # a rank that loads more slowly may not see it, and would wait for this one
            raise RuntimeError(
                "Expected the number of samples of this batch before its gradients are applied. Received: none. Fit on "
                "hvd.BalancedDataset(..., balancer=balancer), with the balancer that the optimizer has, or call "
                "balancer.begin(samples) before each batch."
                + (AHEAD if self._next.ahead else "")
            )
        if not self.step_timer.running:  # the first step of all: nobody was there when it began
            self.step_timer.discard()
        queue = self._next
        if queue.loaded:
            self.step_timer.loading_meter.loaded(queue.loaded.popleft())
        self._begin(queue.samples.popleft(), queue.wholes.popleft())
        self._count()
        queue.unseen = True
        queue.ahead = queue.ahead or bool(queue.samples)
        if queue.terms:
            self.count(queue.terms.popleft())
        return True
