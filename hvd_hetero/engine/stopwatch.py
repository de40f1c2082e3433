"""Measuring compute on a GPU: by events in its stream."""

from __future__ import annotations

import importlib
from typing import Any


class CudaStopwatch:
    """Marks are events on the device's current stream: a GPU's kernels run long after Python has launched them."""

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
