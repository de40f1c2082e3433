"""What the engine tells people: lines on standard error."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """None; writes the text, where that can be done. Who started this process, and read it, may be gone; and a signal
    may have come while it wrote there. It goes on all the same."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(text, file=sys.stderr, flush=True)
