"""One real rank of tests/test_keras_horovod.py: runs the named checks in turn and prints `OK name` for each that holds.

Rank 0 compares with what a single process makes of the global batches; the other ranks with rank 0, bit for bit.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
import zlib
from pathlib import Path

import keras
import numpy as np
from checks import end_datasets_at_once, expect, time_quickly

import hvd_hetero.keras as hvd
from hvd_hetero.engine import payload, port
from hvd_hetero.keras import backend

WHOLE, STEPS = 24, 20
UNEVEN = {1: (24,), 2: (19, 5), 3: (13, 8, 3)}
TENSORFLOW = keras.backend.backend() == "tensorflow"


@keras.saving.register_keras_serializable("law")
class Dense(keras.layers.Dense):
    """Keras's, in float64 where that is asked for: with the torch back end its `ops.matmul` computes in float32."""

    def call(self, inputs):
        return self.activation(inputs @ keras.ops.convert_to_tensor(self.kernel) + self.bias)


def dense_model():
    keras.utils.set_random_seed(0)
    layers = [Dense(16, activation="gelu"), Dense(16, activation="tanh")]
    return keras.Sequential([keras.Input((6,)), *layers, Dense(3)])


def embedding_model():
    keras.utils.set_random_seed(0)
    body = [keras.layers.Embedding(20, 5), keras.layers.Flatten(), Dense(3)]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *body])


def data(rows=WHOLE * STEPS, *, words=False):
    draw = np.random.RandomState(1)
    x = draw.randint(0, 20, (rows, 6)) if words else draw.standard_normal((rows, 6))
    return x, draw.standard_normal((rows, 3)), draw.uniform(0.1, 2.0, rows)


class Share(keras.utils.PyDataset):
    """This rank's block of each global batch, announced in advance."""

    def __init__(self, arrays, shares, balancer=None, epochs=1):
        super().__init__()
        self.arrays, self.blocks = arrays, []
        for start in range(0, len(arrays[0]), WHOLE):
            whole = min(WHOLE, len(arrays[0]) - start)
            ends = [round(whole * sum(shares[:r]) / WHOLE) for r in range(len(shares) + 1)]
            self.blocks.append(slice(start + ends[hvd.rank()], start + ends[hvd.rank() + 1]))
        if balancer is not None:
            for block in self.blocks * epochs:
                balancer.announce(block.stop - block.start)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return tuple(array[self.blocks[index]] for array in self.arrays)


def weights_of(model):
    return [np.array(w) for w in model.get_weights()]


def same_on_all(arrays, what=""):
    sums = hvd.allgather(np.array([zlib.crc32(b"".join(a.tobytes() for a in arrays))], np.int64))
    assert len(set(sums.tolist())) == 1, f"{what}: ranks differ: {sums}"


def distance(arrays, others):
    """The largest difference, relative to the largest value of its array."""
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12)) for a, b in zip(arrays, others, strict=True))


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "embedding": lambda: keras.optimizers.Adam(1e-2),
    "clipping_average_and_schedule": lambda: keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(2e-2, 3, 0.9), weight_decay=0.05, global_clipnorm=0.1,
        use_ema=True, ema_overwrite_frequency=5,
    ),  # fmt: skip
    "accumulation": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "weights_and_short_last_batch": lambda: keras.optimizers.SGD(0.1),
    "eager": lambda: keras.optimizers.RMSprop(1e-2),
    "many_steps_per_execution": lambda: keras.optimizers.SGD(0.1),
}


def with_dense_gradients(base):
    """Keras's Adam squares the slices of a repeated row one by one; that is not what it is to be compared with."""

    def apply(self, grads, trainable_variables=None):
        dense = [sys.modules["tensorflow"].convert_to_tensor(g) if TENSORFLOW else g for g in grads]
        base.apply(self, dense, trainable_variables)

    return type(base.__name__, (base,), {"apply": apply})


def mean_squared_error(y, predicted):
    """In the type of its arguments: with the torch back end, Keras's own mean divides in float32."""
    total = keras.ops.sum(keras.ops.square(y - predicted))
    return total / keras.ops.cast(keras.ops.shape(predicted)[0], predicted.dtype)


