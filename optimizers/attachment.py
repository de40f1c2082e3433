"""What a balancer and the exchanges of gradients attached to it say to each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

FAIL_WAIT_S = 30.0  # at least so long a rank that fails waits for the others to hear of it
END_WAIT_S = 10.0  # and so long for them to end what else they have with it


class PeerError(RuntimeError):
    """Another rank cannot go on."""


class Attached(Protocol):
    """An exchange of gradients, as the balancer sees it."""

    def on_begin(self) -> None:
        """A global batch begins."""

    def on_count(self, terms: float) -> None:
        """The next backward pass is over so many loss terms."""

    def on_epoch_end(self) -> None:
        """The samples of an epoch are used up."""

    def withdraw(self) -> Callable[[], bool] | None:
        """Takes part with nothing, without waiting, in what comes next, as a rank that cannot go on; what it returns
        tells whether that is over. None: there is nothing to take part in yet."""

    def miss(self) -> Callable[[], bool] | None:
        """The same for the exchange of the present batch alone. None: there is none, or ranks are apart."""


class Exchanges:
    """The exchanges that are attached to a balancer, and which of them have run in the present batch.

    Args:
        begin_unseen: see `Balancer.begin_unseen`.
    """

    def __init__(self, begin_unseen: Callable[[], bool]) -> None:
        self._begin_unseen = begin_unseen
        self._attached: list[Attached] = []
        self.ever = 0  # so many were attached
        self._ran: list[tuple[Attached, int]] | None = None  # in this batch; None: the next to run begins another
        self._again = False  # the one that runs has run in the present batch before
        self._over: list[Attached] = []  # in this batch, where batches are told of
        self._leaving: list[Attached] = []  # see `runs`
        self.turn = threading.RLock()  # held while another batch may begin

    def attach(self, exchange: Attached) -> int:
        """The number of exchanges attached before. The first that is left leads, while it takes part in batches: it
        carries measurements and plans."""
        self._attached.append(exchange)
        self.ever += 1
        if self._ran is not None:  # it may be the first of another batch, as one is that has run in this one
            self._ran.append((exchange, 0))
        return self.ever - 1

    def detach(self, exchange: Attached) -> None:
        """Says that an exchange has no part in what follows; on all ranks, between the same batches."""
        if exchange in self._attached:
            self._attached.remove(exchange)
        if exchange in self._over:
            self._over.remove(exchange)

    def leads(self, exchange: Attached) -> bool:
        """Whether it is this one that carries measurements and plans: once in a batch, however often it runs."""
        return bool(self._attached) and self._attached[0] is exchange and not self._again

    @property
    def ran(self) -> bool:
        """Whether one has run in the present batch."""
        return self._ran is not None

    def end_batch(self) -> None:
        """Says that the next to run is of another batch."""
        self._ran = None
        self._leaving.clear()

    def runs(self, exchange: Attached, part: int = 0) -> None:
        """Says that gradients of `exchange` are there, where nothing else tells when a batch begins; others of it may
        be yet to come, until it has `left`.

        One begins with the first exchange of all, and with one that comes again when another batch is announced; that
        one then leads. What comes again without is of the present batch, and so is another `part` of an exchange that
        is known to have several in each batch.
        """
        with self.turn:
            ran = self._ran
            self._again = ran is not None and any(exchange is one for one, _ in ran)
            if (ran is None or (exchange, part) in ran) and (self._begin_unseen() or ran is None):
                ran, self._again = [], False
                self.detach(exchange)
                self._attached.insert(0, exchange)
            self._ran = [*(ran or []), (exchange, part)]
            self._leaving.append(exchange)

    def left(self, exchange: Attached) -> None:
        """Says that all gradients of `exchange` are there."""
        with self.turn:
            self._leaving = [one for one in self._leaving if one is not exchange]

    @property
    def leaving(self) -> bool:
        """Whether gradients may be yet to come that are of the batch in use."""
        return bool(self._leaving)

    def ended(self, exchange: Attached) -> None:
        """Says that `exchange` has had its part in the present batch, which `on_begin` ends."""
        if exchange not in self._over:
            self._over.append(exchange)

    def _pass_on(self) -> None:
        """Where the one that leads had no part in the batch before, as that of a model whose training is over, the
        first of those that had leads from here on. All ranks are told of the same batches, and so of the same parts."""
        over, self._over = self._over, []
        if over and self._attached[0] not in over:
            first = next(each for each in self._attached if each in over)
            self._attached.remove(first)
            self._attached.insert(0, first)

    # What is said to all of them ------------------------------------------------------------------------------------

    def on_begin(self) -> None:
        """A global batch begins."""
        self._pass_on()
        for exchange in list(self._attached):
            exchange.on_begin()

    def on_count(self, terms: float) -> None:
        """The next backward pass is over so many loss terms."""
        for exchange in self._attached:
            exchange.on_count(terms)

    def on_epoch_end(self) -> None:
        """The samples of an epoch are used up."""
        for exchange in self._attached:
            exchange.on_epoch_end()

    def withdraw(self, usual_step_s: float) -> bool:
        """Takes part in what the others wait for, with nothing, and returns when one exchange is over: whether none is
        left under way.

        Which exchange they are in is theirs to know: this rank takes part in all.
        """
        over = [done for exchange in self._attached if (done := exchange.withdraw()) is not None]
        _wait_for(any, over, max(FAIL_WAIT_S, 10 * usual_step_s))
        return _wait_for(all, over, max(END_WAIT_S, 10 * usual_step_s))

    def complete(self, usual_step_s: float) -> bool:
        """Takes part with nothing, as the rank does that has failed, in all exchanges of this batch that are yet to
        come: whether they came to their end. All ranks have heard of it then, and may train on."""
        rest = [exchange for exchange in self._attached if exchange not in self._over]
        self._over += rest
        over = [done for exchange in rest if (done := exchange.miss()) is not None]
        return _wait_for(all, over, max(FAIL_WAIT_S, 10 * usual_step_s))


def _wait_for(enough: Callable[[Iterable[bool]], bool], over: Sequence[Callable[[], bool]], most_s: float) -> bool:
    """Whether enough exchanges are over, once they are, or after so many seconds."""
    deadline = time.monotonic() + most_s
    while over and not enough([done() for done in over]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
