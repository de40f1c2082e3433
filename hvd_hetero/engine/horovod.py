"""`HorovodEngine`: the port on Horovod's operations for PyTorch. Only this module and `horovod_tensorflow` call
Horovod's collectives.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import own_threads
from .environment import waits_without_spinning
from .machine import ThreadClock
from .port import Op, checked_splits
from .process_set import ProcessSetEngine, while_there
from .sleep import wait_until


def _over(binding: Any, handle: int) -> bool:
    """Whether an operation is complete. Any thread may ask, even while another thread waits for the operation and
    releases its handle."""
    try:
        return bool(binding.poll(handle))
    except ValueError:  # Horovod has released the handle
        return True


class HorovodHandle:
    """The handle of a Horovod operation; see `port.Handle`. `like` is the array passed in: a numpy array gives a numpy
    result."""

    def __init__(self, engine: HorovodEngine, handle: int, like: Any, name: str) -> None:
        self._binding, self._handle, self._like = engine._binding, handle, like
        self._failure = engine._internal_error
        self._tracked = engine._track(name, functools.partial(_over, self._binding, handle))
        self._synchronize = engine.synchronize

    def done(self) -> bool:
        return bool(self._binding.poll(self._handle))

    def wait(self) -> Any:
        with self._tracked.waiting(self._failure):
            if not waits_without_spinning():
                wait_until(self.done)
            result = self._synchronize(self._handle)
        if isinstance(result, tuple):  # all-to-all returns the received splits as well
            result = result[0]
        return result.numpy() if isinstance(self._like, np.ndarray) else result


class HorovodEngine(ProcessSetEngine):
    """One rank of a Horovod process set, for torch tensors and numpy arrays (which share memory with tensors)."""

    binding = "horovod.torch.mpi_ops"

    def __init__(self, process_set: Any = None) -> None:
        self._torch = importlib.import_module("torch")
        self._made_by = ThreadClock([threading.get_native_id()])
        super().__init__(process_set)
        # `hvd_hetero.torch` wraps Horovod's `synchronize` to report waits; here `Tracked` reports them, with names.
        self.synchronize = getattr(self._binding.synchronize, "__wrapped__", self._binding.synchronize)

    def serving_s(self) -> float:
        """Without the threads of PyTorch's pool: those of OpenMP spin when they have nothing to do, for 8 ms or more,
        and Intel's for 200 ms."""
        own_s = own_threads.seconds()
        return super().serving_s() if own_s is None else own_s + self._made_by.seconds()

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def on_device(self, array: Any) -> bool:
        return getattr(array, "is_cuda", False) and bool(self._binding.nccl_built())

    @while_there
    def allreduce_async(self, array: Any, *, name: str, op: Op = "sum") -> HorovodHandle:
        handle = self._binding.allreduce_async_(
            self._tensor(array), name=name, op=self._op(op), process_set=self._set
        )
        return HorovodHandle(self, handle, array, name)

    @while_there
    def allgather_async(self, array: Any, *, name: str) -> HorovodHandle:
        handle = self._binding.allgather_async(self._tensor(array), name=name, process_set=self._set)
        return HorovodHandle(self, handle, array, name)

    @while_there
    def broadcast_async(self, array: Any, *, root: int, name: str) -> HorovodHandle:
        handle = self._binding.broadcast_async_(
            self._tensor(array), self.ranks[root], name=name, process_set=self._set
        )
        return HorovodHandle(self, handle, array, name)

    @while_there
    def reducescatter_async(self, array: Any, *, name: str) -> HorovodHandle:
        handle = self._binding.reducescatter_async(
            self._tensor(array), name=name, op=self._binding.Sum, process_set=self._set
        )
        return HorovodHandle(self, handle, array, name)

    @while_there
    def alltoall_async(self, array: Any, *, splits: Sequence[int], name: str) -> HorovodHandle:
        counts = self._torch.tensor(
            checked_splits(splits, rows=len(array), size=self.size, name=name), dtype=self._torch.int32, device="cpu"
        )
        handle = self._binding.alltoall_async(self._tensor(array), splits=counts, name=name, process_set=self._set)
        return HorovodHandle(self, handle, array, name)
