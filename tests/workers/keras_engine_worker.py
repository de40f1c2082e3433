"""One real rank of tests/test_keras_horovod.py: the contract of the engine, on Horovod's TensorFlow operations."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.tensorflow.mpi_ops as binding
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from contract import check_engine

from hvd_hetero.engine.environment import repairs
from hvd_hetero.engine.horovod_tensorflow import TensorflowEngine
from hvd_hetero.keras.gradient_tensorflow import touched
from hvd_hetero.keras.order_tensorflow import one_after_another, threads

STEPS = 150  # after some 90 TensorFlow knows which operations are short, and takes others first


def noted(tensor, note):
    """The tensor, once `note` was called. Not stateful: the graph would call in the order of the program."""

    def call(value):
        note()
        return value

    return tf.ensure_shape(tf.numpy_function(call, [tensor], tensor.dtype, stateful=False), tensor.shape)


def sums_leave_at_once(engine):
    """A graph of one thread hands a tensor over to Horovod before it goes on with anything long: here the other ranks
    have the sum, and say so, while it does. Whichever of both was there first."""
    for sum_first in (True, False):
        early, late, was_early = f"early {sum_first}", f"late {sum_first}", []

        def go_on(late=late, was_early=was_early):
            answer, deadline = engine.allreduce_async(np.ones(1), name=late), time.monotonic() + 10.0
            while not answer.done() and time.monotonic() < deadline:
                time.sleep(0.01)
            was_early.append(answer.done())

        @tf.function
        def graph(x, sum_first=sum_first, early=early, go_on=go_on):
            x = noted(x, lambda: None)
            both = [lambda: noted(x, go_on), lambda: engine.sum_in_graph(x, name=early)]
            return [part() for part in (both[::-1] if sum_first else both)]

        if engine.rank == 0:
            graph(tf.ones(4))
            assert was_early == [True], sum_first
        else:
            engine.allreduce_async(np.ones(4, np.float32), name=early).wait()
            engine.allreduce_async(np.ones(1), name=late).wait()


def gradients_come_in_order(counts):
    """Of the two halves of a model the last layers' gradients leave before the first layer's is computed, and are those
    of a graph without an order; a variable that the backward pass of layer `counts` changes is read and changed in the
    order of the program."""
    weights = [tf.Variable(tf.eye(64)[::-1] * (1.0 + i / 10)) for i in range(6)]
    passes, seen = tf.Variable(0.0), []

    @tf.custom_gradient
    def first(x):
        return tf.identity(x), lambda upstream: noted(upstream, lambda: seen.append("first layer"))

    @tf.custom_gradient
    def counted(x):
        def backward(upstream, variables):
            passes.assign_add(1.0 + 0.0 * tf.reduce_sum(upstream))
            return upstream * weights[counts].read_value()[0, -1], [tf.zeros([]) for _ in variables]

        return x + 0.0 * passes, backward

    @tf.autograph.experimental.do_not_convert
    def gradient(x, ordered):
        with tf.GradientTape() as tape:
            y = first(x @ weights[0])
            for i, weight in enumerate(weights[1:]):
                y = tf.tanh((counted(y) if i == counts else y) @ weight)
            loss = tf.reduce_sum(y)
        gradients = tape.gradient(loss, weights)
        with tf.control_dependencies(touched([*weights, passes])):
            flats = [tf.concat([tf.reshape(g, [-1]) for g in part], 0) for part in (gradients[3:], gradients[:3])]
        leaving = [noted(flat, lambda: seen.append("leaves")) for flat in flats[:1]]
        if ordered:
            one_after_another(flats, leaving)
        return [*leaving, flats[1], passes.read_value()]

    x = tf.linspace(-1.0, 1.0, 256)[:, None] * tf.ones([256, 64])
    expected = gradient(x, False)
    graph = tf.function(gradient)
    for step in range(STEPS):
        seen.clear()
        found = graph(x, True)
        assert seen == ["leaves", "first layer"], (step, seen)
        assert float(found[2]) == step + 2.0
    for one, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def a_bias_and_its_kernel_may_leave_apart():
    """Also of a convolution, whose two gradients are computed as one, whichever of both leaves first."""
    kernel, bias, x = tf.Variable(tf.ones([3, 3, 2, 2])), tf.Variable(tf.ones(2)), tf.ones([4, 8, 8, 2])

    @tf.function
    def gradient(first, ordered):
        with tf.GradientTape() as tape:
            y = tf.nn.bias_add(tf.nn.conv2d(tf.nn.conv2d(x, kernel, 1, "SAME"), kernel + 1.0, 1, "SAME"), bias)
            loss = tf.reduce_sum(tf.square(y))
        flats = [tf.reshape(one, [-1]) for one in tape.gradient(loss, [kernel, bias])[::first]]
        leaving = noted(flats[0], lambda: None)
        if ordered:
            one_after_another(flats, [leaving])
        return leaving, flats[1]

    for first in (1, -1):
        for one, other in zip(gradient(first, True), gradient(first, False), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def main() -> None:
    for chosen, expected in ((2, 2), (0, 1)):  # 0: what TF_NUM_INTEROP_THREADS says
        tf.config.threading.set_inter_op_parallelism_threads(chosen)
        assert threads() == expected
    binding.init()
    engine = TensorflowEngine()
    engine.watch()
    check_engine(engine)
    # a view is sent, or written in place, as well, and what is sent may be read-only
    rows = np.ones((4, 2), np.float32)
    assert engine.allreduce_async(rows[:, 0], name="view").wait().tolist() == [binding.size()] * 4
    rows[:, 0] = engine.rank
    engine.broadcast_async(rows[:, 0], root=1, name="view").wait()
    assert rows.tolist() == [[1.0, 1.0]] * 4, rows
    fixed = np.ones(3)
    fixed.flags.writeable = False
    assert engine.allgather_async(fixed, name="fixed").wait().tolist() == [1.0] * 3 * binding.size()
    # one name, several types and groups
    for dtype in (np.float16, np.float32, np.float64, np.int64):
        assert engine.allreduce_async(np.ones(2, dtype), name="typed").wait().dtype == dtype
    if binding.size() > 2:
        pair = engine.group([0, 2])
        assert (pair is None) == (binding.rank() == 1)
        if pair is not None:
            check_engine(pair)
    if "sum_at_once" in repairs():
        sums_leave_at_once(engine)
    for counts in (1, 4):
        gradients_come_in_order(counts)
    a_bias_and_its_kernel_may_leave_apart()
    engine.allreduce_async(np.ones(1), name="end").wait()  # nobody leaves before all are through
    assert "torch" not in sys.modules
    print("OK contract", flush=True)
    binding.shutdown()


if __name__ == "__main__":
    main()
