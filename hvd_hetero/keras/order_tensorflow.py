"""In which order a graph computes gradients: those of the bucket that is to leave first before the others.

With one thread for operations, TensorFlow goes on with what became ready last. A weight's gradient is ready together
with what the backward pass goes on with, and waits until that has come to the model's first layer: no bucket would be
complete before all are, and nothing of their exchange hidden. With more threads the others take what waits; an order
would have them wait for one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_hetero.engine import environment


def one_after_another(flats: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Where there is one thread, has what each of `flats` needs, and none before it, computed once that one leaves.

    Args:
        flats: tensors of the graph that is being traced, if one is.
        leaves: for each of them but the last, the tensor with which it leaves, and which is made of it.
    """
    if threads() == 1 and not tf.executing_eagerly():
        put_in_order(flats, leaves)


def threads() -> int:
    """How many operations TensorFlow may run side by side in this process."""
    chosen: int = tf.config.threading.get_inter_op_parallelism_threads()
    return chosen or environment.tensorflow_threads() or len(os.sched_getaffinity(0))


def put_in_order(flats: Sequence[Any], leaves: Sequence[Any]) -> None:
    """See `one_after_another`."""
    operations = tf.compat.v1.get_default_graph().get_operations()  # each after its inputs
    # What has a state the graph will keep in the program's order, which comes before this one: it has to wait for
    # nothing, and what it needs neither.
    earlier = _needed([flats[0].op, *filter(_has_state, operations)], besides=())
    waits = []
    for flat, leaving in zip(flats[1:], leaves, strict=True):
        new = _needed([flat.op], besides=earlier)
        waiting: set[Any] = set()
        for op in filter(new.__contains__, operations):
            inputs = {tensor.op for tensor in op.inputs}
            if inputs & (waiting | earlier):
                if not inputs & waiting:
                    waits.append((op, leaving.op))
                waiting.add(op)
        earlier |= new
    for op, leaving in waits:
        op._add_control_input(leaving)  # there is no public way, once an operation is there


def _needed(wanted: Iterable[Any], *, besides: Iterable[Any]) -> set[Any]:
    """The operations and all that they need, but for those in `besides`."""
    found, left = set(besides), list(wanted)
    while left:
        if (op := left.pop()) not in found:
            found.add(op)
            left += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return found.difference(besides)


def _has_state(op: Any) -> bool:
    return bool(op.op_def.is_stateful) or any(tensor.dtype == tf.resource for tensor in op.inputs)
