"""The port: the collectives that the algorithms are written on.

Every operation is named, because Horovod pairs operations by name; it is asynchronous and returns a handle; arrays
are mutable and live on the CPU or on a device (numpy arrays, torch tensors). Ranks are those of the group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

Op = Literal["sum", "min", "max"]

PIECE_BYTES = 1 << 24  # of bytes in one operation, at the most: see `broadcast_in_pieces`
TURNS = 8  # names that operations take by turns which nobody has given one


class CollectiveError(RuntimeError):
    """Ranks called a collective with arguments that do not fit together, or a peer is gone."""


class Handle(Protocol):
    """A collective under way, until it is waited for, which is done once."""

    def done(self) -> bool:
        """True when `wait` would return at once."""

    def wait(self) -> Any:
        """The result; sleeps (never spins) until it is there. Raises the engine's `failure` when it failed."""


@runtime_checkable
class Engine(Protocol):
    """One rank's view of a group of ranks."""

    failure: tuple[type[Exception], ...]
    """What a failed collective raises."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of this group, in order."""

    @property
    def identity(self) -> int:
        """A number that stands for this rank's hardware: it stays when ranks are numbered anew."""

    def quota_cores(self) -> float | None:
        """The cores that a CPU quota allows this process in the long run, as it is now; None where there is none."""

    def on_device(self, array: Any) -> bool:
        """Whether an array's collectives go from and to the memory of a GPU, and not through the host's."""

    def unique(self, prefix: str) -> str:
        """A name that no earlier call returned, and the same on all ranks that call it in the same order."""

    def remember(self, rebuild: Callable[[], None]) -> None:
        """Calls the method `rebuild`, as long as its object lives, whenever the ranks have become others.

        A rank that joins makes its objects while those that stay rebuild theirs, so both make the same collective
        calls in the same order.
        """

    def on_change(self, forget: Callable[[], None]) -> None:
        """Calls the method `forget`, as long as its object lives, when the ranks have become others and nothing is
        rebuilt yet: for what is made when it is needed. It must not be a collective call."""

    def during_waits(self, aside: Callable[[], AbstractContextManager[None]]) -> None:
        """Enters what the method `aside()` returns, as long as its object lives, whenever a thread of this rank waits
        for an operation, of this group or another."""

    def hear_waits(self, hear: Callable[..., None]) -> None:
        """Calls the method `hear(operation=, waited_s=, line=, missing=)`, from a thread of its own and as long as its
        object lives, when a wait takes unusually long; where nobody watches, never."""

    def wait_unless_awaited(self, done: Callable[[], bool], *, name: str) -> bool:
        """Sleeps until `done()`, which `name` is about. False where another rank waits for this one in an operation
        that this one has not come to: then what it waits for might never be done."""

    def wait_for(self, done: Callable[[], bool], *, name: str) -> None:
        """Sleeps until `done()`, which `name` is about; the other ranks see that this one waits."""

    def allreduce_async(self, array: Any, *, name: str, op: Op = "sum") -> Handle:
        """Reduces `array` over the group. Shapes and types must be equal. From here on `array` is the engine's: the
        result may be `array`, overwritten, or another one, and then nothing is said of what `array` holds."""

    def allgather_async(self, array: Any, *, name: str) -> Handle:
        """The arrays of all ranks, concatenated along the first axis, whose length may differ (0 included)."""

    def broadcast_async(self, array: Any, *, root: int, name: str) -> Handle:
        """Overwrites `array` *in place* with that of rank `root` (a rank of this group)."""

    def reducescatter_async(self, array: Any, *, name: str) -> Handle:
        """This rank's rows of the sum; of n rows the first `n % size` ranks get one more."""

    def alltoall_async(self, array: Any, *, splits: Sequence[int], name: str) -> Handle:
        """Row blocks from all ranks, concatenated; `splits[i]` rows of `array` go to rank i."""

    def group(self, ranks: Sequence[int]) -> Engine | None:
        """The engine of a subset of this group's ranks, None on a rank outside it. Every rank of the group calls
        it, with the same ranks, in the same order."""


@runtime_checkable
class GraphEngine(Engine, Protocol):
    """An engine whose sums may be operations of a program that a framework runs by itself."""

    @property
    def sums_in_graph(self) -> bool:
        """Whether they may be here."""

    def sum_in_graph(self, tensor: Any, *, name: str) -> Any:
        """The sum of a tensor over the group, on its device, as an operation of the program that is being traced. It is
        paired with `allreduce_async` of that name."""

    def awaits_in_graph(self, name: str, *, broken: Callable[[], None]) -> Callable[[], None]:
        """Says that the program waits for the sum of that name, until what this returns is called. Where the sum fails,
        that is never, and `broken` is called."""


def checked_splits(splits: Sequence[int], *, rows: int, size: int, name: str) -> list[int]:
    """The splits of an all-to-all of `rows` rows. Raises ValueError where they do not fit."""
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"{name!r}: expected {size} splits that sum to {rows} rows. Received: {list(splits)}.")
    return list(splits)


def gather_text(engine: Engine, text: str, *, name: str) -> list[str]:
    """The texts of all ranks, each on one line. A collective call."""
    row = np.frombuffer(f"{' '.join(text.splitlines())}\n".encode(), dtype=np.uint8).copy()
    whole = np.asarray(engine.allgather_async(row, name=name).wait())
    return whole.tobytes().decode().splitlines()