def law_2(case, floatx, bound):
    """`fit` on uneven shares leaves the parameters of one process on the global batches."""
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    make = embedding_model if case == "embedding" else dense_model
    weighted = case == "weights_and_short_last_batch"
    arrays = data(WHOLE * STEPS - (11 if weighted else 0), words=case == "embedding")
    arrays = arrays if weighted else arrays[:2]
    options = {"run_eagerly": case == "eager", "loss": "mse" if weighted else mean_squared_error}
    if case == "many_steps_per_execution" and TENSORFLOW:
        options["steps_per_execution"] = 4
    balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
    model = make()
    start = weights_of(model)
    few_bytes = 1000  # and so several buckets
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[case](), balancer=balancer, bucket_bytes=few_bytes)
    model.compile(optimizer=optimizer, **options)
    for epochs in (2, 1):  # and fit goes on where it ended
        share = Share(arrays, UNEVEN[hvd.size()], balancer, epochs)
        model.fit(share, epochs=epochs, shuffle=False, verbose=0)
    ours = weights_of(model)
    kept = [v for v in model.optimizer.variables if "accumulator" not in v.path]
    same_on_all(ours + [keras.ops.convert_to_numpy(v) for v in kept], case)
    if hvd.rank() == 0:
        alone, optimizer = make(), OPTIMIZERS[case]()
        optimizer.__class__ = with_dense_gradients(type(optimizer))
        alone.compile(optimizer=optimizer, **options)
        x, y, weights = (*arrays, None)[:3]
        alone.fit(x, y, batch_size=WHOLE, sample_weight=weights, epochs=3, shuffle=False, verbose=0)
        error, moved = distance(ours, weights_of(alone)), distance(ours, start)
        assert moved > 1e-2, f"{case}: nothing was learnt, so nothing is shown"
        assert error <= bound, f"{case} {floatx}: {error}"
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def another_optimizer():
    """Layers that are thawed later: `compile` with a new optimizer, and the same balancer."""
    arrays, shares = data(4 * WHOLE)[:2], UNEVEN[hvd.size()]
    arrays = tuple(array.astype("float32") for array in arrays)

    def train(wrap, fit):
        model = dense_model()
        for rate, thawed in ((0.1, False), (0.05, True)):
            model.layers[0].trainable = thawed
            model.compile(optimizer=wrap(keras.optimizers.SGD(rate)), loss="mse")
            for _ in range(2):
                fit(model)
        return weights_of(model)

    balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
    ours = train(
        lambda optimizer: hvd.DistributedOptimizer(optimizer, balancer=balancer),
        lambda model: model.fit(Share(arrays, shares, balancer), shuffle=False, verbose=0),
    )
    same_on_all(ours)
    assert balancer.step == 15, f"each of the batches of both optimizers is one: {balancer.step}"
    alone = train(lambda optimizer: optimizer,
                  lambda model: model.fit(*arrays, batch_size=WHOLE, shuffle=False, verbose=0))
    assert distance(ours, alone) <= 1e-5, distance(ours, alone)


def batches_of_any_size():
    """Where sizes differ from batch to batch, TensorFlow loses the shapes of gradients behind a Dense of three axes."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6,), dtype="int32")
    hidden = keras.layers.Embedding(20, 8)(x)
    hidden += keras.layers.MultiHeadAttention(2, 4)(hidden, hidden, use_causal_mask=True)
    model = keras.Model(x, keras.layers.Dense(20)(keras.layers.LayerNormalization()(hidden)))
    balancer = hvd.Balancer(WHOLE, adaptive=False)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), balancer=balancer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    draw = np.random.RandomState(hvd.rank())
    for step in range(4):
        words = draw.randint(0, 20, (3 + step + hvd.rank(), 6))
        balancer.begin(len(words))
        model.train_on_batch(words, words)
    same_on_all(weights_of(model))


def law_1():
    """Equal shares: the bits of a hand-written all-reduce, with a balancer and without."""
    x, y, _ = data()
    x, y = x.astype("float32"), y.astype("float32")
    shares = (WHOLE // hvd.size(),) * hvd.size()
    results = []
    for kind in ("balancer", "plain", "by hand"):
        model = dense_model()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        balancer = hvd.Balancer(WHOLE, adaptive=False) if kind == "balancer" else None
        if kind == "by hand":
            optimizer.__class__ = by_hand(type(optimizer))
        else:
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        model.fit(Share((x, y), shares, balancer), shuffle=False, verbose=0)
        results.append(weights_of(model))
    for ours in results[:2]:
        assert all(np.array_equal(a, b) for a, b in zip(ours, results[2], strict=True)), distance(ours, results[2])


def by_hand(base):
    def apply(self, grads, trainable_variables=None):
        summed = [hvd.allreduce(keras.ops.convert_to_numpy(g), name=f"hand.{i}") for i, g in enumerate(grads)]
        base.apply(self, [keras.ops.convert_to_tensor(g) for g in summed], trainable_variables)

    return type(base.__name__, (base,), {"apply": apply})


def nothing_of_a_rank_without_samples():
    """A rank whose share is 0 takes part, and not even its NaN counts."""
    x, y, _ = data(2 * WHOLE)
    balancer = hvd.Balancer(WHOLE, min_share=0)
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), balancer=balancer), loss="mse")
    for step in range(2):
        last = hvd.rank() == hvd.size() - 1
        balancer.begin(0 if last else 6)
        model.train_on_batch(x[:6] * np.nan if last else x[:6], y[:6])
        assert np.isfinite(weights_of(model)[0]).all(), step
    same_on_all(weights_of(model))


class LeftOut(keras.layers.Layer):
    """Adds a layer's outputs in some batches, as LayerDrop does; `used` says in which."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.used = layer, True

    def call(self, inputs):
        return inputs + self.layer(inputs) if self.used else inputs


