"""`TensorflowEngine`: the port on Horovod's operations for TensorFlow, for numpy arrays. PyTorch is not needed.

Horovod's TensorFlow operations have no handles, and in eager mode no names, by which Horovod pairs operations. So each
operation is a node of one graph in this process, named as the operation, and a thread of its own runs the node
(`ThreadHandle`). The graph's session has its own thread pool: an operation that is awaited inside a training step,
which occupies one of TensorFlow's threads, must not need a second one of them. The session sees no GPU, as the arrays
are in host memory.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar

import numpy as np

from . import background, script
from .port import Op, checked_splits
from .process_set import ProcessSetEngine, while_there
from .tracked import Tracked

RUNS_FUNCTIONS = "tensorflow.python.eager.polymorphic_function.atomic_function"  # TensorFlow's module that runs them


class _Threads:
    """A pool of threads that grows to the largest number of calls that were under way at once.

    `concurrent.futures` is not used, because a process waits for its threads at exit: if a peer is gone for good, a
    call never returns, and the process must end nevertheless.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def run(self, call: Callable[[], None]) -> None:
        """Has a thread make the call, and returns at once. `call` must not raise."""
        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            background.begin(self._main, name="hvd_hetero.call", end=lambda: self._calls.put(sys.exit))

    def _main(self) -> None:
        while True:
            self._calls.get()()
            self._idle.release()


