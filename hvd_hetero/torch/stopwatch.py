"""Measuring compute where it happens: on the CPU by the clock, on a GPU by events in its stream."""

from __future__ import annotations

from typing import Any

import torch

from hvd_hetero.optimizers.meter import Stopwatch, WallClock


class CudaStopwatch:
    """Marks are events on the device's current stream: a GPU's kernels run long after Python has launched them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def stopwatch_of(device: torch.device) -> Stopwatch:
    """What measures compute on `device`."""
    return CudaStopwatch(device) if device.type == "cuda" else WallClock()
