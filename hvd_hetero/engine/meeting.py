"""Where ranks that are threads of this process meet: what each brought to a collective, and what each gets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .port import CollectiveError

if TYPE_CHECKING:
    from .local import World

_REDUCE: dict[str, Any] = {"sum": np.add, "min": np.minimum, "max": np.maximum}


@dataclass(eq=False)
class Call:
    """One collective operation under way, with the arrays of the ranks that have called it, and their results."""

    size: int
    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    signatures: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    results: dict[int, np.ndarray] = field(default_factory=dict)
    error: str | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class Group:
    """A group of ranks that are threads, and the collective operations between them."""

    def __init__(self, size: int, world: World | None) -> None:
        self.size, self.world = size, world
        self.lock = threading.Lock()
        self.calls: dict[str, Call] = {}
        self.waited_for: list[Call] = []  # once for each rank that waits

    def check(self, name: str) -> None:
        """Raises CollectiveError where what is called `name` cannot end any more."""
        if self.world is not None and self.world.failed.is_set():
            raise CollectiveError(f"{name!r}: another rank stopped before it took part.")

    @contextlib.contextmanager
    def waiting(self, call: Call | None) -> Iterator[None]:
        """While a rank waits for `call`; None: for one that is over."""
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
    """Fills `call.results`, or `call.error` when the ranks disagree."""
    arrays = [call.arrays[rank] for rank in range(call.size)]
    kind = call.signatures[0][0]
    # All-to-all brings its own splits on each rank; everything else must be called alike.
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
            with np.errstate(over="ignore"):  # infinity, as anywhere else
                total = _REDUCE[call.signatures[0][1]](total, array, out=total)
        if kind == "allreduce":
            call.results = {rank: total.copy() for rank in range(call.size)}
            for array in arrays if call.size > 1 else ():  # whoever takes this for the result is to notice
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
