"""Background threads of this package, which are ended before the interpreter shuts down.

A thread that still runs during the interpreter's shutdown is terminated when it next acquires the GIL. If C++ code is
on its stack, that aborts the process with status 134, even after a successful job. A thread of pure Python code is
affected too: the garbage collector may run in any thread, and PyTorch releases the GIL for each tensor that it frees.
(In Python 3.14 such a thread waits forever instead.)
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

LIMIT_S = 3.0  # seconds in which all threads have to end; longer than `peer.QUESTION_S`

_ends: dict[threading.Thread, Callable[[], object]] = {}  # for each thread, the function that makes it end


def begin(work: Callable[[], object], *, name: str, end: Callable[[], object] = lambda: None) -> None:
    """Calls `work()` in a daemon thread, which is ended before the interpreter shuts down.

    Args:
        work: returns by itself, or soon after `end()` was called.
        name: the thread's name.
        end: makes `work` return. It is called, maybe several times, after the script has ended and Horovod was shut
            down.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    _ends[thread] = end
    for each in list(_ends):
        if not each.is_alive():
            _ends.pop(each, None)


# Registered before the exit functions of the script and of Horovod's initialisation, and so called after them.
@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + LIMIT_S
    while threads := dict(_ends):  # one of them may begin another
        for end in threads.values():
            end()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            _ends.pop(thread, None)


os.register_at_fork(after_in_child=_ends.clear)  # a forked process has none of these threads
