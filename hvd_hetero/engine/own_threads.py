"""The threads that Horovod has started in this process, which serve the communication.

Gloo has one for each process set, which receives what its ranks send.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .machine import ThreadClock, threads

_clock: ThreadClock | None = None  # None: not known, as the script has initialised Horovod, or /proc does not tell


@contextlib.contextmanager
def starting(*, anew: bool = False) -> Iterator[None]:
    """A context in which Horovod starts threads: it is initialised (`anew`), or makes a process set."""
    global _clock
    before = threads()
    yield
    now = threads()
    if anew:  # a /proc of another namespace has other numbers
        _clock = ThreadClock() if threading.get_native_id() in before else None
    if _clock is not None:  # those of process sets that were removed have ended
        _clock = ThreadClock((_clock.numbers & now) | (now - before))


def forget() -> None:
    """Says that these threads are not known, as Horovod was initialised elsewhere."""
    global _clock
    _clock = None


def seconds() -> float | None:
    """Their processor time in seconds; None if they are not known. May be called from any thread."""
    clock = _clock
    return None if clock is None else clock.seconds()
