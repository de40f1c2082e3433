"""What a balancer and the exchanges of gradients attached to it say to each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

FAIL_WAIT_S = 30.0  # at least so long a rank that fails waits for the others to hear of it


class PeerError(RuntimeError):
    """Another rank cannot go on."""


class Attached(Protocol):
    """An exchange of gradients, as the balancer sees it."""

    def on_begin(self) -> None:
        """A global batch begins."""

    def on_count(self, terms: float) -> None:
        """The next backward pass is over so many loss terms."""

    def withdraw(self) -> Callable[[], bool]:
        """Takes part with nothing, without waiting; what it returns tells whether the exchange is over."""


def withdraw(exchanges: Sequence[Attached], usual_step_s: float) -> None:
    """Takes part in what the others wait for, with nothing, and returns when one exchange is over.

    Which exchange they are in is theirs to know: this rank takes part in all.
    """
    over = [exchange.withdraw() for exchange in exchanges]
    deadline = time.monotonic() + max(FAIL_WAIT_S, 10 * usual_step_s)
    while over and not any(done() for done in over) and time.monotonic() < deadline:
        time.sleep(0.01)
