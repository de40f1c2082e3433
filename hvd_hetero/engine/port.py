"""The port: the interface (`Engine`) through which the algorithms call collectives. `payload.py` has helpers on it.

`horovod.py` and `horovod_tensorflow.py` implement `Engine` on Horovod, `local.py` on threads. Every operation has a
name, because Horovod pairs the operations of different ranks by name. Every operation is asynchronous and returns a
handle. Arrays are mutable and live on the CPU or on a device (numpy arrays, torch tensors). Unless a docstring says
"global rank", a rank is a number within the engine's own group.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

Op = Literal["sum", "min", "max"]

ROTATING_NAMES = 8  # how many names `rotating_name` uses, in rotation


class CollectiveError(RuntimeError):
    """The ranks' arguments of one collective do not fit together, or a peer is gone. Raised by engines of threads."""


class Handle(Protocol):
    """The handle of a collective under way. `wait` is called once, and neither method after that."""

    def done(self) -> bool:
        """Whether the collective is complete, so that `wait` returns at once."""

    def wait(self) -> Any:
        """Sleeps (never spins) until the collective is complete, and returns its result. If it failed, raises one of
        the exceptions in `Engine.failure`."""


@runtime_checkable
class Engine(Protocol):
    """One rank's view of a group of ranks, and the collectives of that group."""

    failure: tuple[type[Exception], ...]
    """The exceptions that a failed collective raises: on the call, or in `Handle.wait`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of this group, in order."""

    @property
    def identity(self) -> int:
        """A number that identifies this rank's host and device: the same after ranks are renumbered (elastic reset)."""

    @property
    def kind(self) -> int:
        """A number that stands for the kind of this rank's device (processor, cores, GPU): the same in another job, on
        any host, if the device is of the same kind."""

    def quota_cores(self) -> float | None:
        """The current CPU quota of this process, in cores (may be a fraction); None if there is no quota."""

    def crowding(self) -> float | None:
        """How many seconds the thread that made this engine takes, of late, for a second of processor time, as others
        use its cores, or its quota is used up; None if not known."""

    def serving_s(self) -> float:
        """Seconds of processor time of the threads of this process that serve the communication, and of the one that
        made this engine; of all threads, where these are not known. May be called from any thread."""

    @property
    def spins(self) -> bool:
        """Whether one of these threads keeps a core busy while it waits for other ranks, as MPI's does."""

    def on_device(self, array: Any) -> bool:
        """Whether collectives on `array` read and write GPU memory directly (NCCL), without a copy to host memory."""

    def unique(self, prefix: str) -> str:
        """Returns `prefix` and a number that no earlier call returned. Ranks that call it in the same order get the
        same names."""

    def on_reset_end(self, rebuild: Callable[[], None]) -> None:
        """Registers a bound method to be called after each elastic reset, on the new ranks. Holds it by weak reference.

        `rebuild` may make collective calls. While the ranks that stay call it, a rank that joins constructs the same
        objects, so both make the same collective calls in the same order.
        """

    def on_reset_begin(self, forget: Callable[[], None]) -> None:
        """Registers a bound method to be called at each elastic reset, before any `rebuild` of `on_reset_end`. Holds it
        by weak reference. It is for objects that drop what depends on the ranks and make it again at the next use;
        `forget` must make no collective call."""

    def during_waits(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        """Registers a bound method whose result, a context manager, is active while a thread of this rank waits for an
        operation of any group. Holds it by weak reference. The balancer excludes waits from compute time with it."""

    def hear_waits(self, hear: Callable[..., None]) -> None:
        """Registers a bound method to be called, in the watchdog's thread, when a wait takes unusually long. Holds it
        by weak reference. Without a watchdog (see `Watch`) it is never called.

        Args:
            hear: is called as `hear(operation=, waited_s=, line=, missing=)`: the operation's name, the seconds waited,
                the line of the script, and the global ranks that have not submitted the operation.
        """

    def wait_avoiding_deadlock(self, done: Callable[[], bool], *, name: str) -> bool:
        """Sleeps until `done()` is true, and returns True; or returns `done()` early, to avoid a deadlock.

        It returns early when another rank waits for this one in an operation that this rank has not submitted yet:
        that rank may be the one that has to make `done()` true.

        Args:
            name: the operation that `done` depends on, as the other ranks call it.
        """

    def wait_for(self, done: Callable[[], bool], *, name: str) -> None:
        """Sleeps until `done()` is true. Meanwhile this rank tells those that ask that it waits in operation `name`."""

    def end_after(self, ranks: Sequence[int]) -> None:
        """Lets this process end after those of these global ranks, which have failed, so that they can say why; or half
        a minute from now. Returns at once."""

    def allreduce_async(self, array: Any, *, name: str, op: Op = "sum") -> Handle:
        """All-reduce of `array` by `op`. Shapes and types must be equal on all ranks.

        The caller gives `array` away and uses the handle's result only. The result may be `array` itself, overwritten,
        or a new array; in that case the content of `array` is undefined.
        """

    def allgather_async(self, array: Any, *, name: str) -> Handle:
        """Concatenates the arrays of all ranks along the first axis. Its length may differ between ranks, and be 0."""

    def broadcast_async(self, array: Any, *, root: int, name: str) -> Handle:
        """Overwrites `array` *in place* with the array of rank `root` (a rank of this group)."""

    def reducescatter_async(self, array: Any, *, name: str) -> Handle:
        """Sums over the ranks, and returns this rank's rows of the sum: n // size of n, on the first n % size ranks one
        more."""

    def alltoall_async(self, array: Any, *, splits: Sequence[int], name: str) -> Handle:
        """Sends `splits[i]` rows of `array`, in order, to rank i. Returns the rows received, concatenated by rank."""

    def group(self, ranks: Sequence[int]) -> Engine | None:
        """Returns the engine of a subset of this group's ranks; None on a rank outside the subset. A collective call of
        all ranks of this group, with the same `ranks` in the same order."""


@runtime_checkable
class GraphEngine(Engine, Protocol):
    """An engine whose all-reduce may also be an operation in a TensorFlow graph (a `tf.function`)."""

    @property
    def sums_in_graph(self) -> bool:
        """Whether `sum_in_graph` can be used in this process: the watchdog runs, and TensorFlow executes functions."""

    def sum_in_graph(self, tensor: Any, *, name: str) -> Any:
        """Adds an all-reduce (sum) of `tensor` to the graph that is being traced, and returns its output, on the
        tensor's device. Another rank may take part in it by `allreduce_async` of the same name."""

    def awaits_in_graph(self, name: str, *, broken: Callable[[], None]) -> Callable[[], None]:
        """Tells the watchdog that the running graph waits for the sum `name`. Returns a function that ends this.

        The graph calls that function when the sum has arrived. If the graph fails before, `broken` is called instead.
        """


def checked_splits(splits: Sequence[int], *, rows: int, size: int, name: str) -> list[int]:
    """Returns `splits` as a list. Raises ValueError if there are not `size` of them, or they do not sum to `rows`."""
    if len(splits) != size or sum(splits) != rows:
        raise ValueError(f"{name!r}: expected {size} splits that sum to {rows} rows. Received: {list(splits)}.")
    return list(splits)


def rotating_name(engine: Engine, prefix: str) -> str:
    """Returns one of `ROTATING_NAMES` names for an operation. Ranks that call it in the same order get the same.

    It is for operations that the caller waits for at once. Names are reused because an engine may keep memory for each
    name for good: Horovod keeps responses, TensorFlow graph nodes. There are several names because other threads may be
    waiting in operations with the same prefix.
    """
    return f"{prefix}{int(engine.unique('')) % ROTATING_NAMES}"


_LANE = re.compile(r"\.lane\.\d+")


def numbered_name(name: str, number: int) -> str:
    """Returns the name of operation `number` of several with the same base name, which may be under way at once.

    `LocalSteps` names the merges of a fragment so: the next merge may begin before the last one has ended.
    """
    return f"{name}.lane.{number}" if number else name


def base_name(name: str) -> str:
    """Returns the base name of an operation that `numbered_name` named."""
    return _LANE.sub("", name)


Steps = Generator[Handle, Any, Any]
"""A generator that runs collectives one after the other, for `Chain`.

It yields the handle of each collective that it starts, is sent the result of that collective, and may return a value:
the result of the sequence.
"""


class Chain:
    """One handle for a sequence of collectives (`Steps`), each of which starts when the one before it is complete.

    To avoid deadlock, all ranks must start their chains in the same order, and either wait for them in that order or
    keep calling `done` on all of them. A chain starts its next collective only within `done` and `wait`.
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
        """Whether the whole sequence is complete. Starts the next collective if the current one is complete."""
        while self._current is not None and self._current.done():
            self._forward(self._current)
        return self._current is None

    def wait(self) -> Any:
        """Runs the sequence to its end, and returns what the generator returns. Raises what the generator raises; it
        may handle the failure of a collective itself."""
        while self._current is not None:
            self._forward(self._current)
        return self._result
