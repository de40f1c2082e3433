"""What the workers of several tests share: running the checks that a test names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any


def run_checks(hvd: Any, names: Iterable[str], checks: Mapping[str, Callable[[], None]]) -> None:
    """Calls the named checks on all ranks together, and prints `OK name` for each that holds."""
    for name in names:
        checks[name]()
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"OK {name}", flush=True)