def gather_bytes(engine: Engine, mine: bytes, *, name: str, root: int | None = None) -> list[bytes]:
    """The bytes of all ranks; with `root`, on that rank alone, and none on others. A collective call, in pieces as
    `broadcast_in_pieces`."""
    lengths = np.asarray(engine.allgather_async(np.array([len(mine)]), name=f"{name}.lengths").wait())
    step = PIECE_BYTES if lengths.sum() <= PIECE_BYTES else max(PIECE_BYTES // engine.size, 1)
    row, found = np.frombuffer(mine, np.uint8), [bytearray() for _ in lengths]
    for at in range(0, max(int(lengths.max()), 1), step):
        piece = row[at : at + step].copy()
        if root is None:
            whole = np.asarray(engine.allgather_async(piece, name=name).wait())
        else:
            splits = [len(piece) if rank == root else 0 for rank in range(engine.size)]
            whole = np.asarray(engine.alltoall_async(piece, splits=splits, name=name).wait())
            if engine.rank != root:
                continue
        ends: np.ndarray = np.cumsum(np.clip(lengths - at, 0, step))
        for one, part in zip(found, np.split(whole, ends[:-1]), strict=True):
            one += part.data
    return list(map(bytes, found)) if root in (None, engine.rank) else []


def scatter_bytes(engine: Engine, parts: Sequence[bytes], *, root: int, name: str) -> bytes:
    """What rank `root` has in `parts` for this rank; other ranks' `parts` are ignored. A collective call, in pieces as
    `broadcast_in_pieces`."""
    lengths = np.array([len(part) for part in parts] if engine.rank == root else [0] * engine.size)
    engine.broadcast_async(lengths, root=root, name=f"{name}.lengths").wait()
    step = PIECE_BYTES if lengths.sum() <= PIECE_BYTES else max(PIECE_BYTES // engine.size, 1)
    mine = bytearray()
    for at in range(0, max(int(lengths.max()), 1), step):
        pieces = [part[at : at + step] for part in parts] if engine.rank == root else [b""] * engine.size
        row = np.frombuffer(b"".join(pieces), np.uint8).copy()
        sent = engine.alltoall_async(row, splits=list(map(len, pieces)), name=name).wait()
        mine += np.asarray(sent).data
    return bytes(mine)


def broadcast_bytes(engine: Engine, mine: bytes, *, root: int, name: str) -> bytes:
    """The bytes of rank `root`, on all ranks; the others' are of no effect. A collective call."""
    length = np.array([len(mine)])
    engine.broadcast_async(length, root=root, name=f"{name}.length").wait()
    content = np.frombuffer(mine, np.uint8).copy() if engine.rank == root else np.zeros(int(length[0]), np.uint8)
    broadcast_in_pieces(engine, content, root=root, name=name)
    return content.tobytes()


def broadcast_in_pieces(engine: Engine, array: np.ndarray, *, root: int, name: str) -> None:
    """Overwrites an array of uint8 with that of rank `root`. A collective call.

    A long one travels in several operations: Horovod counts elements in 32 bits, and Gloo gives an operation 30 s,
    which a slow link may need for one of some 100 MB.

    Lengths that differ are an error on every rank, as in one operation: the engine's `failure`.
    """
    if len(array) > PIECE_BYTES:  # nothing, in a shape that says how long it is: ranks compare shapes
        engine.broadcast_async(np.zeros((0, len(array)), np.uint8), root=root, name=name).wait()
    for at in range(0, max(len(array), 1), PIECE_BYTES):
        engine.broadcast_async(array[at : at + PIECE_BYTES], root=root, name=name).wait()


def in_turn(engine: Engine, prefix: str) -> str:
    """A name for an operation that its caller waits for, the same on all ranks that call this in the same order.

    One of a few, by turns: an engine may keep what belongs to a name for good, as Horovod keeps answers, and
    TensorFlow's graph nodes. Several, as other threads may be waiting in operations of the same kind.
    """
    return f"{prefix}{int(engine.unique('')) % TURNS}"


_LANE = re.compile(r"\.lane\.\d+")


def in_lane(name: str, number: int) -> str:
    """The name of one of several operations that take turns, so that the next may begin before the last has ended."""
    return f"{name}.lane.{number}" if number else name


def without_lane(name: str) -> str:
    """The name that operations have in common that take turns."""
    return _LANE.sub("", name)


Steps = Generator[Handle, Any, Any]
"""Collectives one after the other: yields each one's handle, is sent its result, and returns the last result."""


class Chain:
    """The handle on several collectives, each of which starts when the one before it is done.

    Ranks that have several chains under way must start them in the same order, and wait for them in that order or
    look at all of them: then no two ranks ever wait for each other.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._current: Handle | None = None
        self._result: Any = None
        self._go(lambda: next(steps))

    def _go(self, step: Callable[[], Handle]) -> None:
        try:
            self._current = step()
        except StopIteration as end:
            self._current, self._result = None, end.value
        except BaseException:
            self._current = None  # nothing is under way any more
            raise

    def _forward(self, current: Handle) -> None:
        try:
            value = current.wait()
        except Exception as error:
            failure = error
            self._go(lambda: self._steps.throw(failure))
        else:
            self._go(lambda: self._steps.send(value))

    def done(self) -> bool:
        """True when all of it is done; starts what can be started."""
        while self._current is not None and self._current.done():
            self._forward(self._current)
        return self._current is None

    def wait(self) -> Any:
        """Returns the result of the last collective. Raises what any of them raised."""
        while self._current is not None:
            self._forward(self._current)
        return self._result
