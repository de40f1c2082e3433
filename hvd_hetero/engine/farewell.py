"""The end of a job whose sums have several levels: no rank goes while others are still at the last one.

The last stage of such a sum is one of each node's ranks. A rank that has seen the end of its own, and ends its process,
shuts Horovod down on all ranks, and the sum of another node fails in the last step of a training that went well.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from typing import Any

import numpy as np

from .environment import is_elastic
from .port import Engine

LIMIT_S = 10.0  # a rank that has more to do than the others, such as saving, keeps them no longer
LOOK_S = 0.005


_everyone: list[Engine] = []  # the engine of all ranks, where there are groups among them; at most one


def prepare(engine: Any) -> None:
    """Names the engine of all ranks, among which there are groups, of the present initialisation."""
    _everyone[:] = [engine]
    # Anew, as Horovod registers its own end anew whenever it is initialised: the last one comes first.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def say() -> None:
    """Returns when all ranks say so, when one of them is gone, or after a while. Once for each initialisation."""
    if _everyone:
        engine = _everyone.pop()
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
