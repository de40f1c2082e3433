"""Finds where a batch begins from the arrival of its gradients, where no loader or script says so: Keras's `fit`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attachment import Attached


class GradientArrivals:
    """The gradient exchanges whose gradients have arrived in the present batch, for Keras.

    A batch begins with the first gradients after `end_batch`, and with gradients of an exchange that has had some in
    the present batch, if another batch is announced. The exchange that begins a batch leads in it.

    Args:
        begin_if_unannounced: begins a batch that nobody told of, if there is one: see `Balancer.begin_if_unannounced`.
        lead: makes an exchange lead from now on.

    Attributes:
        again: whether the gradients that arrived last are further ones of an exchange that had some in this batch.
        turn: a lock to hold while it is decided whether another batch begins.
    """

    def __init__(self, begin_if_unannounced: Callable[[], bool], lead: Callable[[Attached], None]) -> None:
        self._begin_if_unannounced, self._lead = begin_if_unannounced, lead
        self._arrived: list[tuple[Attached, int]] | None = None  # in the present batch; None: it has ended
        self.again = False
        self._incomplete: list[Attached] = []  # exchanges that have some of their gradients, but not all
        self.turn = threading.RLock()

    def add(self, exchange: Attached) -> None:
        """Takes in a new exchange within a batch, as if it had its gradients: so it may begin the next one."""
        if self._arrived is not None:
            self._arrived.append((exchange, 0))

    @property
    def started(self) -> bool:
        """Whether gradients of the present batch have arrived."""
        return self._arrived is not None

    @property
    def incomplete(self) -> bool:
        """Whether an exchange has only part of its gradients, so that more of the present batch are to come."""
        return bool(self._incomplete)

    def end_batch(self) -> None:
        """Ends the present batch: the gradients that arrive next are of another one."""
        self._arrived = None
        self._incomplete.clear()

    def first(self, exchange: Attached, part: int = 0) -> None:
        """Notes the first gradients of an exchange, and begins a batch if they are of another one than the present.

        `complete` follows once all gradients of the exchange are there.

        Args:
            part: which use of the exchange this is, for one that a traced graph uses several times in each batch.
        """
        with self.turn:
            arrived = self._arrived
            self.again = arrived is not None and any(exchange is one for one, _ in arrived)
            if (arrived is None or (exchange, part) in arrived) and (self._begin_if_unannounced() or arrived is None):
                arrived, self.again = [], False
                self._lead(exchange)
            self._arrived = [*(arrived or []), (exchange, part)]
            self._incomplete.append(exchange)

    def complete(self, exchange: Attached) -> None:
        """Notes that all gradients of an exchange are there."""
        with self.turn:
            self._incomplete = [one for one in self._incomplete if one is not exchange]
