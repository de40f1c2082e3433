"""Stopwatches of a rank's compute: by the clock on a CPU, by CUDA events on a GPU."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, Protocol


class Stopwatch(Protocol):
    """Marks moments, and tells the seconds between two marks. A mark may be an event that a device reaches later."""

    def mark(self) -> Any: ...

    def passed(self, mark: Any) -> bool:
        """Whether the device has reached `mark`, so that `seconds` up to it does not wait. Returns at once."""

    def seconds(self, start: Any, end: Any) -> float: ...


class WallClock:
    """A `Stopwatch` of wall time, for ranks that compute on the CPU, where their Python code runs."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start


class CudaStopwatch:
    """A `Stopwatch` whose marks are CUDA events on the device's current stream, because a GPU's kernels run after
    Python has launched them. `seconds(start, end)` waits for the event `end`."""

    def __init__(self, device: Any) -> None:
        self._cuda, self._device = importlib.import_module("torch").cuda, device

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def stopwatch_of(device: Any) -> Stopwatch:
    """The stopwatch that measures compute time on a `torch.device`."""
    return CudaStopwatch(device) if device.type == "cuda" else WallClock()
