"""What a process says: messages of the engine on standard error, and what is left to print when it ends at once."""

from __future__ import annotations

import contextlib
import sys


def tell(text: str) -> None:
    """Prints a text to standard error. Ignores failures: the reading process may be gone, and a signal handler may call
    this while the same stream is being written."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        print(text, file=sys.stderr, flush=True)


def flush_output() -> None:
    """Writes what the script has printed so far to standard output. Ignores failures, and an output that was closed."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if sys.stdout is not None:
            sys.stdout.flush()
