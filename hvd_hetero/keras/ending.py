"""The end of a process whose data TensorFlow was still reading.

A thread of TensorFlow that is in Python, or comes there, when the interpreter ends is ended with it. An iterator that
goes after that waits for what this thread was to bring, for ever: a process in which `fit` raised an error does not
end, and neither do the ranks that wait for its end. (TensorFlow 2.21 with Keras 3.15, with one process and no Horovod
as well: a PyDataset whose batches take 0.3 s, and a callback that raises.)
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
    """Sees to it that at the end of the process nobody waits who deals its batches."""
    _balancers.add(balancer)


@atexit.register  # before Horovod's own, so that this comes after it: the other ranks need not wait for a batch
def _end_reading() -> None:
    """Lets go of all iterators, while the threads that read can still come to their end."""
    if (tf := sys.modules.get("tensorflow")) is None:
        return
    for balancer in list(_balancers):
        balancer.dialogue.unheard()
    iterator = tf.data.Iterator
    for one in gc.get_objects():  # which are asked nothing: a lazy one would begin to work
        if issubclass(type(one), iterator):
            vars(one).clear()
        elif type(one) is types.TracebackType:  # the last error's, or of one that somebody caught
            for frame, _ in traceback.walk_stack(one.tb_frame):
                with contextlib.suppress(RuntimeError):  # it is not at its end
                    frame.clear()
