"""Opens the record of a run that this process writes itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hvd_hetero.engine.environment import run_folder
from hvd_hetero.engine.host import host_identity

from .record import Trace, trace_of


def own_trace(run: str | os.PathLike[str] | None, *, ranks: Sequence[int], rank: int) -> Trace | None:
    """Opens a balancer's trace in the folder `run`, or if that is None in `HVD_HETERO_RUN`; None without either.

    Args:
        ranks: the global ranks that train together.
        rank: the index of this rank among them.

    Raises:
        TypeError: `run` is no path.
    """
    if run is not None and not isinstance(run, (str, os.PathLike)):
        raise TypeError(f"run: expected a folder for this run's trace, a text or a path, or None. Received: {run!r}.")
    return trace_of(run or run_folder(ranks, rank), rank=rank, clock=_even_clock(), host=host_identity()[0])


def _even_clock() -> Callable[[], float]:
    """A clock of seconds since the epoch, as the host's stands now. What sets that one later, by hand or by NTP, makes
    no step of the run longer or shorter."""
    epoch_s = time.time() - time.monotonic()
    return lambda: epoch_s + time.monotonic()
