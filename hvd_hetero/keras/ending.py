"""Lets a process end while TensorFlow is still reading its data, by destroying all tf.data iterators at exit.

When the interpreter shuts down, it ends each thread of TensorFlow that runs Python code, or is about to. An iterator
that is destroyed after that waits for ever for the batch that the thread was to bring. So a process in which `fit`
raised an error would not end, nor would the ranks that wait for its end. (Seen with TensorFlow 2.21 and Keras 3.15,
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
    """Registers a balancer, so that at the end of the process no thread goes on waiting to deal its batches.

    `BalancedDataset` calls it. A thread that reads ahead may wait for an exchange that this process no longer makes.
    """
    _balancers.add(balancer)


@atexit.register  # registered before Horovod's own, and so called after it: other ranks do not wait for this
def _end_reading() -> None:
    """Destroys all tf.data iterators while the threads that read for them can still finish.

    It also clears the frames of tracebacks, whose local variables may hold iterators, and collects garbage, as frames
    that refer to themselves may hold the tensor that an iterator is.
    """
    if (tf := sys.modules.get("tensorflow")) is None:
        return
    for balancer in list(_balancers):
        balancer.dialogue.unheard()
    iterator = tf.data.Iterator
    for one in gc.get_objects():  # looks at types alone, as reading an attribute would wake up lazy objects
        if issubclass(type(one), iterator):
            vars(one).clear()
        elif type(one) is types.TracebackType:  # of the error that ends the process, or of one that was caught
            for frame, _ in traceback.walk_stack(one.tb_frame):
                with contextlib.suppress(RuntimeError):  # the frame is still running
                    frame.clear()
    gc.collect()
