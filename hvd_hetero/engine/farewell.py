"""A barrier at the end of a job with hierarchical all-reduces: no rank exits while others are in the last one.

The last stage of such an all-reduce runs within each node. A rank whose stage is complete could exit, which shuts
Horovod down on all ranks. Then the last stage of another node would fail, in the last step of a successful training.

While the function of an elastic job runs (`train`, given to `hvd.elastic.run`), a rank may leave alone, and no other
waits for it. There is a barrier at the end of that function, and one at the end of the process: a script may go on
with collective work after the function, or call another one.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from typing import Any

import numpy as np

from .port import Engine

LIMIT_S = 10.0  # the longest wait, in seconds: another rank may have more to do at the end, such as saving
NAME = "hvd_hetero.farewell"  # of the operation


_everyone: list[Engine] = []  # the engine of all ranks, if groups of ranks were made; at most one entry
_alone = False  # whether this rank may leave the job alone: while the function of an elastic job runs, and if it fails


def prepare(engine: Any) -> None:
    """Makes `say` and the end of the process wait for the other ranks. Is called when a group of ranks is made.

    Args:
        engine: the engine of all ranks.
    """
    _everyone[:] = [engine]
    # Registered again, because each initialisation of Horovod registers its shutdown, and the last registered function
    # is called first.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def forget() -> None:
    """Forgets the engine given to `prepare`; is called when Horovod is shut down, which removes all groups of ranks."""
    _everyone.clear()


def begin() -> None:
    """Notes that the function of an elastic job begins: a rank that ends before `say` leaves alone."""
    global _alone
    _alone = True


def say() -> None:
    """Waits until all ranks have called this; at most `LIMIT_S`, and no longer once a rank is gone. Raises nothing.

    Ends as well where another rank waits for this one in another operation: then this one ends before the script has,
    as by `sys.exit()` on one rank, and the others have to learn of it.

    Has no effect if no group was made. Is called before Horovod is shut down, at the end of the function of an elastic
    job, and at the end of the process.
    """
    global _alone
    _alone = False
    for engine in _everyone:
        with contextlib.suppress(Exception):  # a rank is gone, and the next collective call says so
            _say_to(engine)


def _say_to(engine: Engine) -> None:
    handle, deadline = engine.allreduce_async(np.zeros(1), name=NAME), time.monotonic() + LIMIT_S
    engine.wait_avoiding_deadlock(lambda: handle.done() or time.monotonic() > deadline, name=NAME)
    if handle.done():
        handle.wait()


def _at_exit() -> None:
    # Not after an uncaught exception: the other ranks have to learn of it at once.
    if not hasattr(sys, "last_value") and not _alone:
        say()
