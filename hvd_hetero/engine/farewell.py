"""The end of a job whose sums have several levels: no rank goes while others are still at the last one.

The last stage of such a sum is one of each node's ranks. A rank that has seen the end of its own, and ends its process,
shuts Horovod down on all ranks, and the sum of another node fails in the last step of a training that went well.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import time
from typing import Any

import numpy as np

from .environment import is_elastic
from .port import Engine

LIMIT_S = 10.0  # a rank that has more to do than the others, such as saving, keeps them no longer
LOOK_S = 0.005


@functools.cache
def expect_levels() -> None:
    """Sees to it that this process says farewell when it ends: it takes part in sums of several levels. It is called
    after Horovod was initialised, whose own function for the end of the process comes after ours, then."""
    atexit.register(_at_exit)


_said_by: list[Engine] = []  # the engine of all ranks, of the present initialisation


def prepare(engine: Any) -> None:
    """Names the engine of all ranks, among which there are groups."""
    _said_by[:] = [engine]
    expect_levels()


def say() -> None:
    """Returns when all ranks say so, when one of them is gone, or after a while. Once for each initialisation."""
    while _said_by:
        engine = _said_by.pop()
        with contextlib.suppress(Exception):  # whatever is wrong by now, this process ends
            handle = engine.allreduce_async(np.zeros(1), name="hvd_hetero.farewell")
            deadline = time.monotonic() + LIMIT_S
            while not handle.done():
                if time.monotonic() > deadline:
                    return
                time.sleep(LOOK_S)
            handle.wait()


def _at_exit() -> None:
    # Not after an error: the others are to hear of that at once. A rank that leaves an elastic job goes alone.
    if not hasattr(sys, "last_value") and not is_elastic():
        say()