def eager_gradients(model, inputs, outputs):
    inputs, outputs = (keras.ops.convert_to_tensor(part.astype("float32")) for part in (inputs, outputs))
    if TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = mean_squared_error(outputs, model(inputs))
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    model.zero_grad()
    mean_squared_error(outputs, model(inputs)).backward()
    return [None if v.value.grad is None else v.value.grad.clone() for v in model.trainable_variables]


def layers_that_a_batch_leaves_out():
    """Each rank's batch decides, where functions run eagerly. What no rank has used stays as it is: no decay moves it.
    """

    def make():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3,)), *(LeftOut(Dense(3)) for _ in range(3)), Dense(3)])

    one, model, shares = make(), make(), UNEVEN[hvd.size()]
    balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
    alone, optimizer = (keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
    x, y, _ = data()
    for step in range(6):
        found, start = [], step * WHOLE
        for rank, share in enumerate(shares):
            # Layer 0 on rank 0 alone; layer 1 by turns; layer 2 on no rank in some steps, the first among them.
            used = [rank == 0, (rank + step) % 2 == 0, step % 3 == 2]
            rows, start = slice(start, start + share), start + share
            for tried in (one, model) if rank == hvd.rank() else (one,):
                for layer, now in zip(tried.layers, used, strict=False):
                    layer.used = now
                gradients = eager_gradients(tried, x[rows, :3], y[rows])
                if tried is one:
                    found.append(gradients)
                else:
                    mine = gradients
        there = [[g * (n / WHOLE) for g, n in zip(each, shares, strict=True) if g is not None]
                 for each in zip(*found, strict=True)]  # fmt: skip
        alone.apply([sum(each) if each else None for each in there], one.trainable_variables)
        balancer.begin(shares[hvd.rank()])
        optimizer.apply(mine, model.trainable_variables)
        assert distance(weights_of(model), weights_of(one)) <= 1e-5, step
    same_on_all(weights_of(model))
    nothing, before = [None] * len(mine), weights_of(model)
    for samples in (shares, [WHOLE, *[0] * (hvd.size() - 1)]):  # and what a rank without samples has is nobody's
        balancer.begin(samples[hvd.rank()])
        given = nothing if samples[hvd.rank()] or samples is shares else mine
        raises("No gradients", lambda given=given: optimizer.apply(given, model.trainable_variables))
        assert distance(weights_of(model), before) == 0.0
    same_on_all(weights_of(model))


def overflow_on_one_rank():
    """mixed_float16: an infinite gradient on one rank, and all skip the same step and halve the same scale."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y, _ = data(WHOLE)
    model = dense_model()
    balancer = hvd.Balancer(WHOLE)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), balancer=balancer), loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) and "_reducer" in vars(model.optimizer)
    for step, spoilt in enumerate((False, True, False)):
        before = weights_of(model)
        balancer.begin(8)
        model.train_on_batch(x[:8] * (np.inf if spoilt and hvd.rank() == 1 else 1.0), y[:8])
        changed = any(not np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
        assert changed != spoilt, step
        same_on_all(weights_of(model))
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    raises(
        "outermost",
        lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(plain_sgd())),
        before=lambda: keras.config.set_dtype_policy("float32"),
    )


def plain_sgd():
    return keras.optimizers.SGD(0.1)


def raises(text, call, *, before=None, kind=Exception):
    if before is not None:
        before()
    expect(text, call, kind=kind)


def half_precision_types():
    """bfloat16 gradients travel as float32, and arrive as bfloat16."""
    x, y, _ = data(WHOLE)
    for policy in ("bfloat16", "mixed_bfloat16"):
        keras.config.set_dtype_policy(policy)
        model = dense_model()
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        before = weights_of(model)
        for _ in range(3):
            model.train_on_batch(x[: 4 + hvd.rank()], y[: 4 + hvd.rank()])
        assert distance([w.astype("float32") for w in weights_of(model)[:1]], [before[0].astype("float32")]) > 1e-3
        same_on_all(weights_of(model), policy)
    keras.config.set_dtype_policy("float32")


class Halves:
    """A compressor of a script's own, for the weights of layers alone: those are tensors in their shapes."""

    seen = set()

    @classmethod
    def compress(cls, tensor):
        assert keras.ops.is_tensor(tensor)
        cls.seen.add(tuple(tensor.shape))
        return (keras.ops.cast(tensor, "float16"), "float32") if len(tensor.shape) > 1 else (tensor, None)

    @staticmethod
    def decompress(tensor, dtype):
        assert keras.ops.is_tensor(tensor)
        return tensor if dtype is None else keras.ops.cast(tensor, dtype)


def codecs_and_topology():
    """Gradients through codecs and over nodes that are found: all ranks hold one model, which learns."""
    x, y, _ = data()
    for arguments in (
        {"compression": hvd.Compression.fp16, "name": "mine", "device_dense": "", "sparse_as_dense": True, "groups": 2,
         "scale_local_gradients": False},
        {"compression": hvd.Compression.int8},
        {"compression": hvd.Compression.powersgd(2, warmup_steps=2), "bucket_bytes": 256},
        {"compression": Halves},
        {"topology": hvd.Topology(nodes=((0,), tuple(range(1, hvd.size()))))},
    ):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(200), keras.layers.Dense(3)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), **arguments), loss="mse")
        history = model.fit(Share((x, y), UNEVEN[hvd.size()]), epochs=2, shuffle=False, verbose=0).history["loss"]
        assert history[1] < history[0], (arguments, history)
        same_on_all(weights_of(model), str(arguments))
    assert Halves.seen == {(6, 200), (200,), (200, 3), (3,)}, Halves.seen


