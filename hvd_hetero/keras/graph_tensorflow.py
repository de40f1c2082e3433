"""Gradients of the TensorFlow back end, summed within the graph: by Horovod's operations, on their device.

For who sums buckets as they are, in one all-reduce each, the way through host memory (`gradient_tensorflow`) is not
needed: what leaves the graph is told and heard, as few numbers. Each step calls the host three times: when the first
bucket is there, for its weight; when all are, for the control vector, which rides in one of them; and with the sum of
the control vectors, for what turns sums into means.

The names of the sums are those of the way through the host, so that a rank that cannot compute takes part that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from .gradient_tensorflow import flats_of, pieces_of, touched, turn
from .layout import BucketLayout
from .order_tensorflow import one_after_another


class GraphStep(Protocol):
    """The host's part in sums that are operations of the graph."""

    layout: BucketLayout

    def begin(self, part: int) -> list[float]:
        """What this rank's gradients are multiplied by, of which the first are there, and whether norms are measured.
        `part`: see `GradientArrivals.first`."""

    def send(self) -> Sequence[float]:
        """The control vector: all gradients are there."""

    def sum(self, index: int, flat: Any) -> Any:
        """The sum over the ranks of bucket `index`, as an operation of the graph."""

    def end(self, total: Sequence[float], own: Sequence[float], merged: Sequence[float]) -> float:
        """What the sums are multiplied by. `total`: of the control vectors; `own`, `merged`: the squared norms of the
        buckets and of their sums, where they are measured."""


def through(step: GraphStep, gradients: Sequence[Any], part: int, variables: Sequence[Any]) -> list[Any]:
    """What `step` makes of the gradients, in their shapes and types. It may read and write `variables`."""
    layout = step.layout
    tail, tail_in = layout.tail, layout.tail_in
    assert tail is not None and tail_in is not None

    def begin(*_: np.ndarray) -> np.ndarray:
        return np.array(step.begin(part))

    def send(*_: np.ndarray) -> np.ndarray:
        return np.array(step.send(), tail.dtype)

    def end(total: np.ndarray, own: np.ndarray, merged: np.ndarray, *_: np.ndarray) -> np.ndarray:
        return np.float64(step.end(total.tolist(), own.tolist(), merged.tolist()))

    with tf.control_dependencies([*touched(variables), *touched([turn()])]):
        found = flats_of(layout, gradients)
        # Not stateful, as in `gradient_tensorflow`. A call follows what it is given a first element of. All that comes
        # rests on this one, and it on a variable: gradients may be constants.
        told = _called(begin, [_first(found[0]), turn().read_value()], tf.float64, [2], stateful=False)
        weight, measured = tf.unstack(told)
        flats = [_weighted(flat, weight) for flat in found]
        one_after_another(found, flats[:-1])
        control = _called(send, [_first(flat) for flat in flats], flats[tail_in].dtype, [len(tail)], stateful=False)
    own = _squared_norms(flats, measured)
    sums = [step.sum(i, tf.concat([flat, control], 0) if i == tail_in else flat) for i, flat in enumerate(flats)]
    total = sums[tail_in][layout.lengths[tail_in] :]
    sums[tail_in] = sums[tail_in][: layout.lengths[tail_in]]
    merged = _squared_norms(sums, measured)
    factor = _called(end, [total, own, merged, *map(_first, sums)], tf.float64, [], stateful=True)
    touched(variables, after=[factor])
    touched([turn()], after=[factor])
    return pieces_of(layout, [_scaled(flat, factor) for flat in sums])


def _called(function: Any, inputs: Sequence[Any], dtype: Any, shape: Sequence[int], *, stateful: bool) -> Any:
    """What a function on the host returns, which is of a known shape."""
    found = tf.numpy_function(function, inputs, dtype, stateful=stateful)
    found.set_shape(shape)
    return found


def _first(flat: Any) -> Any:
    return flat[:1]


def _weighted(flat: Any, weight: Any) -> Any:
    """`flat` times `weight`; what weighs nothing is zero, whatever it is."""
    return tf.cond(tf.equal(weight, 0.0), lambda: tf.zeros_like(flat), lambda: flat * tf.cast(weight, flat.dtype))


def _scaled(flat: Any, factor: Any) -> Any:
    return tf.cond(tf.equal(factor, 1.0), lambda: tf.identity(flat), lambda: flat * tf.cast(factor, flat.dtype))


def _squared_norms(flats: Sequence[Any], measured: Any) -> Any:
    """The squared norms, in float64 as their differences are small; zeros if they are not `measured`."""
    return tf.cond(
        tf.equal(measured, 0.0),
        lambda: tf.zeros([len(flats)], tf.float64),
        lambda: tf.stack([tf.reduce_sum(tf.square(tf.cast(flat, tf.float64))) for flat in flats]),
    )
