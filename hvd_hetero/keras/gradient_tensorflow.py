"""Flattens gradients of the TensorFlow back end in the graph, and exchanges them through host memory.

This way is for all that is more than a sum (codecs, sums in two levels, local steps, several passes), and for eager
computation; `graph_tensorflow` is the other way. In each step the graph calls the host once for each of few flat
arrays, as soon as its gradients are there, and once for all results. On a GPU this means a copy to the host, the
exchange there, and a copy back.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from hvd_hetero.codecs.codec import HorovodCompressor
from hvd_hetero.engine.port import Engine
from hvd_hetero.engine.stopwatch import WallClock

from .layout import BucketLayout, Spec, Step
from .order_tensorflow import one_after_another
from .traces_tensorflow import TRACES

ALIGNMENT = 64
_PARTS: weakref.WeakKeyDictionary[Any, Counter[Any]] = weakref.WeakKeyDictionary()  # of exchanges, in each graph


@functools.cache
def turn() -> tf.Variable:
    """A variable that all exchanges touch, so that a graph makes them in the order of the program, the same on all
    ranks. Otherwise exchanges of unlike variables could begin together, or in an order that differs between ranks.

    It is made when it is first needed, and not by the import: a variable initialises TensorFlow, and after that a
    script, as Horovod's examples do, can no longer choose its GPU (`tf.config.set_visible_devices`).
    """
    return _beside_the_graph(0.0, tf.float32, "hvd_hetero_turn")


def _beside_the_graph(value: float, dtype: Any, name: str) -> tf.Variable:
    """A variable that is none of the function being traced, if one is. One that makes variables (`tf.Variable`, also in
    an `init_scope`) TensorFlow traces a second time, which takes as long as the first."""
    with tf.init_scope(), tf.device("CPU"):
        return ResourceVariable(value, trainable=False, dtype=dtype, name=name)


def dense(gradient: Any, variable: Any) -> Any:
    """The gradient as a tensor: slices, as of an embedding, are summed into zeros of the variable's shape.

    Ranks need not have slices of the same rows. And Keras's optimizers treat the slices of one row one by one, so that
    Adam squares them before it adds them; the sum is what they are defined for.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        gradient = tf.math.unsorted_segment_sum(gradient.values, gradient.indices, variable.shape[0])
    gradient = tf.convert_to_tensor(gradient)
    # Where batches are of any size, tracing loses shapes on the way back (of a Dense on three axes).
    return gradient if gradient.shape.is_fully_defined() else tf.ensure_shape(gradient, variable.shape)


def none_of(variable: Any) -> tf.Tensor | None:
    """A gradient of zeros for a variable; None if its type can have no gradient."""
    return tf.zeros(variable.shape, variable.dtype) if tf.as_dtype(variable.dtype).is_floating else None


def constant(values: Sequence[float], like: tf.Tensor) -> tf.Tensor:
    """A vector of these values, of the type in which the gradient `like` travels."""
    return tf.constant(values, dtype=spec(like).wire)


def spec(gradient: Any) -> Spec:
    """A gradient's shape, which has to be known, and type."""
    if not gradient.shape.is_fully_defined():
        raise ValueError(f"Expected gradients of a known shape. Received: {gradient.shape}.")
    return Spec(tuple(gradient.shape.as_list()), gradient.dtype.name)


def tracing() -> bool:
    """Whether a function is being traced; a step in which one is takes longer than its samples do.

    Raises:
        ValueError: for XLA, which cannot leave the graph, and for which Horovod has no operations; and for replicas
            within this process, as a `tf.distribute.MirroredStrategy` makes them.
    """
    if (replicas := tf.distribute.get_strategy().num_replicas_in_sync) > 1:
        raise ValueError(
            "tf.distribute: expected one replica in each process, as each rank is one process with one device. "
            f"Received: a strategy with {replicas} replicas in sync. Start a rank for each device, without a strategy."
        )
    if tf.executing_eagerly():
        return False
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "jit_compile: expected False where ranks exchange gradients on the TensorFlow back end, because XLA cannot "
            'communicate. Received: True, or "auto" where there is a GPU. Pass jit_compile=False to model.compile() or '
            "to the tf.function: XLA may compile the forward pass within it."
        )
    return True


def traced(engine: Engine) -> None:
    """Lets graphs be forgotten after an elastic reset, as what is traced now fits the present ranks alone."""
    engine.on_reset_begin(TRACES.forget)


def part_of(owner: Any) -> int:
    """How often the function that is being traced has exchanged gradients of `owner` since it took a batch: each time
    it is run, that many of its exchanges are of the same batch. 0 without a function."""
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    taken = sum(op.type.startswith("IteratorGetNext") for op in graph.get_operations())
    parts = _PARTS.setdefault(graph, Counter())
    parts[owner, taken] += 1
    return parts[owner, taken] - 1


def last_of(iterations: Any, passes: int) -> Any:
    """Whether an exchange follows the gradients of this iteration."""
    if passes == 1:
        return True
    return tf.equal((tf.convert_to_tensor(iterations) + 1) % passes, 0)