def saved_and_loaded():
    """A saved model opens as a plain Keras model; loaded by `hvd.load_model` it goes on as if it had not stopped."""
    x, y, _ = data(4 * WHOLE)

    def train(model, steps):
        for _ in range(steps):
            model.train_on_batch(x[: 4 + hvd.rank()], y[: 4 + hvd.rank()])

    @keras.saving.register_keras_serializable("worker")
    class Mine(keras.optimizers.SGD):
        pass

    class Unregistered(keras.optimizers.SGD):
        pass

    for plain in (keras.optimizers.Adam(1e-2), Mine(0.1, momentum=0.9), Unregistered(0.1)):
        model = dense_model()
        model.compile(optimizer=hvd.DistributedOptimizer(plain), loss="mse")
        train(model, 3)
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            model.save(path)
            opened = keras.models.load_model(path, {"Unregistered": Unregistered})
            expected = type(plain) if isinstance(plain, (Mine, Unregistered)) else keras.optimizers.Adam
            assert isinstance(opened.optimizer, expected) and "_reducer" not in vars(opened.optimizer)
            assert "hvd_hetero" not in str(keras.saving.serialize_keras_object(model.optimizer))
            loaded = hvd.load_model(path, [Unregistered], None, hvd.Compression.none, False)
        assert int(loaded.optimizer.iterations) == 3 and "_reducer" in vars(loaded.optimizer)
        train(model, 2)
        train(loaded, 2)
        assert all(np.array_equal(a, b) for a, b in zip(weights_of(model), weights_of(loaded), strict=True))
        same_on_all(weights_of(loaded))


