"""`ProcessSetEngine`: what the engines on Horovod's bindings for PyTorch and TensorFlow have in common.

That is everything of `port.Engine` but the collectives: ranks, names, groups, rebuilding, and the watchdog of waits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

from . import farewell, shared_sets
from .callback import Rebuilds, WeakMethods
from .device import describe_device, kind_of
from .environment import patience
from .host import host_identity
from .machine import CpuQuota, Crowding
from .payload import gather_text
from .port import Op
from .shared_sets import process_set_of
from .sleep import wait_until
from .tracked import AROUND_WAITS, Tracked
from .watch import Watch

Self = TypeVar("Self", bound="ProcessSetEngine")
P = ParamSpec("P")
T = TypeVar("T")

# Horovod's error messages for a process set that does not exist: at the start of an operation, at that of a
# reduce-scatter, at a query of size or rank, and when a process set is made.
_REMOVED = (
    "Process set provided does not exist", "Invalid process set id for this rank", "Process set does not exist",
    "Horovod is shutting down",
)  # fmt: skip


def says_removed(text: str) -> bool:
    """Whether the text of an error of Horovod says that a process set does not exist."""
    return any(words in text for words in _REMOVED)


def while_there(call: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that uses an existing process set: a removed one is reported as the loss of a peer.

    When a peer is gone, Horovod removes all process sets, and raises ValueError at the next use of one. The decorated
    function raises HorovodInternalError instead, as a failed collective does, so that an elastic job recovers. It and
    the HorovodInternalError of an operation that cannot be started any more name the ranks that are gone, if any are.
    """

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (ValueError, RuntimeError) as error:
            failure = importlib.import_module("horovod.common.exceptions").HorovodInternalError
            removed = isinstance(error, ValueError) and says_removed(str(error))
            why = ProcessSetEngine.explain() if removed or isinstance(error, failure) else ""
            if not (removed or why):
                raise
            raise failure(f"{why}. Horovod says: {error}" if why else str(error)) from None

    return checked


