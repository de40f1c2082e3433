"""One real rank of tests/test_keras_data_horovod.py: data, callbacks and normalisation through `fit`.

Prints `OK name` for each named check that holds. The back end of Keras is that of KERAS_BACKEND.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings

import keras
import numpy as np
from checks import end_datasets_at_once, expect, run_checks
from rates import One, Rates

import hvd_hetero.keras as hvd
from hvd_hetero.keras import backend
from hvd_hetero.optimizers.dealer import Dealer
from hvd_hetero.trace import reader

LENGTH, WHOLE = 21, 8  # the last batch of an epoch has 5 samples
SHARES = {1: (8,), 2: (7, 1), 3: (6, 2, 0)}


def arrays(length=LENGTH):
    generator = np.random.RandomState(0)
    x = {"number": generator.randint(0, 5, length), "image": generator.randn(length, 6, 6, 1).astype("float32")}
    return x, generator.randint(0, 3, length)


def make_model(normalization=lambda: None, seed=0):
    keras.utils.set_random_seed(seed)
    number, image = keras.Input((), name="number", dtype="int32"), keras.Input((6, 6, 1), name="image")
    h = keras.layers.Conv2D(3, 3)(image)
    h = (normalization() or keras.layers.Identity())(h)
    h = keras.layers.Flatten()(keras.layers.Activation("relu")(h))
    h = keras.layers.Dense(8)(keras.layers.Concatenate()([h, keras.layers.Embedding(5, 4)(number)]))
    h = keras.layers.Activation("tanh")((normalization() or keras.layers.Identity())(h))
    return keras.Model({"number": number, "image": image}, keras.layers.Dense(3)(h))


def compile_model(model, optimizer, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False, **options)
    return model


def make_balancer(**options):
    return hvd.Balancer(WHOLE, **{"shares": SHARES[hvd.size()], "min_share": 0, "adaptive": False, **options})


def worst(found, expected):
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))


def spread(weights):
    """0.0 when all ranks hold the same bits."""
    flat = np.concatenate([np.asarray(w, dtype=np.float64).reshape(-1) for w in weights])
    return float((hvd.allreduce(flat, op=hvd.Max) - hvd.allreduce(flat, op=hvd.Min)).max())


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def sync_batch_norm_and_a_rank_without_samples_equal_one_process():
    epochs, (x, y) = 3, arrays()
    one = compile_model(make_model(keras.layers.BatchNormalization), sgd())
    dealer = Dealer(LENGTH, global_batch_size=WHOLE, shuffle=True, seed=0, drop_last=False)
    for epoch in range(epochs):
        dealer.epoch = epoch
        for batch in dealer.batches():
            one.train_on_batch(keras.tree.map_structure(lambda leaf, batch=batch: leaf[batch], x), y[batch])
    # With small buckets a batch begins while some of its gradients are yet to come.
    tensorflow = keras.backend.backend() == "tensorflow"
    for as_tf, bucket_bytes in ((False, None), (False, 64), (True, None))[: 3 if tensorflow else 2]:
        balancer = make_balancer()
        model = make_model(lambda balancer=balancer: hvd.SyncBatchNormalization(balancer=balancer))
        compile_model(model, hvd.DistributedOptimizer(sgd(), balancer=balancer, bucket_bytes=bucket_bytes))
        data = hvd.BalancedDataset(x, y, balancer=balancer)
        model.fit(data.as_tf_dataset() if as_tf else data, epochs=epochs, verbose=0)
        assert spread(model.get_weights()) == 0.0
        assert worst(model.get_weights(), one.get_weights()) <= 2e-5, worst(model.get_weights(), one.get_weights())


def class_and_sample_weights_equal_one_process():
    x, y = arrays()
    weights = {0: 0.5, 1: 2.0, 2: 1.0}
    sample = np.array([weights[label] for label in y], dtype="float32")
    found = []
    for arguments, options in (((), {"class_weight": weights}), ((sample,), {})):
        balancer = make_balancer()
        model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer))
        data = hvd.BalancedDataset(x, y, *arguments, balancer=balancer, shuffle=False, workers=2)
        model.fit(data, epochs=2, verbose=0, **options)
        found.append(model.get_weights())
    one = compile_model(make_model(), sgd())
    one.fit(x, y, sample_weight=sample, batch_size=WHOLE, epochs=2, shuffle=False, verbose=0)
    assert worst(found[0], one.get_weights()) <= 1e-5 and worst(found[1], one.get_weights()) <= 1e-5


class Slow(keras.callbacks.Callback):
    """Makes rank 0 slower than the others."""

    def __init__(self, balancer):
        super().__init__()
        self.balancer = balancer

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(self.balancer.share * (0.004 if hvd.rank() == 0 else 0.001))


def shares_change_without_retracing():
    class Counting(keras.Model):
        traces = 0

        def train_step(self, *arguments):
            self.traces += 1
            return super().train_step(*arguments)

    for as_tf in (False, True):
        keras.utils.set_random_seed(0)
        backend.form().turn.cache_clear()  # as in a process that exchanges for the first time
        inputs = keras.Input((2,))
        model = Counting(inputs, keras.layers.Dense(1)(inputs))
        balancer = hvd.Balancer(32)
        model.compile(hvd.DistributedOptimizer(sgd(), balancer=balancer), "mse", jit_compile=False)
        data = hvd.BalancedDataset(np.ones((32 * 25 - 7, 2)), np.ones((32 * 25 - 7, 1)), balancer=balancer)
        # The first, which builds the optimizer: TensorFlow traces a step that makes variables a second time.
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        callbacks += [hvd.callbacks.RebalanceCallback(balancer), Slow(balancer)]
        history = model.fit(data.as_tf_dataset() if as_tf else data, epochs=3, verbose=0, callbacks=callbacks)
        assert len(balancer.plans) > 1, "no plan was made: the test shows nothing"
        assert len(set(hvd.allgather_object(str(balancer.plans)))) == 1
        assert model.traces == 1, model.traces
        assert history.history["share"][-1] == balancer.share
        assert balancer.plan.shares[0] < min(balancer.plan.shares[1:])


def every_sample_once_while_shares_change_and_tensorflow_reads_ahead():
    """Each sample moves its own number by 1 / (samples of its batch): what moved differently was not used once."""
    length = 32 * 12 - 7
    balancer = hvd.Balancer(32)
    inputs = keras.Input((), dtype="int32")
    model = keras.Model(inputs, keras.layers.Embedding(length, 1, embeddings_initializer="zeros")(inputs))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), balancer=balancer)
    model.compile(optimizer, lambda y, p: keras.ops.reshape(p, (-1,)), jit_compile=False)
    data = hvd.BalancedDataset(np.arange(length), np.zeros(length), balancer=balancer)
    expected = np.zeros(length)
    for epoch in range(3):
        data.sampler.dealer.epoch, kept = epoch, data.sampler.dealer.epoch
        for batch in data.sampler.dealer.batches():
            expected[batch] -= 1.0 / len(batch)
        data.sampler.dealer.epoch = kept
    model.fit(data, epochs=3, verbose=0, callbacks=[Slow(balancer)])
    assert len(balancer.plans) > 1, "no plan was made: the test shows nothing"
    assert np.abs(model.get_weights()[0][:, 0] - expected).max() <= 1e-6
    if keras.backend.backend() == "tensorflow":  # or ends of epochs are waited for
        from keras.src.trainers.data_adapters import get_data_adapter

        for each in (data, hvd.EvaluationDataset(np.arange(length), balancer=balancer)):
            assert get_data_adapter(each).get_tf_dataset().options().autotune.enabled is False


def broadcast_makes_ranks_alike():
    x, y = arrays()
    balancer = make_balancer()
    rows = np.arange(6.0).reshape(2, 3) + 10 * hvd.rank()
    assert hvd.broadcast(rows.T, 0).tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert hvd.allgather(rows.T).shape == (3 * hvd.size(), 2)
    said = hvd.allgather(rows[: 1 + hvd.rank()] > 11)
    assert said.dtype == bool and said[:2].tolist() == [[False] * 3, [False, False, True]]
    halves = keras.ops.cast(rows, "bfloat16")
    found = hvd.allreduce(halves)
    assert str(found.dtype) == "bfloat16" and found.astype(float)[0, 0] == 5.0 * (hvd.size() - 1)
    assert str(hvd.allgather(halves).dtype) == "bfloat16"
    # The weights that this makes do not lie in order in memory, with the torch back end.
    tall = keras.layers.Dense(2, kernel_initializer=keras.initializers.Orthogonal(seed=hvd.rank()))
    tall.build((None, 4))
    hvd.broadcast_variables(tall.weights)
    assert spread([keras.ops.convert_to_numpy(v) for v in tall.weights]) == 0.0
    model = compile_model(make_model(seed=hvd.rank()), hvd.DistributedOptimizer(sgd(), balancer=balancer))
    assert spread(model.get_weights()) > 0
    model.optimizer.build(model.trainable_variables)
    model.optimizer.variables[-1].assign(model.optimizer.variables[-1] + hvd.rank() + 1.0)
    kept = keras.Variable(float(hvd.rank()))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(hvd.BalancedDataset(x, y, balancer=balancer), verbose=0, callbacks=[callback])
    assert spread(model.get_weights()) == 0.0 and spread([v.numpy() for v in model.optimizer.variables]) == 0.0
    assert float(kept.value) == hvd.rank()
    first = [keras.ops.convert_to_numpy(w).copy() for w in model.weights]
    model.weights[0].assign(model.weights[0] + hvd.rank())
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[model.weights[0]])
    callback.set_model(model)
    callback.on_train_begin()
    assert worst([model.weights[0].numpy()], [first[0] + hvd.rank()]) == 0.0
    model = keras.Sequential([keras.Input((4,)), keras.layers.Normalization(), keras.layers.Dense(1)])
    if hvd.rank() == 0:
        model.layers[0].adapt(np.arange(8.0).reshape(2, 4))
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    assert spread([keras.ops.convert_to_numpy(model(np.ones((1, 4))))]) == 0.0


def a_balancer_that_was_forgotten_is_told():
    """Before anything is learned with wrong weights."""
    x, y = arrays()
    balancer = make_balancer()
    model = compile_model(make_model(), hvd.DistributedOptimizer(sgd()))
    dataset = hvd.BalancedDataset(x, y, balancer=balancer)
    expect("Pass balancer= to hvd.DistributedOptimizer", lambda: model.fit(dataset, verbose=0), kind=Exception)


def other_variables_or_optimizers_are_told():
    """On every rank, whatever is first to look: the optimizer, or a broadcast of those that are not distributed."""
    kind = keras.optimizers.Adam if hvd.rank() == 0 else keras.optimizers.SGD
    expect("optimizer=Adam", lambda: hvd.DistributedOptimizer(kind(0.1)))
    wide = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2 + hvd.rank())])
    expect("rank 1: float32[4, 3]", lambda: hvd.broadcast_variables(wide.weights))
    model = compile_model(make_model(), kind(0.1))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    expect("number of variables: expected the same on every rank", callback.on_train_begin)


def a_mistake_on_one_rank_is_an_error_on_all():
    """After which they go on, alike."""
    last, balancer, (x, y) = hvd.rank() == hvd.size() - 1, make_balancer(), arrays()

    def refused(text, call):
        told = text if last else f"rank {hvd.size() - 1}: wrong arguments ({text}"
        expect(told, call, kind=(TypeError, ValueError))

    refused(
        "steps_per_epoch: expected none",
        lambda: hvd.BalancedDataset(x, y, balancer=balancer, steps_per_epoch=2 if last else None),
    )
    for given in ({"balancer": balancer}, {}):
        refused(
            "bucket_bytes: expected",
            lambda given=given: hvd.DistributedOptimizer(sgd(), **given, bucket_bytes=0 if last else 1 << 20),
        )
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:  # True is no reduction, but equal to hvd.Sum
                pass
            refused(
                "op: expected",
                lambda given=given, tape=tape: hvd.DistributedGradientTape(tape, **given, op=True if last else hvd.Sum),
            )
            for _ in range(2):
                hvd.DistributedGradientTape(tape, **given, op=hvd.Sum)
    compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer)).fit(
        hvd.BalancedDataset(x, y, balancer=balancer), verbose=0
    )


def metrics_are_those_of_all_samples():
    x, y = arrays()
    balancer = make_balancer(min_share=1, shares={1: (8,), 2: (7, 1), 3: (5, 2, 1)}[hvd.size()])
    model = compile_model(make_model(), hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), balancer=balancer))
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    best = hvd.callbacks.BestModelCheckpoint(filepath=os.path.join(folder, "best.keras"))
    history = model.fit(
        hvd.BalancedDataset(x, y, balancer=balancer),
        epochs=2,
        verbose=0,
        validation_data=hvd.EvaluationDataset(x, y, balancer=balancer),
        callbacks=[hvd.callbacks.MetricAverageCallback(), best],
    ).history
    for key, value in expected.items():
        for name in (key, f"val_{key}"):
            assert np.allclose(history[name], value, rtol=1e-5), (name, history[name], value)
    hvd.barrier()
    assert worst(keras.models.load_model(best.filepath).get_weights(), model.get_weights()) == 0.0


class Own(keras.Model):
    """Updates its metrics as Keras's guide to a train_step of one's own does: the loss by batches."""

    def __init__(self):
        super().__init__()
        self.inner, self.loss_tracker = make_model(), keras.metrics.Mean(name="loss")

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def _measured(self, x, y):
        loss = self.compute_loss(x=x, y=y, y_pred=self(x))
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (y, self(x))))
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data):
        return self._measured(*data)


def metrics_of_a_train_step_of_ones_own():
    """Each metric is weighted by what it is a mean over, and not by what the loss is."""
    x, y = arrays(24)  # no short batch, in which one rank would look at a sample of another's
    balancer = make_balancer(min_share=1, shares={1: (8,), 2: (7, 1), 3: (5, 2, 1)}[hvd.size()])
    model = Own()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), balancer=balancer),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=False,
    )
    predicted = keras.ops.convert_to_numpy(model(x)).argmax(1)
    history = model.fit(
        TrainedByNobody(x, y, balancer), epochs=1, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()]
    ).history
    assert np.allclose(history["accuracy"], (predicted == y).mean(), rtol=1e-6), (history, (predicted == y).mean())


def losses_of_several_outputs_are_those_of_all_samples():
    """They add up to the loss, however uneven the shares are."""
    generator = np.random.RandomState(2)
    x, y = generator.randn(48, 6).astype("float32"), generator.randn(48, 2).astype("float32")
    targets = {"p": y[:, :1], "q": y[:, 1:]}
    keras.utils.set_random_seed(0)
    rows = keras.Input((6,))
    model = keras.Model(rows, {name: keras.layers.Dense(1, name=name)(rows) for name in targets})
    balancer = hvd.Balancer(24, shares={1: (24,), 2: (4, 20), 3: (4, 8, 12)}[hvd.size()], adaptive=False)
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), balancer=balancer),
        loss={"p": "mse", "q": "mae"},
        jit_compile=False,
    )
    expected = model.evaluate(x, targets, batch_size=24, verbose=0, return_dict=True)
    history = model.fit(
        hvd.BalancedDataset(x, targets, balancer=balancer), verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()]
    ).history
    found = {name: values[0] for name, values in history.items()}
    assert np.isclose(found["p_loss"] + found["q_loss"], found["loss"], rtol=1e-5), found
    for name in ("loss", "p_loss", "q_loss"):
        assert np.isclose(found[name], expected[name], rtol=1e-5), (name, found, expected)


class TrainedByNobody(keras.utils.PyDataset):
    """This rank's rows of each batch, for a train_step that trains nothing."""

    def __init__(self, x, y, balancer):
        super().__init__()
        shares = balancer.plan.shares
        self.rows = slice(sum(shares[: hvd.rank()]), sum(shares[: hvd.rank() + 1]))
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y) // WHOLE

    def __getitem__(self, index):
        mine = slice(index * WHOLE + self.rows.start, index * WHOLE + self.rows.stop)
        return {name: leaf[mine] for name, leaf in self.x.items()}, self.y[mine]


