"""What a balancer calls on the gradient exchanges of its optimizers, and which of these exchanges leads in a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from .arrivals import GradientArrivals

FAIL_WAIT_S = 30.0  # a rank that fails waits at least this long for an exchange in which the others learn of it
END_WAIT_S = 10.0  # then at least this long for the other exchanges that it takes part in


class Attached(Protocol):
    """The gradient exchange of one optimizer, as the balancer sees it: the gradient reducers of PyTorch and Keras."""

    def on_begin(self) -> None:
        """Is called when a global batch begins."""

    def on_count(self) -> None:
        """Is called before a backward pass, whose number of loss terms the balancer counts next."""

    def on_epoch_end(self) -> None:
        """Is called when all samples of an epoch have been used."""

    def withdraw(self) -> Callable[[], bool] | None:
        """Takes part with zeros in the next exchange or merge, whose control vector says that this rank cannot go on.

        Does not wait. Returns a function that returns whether that exchange or merge is over; None if there is none
        that this rank could take part in.
        """

    def miss(self) -> Callable[[], bool] | None:
        """As `withdraw`, but only in the exchange of the present batch. None if there is none, as in local steps."""


class Exchanges:
    """The gradient exchanges attached to a balancer, one per optimizer, and which of them have ended in this batch.

    One of them leads in each batch: its control vector carries the measurements and plans. In general a loader or the
    script tells when a batch begins; with Keras's `fit` nobody does, and `arrivals` finds out.

    Args:
        begin_if_unannounced: begins a batch that nobody told of, if there is one: see `Balancer.begin_if_unannounced`.

    Attributes:
        ever: how many exchanges have been attached so far, including those detached since.
        arrivals: whose gradients have arrived in the present batch; used by Keras.
    """

    def __init__(self, begin_if_unannounced: Callable[[], bool]) -> None:
        self._attached: list[Attached] = []
        self.ever = 0
        self._over: list[Attached] = []  # exchanges that have ended in this batch; see `ended`
        self.arrivals = GradientArrivals(begin_if_unannounced, self._lead)

    def attach(self, exchange: Attached) -> int:
        """Attaches an exchange, and returns how many were attached before it: its number, the same on all ranks.

        Of those attached the first leads, as long as it takes part in the batches.
        """
        self._attached.append(exchange)
        self.ever += 1
        self.arrivals.add(exchange)
        return self.ever - 1

    def detach(self, exchange: Attached) -> None:
        """Removes an exchange that takes part in no further batch; all ranks do so between the same two batches."""
        if exchange in self._attached:
            self._attached.remove(exchange)
        if exchange in self._over:
            self._over.remove(exchange)

    def leads(self, exchange: Attached) -> bool:
        """Whether `exchange` carries measurements and plans now: only the leading one does, once in a batch."""
        return bool(self._attached) and self._attached[0] is exchange and not self.arrivals.again

    def _lead(self, exchange: Attached) -> None:
        """Makes an exchange lead from now on."""
        self.detach(exchange)
        self._attached.insert(0, exchange)

    def ended(self, exchange: Attached) -> None:
        """Notes that `exchange` has ended in the present batch. PyTorch's reducers call it; `on_begin` clears it."""
        if exchange not in self._over:
            self._over.append(exchange)

    def _pass_on(self) -> None:
        """Makes another exchange lead, if the leading one did not end in the last batch while others did.

        So where the training of its model is over. The first of those that did leads then. All ranks choose alike, as
        the same exchanges end in a batch on all of them.
        """
        over, self._over = self._over, []
        if over and self._attached[0] not in over:
            self._lead(next(each for each in self._attached if each in over))

    # What is said to all of them ------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        """Tells all exchanges that a global batch begins."""
        self._pass_on()
        for exchange in list(self._attached):
            exchange.on_begin()

    def on_count(self) -> None:
        """Tells all exchanges that the loss terms of the next backward pass are counted."""
        for exchange in list(self._attached):
            exchange.on_count()

    def on_epoch_end(self) -> None:
        """Tells all exchanges that the samples of an epoch have been used."""
        for exchange in list(self._attached):
            exchange.on_epoch_end()

    def withdraw(self, usual_step_s: float) -> bool:
        """Takes part with zeros, as a rank that cannot go on, in whatever exchange or merge the other ranks wait in.

        This rank does not know which one that is, and so takes part in all. It waits until one is over, then for the
        others, each time for a limited time.

        Args:
            usual_step_s: seconds of a usual step; each of the two waits lasts up to ten of them, if that is longer.

        Returns:
            Whether all are over.
        """
        over = [done for exchange in self._attached if (done := exchange.withdraw()) is not None]
        _wait_for(any, over, max(FAIL_WAIT_S, 10 * usual_step_s))
        return _wait_for(all, over, max(END_WAIT_S, 10 * usual_step_s))

    def complete(self, usual_step_s: float) -> bool:
        """Takes part with zeros in the exchanges of this batch that have not ended, after one said that a rank failed.

        With PyTorch the ranks that learn of the failure call it, so that all exchanges of the batch end and ranks may
        train on.

        Args:
            usual_step_s: seconds of a usual step; the wait lasts up to ten of them, if that is longer.

        Returns:
            Whether the exchanges are over.
        """
        rest = [exchange for exchange in self._attached if exchange not in self._over]
        self._over += rest
        over = [done for exchange in rest if (done := exchange.miss()) is not None]
        return _wait_for(all, over, max(FAIL_WAIT_S, 10 * usual_step_s))


def _wait_for(enough: Callable[[Iterable[bool]], bool], over: Sequence[Callable[[], bool]], most_s: float) -> bool:
    """Waits until enough exchanges are over, for `most_s` seconds at most. Returns whether enough are.

    Args:
        enough: `any` or `all`, of the results of `over`.
        over: functions that return whether an exchange is over; with none of them, True is returned at once.
    """
    deadline = time.monotonic() + most_s
    while over and not enough([done() for done in over]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
