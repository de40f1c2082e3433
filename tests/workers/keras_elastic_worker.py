"""One rank of tests/test_keras_elastic_horovod.py: `model.fit` while ranks die and join, and a job that is resumed.

`elastic FOLDER KIND`: the rank alone on its host gets that signal at batch 12, once; another one follows it.
`loop FOLDER KIND`: the same of a loop of one's own, with a traced step.
`resume FOLDER`: stopped by SIGTERM at a batch, and resumed. `between FOLDER`: so between two updates of an optimizer
that accumulates gradients and averages weights, with a model that draws random numbers without a seed, and between two
steps of a loop with a tape. `RESULT` is printed by rank 0 at the end.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import hvd_hetero.keras as hvd
from hvd_hetero.keras import backend
from hvd_hetero.optimizers.dealer import Dealer

SAMPLES, WHOLE, EPOCHS, DIES_AT, WAITS_AT = 250, 20, 3, 12, 26
BATCHES = -(-SAMPLES // WHOLE)


def make_data():
    draw = np.random.RandomState(1)
    x = draw.standard_normal((SAMPLES, 6))
    return x, (x @ draw.standard_normal((6, 3))).argmax(1)


class Exact(keras.layers.Layer):
    """Dense, summed in the type of its input: with the torch back end `keras.ops.matmul` of float64 has the precision
    of float32 (Keras 3.15.1)."""

    def __init__(self, units):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_uniform")

    def call(self, inputs):
        return keras.ops.sum(inputs[:, :, None] * self.kernel, axis=1)


def cross_entropy(y, logits):
    """Its mean, written out for the same reason."""
    logits = logits - keras.ops.max(logits, axis=-1, keepdims=True)
    chosen = keras.ops.sum(logits * keras.ops.one_hot(keras.ops.reshape(y, (-1,)), 3, dtype=logits.dtype), axis=-1)
    each = keras.ops.log(keras.ops.sum(keras.ops.exp(logits), axis=-1)) - chosen
    return keras.ops.sum(each) / keras.ops.cast(keras.ops.shape(logits)[0], logits.dtype)


def make_model(optimizer, *, hidden=8, dropout=0.0):
    keras.utils.set_random_seed(0)
    layers = [Exact(hidden), keras.layers.Activation("tanh"), keras.layers.Dropout(dropout, seed=3)]
    model = keras.Sequential([keras.Input((6,)), *layers, Exact(3)])
    model.compile(optimizer=optimizer, loss=cross_entropy, jit_compile=False)
    return model


def flat(model):
    return np.concatenate([np.asarray(w, np.float64).reshape(-1) for w in model.get_weights()])


def by_one_process():
    """The weights of one process that takes the same global batches."""
    x, y = make_data()
    model = make_model(keras.optimizers.SGD(0.1, momentum=0.9))
    dealer = Dealer(SAMPLES, global_batch_size=WHOLE, shuffle=True, seed=5, drop_last=False)
    for epoch in range(EPOCHS):
        dealer.epoch = epoch
        for batch in dealer.batches():
            model.train_on_batch(x[batch], y[batch])
    return flat(model)


class Fate(keras.callbacks.Callback):
    """What happens to the ranks."""

    def __init__(self, state, folder, kind):
        super().__init__()
        self.state, self.died, self.kind = state, folder / "died", kind

    def on_train_batch_end(self, batch, logs=None):
        self.strike()

    def strike(self):
        state = self.state
        done = state.epoch * BATCHES + state.batch
        if done == DIES_AT and hvd.local_size() == 1 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), getattr(signal, f"SIG{self.kind}"))
        while done > WAITS_AT and hvd.size() < 3:
            time.sleep(0.1)  # for the rank that is to join
            state.commit()


def ended(state):
    """What has become of an elastic job."""
    found = flat(state.model)
    every = hvd.allgather(found[None])
    return {
        "sizes": state.sizes,
        "alike": all(np.array_equal(row, every[0]) for row in every),
        "off": float(np.abs(found - by_one_process()).max()),
        "batches": int(state.model.optimizer.iterations),
    }


def elastic(folder, kind):
    balancer = hvd.Balancer(WHOLE, rule=hvd.ReplanRule(minimum_observations=4, warmup_steps=2))
    dataset = hvd.BalancedDataset(*make_data(), balancer=balancer, seed=5)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), balancer=balancer)
    model = make_model(optimizer)

    @hvd.elastic.run
    def train(state):
        state.sizes = [*state.sizes, hvd.size()]
        latency = hvd.callbacks.LatencyAwareLearningRate(balancer)
        state.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            latency,
            Fate(state, folder, kind),
            hvd.callbacks.CommitStateCallback(state, batches_per_commit=5),
        ])  # fmt: skip
        return latency.state_dict()["steps"]

    state = hvd.elastic.KerasState(model, epoch=0, batch=0, sizes=[])
    counted = train(state)
    return {**ended(state), "counted": counted, "epochs": state.epoch}


def loop(folder, kind):
    import tensorflow as tf

    balancer = hvd.Balancer(WHOLE, rule=hvd.ReplanRule(minimum_observations=4, warmup_steps=2))
    dataset = hvd.BalancedDataset(*make_data(), balancer=balancer, seed=5)
    model = make_model(keras.optimizers.SGD(0.1, momentum=0.9))
    traced = []

    @tf.function(reduce_retracing=True)
    def step(x, y):
        traced.append(hvd.size())
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, model(x, training=True))
        with tf.GradientTape() as counting:  # of equal weights
            wide = tf.reduce_sum(model.trainable_variables[0] ** 2)
        gradients = hvd.DistributedGradientTape(tape, balancer=balancer).gradient(loss, model.trainable_variables)
        (same,) = hvd.DistributedGradientTape(counting).gradient(wide, model.trainable_variables[:1])
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.reduce_sum(same)

    @hvd.elastic.run
    def train(state):
        state.sizes = [*state.sizes, hvd.size()]
        fate = Fate(state, folder, kind)
        while state.epoch < EPOCHS:
            dataset.set_epoch(state.epoch)
            for x, y in dataset:
                step(tf.constant(x), tf.constant(y))
                state.batch += 1
                fate.strike()
                if state.batch % 5 == 0:
                    state.commit()
            state.epoch, state.batch = state.epoch + 1, 0
        return traced

    state = hvd.elastic.TensorFlowKerasState(model, model.optimizer, epoch=0, batch=0, sizes=[], balancer=balancer)
    train(state)
    return {**ended(state), "traced": sorted(set(traced))}


class Stop(keras.callbacks.Callback):
    """SIGTERM on one rank, at a batch."""

    def __init__(self, at, who):
        super().__init__()
        self.at, self.who = at, who

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.at and hvd.rank() == self.who:
            os.kill(os.getpid(), signal.SIGTERM)


def resumed(path, stop_at=None, who=0):
    """The weights at the end, None where SIGTERM came first; and after how many batches it ended."""
    balancer = hvd.Balancer(WHOLE, shares={2: (13, 7), 3: (10, 6, 4)}[hvd.size()], adaptive=False)
    dataset = hvd.BalancedDataset(*make_data(), balancer=balancer, seed=5)
    codec = hvd.Compression.int8  # of what it could not send, nothing is lost either
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), balancer=balancer, compression=codec)
    model = make_model(optimizer, hidden=200, dropout=0.3)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    checkpoint = hvd.Checkpoint(path, state, every_steps=9)
    checkpoint.restore()
    callbacks = [*([Stop(stop_at, who)] if stop_at else []), hvd.callbacks.CheckpointCallback(checkpoint)]
    try:
        state.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return flat(model), int(model.optimizer.iterations)
    except SystemExit as left:
        assert left.code == 75
        return None, int(model.optimizer.iterations)
    finally:
        checkpoint.close()


def resume(folder):
    expected, batches = resumed(folder / "uninterrupted")
    assert batches == EPOCHS * BATCHES
    off = []
    for number, (stop_at, who) in enumerate([(4, 0), (BATCHES, 1), (BATCHES + 3, 1), (2 * BATCHES - 1, 0)]):
        nothing, left = resumed(folder / f"run.{number}", stop_at, who)
        assert nothing is None and stop_at <= left <= stop_at + 2, (stop_at, left)
        found, batches = resumed(folder / f"run.{number}")
        assert batches == EPOCHS * BATCHES, (batches, stop_at, left)
        off.append(float(np.abs(found - expected).max()))
    return {"off": off}


class Halt(Exception):
    pass


class HaltAt(keras.callbacks.Callback):
    """Keeps the state by `keep` after `kept` batches of all epochs, and ends `fit` after `at`."""

    def __init__(self, state, keep, kept, at):
        super().__init__()
        self.state, self.keep, self.kept, self.at = state, keep, kept, at

    def on_train_batch_end(self, batch, logs=None):
        done = self.state.epoch * BATCHES + self.state.batch
        if done == self.kept:
            self.keep()
        if done == self.at:
            raise Halt


class Noise(keras.layers.Layer):
    """Draws from Keras's own generator."""

    def call(self, inputs, training=False):
        return inputs + keras.random.normal(keras.ops.shape(inputs), dtype=inputs.dtype) if training else inputs


