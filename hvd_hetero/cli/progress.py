"""The display of a long build while it runs: its stage, the percentage compiled, and the time since its start."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import TextIO

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s+(.*)$")
_PLAIN_EVERY_PERCENT = 20  # without a terminal, a line is written at each multiple of this percentage


def percent_done(line: str) -> int | None:
    """The percentage in a line of make's output such as `[ 42%] Building CXX …`, or None."""
    match = _PERCENT.match(line)
    return min(int(match[1]), 100) if match else None


class Progress:
    """Shows the stages of a build on `stream`: as one line that is rewritten on a terminal, else as separate lines.

    `stream` None means stderr; `clock` returns seconds.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._start = clock()
        self._stage = ""
        self._shown_percent = -1
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._width = 0

    def stage(self, text: str) -> None:
        """Ends the stage before, and shows `text` as the present one."""
        self.end_line()
        self._stage = text
        self._shown_percent = -1
        self._write(text)

    def line(self, line: str) -> None:
        """Takes one line of the build's output, and shows the percentage if the line has one and it has grown."""
        now = percent_done(line)
        if now is None or now <= self._shown_percent:
            return
        same_step = now // _PLAIN_EVERY_PERCENT == self._shown_percent // _PLAIN_EVERY_PERCENT
        if not self._terminal and same_step and now < 100:
            return
        self._shown_percent = now
        self._write(f"{self._stage} {now:3d} %")

    def done(self, text: str) -> None:
        """Ends the display with `text` as its last line."""
        self.end_line()
        self._write(text)
        self.end_line()

    def end_line(self) -> None:
        """Ends the line that is being rewritten, so that what is printed next, as an error, begins a new one."""
        if self._terminal and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0

    def _write(self, text: str) -> None:
        elapsed_s = int(self._clock() - self._start)
        shown = f"[{elapsed_s // 60:d}:{elapsed_s % 60:02d}] {text}"
        if self._terminal:
            self._stream.write("\r" + shown.ljust(self._width))
            self._width = len(shown)
        else:
            self._stream.write(shown + "\n")
        self._stream.flush()
