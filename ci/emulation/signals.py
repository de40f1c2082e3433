"""Signals around an emulated cluster: they end it in good order, and cannot interrupt its removal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_signals() -> Callable[[], None]:
    """A function that undoes what was done here: SIGTERM and SIGHUP, where nobody handles them, raise SystemExit (as
    SIGINT raises KeyboardInterrupt), so that `with` blocks are left properly."""
    old: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                old[number] = signal.signal(number, _exit)
    return lambda: _restore(old)


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """A block that no second Ctrl-C cuts short."""
    old: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        old = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        _restore(old)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
