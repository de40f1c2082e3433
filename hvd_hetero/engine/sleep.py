"""Waiting for what can only be looked at."""

from __future__ import annotations

import time
from collections.abc import Callable

SHORTEST_S = 0.0003
LONGEST_S = 0.002


def wait_until(done: Callable[[], bool], *, unless: Callable[[], bool] = lambda: False) -> bool:
    """Sleeps until `done()`; or, False, until `unless()` and not `done()` meanwhile. A look costs CPU that a slow rank
    needs, so the longer the wait, the rarer the looks."""
    start = time.perf_counter()
    while not done():
        if unless():
            return done()
        waited = time.perf_counter() - start
        time.sleep(min(LONGEST_S, max(SHORTEST_S, waited / 16)))
    return True
