"""Measures compute time on the device of the parameters: on a CPU by the clock, on a GPU by events in its stream."""

from __future__ import annotations

import torch

from hvd_hetero.engine.stopwatch import CudaStopwatch
from hvd_hetero.optimizers.meter import Stopwatch, WallClock


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The stopwatch that measures compute time on `device`."""
    return CudaStopwatch(device) if device.type == "cuda" else WallClock()
