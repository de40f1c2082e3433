"""In which order a graph computes gradients: those of the bucket that is to leave first before the others.

With one thread for operations, TensorFlow goes on with what became ready last. A weight's gradient is ready together
with what the backward pass goes on with, and waits until that has come to the model's first layer: no bucket would be
complete before all are, and nothing of their exchange hidden. With more threads the others take what waits; put in
order, they would wait for one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_hetero.engine import environment


def one_after_another(flats: Sequence[Any], leaves: Sequence[Any]) -> None:
    """With one thread: what a flat array needs, and none before it does, is computed after the one before it has left.

    Nothing is put in order outside of a graph, or where there is a GPU, which would have to wait for the host.

    Args:
        flats: tensors of the graph that is being traced, if one is.
        leaves: for each of them but the last, the tensor with which it leaves, and which is made of it.
    """
    if threads() > 1 or len(flats) == 1 or tf.executing_eagerly() or tf.config.list_logical_devices("GPU"):
        return
    operations = tf.compat.v1.get_default_graph().get_operations()
    # The graph will add edges between operations that have a state, in the order of the program. None of them may wait,
    # nor what they need, or there could be a cycle.
    earlier = _needed([flats[0].op, *filter(_has_state, operations)], besides=())
    biases = [op for op in operations if op.type == "BiasAddGrad"]
    waits = []
    for flat, leaving in zip(flats[1:], leaves, strict=True):
        earlier |= _needed(_kernels_of(filter(earlier.__contains__, biases)), besides=earlier)
        new = _needed([flat.op], besides=earlier)
        waiting: set[Any] = set()
        for op in filter(new.__contains__, operations):
            inputs = {tensor.op for tensor in op.inputs}
            if not inputs.isdisjoint(waiting):
                waiting.add(op)
            elif not inputs.isdisjoint(earlier):
                waiting.add(op)
                waits.append((op, leaving.op))
        earlier |= new
    for op, leaving in waits:
        op._add_control_input(leaving)  # there is no public way, once an operation is there


def threads() -> int:
    """How many operations TensorFlow may run side by side in this process."""
    chosen: int = tf.config.threading.get_inter_op_parallelism_threads()
    return chosen or environment.tensorflow_threads() or len(os.sched_getaffinity(0))


def _needed(wanted: Iterable[Any], *, besides: Iterable[Any]) -> set[Any]:
    """The operations and all that they need, but for those in `besides`."""
    found, left = set(besides), list(wanted)
    while left:
        if (op := left.pop()) not in found:
            found.add(op)
            left += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return found.difference(besides)


def _kernels_of(biases: Iterable[Any]) -> list[Any]:
    """The gradients of convolutions' kernels that are made of the same as those of `biases`. oneDNN joins both into one
    operation, so that the kernel's must not wait for the bias's to leave. The other way round is fine."""
    return [op for bias in biases for op in bias.inputs[0].consumers() if "BackpropFilter" in op.type]


def _has_state(op: Any) -> bool:
    return bool(op.op_def.is_stateful) or any(tensor.dtype == tf.resource for tensor in op.inputs)
