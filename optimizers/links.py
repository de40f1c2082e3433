"""Whether links have changed since it was chosen how gradients travel, as rank 0 sees it for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence

from hvd_hetero.policy.link_watch import LinkWatch


class Links:
    """What rank 0 knows of it; on other ranks, nothing.

    Args:
        clock: seconds.

    Attributes:
        asked: how many times all ranks were to choose anew.
        reason: of the last time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._heard = clock, (0.0, -1)  # when the last exchange was heard of, and its batch
        self._watch: LinkWatch | None = None
        self._choosing = False  # all ranks are about to
        self._timing_s: dict[Hashable, float] = {}  # of each optimizer
        self._changed: dict[Hashable, bool] = {}  # of those that have chosen since all were asked
        self.asked, self.reason = 0, ""

    def matter(self, owner: Hashable, *, timing_s: float, gentle_steps: int) -> None:
        """Says that there is something to choose for a new exchange of an optimizer: see `LinkWatch`."""
        self._timing_s[owner] = timing_s
        self._watch = LinkWatch(gentle_steps=gentle_steps)  # other buckets take another time
        self._choosing = False  # who was about to may be gone

    def gone(self, owner: Hashable) -> None:
        """An optimizer exchanges no more."""
        self._timing_s.pop(owner, None)
        self._changed.pop(owner, None)

    def hear(self, step: int, *, busy_s: Sequence[float], together: bool) -> None:
        """Takes in the exchange of a batch, and what each rank needed for one before it, its data included;
        `together`: all ranks are at the same one."""
        if self._watch is None or self._choosing:
            return
        (before_s, before), self._heard = self._heard, (self._clock(), step if together else -1)
        if not 0 <= before < step:
            return
        reason = self._watch.hear(
            busy_s=max(busy_s) * (step - before), step_s=self._heard[0] - before_s,
            timing_s=sum(self._timing_s.values()),
        )  # fmt: skip
        if reason is not None:
            self._choosing, self.reason = True, reason
            self._changed = {}
            self.asked += 1

    def chosen(self, owner: Hashable, timing_s: float, *, changed: bool) -> None:
        """All ranks have chosen for one optimizer; others may follow: see `LinkWatch`."""
        self._choosing, self._heard = False, (0.0, -1)
        self._timing_s[owner], self._changed[owner] = timing_s, changed
        if self._watch is not None:
            self._watch.chosen(changed=any(self._changed.values()), again=len(self._changed) > 1)