def a_loss_over_other_terms_equals_one_process():
    """Labels that do not count: the loss is a mean over the others, of which each rank says how many it has."""
    x, y = arrays()
    y = np.where(np.arange(LENGTH) % 3 == 1, -1, y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    found = []
    for terms in (lambda x, y: (y >= 0).sum(), None):
        balancer = make_balancer()
        model = make_model()
        model.compile(optimizer=hvd.DistributedOptimizer(sgd(), balancer=balancer), loss=loss, jit_compile=False)
        model.fit(hvd.BalancedDataset(x, y, balancer=balancer, terms=terms, shuffle=False), epochs=3, verbose=0)
        assert spread(model.get_weights()) == 0.0
        found.append(model.get_weights())
    one = make_model()
    one.compile(optimizer=sgd(), loss=loss, jit_compile=False)
    one.fit(x, y, batch_size=WHOLE, shuffle=False, epochs=3, verbose=0)
    errors = [worst(weights, one.get_weights()) for weights in found]
    assert errors[0] < 1e-5 and (hvd.size() == 1 or errors[1] > 1e-3), errors


def the_learning_rate_is_scheduled_and_follows_the_batch():
    x, y = arrays()
    balancer = make_balancer()
    model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer))
    data = hvd.BalancedDataset(x, y, balancer=balancer)
    seen = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    size = hvd.size()
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2)
    decay = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=2)
    logs = model.fit(data, epochs=4, verbose=0, callbacks=[warmup, decay, Rates()]).history
    expected = [0.1 / size * (1 + (size - 1) * (step + 1) / 6) for step in range(6)] + [0.1] * 3 + [0.05] * 3
    assert np.allclose(seen, expected) and np.allclose(logs["lr"], [seen[2], seen[5], 0.1, 0.05]), (seen, expected)

    seen.clear()
    model.optimizer.learning_rate = 0.01
    latency = hvd.callbacks.LatencyAwareLearningRate(balancer, base_batch_size=WHOLE // 2, warmup_steps=3)
    model.fit(data, epochs=2, verbose=0, callbacks=[latency, Rates()])
    assert np.allclose(seen, [0.01] * 6), seen  # for others: see the next check for the updates
    assert latency.factor == 2.0 and np.isclose(float(model.optimizer.learning_rate), 0.01)

    scheduled = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    model = compile_model(make_model(), hvd.DistributedOptimizer(scheduled, balancer=balancer))
    for callback in (warmup, latency):
        try:
            model.fit(data, verbose=0, callbacks=[callback])
        except TypeError as error:
            assert "LearningRateSchedule" in str(error)
        else:
            raise AssertionError("a schedule was overwritten")


def the_factor_is_in_updates_alone():
    tensorflow = keras.backend.backend() == "tensorflow"

    class Counting(keras.Model):
        traces, tape = 0, None

        def train_step(self, data):
            self.traces += 1
            if self.tape is None:
                return super().train_step(data)
            import tensorflow as tf

            with hvd.DistributedGradientTape(tf.GradientTape(), balancer=self.tape) as tape:
                loss = self.compute_loss(y=data[1], y_pred=self(data[0]))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def rates(plain, *callbacks, compiled=None, tape=False, before=True, **options):
        balancer, inputs = make_balancer(shares=(5, 3)), keras.Input((1,))
        model = Counting(inputs, One()(inputs))
        model.tape = balancer if tape else None
        optimizer = plain if tape else hvd.DistributedOptimizer(plain, balancer=balancer, **options)
        model.compile(optimizer, lambda y, p: keras.ops.mean(p), jit_compile=False, **(compiled or {}))
        data = hvd.BalancedDataset(*[np.zeros((6 * WHOLE, 1), "float32")] * 2, balancer=balancer)
        if before:
            model.fit(data, verbose=0, callbacks=[rates := Rates()])
            assert np.allclose(sum(rates.used), 2.0 if accumulates(plain) else 6.0), rates.used
            before = model.traces
        latency = hvd.callbacks.LatencyAwareLearningRate(balancer, base_batch_size=WHOLE // 4, warmup_steps=3)
        model.fit(data, verbose=0, callbacks=[*callbacks, latency, rates := Rates()])
        assert set(rates.shown) == {1.0} and spread(model.get_weights()) == 0.0, rates.shown
        assert not tensorflow or not before or model.traces == before + tape, "traced again"
        assert latency.factor == (2.0 if accumulates(plain) else 4.0)
        return rates.used

    def accumulates(optimizer):
        return optimizer.gradient_accumulation_steps is not None

    def sgd(**options):
        return keras.optimizers.SGD(1.0, **options)

    warm = [1, 2, 3, 4, 4, 4]
    scaled = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0)
    for found, expected in (
        (rates(sgd()), warm),
        (rates(sgd(), bucket_bytes=4, compression=hvd.Compression.fp16), warm),
        (rates(scaled), warm),
        (rates(sgd(gradient_accumulation_steps=3)), [0, 0, 1, 0, 0, 2]),
        (rates(sgd(), strategy=hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0), before=False), None),
        *([
            (rates(sgd(), compiled={"steps_per_execution": 3}), [sum(warm[:3]), sum(warm[3:])]),
            (rates(sgd(), tape=True), warm),
        ] if tensorflow else []),
    ):  # fmt: skip
        # Ranks that make steps apart hear of a factor with a merge.
        assert np.allclose(found[:: 5 if expected is None else 1], expected or [1, 4]), (found, expected)