def functions():
    """The functions that users of horovod.keras know."""
    rank, size = hvd.rank(), hvd.size()
    assert hvd.allreduce(np.array([1.0 * rank, 2.0])).tolist() == [(size - 1) / 2, 2.0]
    assert float(hvd.allreduce(rank, op=hvd.Max)) == size - 1
    assert hvd.allreduce(keras.ops.ones((2, 2)), op=hvd.Sum, name="named").tolist() == [[size, size]] * 2
    assert hvd.allgather(np.full(rank + 1, rank)).tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert hvd.broadcast(np.array([rank, 7]), root_rank=1).tolist() == [1, 7]
    assert {3: "a number"}[hvd.broadcast(3, 0)] and {size: "one"}[hvd.allreduce(1, op=hvd.Sum)]
    assert hvd.broadcast_object({"rank": rank} if rank == 1 else None, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object(f"rank {rank}" if rank else 0) == [f"rank {r}" if r else 0 for r in range(size)]
    assert hvd.broadcast_object(rank, 1, session=None) == 1 and len(hvd.allgather_object(rank, session=None)) == size
    last = hvd.add_process_set([size - 1])
    if last.included():
        assert hvd.allgather_object({"rank": rank}, process_set=last) == [{"rank": rank}]
    hvd.remove_process_set(last)
    model = dense_model()
    model.set_weights([w + rank for w in weights_of(model)])
    hvd.broadcast_variables(model.variables, root_rank=0, inplace=True)
    same_on_all(weights_of(model))
    whole, payload.PIECE_BYTES = payload.PIECE_BYTES, 60
    model.set_weights([w + rank for w in weights_of(model)])
    expected = hvd.allgather_object(weights_of(model))[1]
    hvd.broadcast_variables(model.variables, root_rank=1)
    assert all(np.array_equal(a, b) for a, b in zip(weights_of(model), expected, strict=True)), "in pieces"
    assert hvd.broadcast_object([rank] * 100, root_rank=1) == [1] * 100
    payload.PIECE_BYTES = whole


def operations_without_a_name_leave_nothing_behind():
    """With TensorFlow each name is a node of a graph, which keeps it, and grows slower."""
    model, seen = dense_model(), []
    for number in range(3 * port.ROTATING_NAMES):
        # of unlike lengths, as what Horovod keeps of a name is of one
        assert hvd.allreduce(np.ones(1 + number % 5)).tolist() == [1.0] * (1 + number % 5)
        assert len(hvd.allgather(np.ones((hvd.rank(), 2)))) == sum(range(hvd.size()))
        assert hvd.broadcast(np.full(number % 3, hvd.rank()), root_rank=1).tolist() == [1] * (number % 3)
        assert hvd.reducescatter(np.ones(hvd.size())).tolist() == [1.0]
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.barrier()
        seen.append(len(backend.engine()._graph._nodes) if TENSORFLOW else 0)
    assert seen[-1] == seen[2 * port.ROTATING_NAMES - 1], seen


def reductions_as_horovod_has_them():
    """`allreduce` by all of Horovod's arguments, in their places, and `reducescatter`."""
    rank, size = hvd.rank(), hvd.size()
    values, everyone = np.array([1.0, 2.0]) * (rank + 1), size * (size + 1) / 2
    assert hvd.allreduce(values, "a", False).tolist() == [everyone, 2 * everyone]
    assert hvd.allreduce(values, "b", True).tolist() == [everyone / size, 2 * everyone / size]
    assert hvd.allreduce(values, "c", None, 2.0, 3.0, hvd.Sum).tolist() == [6 * everyone, 12 * everyone]
    scaled = hvd.allreduce(rank + 1, prescale_factor=0.5, op=hvd.Max)
    assert scaled == size / 2 and scaled.dtype == np.float64, "a factor makes fractions of whole numbers"
    third = np.full(3, 1 / 3, "float32")
    for mean in (hvd.allreduce(third, compression=hvd.Compression.fp16),
                 hvd.allreduce(third, "d", None, 1.0, 1.0, None, hvd.Compression.fp16)):
        assert mean.dtype == np.float32 and mean.tolist() == [float(np.float16(1 / 3))] * 3, mean
    assert hvd.allreduce(third, compression=hvd.Compression.none).tolist() == third.tolist()
    whole = hvd.allreduce(np.array([2**20 + 1]), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert whole.dtype == np.int64 and whole.tolist() == [size * (2**20 + 1)], "no float is no float16"
    raises("none or fp16", lambda: hvd.allreduce(third, compression=hvd.Compression.int8), kind=TypeError)
    rows = np.arange(size + 1.0)[:, None] * [1.0, 10.0]
    mine = rows[:2] if rank == 0 else rows[rank + 1 : rank + 2]
    assert hvd.reducescatter(rows * (rank + 1), op=hvd.Sum).tolist() == (mine * everyone).tolist()
    assert np.allclose(hvd.reducescatter(keras.ops.convert_to_tensor(rows * (rank + 1)), "e"), mine * everyone / size)


def passes_of_horovod():
    """backward_passes_per_step: the mean over so many batches, or their sum, before anything is clipped; and the same
    for a model that was saved and loaded."""
    arrays, shares = tuple(array.astype("float32") for array in data(8 * WHOLE)[:2]), UNEVEN[hvd.size()]

    def plain(**options):
        return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0, **options)

    for average, factor in ((True, 1.0), (False, 2.0)):
        arguments = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        balancer, model = hvd.Balancer(WHOLE, shares=shares, adaptive=False), dense_model()
        model.compile(optimizer=hvd.DistributedOptimizer(plain(), balancer=balancer, **arguments), loss="mse")
        model.fit(Share(arrays, shares, balancer), shuffle=False, verbose=0)
        assert int(model.optimizer.iterations) == 4, "two batches are one update"
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.keras")
            model.save(path)
            model = hvd.load_model(path, balancer=balancer, **arguments)
        model.fit(Share(arrays, shares, balancer), shuffle=False, verbose=0)
        same_on_all(weights_of(model))
        alone = dense_model()

        def loss(y, predicted, factor=factor):
            return factor * mean_squared_error(y, predicted) / 3  # columns

        alone.compile(optimizer=plain(gradient_accumulation_steps=2), loss=loss)
        alone.fit(*arrays, batch_size=WHOLE, epochs=2, shuffle=False, verbose=0)
        error = distance(weights_of(model), weights_of(alone))
        assert error <= 1e-5, (average, error)
    scaled = keras.optimizers.LossScaleOptimizer(plain())
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(scaled, backward_passes_per_step=2), loss="mse")
    for changes in (False, True):
        before = weights_of(model)
        model.train_on_batch(arrays[0][:4], arrays[1][:4])
        assert changes != all(np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))


