"""Decides when links have changed so much that the routes of gradients should be timed and chosen again.

The time of a synchronous step beyond the compute time of its slowest rank is the exposed exchange: the part that
computing does not hide. Its median over the last steps is compared with its median over the first steps after the last
choice. Timing the routes again costs time on all ranks. Therefore it is not asked for before the time that a better
route could have saved is as long as the timing itself (the rule of the ski-rental problem, Karlin et al. 1988: at most
twice the cost of the best decision in hindsight). After choices that changed nothing, a multiple of that time is
required.
"""

from __future__ import annotations

import statistics
from collections import deque

SETTLING = 20  # steps after a choice that are ignored: several routes may be on trial, see `RouteTrial`
WINDOW = 24  # steps of which a median is taken
EVERY = 4  # steps between two comparisons
CHANGED = 2.0  # factor between two medians from which on links count as changed
PART = 0.25  # fraction of a step; a difference below it may be the noise of the ranks' compute times
MOST_PATIENCE = 16.0  # the largest multiple of the timing's seconds that has to be lost before routes are timed again


class LinkWatch:
    """Watches the exchanges of a job for a change of its links. `LinkMonitor` uses it, on rank 0.

    Args:
        codec_warmup_steps: so many steps after a choice are ignored in addition to `SETTLING`, because a codec that
            warms up (`Routing.codec_warmup_steps`) makes their exchanges longer.
    """

    def __init__(self, *, codec_warmup_steps: int = 0) -> None:
        self._patience = self._patience_before = 1.0
        self._settling = SETTLING + codec_warmup_steps
        self._begin()

    def _begin(self) -> None:
        self._seen, self._lost_s = -self._settling, 0.0
        self._first: list[float] = []
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def observe_step(self, *, busy_s: float, step_s: float, timing_s: float) -> str | None:
        """Takes in a synchronous step, and returns why routes should be chosen again, or None if they should not.

        Args:
            busy_s: seconds of the step in which the slowest rank loaded data and computed; 0 if that is not known, and
                the step is ignored then.
            step_s: seconds from the beginning of the step to its end.
            timing_s: seconds that timing all routes takes.
        """
        if not busy_s > 0.0:
            return None
        self._seen += 1
        exchange_s = max(0.0, step_s - busy_s)
        if self._seen <= 0:
            return None
        if len(self._first) < WINDOW:
            self._first.append(exchange_s)
            return None
        self._last.append((exchange_s, step_s))
        if len(self._last) < WINDOW or self._seen % EVERY:
            return None
        before_s = statistics.median(self._first)
        now_s, usual_s = (statistics.median(each) for each in zip(*self._last, strict=True))
        least, most = sorted((before_s, now_s))
        if most < CHANGED * least or most - least < PART * usual_s:
            self._lost_s = 0.0
            return None
        self._lost_s += EVERY * min(now_s, most - least)  # no choice saves more than the whole exchange
        if self._lost_s < self._patience * timing_s:
            return None
        return f"exchanges take {1e3 * now_s:.0f} ms, where they took {1e3 * before_s:.0f} ms"

    def routes_chosen(self, *, changed: bool, corrects_last: bool = False) -> None:
        """Begins to watch anew, after all ranks have chosen routes.

        Args:
            changed: whether a route differs from the one before. If none does, the next choice has to be twice as
                worthwhile, up to `MOST_PATIENCE`.
            corrects_last: whether this call corrects the last one for the same change of links, as when a second
                optimizer of the job has chosen its routes.
        """
        if not corrects_last:
            self._patience_before = self._patience
        self._patience = 1.0 if changed else min(2.0 * self._patience_before, MOST_PATIENCE)
        self._begin()
