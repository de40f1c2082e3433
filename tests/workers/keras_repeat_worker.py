"""One real rank of tests/test_keras_horovod.py: all of `keras_law_worker`, and some of several exchanges in a batch.
Rank 0 compares with what a single process makes of the global batches."""

from __future__ import annotations

import time

import keras
import keras_law_worker
import numpy as np
from keras_law_worker import (
    TENSORFLOW,
    UNEVEN,
    WHOLE,
    data,
    dense_model,
    distance,
    main,
    plain_sgd,
    same_on_all,
    weights_of,
)

import hvd_hetero.keras as hvd
from hvd_hetero.optimizers import attachment


def my_rows():
    """Of a global batch."""
    shares = UNEVEN[hvd.size()]
    start = sum(shares[: hvd.rank()])
    return slice(start, start + shares[hvd.rank()])


def make_balancer():
    return hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)


TOP = hvd.Compression.topk(0.1, warmup_steps=0)


def linear(y, p):
    """Its gradient is that of the data, whatever the weights."""
    return keras.ops.sum(y * p) / keras.ops.cast(keras.ops.shape(p)[0], p.dtype)


class Towers:
    """Two layers alike, side by side, and steps whose gradients may be zero: what codecs keep back comes out then."""

    def __init__(self, balancer, compression=TOP):
        self.compression = compression
        inputs = keras.Input((40,))
        layers = [keras.layers.Dense(32, use_bias=False, name=name) for name in ("a", "b")]
        self.a, self.b = layers
        self.model = keras.Model(inputs, keras.layers.Add()([layer(inputs) for layer in layers]))
        self.balancer, self.random = balancer, np.random.RandomState(hvd.rank())

    def distributed(self, scale=None):
        plain = keras.optimizers.SGD(0.1)
        if scale is not None:
            plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=scale)
        return hvd.DistributedOptimizer(plain, balancer=self.balancer, compression=self.compression)

    def compile(self, optimizer, *trainable):
        self.a.trainable, self.b.trainable = self.a in trainable, self.b in trainable
        self.model.compile(optimizer=optimizer, loss=linear, jit_compile=False)

    def steps(self, number, zero=False):
        for _ in range(number):
            samples = UNEVEN[hvd.size()][hvd.rank()]
            x, y = (self.random.standard_normal((samples, width)).astype("float32") for width in (40, 32))
            self.balancer.begin(samples)
            self.model.train_on_batch(x, y * (not zero))

    def moved(self, layer, before):
        return float(np.abs(np.array(keras.ops.convert_to_numpy(layer.kernel)) - before).sum())

    def kernel(self, layer):
        return np.array(keras.ops.convert_to_numpy(layer.kernel))


def what_codecs_keep_back_is_of_its_variables():
    """Not of others of their shapes that the same optimizer is given; it goes with another optimizer of theirs, and is
    gone in a state from before the first exchange."""
    keras.utils.set_random_seed(0)
    towers = Towers(make_balancer())
    both = towers.distributed()
    both.build([towers.a.kernel, towers.b.kernel])
    towers.compile(both, towers.a)
    towers.steps(5)
    before = towers.kernel(towers.b)
    towers.compile(both, towers.b)
    towers.steps(30, zero=True)
    assert towers.moved(towers.b, before) == 0.0, "of a layer of the same shape"

    ended = []
    for anew in (False, True):
        keras.utils.set_random_seed(0)
        towers = Towers(make_balancer())
        before = towers.kernel(towers.a)
        towers.compile(towers.distributed(), towers.a)
        towers.steps(5)
        if anew:  # and with one more layer
            towers.compile(towers.distributed(), towers.a, towers.b)
        towers.steps(40, zero=True)
        ended.append(towers.kernel(towers.a) - before)
    assert np.abs(ended[1] - ended[0]).sum() < 1e-5 * np.abs(ended[0]).sum() > 0, "of an optimizer before"

    towers = Towers(make_balancer())
    towers.compile(towers.distributed(), towers.a)
    state = hvd.elastic.KerasState(towers.model, epoch=0, batch=0)
    before = towers.kernel(towers.a)
    towers.steps(5)
    assert towers.moved(towers.a, before) > 1.0
    state.restore()
    towers.steps(30, zero=True)
    assert towers.moved(towers.a, before) == 0.0, "of steps that are undone"