class ThreadHandle:
    """The handle of a call that another thread makes; see `port.Handle`.

    Args:
        call: the call, which returns the operation's result.
        track: makes the `Tracked` of the operation, given what returns whether it is complete.
        failure: the exception by which `call` says that the operation failed.
    """

    _threads: ClassVar[_Threads] = _Threads()

    def __init__(
        self, call: Callable[[], Any], track: Callable[[Callable[[], bool]], Tracked], failure: type[Exception]
    ) -> None:
        self._call, self._failure = call, failure
        self._ready = threading.Event()
        self._tracked = track(self._ready.is_set)
        self._result: Any = None
        self._error: BaseException | None = None
        self._threads.run(self._main)

    def _main(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # raised in `wait`
            self._error = error
        self._ready.set()

    def done(self) -> bool:
        return self._ready.is_set()

    def wait(self) -> Any:
        with self._tracked.waiting(self._failure):
            self._ready.wait()
            if self._error is not None:
                raise self._error
            return self._result


class _Graph:
    """A TensorFlow graph with a node for each of Horovod's operations, added at the first use of its name."""

    def __init__(self) -> None:
        self._tensorflow = importlib.import_module("tensorflow")
        v1 = self._tensorflow.compat.v1
        self._graph = self._tensorflow.Graph()
        options = v1.ConfigProto(
            device_count={"GPU": 0},
            use_per_session_threads=True,
            inter_op_parallelism_threads=1,
            intra_op_parallelism_threads=1,
        )
        options.graph_options.rewrite_options.disable_meta_optimizer = True  # there is nothing to optimise
        self._session = v1.Session(graph=self._graph, config=options)
        self._nodes: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def node(
        self, key: tuple[Any, ...], types: Sequence[np.dtype[Any]], make: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Returns a function that runs an operation on arrays of these types.

        Args:
            key: identifies the operation. The first call with this key adds it to the graph.
            types: the types of its arrays.
            make: adds the operation to the graph, given placeholders for its arrays, and returns its output.
        """
        with self._lock:
            if key not in self._nodes:
                with self._graph.as_default(), self._tensorflow.device("/CPU:0"):
                    inputs = [self._tensorflow.compat.v1.placeholder(each) for each in types]
                    self._nodes[key] = self._callable(make(*inputs), inputs)
            return self._nodes[key]

    def _callable(self, output: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Returns a function that computes `output` from the values of `inputs`.

        `Session.make_callable` looks up names and checks values at each call. `_make_callable_from_options`, which
        TensorFlow 1 made for Keras and which is not public, does not: 0.17 ms of CPU time instead of 0.33 ms for a call
        with 1 MB.
        """
        prepared = getattr(self._session, "_make_callable_from_options", None)
        if prepared is None:
            found: Callable[..., Any] = self._session.make_callable(output, inputs)
            return found
        options = importlib.import_module("tensorflow.core.protobuf.config_pb2").CallableOptions(
            feed=[tensor.name for tensor in inputs], fetch=[output.name]
        )
        options.run_options.inter_op_thread_pool = -1  # the calling thread runs it and waits
        run = prepared(options)
        return lambda *arrays: run(*arrays)[0]


def reason_in(message: str) -> str:
    """Horovod's message in one of TensorFlow's, which has descriptions of the node before it, or none, and after it."""
    _, described, rest = message.rpartition("Node: ")
    text = rest.partition("\n")[2] if described else message
    return (text or message).partition(" [[")[0].strip()


class TensorflowEngine(ProcessSetEngine):
    """One rank of a Horovod process set, for numpy arrays; and sums in graphs (`port.GraphEngine`)."""

    binding = "horovod.tensorflow.mpi_ops"
    _graph: ClassVar[_Graph | None] = None

    def __init__(self, process_set: Any = None) -> None:
        super().__init__(process_set)
        self._tensorflow = importlib.import_module("tensorflow")
        self._errors = self._tensorflow.errors
        if TensorflowEngine._graph is None:
            TensorflowEngine._graph = _Graph()

    @while_there
    def _start(
        self, kind: str, arrays: Sequence[Any], name: str, make: Callable[..., Any], *, into: Any = None, op: Any = None
    ) -> ThreadHandle:
        for array in arrays:
            if not isinstance(array, np.ndarray):
                raise TypeError(
                    f"{name!r}: expected a numpy array, since results are written in place. Received: {type(array)}. "
                    "Pass tensor.numpy().copy()."
                )
        assert self._graph is not None
        types = [array.dtype for array in arrays]
        number = self._set.process_set_id

        def named(*inputs: Any) -> Any:
            scope = f"{kind}.{op}.{number}.{'.'.join(each.name for each in types)}"
            return make(*inputs, **self._as(name, scope))

        run = self._graph.node((kind, op, number, name, *types), types, named)

        def call() -> Any:
            try:
                result = run(*arrays)
            except self._errors.OpError as error:
                raise self._internal_error(f"Horovod{kind} {name!r}: {reason_in(error.message)}") from None
            if into is None:
                return result
            np.copyto(into, result)
            return into

        return ThreadHandle(call, functools.partial(self._track, name), self._internal_error)

    def _as(self, name: str, scope: str) -> dict[str, Any]:
        """Returns the keyword arguments by which Horovod's operations get their name and process set.

        TensorFlow makes node names unique by appending numbers, which may differ between ranks. So nodes with the same
        `name` are told apart by `scope`, a prefix that Horovod is told to ignore when it pairs names.
        """
        node = re.sub("[^A-Za-z0-9_.-]", "_", name)
        return {"name": f"{scope}/{node}", "ignore_name_scope": True, "process_set": self._set}

    def sum_in_graph(self, tensor: Any, *, name: str) -> Any:
        scope = self._tensorflow.compat.v1.get_default_graph().unique_name("HorovodSum")
        return self._binding._allreduce(tensor, op=self._binding.Sum, **self._as(name, scope))

    @property
    def sums_in_graph(self) -> bool:
        # Only the watchdog notices that a sum in a graph has failed.
        return self._watch is not None and self._watch.watches and RUNS_FUNCTIONS in sys.modules

    def awaits_in_graph(self, name: str, *, broken: Callable[[], None]) -> Callable[[], None]:
        # A tf.function that fails tells only its caller. So it is watched whether the present calls of functions go on.
        calls = script.calls_within(sys.modules[RUNS_FUNCTIONS].__file__ or "")
        if not calls:  # the graph is run in an unknown way, and cannot be watched
            return lambda: None
        return self._track(name).begin_graph_wait(lasts=lambda: script.under_way(calls), broken=broken)

    def allreduce_async(self, array: Any, *, name: str, op: Op = "sum") -> ThreadHandle:
        return self._start(
            "Allreduce", [array], name, lambda x, **c: self._binding._allreduce(x, op=self._op(op), **c), op=op
        )

    def allgather_async(self, array: Any, *, name: str) -> ThreadHandle:
        return self._start("Allgather", [array], name, self._binding.allgather)

    def broadcast_async(self, array: Any, *, root: int, name: str) -> ThreadHandle:
        first = self.ranks[root]
        return self._start(
            "Broadcast", [array], name, lambda x, **c: self._binding.broadcast(x, first, **c), into=array, op=first
        )

    def reducescatter_async(self, array: Any, *, name: str) -> ThreadHandle:
        return self._start(
            "Reducescatter", [array], name, lambda x, **c: self._binding._reducescatter(x, op=self._binding.Sum, **c)
        )

    def alltoall_async(self, array: Any, *, splits: Sequence[int], name: str) -> ThreadHandle:
        counts = np.array(checked_splits(splits, rows=len(array), size=self.size, name=name), dtype=np.int32)
        return self._start(
            "Alltoall", [array, counts], name, lambda x, s, **c: self._binding.alltoall(x, splits=s, **c)[0]
        )