def _number(text: str) -> int:
    """A hash of the text, below 2**56."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def check_process_set(process_set: Any) -> None:
    """Raises TypeError for a `process_set=` that is not a process set, but a list of ranks, say."""
    if not hasattr(process_set, "process_set_id"):
        raise TypeError(
            "process_set: expected an hvd.ProcessSet, as hvd.add_process_set([0, 1]) returns. Received: "
            f"{process_set!r}."
        )


class ProcessSetEngine:
    """One rank's view of a Horovod process set; see `port.Engine` for the methods that have no docstring here.

    Args:
        process_set: Horovod's process set; None for that of all ranks.

    Raises:
        RuntimeError: Horovod is not initialised.
        ValueError: the process set does not exist, or does not include this rank.
    """

    binding: ClassVar[str]
    """The name of Horovod's module with the operations of the framework, such as `horovod.torch.mpi_ops`. The subclass
    for each framework sets it; the module is imported by the first engine that is made, and not before."""

    # A counter for each tuple of global ranks: Horovod pairs names within a process set, and only its members call it.
    _named: ClassVar[dict[tuple[int, ...], Iterator[int]]] = {}
    _unnamed: ClassVar[dict[tuple[int, ...], Iterator[int]]] = {}  # for operations of the script that it gave no name
    _rebuilds: ClassVar[Rebuilds] = Rebuilds()
    _forgets: ClassVar[WeakMethods] = WeakMethods()
    _identity: ClassVar[int | None] = None
    _kind: ClassVar[int | None] = None
    _quota: ClassVar[CpuQuota | None] = None
    _watch: ClassVar[Watch | None] = None

    def __init__(self, process_set: Any = None) -> None:
        self._binding = binding = importlib.import_module(self.binding)
        self._given = process_set if process_set is not None else binding.global_process_set
        check_process_set(self._given)
        self._crowding = Crowding(threading.get_native_id())
        # ValueError: the binding raises it at once for arguments that cannot be reduced on any rank.
        self._internal_error = importlib.import_module("horovod.common.exceptions").HorovodInternalError
        self.failure: tuple[type[Exception], ...] = (self._internal_error, ValueError)
        if not binding.is_initialized():
            raise RuntimeError("Expected hvd.init() first. Received: Horovod not initialised.")
        if not self._set.included():
            raise ValueError(
                f"Expected a process set that includes this rank ({binding.rank()}). Received: "
                f"{self._set.ranks}. Guard the call with process_set.included()."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSetEngine:
        """The engine itself: a copy of what refers to it, as of a callback, is on the same ranks."""
        return self

    @property
    def _set(self) -> Any:
        """Horovod's process set. Raises ValueError if it was not added to Horovod, or has been removed."""
        if self._given.process_set_id is None:
            raise ValueError(
                "Expected a process set that is there while it is used: from hvd.add_process_set, or given to "
                f"hvd.init. Received: one of ranks {self._given.ranks} that was not added, or has been removed."
            )
        return self._given

    @property
    @while_there
    def rank(self) -> int:
        return int(self._set.rank())

    @property
    @while_there
    def size(self) -> int:
        return int(self._set.size())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._given.ranks) if self._given.ranks else tuple(range(self._binding.size()))

    @property
    def identity(self) -> int:
        if ProcessSetEngine._identity is None:  # cached: a process keeps its device when local ranks are renumbered
            ProcessSetEngine._identity = _number(f"{host_identity()}/{self._binding.local_rank()}")
        return ProcessSetEngine._identity

    @property
    def kind(self) -> int:
        if ProcessSetEngine._kind is None:
            ProcessSetEngine._kind = _number(kind_of(describe_device(), self._binding.local_rank()))
        return ProcessSetEngine._kind

    def quota_cores(self) -> float | None:
        if ProcessSetEngine._quota is None:
            ProcessSetEngine._quota = CpuQuota()
        return ProcessSetEngine._quota.cores()

    def crowding(self) -> float | None:
        return self._crowding.slowness()

    def serving_s(self) -> float:
        return time.process_time()

    @property
    def spins(self) -> bool:
        return bool(self._binding.mpi_enabled())

    def on_device(self, array: Any) -> bool:
        return False

    def unique(self, prefix: str) -> str:
        return f"{prefix}{next(self._named.setdefault(self.ranks, itertools.count(1)))}"

    @classmethod
    def next_of(cls, process_set: Any, prefix: str) -> str:
        """As `unique`, for an operation of the script that it gave no name, on a process set. This rank need not be in
        that set."""
        numbers = cls._unnamed.setdefault(tuple(process_set.ranks or ()), itertools.count(1))
        return f"{prefix}{next(numbers)}"

    def on_reset_end(self, rebuild: Callable[[], None]) -> None:
        self._rebuilds.add(rebuild, by_all=len(self.ranks) == self._binding.size())

    def on_reset_begin(self, forget: Callable[[], None]) -> None:
        self._forgets.add(forget)

    def agree_on_rebuilds(self: Any) -> list[Callable[[], None]]:
        """Returns the methods that `rebuild` has to call: see `Rebuilds.agree`. Is called after each initialisation of
        Horovod, on the engine of all ranks, also by ranks that join. A collective call."""
        return self._rebuilds.agree(lambda mine: gather_text(self, mine, name="hvd_hetero.made"))

    @classmethod
    def begin_train(cls) -> None:
        """Notes that a call of the function of an elastic job (given to `hvd.elastic.run`) begins."""
        cls._rebuilds.begin_train()

    def watch(self: Any) -> None:
        """Starts the watchdog, which explains long waits of ranks for each other and ends too long ones: see `Watch`.

        Is called after each initialisation of Horovod, on the engine of all ranks. A collective call. Does nothing if
        there is one rank.
        """
        if self.size == 1:
            return
        if ProcessSetEngine._watch is None:
            ProcessSetEngine._watch = Watch(patience())
        here = self._watch.introduce(self.rank)
        self._watch.meet(gather_text(self, here, name="hvd_hetero.watch"))

    def during_waits(self, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        AROUND_WAITS.add(context)

    def hear_waits(self, hear: Callable[..., None]) -> None:
        if self._watch is not None:
            self._watch.hearers.add(hear)

    def wait_avoiding_deadlock(self, done: Callable[[], bool], *, name: str) -> bool:
        with AROUND_WAITS.entered():
            if self._watch is None:
                return wait_until(done)
            return self._watch.wait_avoiding_deadlock(done, name, self.ranks)

    def wait_for(self, done: Callable[[], bool], *, name: str) -> None:
        watched = contextlib.nullcontext() if self._watch is None else self._watch.waiting(name, self.ranks)
        with AROUND_WAITS.entered(), watched:
            wait_until(done)

    def end_after(self, ranks: Sequence[int]) -> None:
        if self._watch is not None:
            self._watch.end_after(ranks, leave=self._binding.shutdown)

    def _op(self, op: Op) -> Any:
        """Horovod's reduction of this name."""
        return getattr(self._binding, op.capitalize())

    def _track(self, operation: str, over: Callable[[], bool] = lambda: False) -> Tracked:
        """Tells the watchdog that this rank has submitted an operation of this engine's ranks. `over()` returns whether
        the operation is complete."""
        return Tracked(operation, self.ranks, self._watch, over)

    @classmethod
    def tracked(cls, operation: str, process_set: Any) -> Tracked:
        """Tells the watchdog that this rank has submitted an operation by calling Horovod itself, not an engine."""
        ranks = getattr(process_set, "ranks", None)
        if not ranks and cls._watch is not None:
            ranks = range(importlib.import_module(cls.binding).size())
        return Tracked(operation, tuple(ranks or ()), cls._watch)

    @classmethod
    def explain(cls) -> str:
        """Says which ranks' processes are gone or do not answer; "" if all answer, or there is no watchdog."""
        return cls._watch.explain() if cls._watch is not None else ""

    @classmethod
    def forget(cls) -> None:
        """Calls the methods given to `on_reset_begin`, and forgets the process sets; after Horovod was shut down."""
        cls._forgets.call()
        shared_sets.forget()
        farewell.forget()

    @classmethod
    def rebuild(cls, methods: Sequence[Callable[[], None]]) -> None:
        """Calls the methods that `agree_on_rebuilds` returned, and starts the counters of `unique` anew.

        Is called after Horovod was initialised again. A collective call: ranks that have joined meanwhile construct the
        same objects.
        """
        cls._named.clear()
        cls._unnamed.clear()
        for method in methods:
            method()

    @while_there
    def group(self: Self, ranks: Sequence[int]) -> Self | None:
        members = [self.ranks[rank] for rank in ranks]
        if tuple(members) == self.ranks:
            return self
        if len(self.ranks) != self._binding.size():
            raise ValueError(
                'topology: expected None or "flat" with a process_set of some ranks, because the process sets of a '
                f"topology's nodes are made by all ranks together. Received: one of ranks {list(self.ranks)}."
            )
        farewell.prepare(self)
        process_set = process_set_of(members)
        return type(self)(process_set) if process_set.included() else None
