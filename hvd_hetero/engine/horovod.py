"""The port on real Horovod. The only file that calls Horovod's collectives."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from .environment import prepare_init, waits_without_spinning
from .port import Op

_OPS = {"sum": "Sum", "min": "Min", "max": "Max"}
_SHORTEST_SLEEP_S = 0.0003
_LONGEST_SLEEP_S = 0.002


def wait_until(done: Callable[[], bool]) -> None:
    """Sleeps until `done()`. A look costs CPU that a slow rank needs, so the longer the wait, the rarer the looks."""
    start = time.perf_counter()
    while not done():
        waited = time.perf_counter() - start
        time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, waited / 16)))


class HorovodHandle:
    """A Horovod operation under way."""

    def __init__(self, binding: Any, handle: int, like: Any) -> None:
        self._binding, self._handle, self._like = binding, handle, like

    def done(self) -> bool:
        return bool(self._binding.poll(self._handle))

    def wait(self) -> Any:
        if not waits_without_spinning():
            wait_until(self.done)
        result = self._binding.synchronize(self._handle)
        if isinstance(result, tuple):  # all-to-all returns the received splits as well
            result = result[0]
        return result.numpy() if isinstance(self._like, np.ndarray) else result


class HorovodEngine:
    """One rank of a Horovod process set, for torch tensors and numpy arrays (which share memory with tensors)."""

    # By ranks: Horovod pairs names within a process set, and only its members count.
    _named: ClassVar[dict[tuple[int, ...], Iterator[int]]] = {}

    def __init__(self, process_set: Any = None) -> None:
        # Horovod itself decides what `horovod.torch` needs; nothing is imported before somebody asks for it.
        self._torch = importlib.import_module("torch")
        self._binding = importlib.import_module("horovod.torch.mpi_ops")
        self._set = process_set if process_set is not None else self._binding.global_process_set
        self.failure: tuple[type[Exception], ...] = (self._binding.HorovodInternalError, ValueError)
        if not self._binding.is_initialized():
            raise RuntimeError("Expected hvd.init() first. Received: Horovod not initialised.")
        if not self._set.included():
            raise ValueError(
                f"Expected a process set that includes this rank ({self._binding.rank()}). Received: "
                f"{self._set.ranks}. Guard the call with process_set.included()."
            )

    @property
    def rank(self) -> int:
        return int(self._set.rank())

    @property
    def size(self) -> int:
        return int(self._set.size())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._set.ranks) if self._set.ranks else tuple(range(self._binding.size()))

    def unique(self, prefix: str) -> str:
        return f"{prefix}{next(self._named.setdefault(self.ranks, itertools.count(1)))}"

    def _tensor(self, array: Any) -> Any:
        return self._torch.from_numpy(array) if isinstance(array, np.ndarray) else array

    def allreduce_async(self, array: Any, *, name: str, op: Op = "sum") -> HorovodHandle:
        handle = self._binding.allreduce_async_(
            self._tensor(array), name=name, op=getattr(self._binding, _OPS[op]), process_set=self._set
        )
        return HorovodHandle(self._binding, handle, array)

    def allgather_async(self, array: Any, *, name: str) -> HorovodHandle:
        handle = self._binding.allgather_async(self._tensor(array), name=name, process_set=self._set)
        return HorovodHandle(self._binding, handle, array)

    def broadcast_async(self, array: Any, *, root: int, name: str) -> HorovodHandle:
        handle = self._binding.broadcast_async_(
            self._tensor(array), self.ranks[root], name=name, process_set=self._set
        )
        return HorovodHandle(self._binding, handle, array)

    def reducescatter_async(self, array: Any, *, name: str) -> HorovodHandle:
        handle = self._binding.reducescatter_async(
            self._tensor(array), name=name, op=self._binding.Sum, process_set=self._set
        )
        return HorovodHandle(self._binding, handle, array)

    def alltoall_async(self, array: Any, *, splits: Sequence[int], name: str) -> HorovodHandle:
        if len(splits) != self.size or sum(splits) != len(array):
            raise ValueError(
                f"{name!r}: expected {self.size} splits that sum to {len(array)} rows. Received: {list(splits)}."
            )
        counts = self._torch.tensor(list(splits), dtype=self._torch.int32)
        handle = self._binding.alltoall_async(self._tensor(array), splits=counts, name=name, process_set=self._set)
        return HorovodHandle(self._binding, handle, array)

    def group(self, ranks: Sequence[int]) -> HorovodEngine | None:
        members = [self.ranks[rank] for rank in ranks]
        if tuple(members) == self.ranks:
            return self
        if len(self.ranks) != self._binding.size():
            raise ValueError("Expected group() on the engine of all ranks, because Horovod's process sets are made by "
                             f"all ranks together. Received: the engine of ranks {self.ranks}.")
        process_set = self._process_set(members)
        return HorovodEngine(process_set) if process_set.included() else None

    def _process_set(self, members: list[int]) -> Any:
        """The process set of these global ranks: the one that there is, or a new one."""
        process_sets = importlib.import_module("horovod.common.process_sets")
        for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items():
            if ranks == members:
                existing = process_sets.ProcessSet(members)
                existing.process_set_id = number
                return existing
        try:
            return process_sets.add_process_set(members)
        except ValueError as error:
            raise ValueError(
                f"Expected process sets that can be made after hvd.init(), for ranks {members}. Received: {error} "
                f'Set HOROVOD_DYNAMIC_PROCESS_SETS=1, or call hvd.init(process_sets="dynamic").'
            ) from error


def start() -> HorovodEngine:
    """The engine of all ranks, once Horovod is initialised; for programs that have no face of a framework."""
    prepare_init()
    importlib.import_module("horovod.torch.mpi_ops").init()
    return HorovodEngine()
