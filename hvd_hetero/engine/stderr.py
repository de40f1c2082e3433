"""Messages of the engine to the user, on standard error."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Prints a text to standard error. Ignores failures: the reading process may be gone, and a signal handler may call
    this while the same stream is being written."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(text, file=sys.stderr, flush=True)
