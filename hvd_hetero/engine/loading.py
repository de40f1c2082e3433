"""Keeps a data loader's worker processes alive at SIGTERM, as long as their rank needs them.

Cluster managers send SIGTERM to all processes of a job. A rank then goes on to its next checkpoint or commit, and needs
batches until then. So its workers ignore the signal until the rank ends them, or is gone.
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
    """Handles SIGTERM in the worker processes of a rank's data loaders.

    The rank gets its object from `loaders()` and passes it to each worker process, which calls `begin`.
    """

    def __init__(self) -> None:
        # A value without a lock: a process that is killed could hold the lock forever.
        self._ended = multiprocessing.RawValue("b", 0)
        # After this exit function, Python ends the remaining workers by SIGTERM and waits for them.
        atexit.register(self.end)

    def begin(self) -> None:
        """Is called in a worker process at its start. From here on SIGTERM ends the worker only after the rank has
        called `end`. The worker also ends when the rank's process ends."""
        # A function and not SIG_IGN, which programs that the worker starts would inherit.
        signal.signal(signal.SIGTERM, self._hear)
        threading.Thread(target=_end_with_rank, daemon=True).start()

    def end(self) -> None:
        """Is called in the rank, before it ends its workers by SIGTERM: from here on they obey the signal."""
        self._ended.value = 1

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._ended.value:
            os._exit(0)


def _end_with_rank() -> None:
    """Waits for the end of the rank's process, then ends this worker. A rank that is killed cannot end its workers, and
    its launcher waits until no process holds the rank's output open."""
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


@functools.cache
def loaders() -> Loaders:
    """Returns the one `Loaders` object of this rank, made at the first call."""
    return Loaders()
