"""Measures compute time on a GPU, by CUDA events."""

from __future__ import annotations

import importlib
from typing import Any


class CudaStopwatch:
    """A stopwatch whose marks are CUDA events on the device's current stream, because a GPU's kernels run after Python
    has launched them. `seconds(start, end)` waits for the event `end`."""

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
