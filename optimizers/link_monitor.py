"""Detects on rank 0 that links have changed since routes were chosen for gradients, so that all ranks choose anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

from hvd_hetero.policy.link_watch import LinkWatch


class LinkMonitor:
    """Watches how long exchanges take, over all optimizers of a balancer, and asks for another choice of routes.

    Works on rank 0 only, as only rank 0 calls `matter`. When `asked` has grown, each `GradientExchange` of rank 0 tells
    all ranks in its control vector to time the routes of its buckets again and to choose among them.

    Args:
        clock: the time, in seconds.

    Attributes:
        asked: how many times rank 0 has asked for another choice.
        reason: why it asked the last time, for the trace; "" before.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._heard = clock, (0.0, -1)  # time and global batch of the last exchange heard of
        self._watch: LinkWatch | None = None
        self._choosing = False  # whether ranks were asked to choose anew, and have not done so yet
        self._timing_s: dict[Hashable, float] = {}  # by optimizer: what timing its routes takes
        self._changed: dict[Hashable, bool] = {}  # by optimizer: the outcome of its choice since ranks were last asked
        self.asked, self.reason = 0, ""

    def matter(self, owner: Hashable, *, timing_s: float, codec_warmup_steps: int) -> None:
        """Starts to watch: a new exchange of an optimizer has several routes to choose from.

        Args:
            owner: the optimizer, by its number.
            timing_s: seconds that timing its routes takes.
            codec_warmup_steps: steps after a choice in which exchanges take longer than later, see `LinkWatch`.
        """
        self._timing_s[owner] = timing_s
        # Anew: with other buckets, exchanges take another time.
        self._watch = LinkWatch(codec_warmup_steps=codec_warmup_steps)
        self._choosing = False  # the optimizer that was asked may be gone

    def gone(self, owner: Hashable) -> None:
        """Forgets an optimizer that makes no further exchange."""
        self._timing_s.pop(owner, None)
        self._changed.pop(owner, None)

    def hear(self, step: int, *, busy_s: Sequence[float], together: bool) -> None:
        """Takes in the exchange of global batch `step`; asks for another choice of routes where `LinkWatch` finds so.

        Args:
            busy_s: for each rank, seconds per global batch in which it loaded data and computed.
            together: whether all ranks are at the same batch, as in a synchronous step; others are not looked at.
        """
        if self._watch is None or self._choosing:
            return
        (before_s, before), self._heard = self._heard, (self._clock(), step if together else -1)
        if not 0 <= before < step:
            return
        reason = self._watch.observe_step(
            busy_s=max(busy_s) * (step - before), step_s=self._heard[0] - before_s,
            timing_s=sum(self._timing_s.values()),
        )  # fmt: skip
        if reason is not None:
            self._choosing, self.reason = True, reason
            self._changed = {}
            self.asked += 1

    def chosen(self, owner: Hashable, timing_s: float, *, changed: bool) -> None:
        """Notes that all ranks have chosen the routes of one optimizer; those of other optimizers may follow.

        Args:
            timing_s: seconds that the timing took.
            changed: whether a route is another one than before.
        """
        self._choosing, self._heard = False, (0.0, -1)
        self._timing_s[owner], self._changed[owner] = timing_s, changed
        if self._watch is not None:
            self._watch.routes_chosen(changed=any(self._changed.values()), corrects_last=len(self._changed) > 1)