def elastic_states_and_a_trace_are_kept():
    class State:
        batch, epoch, commits = 0, 5, 0

        def commit(self):
            self.commits += 1
            kept.append((self.epoch, self.batch))

    kept, state = [], State()
    x, y = arrays()
    balancer = make_balancer()
    model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer))
    folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    callbacks = [
        hvd.callbacks.UpdateBatchStateCallback(state),
        hvd.callbacks.UpdateEpochStateCallback(state),
        hvd.callbacks.CommitStateCallback(state, batches_per_commit=2),
        hvd.callbacks.TraceCallback(run=folder, balancer=balancer),
    ]
    model.fit(hvd.BalancedDataset(x, y, balancer=balancer), epochs=2, verbose=0, callbacks=callbacks)
    # Three batches an epoch, a commit after each second one: the fourth is the first of the second epoch.
    assert kept == [(5, 2), (6, 0), (6, 1), (6, 3), (7, 0)], kept
    hvd.barrier()
    ranks = reader.read(folder).ranks
    run = ranks[hvd.rank()] if not isinstance(ranks, dict) else ranks[hvd.rank()]
    assert [step.samples for step in run.steps][:3] == [SHARES[hvd.size()][hvd.rank()]] * 2 + [run.steps[2].samples]
    assert [event.kind for event in run.events if "epoch" in event.kind] == ["epoch begins", "epoch ends"] * 2


