"""What the workers of several tests share: running the checks that a test names, and expecting an error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvd_hetero.optimizers import timing

AS_IN_USE = timing.SIZES_BYTES


def time_quickly() -> None:
    """What topologies and codecs would take is timed on small messages, and once: only that ranks agree matters."""
    timing.SIZES_BYTES, timing.QUICK_S = dict.fromkeys((2**10, 2**14), math.inf), 0.0


def end_datasets_at_once() -> None:
    """No dataset of TensorFlow's is tuned, of which ranks of tests make many: whoever collects one would wait for it,
    see `hvd_hetero.keras.untuned`."""
    import tensorflow as tf

    from hvd_hetero.keras.untuned import untuned

    begin = tf.data.Dataset.__iter__
    tf.data.Dataset.__iter__ = lambda dataset: begin(untuned(dataset))


def run_checks(hvd: Any, names: Iterable[str], checks: Mapping[str, Callable[[], None]]) -> None:
    """Calls the named checks on all ranks together, and prints `OK name` for each that holds."""
    time_quickly()
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