def accumulating(drawing=False):
    """A state and its data."""
    balancer = hvd.Balancer(WHOLE, shares=(13, 7), adaptive=False)
    dataset = hvd.BalancedDataset(*make_data(), balancer=balancer, seed=5)
    keras.utils.clear_session()  # as a new process is: in Keras 3.10 `set_random_seed` leaves its generator as it was
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.Dropout(0.3), Noise()] if drawing else []
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), *layers, keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=4, use_ema=True, ema_momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer, balancer=balancer), loss=loss, jit_compile=False)
    hvd.broadcast_variables(model.weights)
    return hvd.elastic.KerasState(model, epoch=0, batch=0), dataset


def trained(state, dataset, rule="linear", **halt):
    """The weights at the end; None where `halt` came first."""
    latency = hvd.callbacks.LatencyAwareLearningRate(
        state.optimizer._reducer.balancer, rule=rule, base_batch_size=WHOLE // 4, warmup_steps=4, ramp_steps=2
    )
    warm = hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=2)
    halts = [HaltAt(state, **halt)] if halt else []
    try:
        state.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[warm, *halts, latency])
        return flat(state.model)
    except Halt:
        return None


@functools.cache
def uninterrupted(drawing=False, rule="linear"):
    """The weights at the end of such a job."""
    return trained(*accumulating(drawing), rule)


