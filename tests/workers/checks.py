"""What the workers of several tests share: running the checks that a test names, and expecting an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def run_checks(hvd: Any, names: Iterable[str], checks: Mapping[str, Callable[[], None]]) -> None:
    """Calls the named checks on all ranks together, and prints `OK name` for each that holds."""
    for name in names:
        began = time.perf_counter()
        checks[name]()
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"OK {name} ({time.perf_counter() - began:.1f} s)", flush=True)


def expect(
    text: str, call: Callable[[], Any], *, kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> None:
    """Calls what has to raise an error of that kind with this text in it."""
    try:
        call()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"expected an error with {text!r}")
