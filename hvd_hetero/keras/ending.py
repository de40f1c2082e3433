"""Lets a process end while TensorFlow is still reading its data.

When the interpreter ends, a thread of TensorFlow that runs Python code, or comes to run some, is ended with it. An
iterator that is destroyed after that waits for ever for what the thread was to bring. So a process in which `fit`
raised an error does not end, and neither do the ranks that wait for its end. (Seen with TensorFlow 2.21 and Keras 3.15,
also in one process without Horovod: a PyDataset whose batches take 0.3 s, and a callback that raises.)
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import traceback
import types
import weakref

from .balancer import Balancer

_balancers: weakref.WeakSet[Balancer] = weakref.WeakSet()


def free_at_exit(balancer: Balancer) -> None:
    """Registers a balancer, so that at the end of the process no thread that deals its batches goes on waiting."""
    _balancers.add(balancer)


@atexit.register  # registered before Horovod's, so that this runs after it: other ranks need not wait for a batch here
def _end_reading() -> None:
    """Destroys all iterators while the threads that read can still finish."""
    if (tf := sys.modules.get("tensorflow")) is None:
        return
    for balancer in list(_balancers):
        balancer.dialogue.unheard()
    iterator = tf.data.Iterator
    for one in gc.get_objects():  # by type alone, without touching attributes: a lazy object would begin to work
        if issubclass(type(one), iterator):
            vars(one).clear()
        elif type(one) is types.TracebackType:  # of the last error, or of one that was caught
            for frame, _ in traceback.walk_stack(one.tb_frame):
                with contextlib.suppress(RuntimeError):  # the frame is still running
                    frame.clear()
