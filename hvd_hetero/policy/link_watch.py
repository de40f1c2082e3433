"""When links have changed: exchanges take another time than they did when it was chosen how gradients travel.

What a synchronous step takes beyond its slowest rank is the exchange that nothing hides. The median of the last steps
is compared with the median of the first ones after a choice. What is chosen anew is timed first, and all ranks wait for
that: so nothing is chosen anew before as much time could have been saved as timing takes (which is the rule of the
ski-rental problem, Karlin et al. 1988: at most twice what is best in hindsight), and after choices that have found what
there was, several times as much.
"""

from __future__ import annotations

import statistics
from collections import deque

SETTLING = 20  # steps after a choice that are not looked at: it may be on trial, see `router.Trial`
WINDOW = 24  # steps that say how long exchanges take
EVERY = 4  # steps between two looks
CHANGED = 2.0  # links that are so many times as fast or as slow are others
PART = 0.25  # of a step: what changes by less may be the ranks' own noise
MOST_PATIENCE = 16.0


class LinkWatch:
    """Watches the exchanges of one job, on one rank, which tells the others.

    Args:
        gentle_steps: of so many steps after a choice, exchanges take longer than they will.
    """

    def __init__(self, *, gentle_steps: int = 0) -> None:
        self._patience = self._patience_before = 1.0
        self._settling = SETTLING + gentle_steps
        self._begin()

    def _begin(self) -> None:
        self._seen, self._lost_s = -self._settling, 0.0
        self._first: list[float] = []
        self._last: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def hear(self, *, busy_s: float, step_s: float, timing_s: float) -> str | None:
        """Takes in a synchronous step: says what has changed where it is time for another choice, else None.

        Args:
            busy_s: seconds of it in which the slowest rank loaded data and computed; 0 where that is not known.
            step_s: from its beginning to its end.
            timing_s: seconds of the timing before a choice.
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
        self._lost_s += EVERY * min(now_s, most - least)  # at most: no more than all of it could be saved
        if self._lost_s < self._patience * timing_s:
            return None
        return f"exchanges take {1e3 * now_s:.0f} ms, where they took {1e3 * before_s:.0f} ms"

    def chosen(self, *, changed: bool, again: bool = False) -> None:
        """A choice was made; `changed`: and is another one than before. `again`: this, and not what was said last, is
        what came of it."""
        if not again:
            self._patience_before = self._patience
        self._patience = 1.0 if changed else min(2.0 * self._patience_before, MOST_PATIENCE)
        self._begin()
