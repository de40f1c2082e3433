"""Computes the collectives of ranks that are threads of one process: for `local.World` and `local.SoloEngine`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .port import CollectiveError

if TYPE_CHECKING:
    from .local import World

_REDUCE: dict[str, Any] = {"sum": np.add, "min": np.minimum, "max": np.maximum}


@dataclass(eq=False)
class Call:
    """One collective operation: the arrays of the ranks that have called it so far, and in the end their results.

    Attributes:
        size: the number of ranks that take part.
        arrays: the argument of each rank that has called it, by rank.
        signatures: by rank: the kind of operation, such as "allreduce", and its other arguments (op, root or splits).
        results: by rank, once `ready` is set and there is no error.
        error: why the arguments of the ranks do not fit together; None if they do.
        ready: is set once all ranks have called the operation.
    """

    size: int
    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    signatures: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    results: dict[int, np.ndarray] = field(default_factory=dict)
    error: str | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class ThreadGroup:
    """The state that the threads of one group of ranks share: their collective operations under way.

    Args:
        size: the number of ranks in the group.
        world: the `World` that runs the threads; None for a single rank without one.
    """

    def __init__(self, size: int, world: World | None) -> None:
        self.size, self.world = size, world
        self.lock = threading.Lock()
        self.calls: dict[str, Call] = {}
        self.waited_for: list[Call] = []  # the calls that ranks wait for now, once for each waiting rank

    def check(self, name: str, over: Callable[[], bool]) -> None:
        """Raises CollectiveError, naming operation `name`, if a rank of the world has failed: it will never come. Not
        if the operation is `over()`, looked at afterwards: a rank may complete it, and fail, between two looks."""
        if self.world is not None and self.world.failed.is_set() and not over():
            raise CollectiveError(f"{name!r}: another rank stopped before it took part.")

    @contextlib.contextmanager
    def waiting(self, call: Call | None) -> Iterator[None]:
        """A context in which a rank counts as waiting for `call`. With None (an operation not under way), it does not
        count."""
        waited_for = [] if call is None else [call]
        self.waited_for += waited_for
        try:
            yield
        finally:
            for each in waited_for:
                self.waited_for.remove(each)

    def enter(self, rank: int, name: str, array: np.ndarray, signature: tuple[Any, ...]) -> Call:
        with self.lock:
            call = self.calls.setdefault(name, Call(self.size))
            if rank in call.arrays:
                raise ValueError(
                    f"{name!r}: expected at most one collective of this name under way. Received: a second one from "
                    f"rank {rank}. Wait for the first, or name it differently."
                )
            call.arrays[rank], call.signatures[rank] = array, signature
            if len(call.arrays) == self.size:
                del self.calls[name]
                _finish(name, call)
                call.ready.set()
        return call


def _finish(name: str, call: Call) -> None:
    """Computes `call.results` from the arrays of all ranks; sets `call.error` if operations, types or shapes differ."""
    arrays = [call.arrays[rank] for rank in range(call.size)]
    kind = call.signatures[0][0]
    # The splits of an all-to-all may differ between ranks; the arguments of all other operations must be the same.
    alike = {signature[:1] if kind == "alltoall" else signature for signature in call.signatures.values()}
    same_rows = kind in ("allgather", "alltoall")
    shapes = {(array.dtype, array.shape[1:] if same_rows else array.shape) for array in arrays}
    if len(alike) > 1 or len(shapes) > 1:
        seen = "; ".join(
            f"rank {rank}: {call.signatures[rank]} of {arrays[rank].dtype}{list(arrays[rank].shape)}"
            for rank in range(call.size)
        )
        call.error = f"{name!r}: expected the same operation, type and shape on all ranks. Received: {seen}."
        return
    if kind in ("allreduce", "reducescatter"):
        total = arrays[0].copy()
        for array in arrays[1:]:
            with np.errstate(over="ignore"):  # an overflow gives infinity without a warning, as in Horovod
                total = _REDUCE[call.signatures[0][1]](total, array, out=total)
        if kind == "allreduce":
            call.results = {rank: total.copy() for rank in range(call.size)}
            for array in arrays if call.size > 1 else ():  # overwritten, so that a caller that reads its input notices
                array[...] = np.nan if array.dtype.kind == "f" else 0
        else:
            call.results = dict(enumerate(part.copy() for part in np.array_split(total, call.size)))
    elif kind == "allgather":
        whole = np.concatenate(arrays)
        call.results = {rank: whole.copy() for rank in range(call.size)}
    elif kind == "broadcast":
        root = arrays[call.signatures[0][1]].copy()
        for array in arrays:
            array[...] = root
        call.results = call.arrays
    else:
        starts = [np.concatenate([[0], np.cumsum(call.signatures[rank][1])]) for rank in range(call.size)]
        for to in range(call.size):
            parts = [arrays[r][starts[r][to] : starts[r][to + 1]] for r in range(call.size)]
            call.results[to] = np.concatenate(parts)