def variables_broadcast_in_a_function():
    """In a traced function: after what it does with them before, and before what it does with them then."""
    import tensorflow as tf

    rank = hvd.rank()
    variables = [keras.Variable(np.full(3, rank, "float32")), keras.Variable(np.array(rank + 1, "int32"))]
    other = tf.Variable([0.0, 0.0])

    def step(first):
        variables[0].assign_add(tf.ones(3))
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(other * (1.0 + variables[0][:2]))
        gradient = tape.gradient(loss, other)
        if first:
            hvd.broadcast_variables(variables, root_rank=1)
        seen = variables[0] * 1.0
        variables[0].assign_add(10.0 * tf.ones(3))
        return seen, gradient

    for run in (step, *[tf.function(step, jit_compile=False)] * 4):
        for variable, value in zip(variables, (float(rank), rank + 1), strict=True):
            variable.assign(value * tf.ones(variable.shape, variable.dtype))
        for first in (True, False, tf.constant(True)):
            before = variables[0].numpy()
            sources = hvd.allgather(before[None])[:, 0]
            seen, gradient = run(first)
            assert np.allclose(gradient.numpy(), 2.0 + sources.mean()), (gradient, sources)
            assert (seen.numpy() == (before if first is False else sources[1]) + 1.0).all(), (first, seen, sources)
            assert (variables[0].numpy() == seen.numpy() + 10.0).all() and int(variables[1]) == 2
    wide = keras.Variable(np.zeros(2 + rank, "float32"))

    def unlike():
        hvd.broadcast_variables([wide])

    raises("rank 1: float32[3]", tf.function(unlike))
    raises("jit_compile", tf.function(unlike, jit_compile=True))


def gradient_tape():
    """A loop of one's own: the gradient of the whole batch, eager and traced."""
    import tensorflow as tf

    x, y, _ = data(WHOLE)
    shares = UNEVEN[hvd.size()]
    begin = sum(shares[: hvd.rank()])
    mine = slice(begin, begin + shares[hvd.rank()])
    model = dense_model()
    balancer = hvd.Balancer(WHOLE, shares=shares)

    def gradient(tape, x, y):
        scale = tf.constant([1.0, 1.0, 1.0])  # a tensor, which is no variable
        with tape:
            tape.watch(scale)
            loss = tf.reduce_mean((model(x) * scale - y) ** 2)
        return tape.gradient(loss, {"of": [*model.trainable_variables, scale]})["of"]

    def ours(x, y):
        return gradient(hvd.DistributedGradientTape(tf.GradientTape(), balancer=balancer), x, y)

    whole = gradient(tf.GradientTape(), tf.constant(x, tf.float32), tf.constant(y, tf.float32))
    batch = tf.constant(x[mine], tf.float32), tf.constant(y[mine], tf.float32)
    traced, other = tf.function(ours), tf.function(ours)
    stale = other.get_concrete_function(*batch)
    outer = tf.function(lambda x, y: traced(x, y))  # traced when the inner one is already
    # Parameters are looked at with the second one.
    for call in (ours, traced, outer, ours, "others", ours, traced, outer):
        if call == "others":  # as when the ranks of an elastic job have changed
            engine = balancer.engine
            type(engine).forget()
            type(engine).rebuild(engine.agree_on_rebuilds())
            continue
        balancer.begin(shares[hvd.rank()])
        assert distance([g.numpy() for g in call(*batch)], [g.numpy() for g in whole]) < 1e-5
    raises("traced before they became others", lambda: stale(*batch), before=lambda: balancer.begin(len(batch[0])))


def compiled_by_xla():
    """jit_compile=True ends in words, on every rank."""
    x, y, _ = data(WHOLE)
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(plain_sgd()), loss="mse", jit_compile=True)
    raises("jit_compile=False", lambda: model.train_on_batch(x, y))


def compiled_by_dynamo():
    """jit_compile=True trains as without, with the torch back end. Dynamo needs half a minute for Keras alone."""
    x, y, _ = data(2 * WHOLE)
    results = []
    for compiled in (False, True):
        balancer = hvd.Balancer(WHOLE, adaptive=False)
        model = dense_model()
        optimizer = hvd.DistributedOptimizer(plain_sgd(), balancer=balancer)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=compiled)
        model.fit(hvd.BalancedDataset(x, y, balancer=balancer, shuffle=False), verbose=0)
        results.append(weights_of(model))
    same_on_all(results[1])
    assert distance(*results) < 1e-6


def plans_follow_speed():
    """A rank that is slower gets less, with no callback: compute is measured between exchanges."""
    x, y, _ = data(WHOLE)
    balancer = hvd.Balancer(WHOLE)
    model = dense_model()
    model.compile(optimizer=hvd.DistributedOptimizer(plain_sgd(), balancer=balancer), loss="mse", run_eagerly=True)
    for _ in range(40):
        share = balancer.share
        balancer.announce(share)
        time.sleep(share * (0.004 if hvd.rank() == 0 else 0.001))
        model.train_on_batch(x[:share], y[:share])
    assert balancer.plan.shares[0] < WHOLE // hvd.size() < balancer.plan.shares[-1], balancer.plan
    assert len(set(hvd.allgather_object(str(balancer.plans)))) == 1