def what_one_rank_keeps_back_goes_on_without_the_others():
    """Rank 1 keeps nothing back, and takes part in each warm-up and each exchange as rank 0 does, which it would wait
    for without end; what codecs have come to does not begin anew with each change."""
    keras.utils.set_random_seed(0)
    towers = Towers(make_balancer(), hvd.Compression.topk(0.1, warmup_steps=3))
    one, two = towers.distributed(), towers.distributed()
    for optimizer in (one, two):
        optimizer.build([towers.a.kernel])
    before = towers.kernel(towers.a)
    for turn in range(12):
        towers.compile((one, two)[turn % 2], towers.a)
        towers.steps(2, zero=hvd.rank() == 1 or turn > 3)
    moved = towers.kernel(towers.a) - before
    for turn in range(20):
        towers.compile((one, two)[turn % 2], towers.a)
        towers.steps(2, zero=True)
    assert np.abs(moved).sum() > 1.0, "nothing is kept back any more"
    assert [len(each._reducer.steps) for each in (one, two)] == [1, 1]
    steps = [next(iter(each._reducer.steps.values())) for each in (one, two)]
    routes = [route["cross"] for step in steps for route in step._exchange.state_dict()["routes"]]
    passed = [route["step"] for route in routes if "step" in route]
    assert passed == [32, 32], passed


def what_is_kept_back_of_a_scaled_loss_goes_to_no_other():
    """It would count for so many times what it is."""
    keras.utils.set_random_seed(0)
    towers = Towers(make_balancer())
    towers.compile(towers.distributed(scale=64.0), towers.a)
    towers.steps(5)
    before = towers.kernel(towers.a)
    towers.compile(towers.distributed(), towers.a)
    towers.steps(30, zero=True)
    assert towers.moved(towers.a, before) == 0.0


def tapes_of_twins():
    """Two variables alike, each with a tape of its own."""
    import tensorflow as tf

    balancer, random = make_balancer(), np.random.RandomState(hvd.rank())
    one, two = (tf.Variable(tf.zeros([40, 32])) for _ in range(2))
    samples = UNEVEN[hvd.size()][hvd.rank()]
    for step in range(30):
        balancer.begin(samples)
        x, y = (random.standard_normal((samples, width)).astype("float32") for width in (40, 32))
        for w, scale in ((one, float(step < 5)), (two, 0.0)):
            with hvd.DistributedGradientTape(tf.GradientTape(), balancer=balancer, compression=TOP) as tape:
                loss = tf.reduce_mean(tf.reduce_sum((x @ w) * y * scale, 1))
            w.assign_sub(0.1 * tape.gradient(loss, w))
    assert np.abs(one.numpy()).sum() > 1.0 and not two.numpy().any()


def steps_finished(balancer):
    """Grows by what the balancer counts as steps."""
    found, exchanged = [], balancer.exchanged

    def counts(*, leads, **what):
        found.extend([balancer.step] if leads else ())
        exchanged(leads=leads, **what)

    balancer.exchanged = counts
    return found


def tapes_of_one_batch():
    """A tape that is asked twice, and two tapes of the same arguments: eager and traced, where only an order that is
    asked for keeps the exchanges of parameters apart that have nothing to do with each other."""
    import tensorflow as tf

    x, y = (part.astype("float32") for part in data(WHOLE)[:2])
    models = dense_model(), dense_model()
    models[1].set_weights([2.0 * w for w in weights_of(models[1])])

    def asked_twice(wrap, x, y):
        with wrap(tf.GradientTape(persistent=True)) as tape:
            losses = [tf.reduce_mean((model(x) - y) ** 2) for model in models]
        return [tape.gradient(loss, m.trainable_variables) for loss, m in zip(losses, models, strict=True)]

    def two_tapes(wrap, x, y):
        with wrap(tf.GradientTape()) as first, wrap(tf.GradientTape()) as second:
            losses = [tf.reduce_mean((model(x) - y) ** 2) for model in models]
        return [
            tape.gradient(loss, m.trainable_variables)
            for tape, loss, m in zip((first, second), losses, models, strict=True)
        ]

    for gradients in (asked_twice, two_tapes):
        balancer = make_balancer()
        counted = steps_finished(balancer)

        def ours(x, y, gradients=gradients, balancer=balancer):
            return gradients(lambda tape: hvd.DistributedGradientTape(tape, balancer=balancer, bucket_bytes=64), x, y)

        whole = [g.numpy() for g in tf.nest.flatten(gradients(lambda tape: tape, x, y))]
        calls = [ours, *[tf.function(ours, jit_compile=False)] * 6, ours]
        for call in calls:
            balancer.begin(UNEVEN[hvd.size()][hvd.rank()])
            found = tf.nest.flatten(call(tf.constant(x[my_rows()]), tf.constant(y[my_rows()])))
            assert distance([g.numpy() for g in found], whole) < 1e-5, gradients.__name__
        assert counted == list(range(len(calls))), f"each batch is one step: {counted}"