def stopped(folder, at):
    """How far a job that is saved after `at` batches, and resumed by other objects, is from one that is not."""
    state, dataset = accumulating(drawing=True)
    checkpoint = hvd.Checkpoint(folder / f"at.{at}", state)
    assert trained(state, dataset, "adascale", keep=checkpoint.save, kept=at, at=at) is None
    checkpoint.close()
    state, dataset = accumulating(drawing=True)
    keras.utils.set_random_seed(99)
    checkpoint = hvd.Checkpoint(folder / f"at.{at}", state)
    assert checkpoint.restore() and state.epoch * BATCHES + state.batch == at
    found = trained(state, dataset, "adascale")
    checkpoint.close()
    return float(np.abs(found - uninterrupted(drawing=True, rule="adascale")).max())


def rebuild(state):
    """What an elastic job does where ranks have become others."""
    engine = backend.engine()
    type(engine).forget()
    type(engine).rebuild(engine.agree_on_rebuilds())
    state.on_reset()
    state.sync()


def gone_back(kept, at, *, rebuilt):
    """As far, after going back from batch `at` to what was kept in memory; `rebuilt`: on ranks that are rebuilt."""
    state, dataset = accumulating()
    assert trained(state, dataset, keep=state.commit, kept=kept, at=at) is None
    state.restore()
    if rebuilt:
        rebuild(state)
    return float(np.abs(trained(state, dataset) - uninterrupted()).max())


class Taped:
    """A loop with a tape, whose exchange is made in its first step, and which keeps something back."""

    codec = hvd.Compression.topk(0.05, warmup_steps=0)

    def __init__(self):
        self.balancer = hvd.Balancer(WHOLE, shares=(13, 7), adaptive=False)
        self.dataset = hvd.BalancedDataset(*make_data(), balancer=self.balancer, seed=5)
        self.model = make_model(keras.optimizers.SGD(0.1, momentum=0.9), hidden=200)
        self.state = hvd.elastic.KerasState(self.model, epoch=0, batch=0, balancer=self.balancer)

    def checkpoint(self, path, act):
        checkpoint = hvd.Checkpoint(path, self.state)
        getattr(checkpoint, act)()
        checkpoint.close()
        return self

    def trained(self, to):
        """The weights after so many batches of all epochs."""
        import tensorflow as tf

        model, state = self.model, self.state

        @tf.function(reduce_retracing=True)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = cross_entropy(y, model(x, training=True))
            tape = hvd.DistributedGradientTape(tape, balancer=self.balancer, compression=self.codec)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        while True:
            self.dataset.set_epoch(state.epoch)
            for x, y in self.dataset:
                step(tf.constant(x), tf.constant(y))
                state.batch += 1
                if state.epoch * BATCHES + state.batch == to:
                    return flat(model)
            state.epoch, state.batch = state.epoch + 1, 0

    def gone_back(self, at):
        """Goes back from batch `at` to what was kept, on ranks that are rebuilt."""
        self.trained(at)
        self.state.restore()
        rebuild(self.state)
        return self


def taped(path):
    """How far a loop with a tape is from one that goes on by itself: one that is resumed, one that goes back, and one
    that is resumed and goes back to where it was."""
    end = BATCHES + 6
    expected = Taped().trained(end)
    job = Taped()
    job.trained(6)
    job.checkpoint(path, "save").state.commit()
    found = [job.gone_back(8).trained(end)]
    Taped().checkpoint(path, "restore").checkpoint(path, "save")  # nothing is made meanwhile that takes what was kept
    found.append(Taped().checkpoint(path, "restore").trained(end))
    found.append(Taped().checkpoint(path, "restore").gone_back(8).trained(end))
    gone_back, resumed, both = [float(np.abs(each - expected).max()) for each in found]
    return {"resumed": resumed, "gone back": gone_back, "both": both}


def between(folder, which):
    every = which == "all"
    return {
        "stopped": [stopped(folder, at) for at in ((6, BATCHES, 2 * BATCHES + 9) if every else (2 * BATCHES + 9,))],
        "gone back": [gone_back(6, 7, rebuilt=rebuilt) for rebuilt in ((False, True) if every else (True,))],
        "past an update": [gone_back(6, 9, rebuilt=rebuilt) for rebuilt in ((False, True) if every else (False,))],
        "taped": taped(folder / "taped") if backend.NAME == "tensorflow" else {},
    }


if __name__ == "__main__":
    keras.config.set_floatx("float64")
    hvd.init()
    what, where, *rest = sys.argv[1:]
    result = {"elastic": elastic, "loop": loop, "resume": resume, "between": between}[what](Path(where), *rest)
    if hvd.rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    hvd.barrier()