def other_parameters_are_found():
    """Law 5 is looked at: rounding is mended, and more than rounding ends all ranks with the name of one."""
    arrays = data(4)[:2]

    def train(factor, steps=3):
        model, balancer = dense_model(), hvd.Balancer(8, adaptive=False)
        model.compile(optimizer=hvd.DistributedOptimizer(plain_sgd(), balancer=balancer), loss="mse")
        balancer.announce(4)
        model.train_on_batch(*arrays)
        if hvd.rank() == 1:
            model.layers[0].kernel.assign(model.layers[0].kernel * factor)
        for _ in range(steps):
            balancer.announce(4)
            model.train_on_batch(*arrays)
        return model

    same_on_all(weights_of(train(1.0 + 1e-6)))
    raises("others than rank 0's on rank 1", lambda: train(2.0))


def the_host_comes_between_updates():
    """The exchange reads and writes variables beside the graph: as the step before left them, and before this step
    changes them. A weight decay does not wait for gradients, so that only an order that is asked for keeps it there."""
    x, y, _ = data(8)
    model, balancer = dense_model(), hvd.Balancer(16, adaptive=False)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.AdamW(1e-3, weight_decay=0.5), balancer=balancer)
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    gradient_exchange, seen = optimizer._reducer.gradient_exchange, []
    outgoing = gradient_exchange.outgoing

    def look(terms):
        seen.append([v.numpy() for v in model.trainable_variables])
        for variable in model.trainable_variables:
            variable.assign(variable.numpy() + 1.0)
        return outgoing(terms)

    gradient_exchange.outgoing = look
    for _ in range(40):
        before = [v.numpy() for v in model.trainable_variables]
        balancer.announce(8)
        model.train_on_batch(x, y)
        after = [v.numpy() for v in model.trainable_variables]
        assert all(np.array_equal(a, b) for a, b in zip(seen[-1], before, strict=True))
        assert all(np.abs(a - 1.0 - b).max() < 0.1 for a, b in zip(after, before, strict=True))
    assert len(seen) == 40


def buckets_leave_while_others_are_computed(way):
    """Here the gradient of the first layer is not computed before that of the last one is under way; summed in the
    graph, before its sum is there."""
    import tensorflow as tf

    from hvd_hetero.engine.horovod_tensorflow import TensorflowEngine
    from hvd_hetero.keras.step import ReducedStep

    first, last = tf.Variable(tf.ones([4, 4])), tf.Variable(tf.ones([4, 4]))
    balancer = hvd.Balancer(4 * hvd.size(), adaptive=False)
    taken, early, take, sum_in_graph = [], [], ReducedStep.take, TensorflowEngine.sum_in_graph
    compression = {"graph": hvd.Compression.none, "host": hvd.Compression.fp16}[way]

    def wait(upstream):
        deadline = time.monotonic() + 20.0
        while not taken and time.monotonic() < deadline:
            time.sleep(0.01)
        early.append(list(taken))
        return upstream

    @tf.custom_gradient
    def patient(x):
        return tf.identity(x), lambda upstream: tf.ensure_shape(tf.numpy_function(wait, [upstream], tf.float32), [4, 4])

    @tf.function
    def gradient(x):
        tape = hvd.DistributedGradientTape(
            tf.GradientTape(), balancer=balancer, bucket_bytes=64, compression=compression
        )
        with tape:
            loss = tf.reduce_mean(patient(x @ first) @ last)
        return tape.gradient(loss, [first, last])

    def summed(engine, tensor, *, name):
        def come(flat):
            taken.append(int(name[-1]))
            return flat

        # Not stateful, as it would be called in the order of the program then.
        result = tf.numpy_function(come, [sum_in_graph(engine, tensor, name=name)], tensor.dtype, stateful=False)
        return tf.ensure_shape(result, tensor.shape)

    ReducedStep.take = lambda self, index, *rest: (taken.append(index), take(self, index, *rest))[1]
    TensorflowEngine.sum_in_graph = summed
    try:
        balancer.begin(4)
        gradient(tf.ones([4, 4]))
    finally:
        ReducedStep.take, TensorflowEngine.sum_in_graph = take, sum_in_graph
    assert early == [[0]] and taken == [0, 1], (early, taken)


