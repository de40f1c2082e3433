"""Processes that load batches for a rank, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import Executor, ProcessPoolExecutor

import numpy as np

from .source import Batch, Source

_source: Source | None = None  # in such a process


def processes(workers: int, source: Source) -> Executor:
    """So many processes, each with this source: `submit(take, indices)`."""
    return ProcessPoolExecutor(workers, initializer=_begin, initargs=(source,))


def take(indices: np.ndarray) -> Batch:
    """The samples at these indices; called in one of the processes."""
    assert _source is not None
    return _source.take(indices)


def _begin(source: Source) -> None:
    global _source
    _source = source
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A rank that is killed shuts no pool down; its launcher waits until nobody holds the rank's output open."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
