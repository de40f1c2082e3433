"""The contract of an engine, as one program that any engine must pass: `World(n)` in a test, Horovod in a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_hetero.engine.port import Engine


def check_engine(engine: Engine, array: Callable[[Any], Any] = np.asarray) -> None:
    """Raises where `engine` breaks the contract. `array` makes what it reduces out of nested lists of floats."""
    rank, size = engine.rank, engine.size

    out = engine.allreduce_async(array([1.0 * rank, 2.0]), name="sum").wait()
    assert out.tolist() == [sum(range(size)), 2.0 * size]
    for op, expected in (("max", size - 1.0), ("min", 0.0)):
        value = engine.allreduce_async(array([float(rank)]), name=f"op.{op}", op=op).wait()
        assert value.tolist() == [expected], op

    # Several under way at once, awaited in another order on each rank: pairing is by name.
    handles = {}
    for name in ("a", "b", "c") if rank % 2 else ("c", "b", "a"):
        handles[name] = (engine.allreduce_async(array([float(ord(name))]), name=f"order.{name}"))
    for name in sorted(handles):
        assert handles[name].wait().tolist() == [float(ord(name)) * size]

    rows = engine.allgather_async(array([[float(rank)]] * (rank + 1)), name="gather").wait()
    assert [row[0] for row in rows.tolist()] == [float(r) for r in range(size) for _ in range(r + 1)]

    value = array([float(rank), 7.0])
    engine.broadcast_async(value, root=size - 1, name="broadcast").wait()
    assert value.tolist() == [size - 1.0, 7.0]

    count = 2 * size + 1  # one row more than divides evenly: rank 0 gets it
    part = engine.reducescatter_async(array([[float(i)] for i in range(count)]), name="scatter").wait()
    whole = [[float(i) * size] for i in range(count)]
    first = rank * 2 + min(rank, 1)
    assert part.tolist() == whole[first : first + (3 if rank == 0 else 2)]

    sent = array([[float(rank * 10 + to)] for to in range(size)])
    received = engine.alltoall_async(sent, splits=[1] * size, name="alltoall").wait()
    assert received.tolist() == [[float(source * 10 + rank)] for source in range(size)]

    try:
        engine.allreduce_async(array([0.0] * (1 + rank)), name="mismatch").wait()
    except engine.failure:
        pass
    else:
        raise AssertionError("shapes that differ between ranks must raise on every rank")
    engine.allreduce_async(array([0.0]), name="after").wait()  # and the engine goes on

    assert engine.wait_avoiding_deadlock(lambda: True, name="at once")
    if rank:  # the first rank comes only later to what this one waits for, and waits for this one meanwhile
        assert not engine.wait_avoiding_deadlock(lambda: False, name="never")
        engine.wait_for(lambda: True, name="at once")
    engine.allreduce_async(array([0.0]), name="elsewhere").wait()