def through(step: Step, gradients: Sequence[Any], last: Any, part: int, variables: Sequence[Any]) -> list[Any]:
    """What `step` makes of the gradients, in their shapes and types. It may read and write `variables`."""
    layout = step.layout
    # `last` is passed to the host only if it is computed in the graph.
    passing = [] if last is True else [last]

    def take(index: int, flat: np.ndarray, turned: Any, last: Any = True) -> bool:
        step.take(index, flat, bool(last), part)
        return True

    def finish(flat: np.ndarray, *others: Any) -> list[np.ndarray]:
        every = bool(others[0]) if passing else True
        step.take(len(layout.members) - 1, flat, every, part)
        return step.finish(every)

    with tf.control_dependencies([*touched(variables), *touched([turn()])]):
        *flats, final = flats_of(layout, gradients)
        # Not stateful, or the graph would call in this order: which are ready first depends on its threads. The last
        # call follows their results, for what only an order follows is no call that counts to the graph's optimiser;
        # nor, after the first, one that rests on constants alone, which gradients may be.
        turned = turn().read_value()
        taken = [
            tf.numpy_function(functools.partial(take, index), [flat, turned, *passing], tf.bool, stateful=False)
            for index, flat in enumerate(flats)
        ]
        one_after_another([*flats, final], taken)
    types = [layout.specs[members[0]].wire for members in layout.members]
    results = tf.nest.flatten(tf.numpy_function(finish, [final, *passing, *taken], types))
    touched(variables, after=results)
    touched([turn()], after=results)
    for flat, length in zip(results, layout.lengths, strict=True):
        flat.set_shape([length])
    return pieces_of(layout, results)


def flats_of(layout: BucketLayout, gradients: Sequence[Any]) -> list[Any]:
    """The gradients of each bucket, flat, one after the other, in the type in which they travel."""
    return [
        tf.concat([tf.cast(tf.reshape(gradients[i], [-1]), layout.specs[i].wire) for i in members], axis=0)
        for members in layout.members
    ]


def pieces_of(layout: BucketLayout, flats: Sequence[Any]) -> list[Any]:
    """The gradients of all buckets in their shapes and types."""
    found: dict[int, Any] = {}
    for flat, members in zip(flats, layout.members, strict=True):
        pieces = tf.split(flat, [layout.specs[i].length for i in members])
        for i, piece in zip(members, pieces, strict=True):
            found[i] = tf.cast(tf.reshape(piece, layout.specs[i].shape), layout.specs[i].dtype)
    return [found[i] for i in range(len(layout.specs))]


def afterwards(call: Callable[[float], None], variables: Sequence[Any], rate: Any) -> None:
    """Calls on the host, with the learning rate, once the updates of `variables` before this are made. It may write
    them."""
    rate = tf.cast(tf.convert_to_tensor(rate), tf.float64)
    with tf.control_dependencies(touched(variables)):
        called = tf.numpy_function(lambda lr: call(float(lr)), [rate], [])
    touched(variables, after=tf.nest.flatten(called))


def number(value: float) -> tf.Variable:
    """A number that the host may set at any time."""
    return _beside_the_graph(value, tf.float64, "hvd_hetero_factor")


def set_number(number: tf.Variable, value: float) -> None:
    """Sets a number made by `number`."""
    number.assign(value)


def multiplied(rate: Any, number: tf.Variable, *, after: Sequence[Any]) -> Any:
    """The learning rate times the number, as it is once what is in `after` is there; of the type of the rate."""
    with tf.control_dependencies([one for one in after if one is not None]):
        factor = number.read_value()
    rate = tf.convert_to_tensor(rate)
    return tf.cast(tf.cast(rate, tf.float64) * factor, rate.dtype)


def touched(variables: Sequence[Any], *, after: Sequence[Any] = ()) -> list[Any]:
    """An operation that runs after all that the program does with the variables before it, and before all that it does
    with them afterwards.

    A call on the host that reads and writes variables is put between two of these. The graph does not see that it does,
    and would run what does not depend on the call's results, such as a weight decay, before or after the call or
    during it, on each rank as it comes. What orders it is an operation on their handles of a kind of which the graph
    does not know that it only reads.
    """
    if tf.executing_eagerly() or not variables:
        return []
    with tf.control_dependencies(after):
        return [tf.raw_ops.IdentityN(input=[variable.handle for variable in variables])[0].op]


def flat(variables: Sequence[Any], dtype: str, into: np.ndarray | None = None) -> np.ndarray:
    """A copy of the variables, one after the other, in `into` if given; called on the host."""
    return np.concatenate([values(v).reshape(-1).astype(dtype, copy=False) for v in variables], out=into)


# Without what Keras and TensorFlow do in their own methods beside, which takes several times as long: at each merge,
# milliseconds for each variable.


def values(variable: Any) -> np.ndarray:
    """A variable's values, which may not be written to; called on the host."""
    found: np.ndarray = tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype).numpy()
    return found


def assign(variable: Any, values: np.ndarray) -> None:
    """Writes values of its shape to a variable; called on the host."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.cast(tf.constant(values), variable.dtype))


def zeros(length: int, dtype: str) -> np.ndarray:
    """An array of zeros, aligned to `ALIGNMENT` bytes: TensorFlow uses such arrays in place instead of copying them."""
    size = length * np.dtype(dtype).itemsize
    found: np.ndarray = np.zeros(size + ALIGNMENT, np.uint8)
    start = -found.ctypes.data % ALIGNMENT
    return found[start : start + size].view(dtype)


zeros_like = np.zeros_like
copied = np.array


def scaled_into(bucket: np.ndarray, flat: np.ndarray, weight: float) -> None:
    """Writes `flat` times `weight` into `bucket`."""
    if weight == 1.0:
        np.copyto(bucket, flat)
    else:
        np.multiply(flat, flat.dtype.type(weight), out=bucket)


class Compressor(HorovodCompressor):
    """The codec for a user's compressor, which takes TensorFlow's tensors, where gradients are arrays."""

    def encode(self, array: Any) -> tuple[Any, Any]:
        with tf.device("CPU"):
            wire, context = super().encode(tf.constant(array))
            return np.array(wire), context

    def decode(self, wire: Any, context: Any) -> Any:
        with tf.device("CPU"):
            return np.array(super().decode(tf.constant(wire), context))


def stopwatch() -> WallClock:
    """Gradients are in host memory when a step is measured, so the clock is right for a GPU as well."""
    return WallClock()
