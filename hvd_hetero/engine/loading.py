"""Processes that load for a rank, and SIGTERM.

Cluster managers send it to all processes of a job. The rank then goes on to a checkpoint or commit, for which it needs
batches: who loads them goes on as well, until the rank itself ends it, or is gone.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import threading
from types import FrameType


class Loaders:
    """The loading processes of a rank, which gets it by `loaders()` and hands it to each of them as it starts."""

    def __init__(self) -> None:
        # No lock, which a process that is killed could hold for good.
        self._ended = multiprocessing.RawValue("b", 0)
        # Python ends the processes that are left after this, by SIGTERM, and waits for them.
        atexit.register(self.end)

    def begin(self) -> None:
        """To be called in such a process: from here on SIGTERM ends it once the rank has said `end`, and the end of the
        rank does at any time."""
        # A function and not SIG_IGN, which programs that it starts would inherit.
        signal.signal(signal.SIGTERM, self._hear)
        threading.Thread(target=_end_with_rank, daemon=True).start()

    def end(self) -> None:
        """To be called in the rank before it ends them by SIGTERM."""
        self._ended.value = 1

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._ended.value:
            os._exit(0)


def _end_with_rank() -> None:
    """A rank that is killed ends nothing, and its launcher waits until nobody holds the rank's output open."""
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


@functools.cache
def loaders() -> Loaders:
    """The `Loaders` of this rank, made at the first call."""
    return Loaders()