WHAT = ("data", "compute", "wait")


class Unhurried:
    """Samples that take their time to load."""

    def __len__(self):
        return 6 * WHOLE

    def __getitem__(self, index):
        time.sleep(0.03)
        return np.float32([index, 1.0]), np.float32(0.0)


def waiting_for_data_is_no_compute():
    """Neither where TensorFlow reads ahead nor in a loop of one's own, nor where an update takes several batches."""
    for passes, own_loop in [(1, False), (1, True), (2, False)]:
        folder = hvd.broadcast_object(tempfile.mkdtemp(), 0)
        balancer = make_balancer(run=folder, shares=(WHOLE // hvd.size(),) * hvd.size())
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(1e-6, gradient_accumulation_steps=passes if passes > 1 else None)
        model.compile(optimizer=hvd.DistributedOptimizer(optimizer, balancer=balancer), loss="mse", jit_compile=False)
        data = hvd.BalancedDataset(Unhurried(), balancer=balancer, shuffle=False)
        for _ in range(2):  # in the first epoch there is compilation, while TensorFlow reads ahead
            if own_loop:
                for x, y in data:
                    model.train_on_batch(x, y)
            else:
                model.fit(data, epochs=1, verbose=0)
        balancer.trace.close()
        steps = reader.read(folder).ranks[hvd.rank()].steps
        steps = steps[len(steps) // 2 + 1 :]
        data_s, compute_s, wait_s = (sum(getattr(step, f"{what}_s") for step in steps) for what in WHAT)
        loading_s = 0.03 * (WHOLE // hvd.size()) * passes * len(steps)
        assert data_s + wait_s > 0.6 * loading_s > 2 * compute_s, (passes, own_loop, data_s, compute_s, wait_s)
        # In each step somebody waited for data, and the others for that rank, while more was loaded for them.
        assert float(hvd.allreduce(np.float64(data_s), op=hvd.Sum)) > 0.6 * loading_s, (passes, own_loop, data_s)


def the_rest_of_an_epoch_has_the_steps_that_are_left():
    """Also where an execution has several, which Keras with TensorFlow then takes all."""
    x, y = arrays(8 * WHOLE)
    at_once = 3 if keras.backend.backend() == "tensorflow" else 1

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if state.batch == 3:
                state.commit()
                raise KeyError("broken off")

    def make():
        balancer = make_balancer()
        optimizer = hvd.DistributedOptimizer(sgd(), balancer=balancer)
        return compile_model(make_model(), optimizer, steps_per_execution=at_once), hvd.BalancedDataset(
            x, y, balancer=balancer, shuffle=False
        )

    model, dataset = make()
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    try:
        state.fit(dataset, epochs=2, verbose=0, callbacks=[Breaks()])
    except KeyError:
        state.restore()
    state.fit(dataset, epochs=2, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2 * 8
    assert model.steps_per_execution == at_once
    undisturbed, dataset = make()
    undisturbed.fit(dataset, epochs=2, verbose=0)
    assert worst(model.get_weights(), undisturbed.get_weights()) <= 1e-6


def an_error_of_loading_reaches_every_rank():
    """And ranks that have all caught it train on."""

    class Broken:
        burns = True

        def __len__(self):
            return 5 * WHOLE

        def __getitem__(self, index):
            if self.burns and index >= 3 * WHOLE and hvd.rank() == 1:
                raise OSError("disk on fire")
            return np.ones(2, "float32"), np.ones(1, "float32")

    for workers in (0, 2):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2,))
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        balancer = hvd.Balancer(WHOLE)
        model.compile(hvd.DistributedOptimizer(sgd(), balancer=balancer), "mse", jit_compile=False)
        data = Broken()
        dataset = hvd.BalancedDataset(data, balancer=balancer, shuffle=False, workers=workers)
        try:
            model.fit(dataset, verbose=0)
        except Exception as error:
            expected = "disk on fire" if hvd.rank() == 1 else "rank 1 could not"
            assert expected in str(error), (type(error), str(error)[-2000:])
        else:
            raise AssertionError("nothing was raised")
        data.burns, done = False, int(keras.ops.convert_to_numpy(model.optimizer.iterations))
        model.fit(dataset, epochs=2, verbose=0)
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == done + 2 * 5
        assert spread(model.get_weights()) == 0.0


def a_callback_of_one_rank_stops_all_after_the_same_batch():
    """One that looks at a rank's own batches; and the fit after it goes on."""

    class Stops(keras.callbacks.Callback):
        def __init__(self, after):
            super().__init__()
            self.after = after

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.after and hvd.rank() == hvd.size() - 1:
                self.model.stop_training = True

    x, y = arrays(8 * WHOLE)
    for strategy in ("synchronous", hvd.LocalSGD(round_steps=2, warmup_steps=1)):
        balancer = make_balancer()
        model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer, strategy=strategy))
        dataset = hvd.BalancedDataset(x, y, balancer=balancer, shuffle=False)
        ended = []
        for after in (2, 99):
            last = hvd.callbacks.StopTogetherCallback()
            local = [] if strategy == "synchronous" else [hvd.callbacks.LocalSGDCallback()]
            callbacks = [*local, hvd.callbacks.MetricAverageCallback(), Stops(after), last]
            history = model.fit(dataset, epochs=4 if after == 2 else 1, verbose=0, callbacks=callbacks)
            ended.append((len(history.epoch), balancer.step))
        assert ended[0][1] < 4 * 8 - 1 and ended[1] == (1, ended[0][1] + 8), ended
        assert strategy != "synchronous" or ended[0] == (1, 3), ended
        assert len(set(hvd.allgather_object(tuple(ended)))) == 1, "on all ranks"
        assert spread(model.get_weights()) == 0.0
    alone = compile_model(make_model(), sgd())
    expect("hvd.DistributedOptimizer", lambda: alone.fit(x, y, verbose=0, callbacks=[last]))


def a_callback_of_one_rank_stops_all_at_the_end_of_an_epoch():
    """One that looks at its own clock, say; also where it has said so after the epoch's last batch."""

    class Stops(keras.callbacks.Callback):
        def __init__(self, within):
            super().__init__()
            self.within = within

        def stop(self):
            if self.params["epoch"] == 1 and hvd.rank() == hvd.size() - 1:
                self.model.stop_training = True

        def on_epoch_begin(self, epoch, logs=None):
            self.params["epoch"] = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.within and batch + 1 == self.params["steps"]:
                self.stop()

        def on_epoch_end(self, epoch, logs=None):
            if not self.within:
                self.stop()

    x, y = arrays(4 * WHOLE)
    for strategy in ("synchronous", hvd.LocalSGD(round_steps=2, warmup_steps=1)):
        balancer = make_balancer()
        model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer, strategy=strategy))
        dataset = hvd.BalancedDataset(x, y, balancer=balancer)
        for within in (False, True):
            local = [] if strategy == "synchronous" else [hvd.callbacks.LocalSGDCallback()]
            callbacks = [*local, Stops(within), hvd.callbacks.StopTogetherCallback()]
            history = model.fit(dataset, epochs=4, verbose=0, callbacks=callbacks)
            assert len(history.epoch) == 2, (strategy, within, history.epoch)
        assert balancer.step == 15 and spread(model.get_weights()) == 0.0