class AppliedTwice(keras.Model):
    """Its train_step applies the optimizer twice, to a loss and then to another."""

    def __init__(self):
        super().__init__()
        self.inner = dense_model()

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = (keras.ops.convert_to_tensor(part) for part in data[:2])
        for power in (2, 4):
            self._apply(lambda power=power: keras.ops.mean((self(x) - y) ** power))
        return {"loss": keras.ops.stop_gradient(keras.ops.mean((self(x) - y) ** 2))}  # a number, as Keras's own

    def _apply(self, loss):
        variables = self.trainable_weights
        if TENSORFLOW:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                value = loss()
            self.optimizer.apply(tape.gradient(value, [v.value for v in variables]), variables)
        else:
            import torch

            self.zero_grad()
            loss().backward()
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)


def an_optimizer_applied_twice_in_a_batch():
    """In a loop that begins its batches, and in `fit`, but where TensorFlow reads ahead and nobody can tell."""
    x, y = (part.astype("float32") for part in data(6 * WHOLE)[:2])

    def trained(fit, balancer=None, **options):
        model = AppliedTwice()
        optimizer = keras.optimizers.SGD(0.01)
        if balancer is not None:
            optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer)
        model.compile(optimizer=optimizer, jit_compile=False, **options)
        fit(model)
        return weights_of(model)

    def loop(model):
        for start in range(0, len(x), WHOLE):
            balancer.begin(UNEVEN[hvd.size()][hvd.rank()])
            rows = my_rows()
            model.train_on_batch(x[start:][rows], y[start:][rows])

    alone = trained(lambda model: model.fit(x, y, batch_size=WHOLE, shuffle=False, verbose=0))
    balancer = make_balancer()
    counted = steps_finished(balancer)
    ours = trained(loop, balancer)
    same_on_all(ours)
    assert distance(ours, alone) < 1e-5 and counted == list(range(6)), (distance(ours, alone), counted)
    balancer = make_balancer()
    dataset = hvd.BalancedDataset(x, y, balancer=balancer, shuffle=False, workers=2)
    ours = trained(lambda model: model.fit(dataset, verbose=0), balancer)
    assert distance(ours, alone) < 1e-5 and balancer.step == 5, (distance(ours, alone), balancer.step)
    if not TENSORFLOW:
        return
    if hvd.rank() == 1:  # its batches come so late that none is announced when the optimizer is applied again
        announce = balancer.announce
        balancer.announce = lambda samples, **by: (time.sleep(0.3), announce(samples, **by))
    attachment.END_WAIT_S = 1.0  # the exchange of the model before has no end
    found = None
    try:
        trained(lambda model: model.fit(dataset, verbose=0), balancer, run_eagerly=True)
    except Exception as error:  # where loading is slow, that of another rank comes first
        found = str(error)
    said = hvd.allgather_object(found)
    assert None not in said and any("optimizer for each time" in text for text in said), said


def another_optimizer_in_a_batch():
    """One that is made when others have run in it already."""
    x, y = (part.astype("float32") for part in data(WHOLE)[:2])
    balancer, models = make_balancer(), []
    for _ in range(3):
        balancer.begin(UNEVEN[hvd.size()][hvd.rank()])
        for at in range(2):
            if len(models) == at:
                models.append(dense_model())
                models[at].compile(optimizer=hvd.DistributedOptimizer(plain_sgd(), balancer=balancer), loss="mse")
            models[at].train_on_batch(x[my_rows()], y[my_rows()])
    alone = dense_model()
    alone.compile(optimizer=plain_sgd(), loss="mse")
    for _ in range(3):
        alone.train_on_batch(x, y)
    assert balancer.step == 2 and max(distance(weights_of(m), weights_of(alone)) for m in models) < 1e-5


if __name__ == "__main__":
    main({**vars(keras_law_worker), **globals()})
