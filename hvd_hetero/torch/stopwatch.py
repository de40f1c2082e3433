"""Measuring compute where it happens: on the CPU by the clock, on a GPU by events in its stream."""

from __future__ import annotations

from typing import Any

import torch

from hvd_hetero.optimizers.balancer import Stopwatch, WallClock


class CudaStopwatch:
    """Marks are events on the current stream: a GPU's kernels run long after Python has launched them."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def stopwatch() -> Stopwatch:
    """What fits the device that torch computes on by default in this process."""
    return CudaStopwatch() if torch.cuda.is_available() and torch.cuda.is_initialized() else WallClock()