def samples_of_tf_data():
    import tensorflow as tf

    as_is = tf.autograph.experimental.do_not_convert  # or each function is read and written anew
    pair, first = as_is(lambda x, y: (x, y)), as_is(lambda x, y: x)

    x, y = arrays()
    found = []
    for given in ((x, y), (tf.data.Dataset.from_tensor_slices((x, y)),)):
        balancer = make_balancer()
        model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer))
        model.fit(hvd.BalancedDataset(*given, balancer=balancer, shuffle=False), epochs=2, verbose=0)
        found.append(model.get_weights())
    assert worst(*found) == 0.0
    samples = tf.data.Dataset.from_tensor_slices((x, y))

    def shuffled(epoch):
        return samples.shuffle(len(x), seed=epoch, reshuffle_each_iteration=False)

    def fit(data, epochs):
        model.fit(hvd.BalancedDataset(*data, balancer=balancer, shuffle=False), epochs=epochs, verbose=0)

    found = []
    read = [list(shuffled(epoch).as_numpy_iterator()) for epoch in (0, 1)]
    orders = [keras.tree.map_structure(lambda *leaves: np.stack(leaves), *each) for each in read]
    assert not np.array_equal(orders[0][1], orders[1][1])
    for each in ([([shuffled], 2)], [(order, 1) for order in orders]):
        balancer = make_balancer()
        model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer))
        for data, epochs in each:
            fit(data, epochs)
        found.append(model.get_weights())
    assert worst(*found) == 0.0, "each epoch in its own order"
    fails = [True]

    def once(number):
        if fails and number == WHOLE + 1:
            fails.clear()
            raise OSError("disk on fire")
        return number

    numbers = tf.data.Dataset.range(3 * WHOLE).map(as_is(lambda number: tf.numpy_function(once, [number], tf.int64)))
    source = hvd.BalancedDataset(numbers, balancer=balancer, shuffle=False)._source
    for begin in (0, WHOLE, 2 * WHOLE):
        rows = np.arange(begin, begin + WHOLE)
        if begin == WHOLE:
            expect("disk on fire", lambda rows=rows: source.take(rows), kind=Exception)
        assert list(source.take(rows)[0]) == list(rows)
    tf.random.set_seed(None)  # what make_model() has set, by which ranks that draw alike agree
    unseeded = samples.shuffle(9, reshuffle_each_iteration=False)
    pieces = as_is(lambda x, y: tf.data.Dataset.from_tensors((x, y)))
    sloppy = tf.data.Options()
    sloppy.deterministic = False
    for given, what in (
        (samples.filter(as_is(lambda x, y: True)), "assert_cardinality"),
        (samples.batch(2, drop_remainder=True).prefetch(1), "unbatch"),
        (samples.padded_batch(2).shuffle(3, seed=0).repeat(2).take(9).cache(), "unbatch"),
        (tf.data.Dataset.zip((samples.batch(2), {"y": samples.batch(2).prefetch(1)})), "unbatch"),
        (samples.batch(2).concatenate(samples.batch(2)).rebatch(3), "unbatch"),
        (samples.shuffle(9, seed=3), "reshuffle_each_iteration=False"),
        (tf.data.Dataset.zip((samples.shuffle(9, seed=3), samples)).map(first).prefetch(2), "reshuffle_each"),
        (samples.concatenate(samples.shuffle(9, seed=1)).cache(), "reshuffle_each_iteration=False"),
        (unseeded, "a shuffle() without a seed"),
        (tf.data.Dataset.zip((samples, tf.data.Dataset.random().take(len(x)))), "a random choice without a seed"),
        (samples.map(pair, num_parallel_calls=2, deterministic=False), "with deterministic=False"),
        (samples.interleave(pieces, num_parallel_calls=2, deterministic=False), "with deterministic=False"),
        (samples.with_options(sloppy), "options().deterministic=False"),
    ):
        expect(what, lambda given=given: hvd.BalancedDataset(given, balancer=balancer, shuffle=False))
    turned = samples if hvd.rank() else samples.skip(1).concatenate(samples.take(1))
    expect("checksum of the data", lambda: hvd.BalancedDataset(turned, balancer=balancer, shuffle=False))
    text = tf.data.Dataset.range(90).batch(9, drop_remainder=True).map(as_is(lambda piece: (piece[:-1], piece[1:])))
    for given, told in (
        (samples.batch(2, drop_remainder=True).map(pair).prefetch(1), True),
        (samples.batch(2).map(pair, num_parallel_calls=2), True),
        (samples.batch(2, drop_remainder=True).map(as_is(lambda x, y: (x, None))), True),
        (samples.shuffle(9, seed=3, reshuffle_each_iteration=False), False),
        (samples.batch(2).unbatch().take(len(x)), False), (samples.map(pair), False), (text, False),
        (samples.interleave(pieces, num_parallel_calls=2), False),
        (tf.data.Dataset.zip((samples, samples.batch(2))), False),
    ):
        given = given.apply(tf.data.experimental.assert_cardinality(len(x)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.BalancedDataset(given, balancer=balancer, shuffle=False)
        assert any("Leave its batch() out" in str(each.message) for each in caught) == told, given
    short = tf.data.Dataset.range(5).batch(2).map(as_is(lambda numbers: numbers))
    source = hvd.BalancedDataset(short, balancer=balancer, shuffle=False)._source
    expect("samples of one shape", lambda: source.take(np.arange(3)))


def samples_of_streams_of_the_ranks_own():
    """As Horovod's scripts read them: dataset.shard(hvd.size(), hvd.rank()), without an end. In the second epoch from
    where another dataset of the same samples was."""
    import tensorflow as tf

    x, y = arrays()
    steps, share, rank, size = 3, SHARES[hvd.size()], hvd.rank(), hvd.size()
    samples = tf.data.Dataset.from_tensor_slices((x, y))
    own = [np.arange(len(x["number"]))[each::size] for each in range(size)]
    for as_tf in (False, True)[: 1 + (keras.backend.backend() == "tensorflow")]:
        balancer = make_balancer()
        model = compile_model(make_model(), hvd.DistributedOptimizer(sgd(), balancer=balancer))
        stream = samples.shard(size, rank).repeat()
        parts = [
            hvd.BalancedDataset(stream, balancer=balancer, shuffle=False, sharded=True, steps_per_epoch=steps)
            for _ in range(2)
        ]
        model.fit(parts[0].as_tf_dataset() if as_tf else parts[0], verbose=0)
        parts[1].load_state_dict(parts[0].state_dict())
        parts[1].load_own_state_dict(parts[0].own_state_dict())
        model.fit(parts[1].as_tf_dataset() if as_tf else parts[1], verbose=0)
        assert spread(model.get_weights()) == 0.0
        one = compile_model(make_model(), sgd())
        for batch in range(2 * steps):
            parts = [np.arange(batch * n, (batch + 1) * n) for n in share]
            rows = np.concatenate([mine[part % len(mine)] for mine, part in zip(own, parts, strict=True)])
            one.train_on_batch(keras.tree.map_structure(lambda leaf, rows=rows: leaf[rows], x), y[rows])
        assert worst(model.get_weights(), one.get_weights()) <= 1e-5, worst(model.get_weights(), one.get_weights())


def texts_come_as_keras_takes_them():
    texts, y = np.array(["a", "bb", "c"] * WHOLE), np.arange(3.0 * WHOLE)[:, None]
    for given in (texts, texts.astype(bytes), texts.astype(object)):
        balancer = make_balancer()
        inputs = keras.Input((), dtype="string")
        number = keras.layers.StringLookup(vocabulary=["a", "bb", "c"])(inputs)
        model = keras.Model(inputs, keras.layers.Embedding(4, 1, embeddings_initializer="zeros")(number))
        model.compile(hvd.DistributedOptimizer(sgd(), balancer=balancer), "mse", jit_compile=False)
        validation = hvd.EvaluationDataset(given, y, balancer=balancer)
        model.fit(hvd.BalancedDataset(given, y, balancer=balancer), validation_data=validation, verbose=0)
        unknown, *known = model.get_weights()[0][:, 0]
        assert unknown == 0.0 and all(known), "each text has its own number"


def main() -> None:
    hvd.init()
    if keras.backend.backend() == "tensorflow":
        end_datasets_at_once()
    run_checks(hvd, sys.argv[1:], globals())
    hvd.shutdown()


if __name__ == "__main__":
    main()
