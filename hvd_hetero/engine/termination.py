"""Handles SIGTERM as a request: the rank ends at its next commit or checkpoint, and not at once.

Cluster managers send SIGTERM some time before they kill a process (preemption, a spot instance that is taken back), and
so does `horovodrun` when it stops a job. A manager that signals all processes of a job makes each rank get SIGTERM
twice, as `horovodrun` passes it on; so signals within `ONE_S` count as one. A later SIGTERM has the effect that it had
before this handler was installed: usually it ends the process.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from . import background
from .stderr import flush_output, tell

ONE_S = 5.0  # signals within so many seconds after the first count as one
LATE_S = 2.0  # seconds before a rank in rendezvous ends by itself; `horovodrun` kills it 5 s after SIGTERM
EXIT_STATUS_LEFT = 75  # exit status of a process that has left in order: EX_TEMPFAIL of sysexits.h, "try again"


class TerminationHandler:
    """A handler of SIGTERM, installed by its construction. Outside of the main thread, where Python allows no signal
    handlers, it does nothing.

    Args:
        heard: is called at the first SIGTERM, in the main thread, as any Python signal handler. A bound method is held
            by weak reference; once its object is gone, this handler acts as after `close`.
        say: what happens now, as text that is printed at the first SIGTERM.

    Attributes:
        told: whether this process was told to end.
    """

    def __init__(self, heard: Callable[[], None], *, say: str) -> None:
        self._heard = weakref.WeakMethod(heard) if inspect.ismethod(heard) else lambda: heard
        self._text = say
        self.told = False
        self._process = os.getpid()  # a forked process (as of a data loader) ends at SIGTERM as usual
        self._first_s: float | None = None  # when the first signal came, by `time.monotonic`
        self._before: Any = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._before = signal.signal(signal.SIGTERM, self._handle)

    def close(self) -> None:
        """Restores the handler of SIGTERM that was there before, unless another one was installed since."""
        if self._installed:
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:  # else a later one is in place, and restores this
                self._give_back()

    def _give_back(self) -> None:
        signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # In a forked process; or this handler is closed or its object gone, and a later one has restored it.
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
        """A context for code in which the main thread runs no signal handlers: Horovod's rendezvous, which may wait for
        hosts for minutes.

        If SIGTERM comes and the context is not left within `LATE_S`, another thread calls `leave()`, and this process
        ends with status `EXIT_STATUS_LEFT`. From the moment when `leave()` begins, the main thread cannot leave the
        context, so it changes nothing of what `leave()` saves.
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

        background.begin(listen, name="hvd_hetero.termination")
        if self.told:  # SIGTERM came before the file descriptor was set
            writes.send(bytes([signal.SIGTERM]))
        try:
            yield
        finally:
            with leaving:  # blocks for good if this process is about to end
                over.set()
            signal.set_wakeup_fd(before)
            writes.shutdown(socket.SHUT_RDWR)  # ends `listen`, even if a forked process has the socket open
            writes.close()

    @staticmethod
    def _leave_at_once(leave: Callable[[], object]) -> None:
        """Calls `leave()` and ends this process with status `EXIT_STATUS_LEFT`. Does nothing if the script has
        installed a handler of SIGTERM of its own."""
        if getattr(signal.getsignal(signal.SIGTERM), "__func__", None) is not TerminationHandler._handle:
            return
        tell("hvd_hetero: SIGTERM: this rank was waiting for others to begin with, and ends.")
        try:
            leave()
        except Exception as error:
            tell(f"hvd_hetero: it could not do so in order: {error!r}")
        finally:
            flush_output()
            os._exit(EXIT_STATUS_LEFT)

    def hear(self) -> None:
        """Notes that this process was told to end, and calls `heard`."""
        self.told = True
        if (heard := self._heard()) is not None:
            heard()
