"""SIGTERM as a request: whoever is told to end ends in order, where the job can spare it.

Cluster managers send SIGTERM some time before they end a process (preemption, a spot instance that is taken back), and
`horovodrun` does when it stops a job. Who tells all processes to end is heard twice, as `horovodrun` passes it on. A
second one that comes later acts as it always did.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from . import background
from .stderr import tell

ONE_S = 5.0  # signals within so long are one
LATE_S = 2.0  # who waits for others so long may do so for minutes, and `horovodrun` kills it after 5 s
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
        self._process = os.getpid()  # a fork that is told to end is not the rank, and does
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
        # Of a fork; or closed, or forgotten, and put back by one that came later.
        if self._process != os.getpid() or not self._installed or self._heard() is None:
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

    @contextlib.contextmanager
    def unreachable(self, leave: Callable[[], object]) -> Iterator[None]:
        """While the main thread may be where no signal reaches it: in Horovod's rendezvous, which waits for hosts for
        minutes. Where SIGTERM comes and that is not over `LATE_S` later, `leave()` is called, by another thread, and
        this process ends in order. Where it is over before that has ended, the main thread goes on no further: what is
        saved has to stay as it is.
        """
        if not self._installed:
            yield
            return
        reads, writes = socket.socketpair()
        writes.setblocking(False)
        before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        over, leaving = threading.Event(), threading.Lock()

        def listen() -> None:
            with reads:
                while numbers := reads.recv(64):  # of signals
                    if before >= 0:
                        with contextlib.suppress(OSError):
                            os.write(before, numbers)
                    if signal.SIGTERM in numbers and not over.wait(LATE_S):
                        with leaving:
                            if not over.is_set():
                                self._leave_at_once(leave)

        background.begin(listen, name="hvd_hetero.notice")
        if self.told:  # in between
            writes.send(bytes([signal.SIGTERM]))
        try:
            yield
        finally:
            with leaving:  # for good, where this process is about to end
                over.set()
            signal.set_wakeup_fd(before)
            writes.shutdown(socket.SHUT_RDWR)  # also where a fork has it
            writes.close()

    @staticmethod
    def _leave_at_once(leave: Callable[[], object]) -> None:
        """Ends this process, unless the script hears the signal itself."""
        if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is not Notice._handle:
            return
        tell("hvd_hetero: SIGTERM: this rank was waiting for others to begin with, and ends.")
        try:
            leave()
        except Exception as error:
            tell(f"hvd_hetero: it could not do so in order: {error!r}")
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(LEFT)

    def hear(self) -> None:
        """Handles the signal."""
        self.told = True
        if (heard := self._heard()) is not None:
            heard()
