"""Waiting for a condition that has to be polled, with little CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_S = 0.0003
LONGEST_S = 0.002


def wait_until(done: Callable[[], bool], *, unless: Callable[[], bool] = lambda: False) -> bool:
    """Sleeps until `done()` is true, and returns True; or until `unless()` is true, and then returns `done()`.

    Polling costs CPU time, which a slow rank needs, so the interval grows with the time waited, from `SHORTEST_S` to
    `LONGEST_S`.
    """
    start = time.perf_counter()
    while not done():
        if unless():
            return done()
        waited = time.perf_counter() - start
        time.sleep(min(LONGEST_S, max(SHORTEST_S, waited / 16)))
    return True