def plain_sums_stay_in_the_graph():
    """No gradient is given to the host, the noise is measured all the same, also from a later step on, and is what it
    is on the way through the host; there a step that runs eagerly takes."""
    from hvd_hetero.keras.step import ReducedStep

    x, y, _ = data()
    rows = {0: slice(0, 17), 1: slice(17, 24)}[hvd.rank()]

    def train(**options):
        model, found = dense_model(), []
        balancer = hvd.Balancer(WHOLE, shares=(17, 7), adaptive=False)
        optimizer = hvd.DistributedOptimizer(plain_sgd(), balancer=balancer, bucket_bytes=1000)
        model.compile(optimizer=optimizer, loss="mse", jit_compile=False, **options)
        for step in range(6):
            optimizer._reducer.noise.measuring = step > 1
            balancer.announce(len(x[rows]))
            model.train_on_batch(x[rows] * (step + 1), y[rows])
            found.append(optimizer._reducer.noise.take())
        return found, weights_of(model)

    taken, take = [], ReducedStep.take
    ReducedStep.take = lambda self, index, *rest: (taken.append(index), take(self, index, *rest))[1]
    try:
        in_graph, weights = train()
        assert not taken, taken
        on_host, others = train(run_eagerly=True)
    finally:
        ReducedStep.take = take
    assert len(taken) > 6 and distance(weights, others) < 1e-6, taken
    assert [sums is None for sums in in_graph] == [sums is None for sums in on_host] == 3 * [True] + 3 * [False]
    for one, other in zip(in_graph[3:], on_host[3:], strict=True):
        assert one.merged > 0 and one.ranks == 2, one
        for field in dataclasses.fields(one):
            np.testing.assert_allclose(getattr(one, field.name), getattr(other, field.name), rtol=1e-5)


def constant_gradients_are_exchanged_in_each_step(way):
    """TensorFlow computes what rests on constants once: here all gradients, of two types and so in two buckets."""
    import tensorflow as tf

    compression = {"graph": hvd.Compression.none, "host": hvd.Compression.fp16}[way]
    balancer = hvd.Balancer(8, adaptive=False)
    first, last = tf.Variable(tf.ones([4])), tf.Variable(tf.ones([3], tf.float64))

    @tf.function
    def step():
        tape = hvd.DistributedGradientTape(tf.GradientTape(), balancer=balancer, compression=compression)
        with tape:
            loss = (tf.reduce_sum(first) + tf.cast(2.0 * tf.reduce_sum(last), tf.float32)) * (hvd.rank() + 1)
        return tape.gradient(loss, [first, last])

    for samples in [(6, 2), (4, 4), (0, 8), (8, 0), (2, 6)]:
        balancer.begin(samples[hvd.rank()])
        one, two = step()
        expected = (samples[0] + 2 * samples[1]) / 8
        assert np.allclose(one, expected) and np.allclose(two, 2 * expected), (samples, one, two)


def errors_say_what_to_do():
    raises("keras.optimizers.Optimizer", lambda: hvd.DistributedOptimizer("adam"), kind=TypeError)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        groups = keras.src.optimizers.multi_optimizer.OptimizerMap(plain_sgd(), {"kernel": keras.optimizers.Adam()})
        several = keras.optimizers.MultiOptimizer(groups)
        raises("whose optimizers", lambda: hvd.DistributedOptimizer(several), kind=TypeError)
    raises("not distributed yet", lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain_sgd())))
    raises("hvd.Average or hvd.Sum", lambda: hvd.DistributedOptimizer(plain_sgd(), op=hvd.Max))
    raises("such as hvd.Compression", lambda: hvd.DistributedOptimizer(plain_sgd(), compression="fp16"))
    raises('expected "synchronous"', lambda: hvd.DistributedOptimizer(plain_sgd(), strategy="async"))
    x, y, _ = data(4)
    model = dense_model()
    balancer = hvd.Balancer(WHOLE)
    model.compile(optimizer=hvd.DistributedOptimizer(plain_sgd(), balancer=balancer), loss="mse")
    raises("BalancedDataset", lambda: model.train_on_batch(x, y))
    balancer.begin(4)
    model.train_on_batch(x, y)
    plain = keras.models.clone_model(model)
    plain.compile(optimizer=plain_sgd(), loss="mse")
    calls = [hvd.callbacks.RebalanceCallback(balancer, verbose=0)]
    dataset = hvd.BalancedDataset(x, y, balancer=balancer)
    raises("after clone_model()", lambda: plain.fit(dataset, verbose=0, callbacks=calls), kind=RuntimeError)
    if TENSORFLOW:
        traced = sys.modules["tensorflow"].function(lambda: balancer.begin(4))
        raises("within a tf.function", traced, kind=RuntimeError)
        mean = sys.modules["tensorflow"].function(lambda value: hvd.allreduce(value))
        raises("outside of a tf.function", lambda: mean(keras.ops.ones(2)), kind=TypeError)


def main(checks) -> None:
    """Runs the named ones of `checks`, which are functions by name."""
    hvd.init(process_sets="dynamic")
    time_quickly()
    if TENSORFLOW:
        end_datasets_at_once()
    other = "torch" if TENSORFLOW else "tensorflow"
    assert other not in sys.modules, f"importing hvd_hetero.keras brought in {other}"
    for name in sys.argv[1:]:
        began = time.perf_counter()
        kind, _, rest = name.partition(":")
        checks[kind](*(eval(word) if word[0].isdigit() else word for word in rest.split(",") if word))
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"OK {name} ({time.perf_counter() - began:.1f} s)", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main(globals())
