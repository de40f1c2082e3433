"""Threads beside the script's, which end before the interpreter does.

Whatever thread is at work while the interpreter ends is ended where it next asks for the interpreter's lock. Within C++
that aborts the process, with status 134, however well the job went. A thread of nothing but Python gets there as well:
the garbage collector runs in whichever thread it becomes due in, and PyTorch gives the lock away for each tensor that
it frees. (Python 3.14 lets such a thread wait for good instead.)
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

LIMIT_S = 3.0  # for all of them to end; longer than a question to a process that does not answer

_ends: dict[threading.Thread, Callable[[], object]] = {}  # of each thread, what makes it end


def begin(work: Callable[[], object], *, name: str, end: Callable[[], object] = lambda: None) -> None:
    """Calls `work()` in a thread that keeps no process from ending.

    Args:
        work: returns by itself, or soon after `end()` was called.
        name: of the thread.
        end: called once the script has ended, and with it Horovod.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    _ends[thread] = end
    for each in list(_ends):
        if not each.is_alive():
            _ends.pop(each, None)


# Registered before whatever the script and Horovod's initialisation register, and so called after that.
@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + LIMIT_S
    while threads := dict(_ends):  # one of them may begin another
        for end in threads.values():
            end()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            _ends.pop(thread, None)


os.register_at_fork(after_in_child=_ends.clear)  # it has none of them
