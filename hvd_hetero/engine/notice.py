"""SIGTERM as a request: whoever is told to end ends in order, where the job can spare it.

Cluster managers send SIGTERM some time before they end a process (preemption, a spot instance that is taken back), and
`horovodrun` does when it stops a job. Who tells all processes to end is heard twice, as `horovodrun` passes it on. A
second one that comes later acts as it always did.
"""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from .stderr import tell

ONE_S = 5.0  # signals within so long are one
LEFT = 75  # exit status of who left in order: a temporary failure (sysexits.h); try again


class Notice:
    """Hears SIGTERM; where signals cannot be heard (not in the main thread), nothing.

    Args:
        heard: called at the first SIGTERM, between two instructions of the main thread. Of a method, as long as its
            object lives: once that is gone, this is as if it were closed.
        say: what happens now, for people.
    """

    def __init__(self, heard: Callable[[], None], *, say: str) -> None:
        self._heard = weakref.WeakMethod(heard) if inspect.ismethod(heard) else lambda: heard
        self._text = say
        self.told = False  # this process was told to end
        self._first_s: float | None = None  # when the signal came first
        self._before: Any = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        """Hears no more."""
        if self._installed:
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:  # else of who came later, and gives it back
                self._give_back()

    def _give_back(self) -> None:
        signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._installed or self._heard() is None:  # closed, or forgotten, and put back by one that came later
            self._installed = False
            self._give_back()
            os.kill(os.getpid(), number)
        elif self._first_s is None:
            self._first_s = time.monotonic()
            self.hear()
            tell(f"hvd_hetero: SIGTERM: {self._text}")
        elif time.monotonic() - self._first_s >= ONE_S:
            self.close()
            os.kill(os.getpid(), number)

    def hear(self) -> None:
        """What the signal does."""
        self.told = True
        if (heard := self._heard()) is not None:
            heard()
