"""What a balancer and the exchanges of gradients attached to it say to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


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
