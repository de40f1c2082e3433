"""Measuring compute where it happens: on the CPU by the clock, on a GPU by events in its stream."""

from __future__ import annotations

import torch

from hvd_hetero.engine.stopwatch import CudaStopwatch
from hvd_hetero.optimizers.meter import Stopwatch, WallClock


def stopwatch_of(device: torch.device) -> Stopwatch:
    """What measures compute on `device`."""
    return CudaStopwatch(device) if device.type == "cuda" else WallClock()
