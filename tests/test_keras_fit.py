"""What callbacks, saved models and balancers keep from one `fit` to the next, in one process."""

import contextlib
import copy
import gc
import threading
import types
import warnings
import weakref

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.callbacks import balance
from hvd_hetero.keras.position import UpdatePositionCallback
from hvd_hetero.optimizers.equal_weights import EqualWeights

WHOLE, BATCHES = 4, 20


def make_model(*layers):
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])


def compiled(model, balancer, **options):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), balancer=balancer, **options)
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def make_dataset(balancer):
    x = np.arange(3.0 * WHOLE * BATCHES, dtype="float32").reshape(-1, 3) / 100
    return hvd.BalancedDataset(x, x[:, :1], balancer=balancer)


class State:
    """Notes after how many batches it was committed, or took a step as a checkpoint does."""

    def __init__(self):
        self.batch, self.epoch, self.kept, self.steps = 0, 0, [], []

    def commit(self):
        self.kept.append(self.batch)

    def step(self, steps):
        self.steps.append(steps)


@pytest.mark.parametrize("alone", [True, False])
def test_batches_end_for_a_callback_in_the_thread_that_trains(alone, monkeypatch):
    """Keras looks in a list for callbacks that look at batches, and ends batches in another thread if there is none."""
    monkeypatch.setattr("keras.src.backend.IS_THREAD_SAFE", True)  # as that of torch
    threads = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            threads.append(threading.current_thread())

    callbacks = keras.callbacks.CallbackList(Looks() if alone else [Looks()])
    callbacks.on_train_begin()
    callbacks.on_train_batch_end(0)
    callbacks.on_train_end()
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("tells", [True, False])  # Keras 3.10 tells the first batch of an execution twice
@pytest.mark.parametrize(("at_once", "expected"), [(1, [8, 16]), (4, [8, 16]), (5, [10, 20]), (20, [20])])
def test_commits_and_checkpoints_count_batches_and_not_executions(at_once, expected, tells):
    state = State()
    callbacks = keras.callbacks.CallbackList([
        hvd.callbacks.UpdateBatchStateCallback(state),
        hvd.callbacks.CommitStateCallback(state, 8),
        hvd.callbacks.CheckpointCallback(state),
    ])  # fmt: skip
    callbacks.set_model(types.SimpleNamespace(steps_per_execution=at_once))
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for first in range(0, BATCHES, at_once):
        callbacks.on_train_batch_begin(first)
        callbacks.on_train_batch_end(first + at_once - 1 if tells else first)
    callbacks.on_epoch_end(0)
    assert state.kept == [*expected, 0] and sum(state.steps) == BATCHES, state.kept


@pytest.mark.parametrize("tells", [True, False])
def test_a_fit_of_a_state_keeps_batches_and_not_executions(tells):
    state, found = State(), []
    position = UpdatePositionCallback(state, None)
    position.set_model(types.SimpleNamespace(steps_per_execution=4))
    for first in (0, 4, 8):
        position.on_train_batch_begin(first)
        position.on_train_batch_end(first + 3 if tells else first)
        found.append(state.batch)
    assert found == [4, 8, 12]


def test_a_local_strategy_is_merged_by_the_optimizer_of_the_fit():
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    callback = hvd.callbacks.LocalSGDCallback()
    merges = []
    for strategy in (hvd.LocalSGD(warmup_steps=2), hvd.LocalSGD(warmup_steps=4)):
        model = compiled(make_model(), balancer, strategy=strategy)
        before = getattr(model.optimizer, "merge")  # noqa: B009  # Keras's own `__setattr__` would track it
        vars(model.optimizer)["merge"] = lambda model, s=strategy, m=before: (merges.append(s.warmup_steps), m(model))
        model.fit(make_dataset(balancer), verbose=0, callbacks=[callback])
    assert set(merges[: len(merges) // 2]) == {2} and set(merges[len(merges) // 2 :]) == {4}


def test_a_loaded_model_has_its_balancer_in_the_layers_that_take_part(tmp_path):
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    model = compiled(make_model(hvd.SyncBatchNormalization(balancer=balancer)), balancer)
    model.fit(make_dataset(balancer), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", balancer=balancer)
    assert loaded.layers[0]._balancer is balancer
    with pytest.raises(RuntimeError, match="plain SGD"):
        clone = keras.models.clone_model(model)
        clone.layers[0].take(balancer)
        clone.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
        clone.fit(make_dataset(balancer), verbose=0, callbacks=[hvd.callbacks.RebalanceCallback(balancer)])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
def test_a_loaded_model_goes_on_training_where_it_stopped(tmp_path, name, scaled):
    """Horovod's examples save HDF5 files. Of an optimizer within another one Keras sets no weights by itself."""
    x, y = np.linspace(-1, 1, 24, dtype="float32").reshape(8, 3), np.ones((8, 1), "float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0) if scaled else optimizer
    one = EqualWeights(SoloEngine())
    model.compile(hvd.DistributedOptimizer(optimizer, balancer=one), "mean_squared_error", jit_compile=False)
    model.train_on_batch(x, y)
    model.save(tmp_path / name)
    loaded = hvd.load_model(tmp_path / name, balancer=EqualWeights(SoloEngine()))
    for each in (model, loaded):
        each.train_on_batch(x, y)
    assert int(loaded.optimizer.iterations) == 2
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True))


@pytest.mark.parametrize(("mean", "size", "told"), [(False, 2, True), (False, 1, False), (True, 2, False)])
def test_an_activity_regularizer_that_sums_over_samples_is_told(monkeypatch, mean, size, told):
    monkeypatch.setattr(balance, "MEAN_OF_ACTIVITIES", mean)
    model = make_model(keras.layers.Dense(3, activity_regularizer="l2", name="sparse"))
    balancers = World(size).run(lambda engine: hvd.Balancer(WHOLE, engine=engine))
    callback = hvd.callbacks.RebalanceCallback(balancers[0])
    callback.set_model(model)
    with pytest.warns(UserWarning, match="sum, and sparse: it counts for less") if told else contextlib.nullcontext():
        callback.on_train_begin()


def test_it_is_known_what_keras_makes_of_activities():
    layer = keras.layers.Identity(activity_regularizer=keras.ops.sum)
    layer(keras.ops.ones((2, 1)))
    assert float(layer.losses[0]) == (1.0 if balance.MEAN_OF_ACTIVITIES else 2.0)


def test_a_model_that_is_gone_is_kept_by_no_balancer():
    balancer, variables, reducers = hvd.Balancer(WHOLE, engine=SoloEngine()), [], []
    for _ in range(3):
        keras.backend.clear_session()
        model = compiled(make_model(), balancer)
        model.fit(make_dataset(balancer), verbose=0)
        variables.append([weakref.ref(v) for v in model.trainable_variables])
        reducers.append(model.optimizer._reducer)
        del model
        gc.collect()
    balancer.begin(WHOLE)
    gc.collect()
    assert not any(v() is not None for each in variables for v in each)
    assert not any(reducer.steps for reducer in reducers)


def test_one_variable_may_be_each_ranks_own():
    variable = keras.Variable(np.zeros((2, 2)))
    for given in (variable, [variable]):
        assert hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=given)._local == {id(variable)}


def test_a_model_with_code_in_it_is_loaded_where_the_script_trusts_it(tmp_path):
    """And one that was never compiled, which has no optimizer."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: 2 * x)])
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="safe_mode=False"):
        hvd.load_model(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras", safe_mode=False)
    assert loaded.predict(np.ones((1, 2)), verbose=0).tolist() == [[2, 2]]


def test_a_state_may_be_of_a_model_that_is_not_compiled():
    state = hvd.elastic.KerasState(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), epoch=3)
    state.epoch = 4
    state.restore()
    assert state.epoch == 3


@pytest.mark.parametrize(("reduces", "words"), [
    ("with another", "with a distributed SGD without this balancer as"), ("not", "with a plain SGD as"),
    ("with this", "with a distributed SGD that was not applied as"),
])
def test_an_epoch_without_an_exchange_of_its_balancer_says_what_the_optimizer_lacks(reduces, words):
    balancer = hvd.Balancer(8, engine=SoloEngine())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    if reduces != "not":
        its = balancer if reduces == "with this" else hvd.Balancer(8, engine=SoloEngine())
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=its)
    model.compile(optimizer, "mse", jit_compile=False)
    callback = hvd.callbacks.RebalanceCallback(balancer)
    callback.set_model(model)
    callback.on_epoch_begin(0)
    callback.on_train_batch_end(0)
    with pytest.raises(RuntimeError, match=words):
        callback.on_epoch_end(0)


@pytest.mark.parametrize(("ranks", "distributed"), [(2, False), (2, True), (1, False)])
def test_an_epoch_of_a_plain_optimizer_is_told_of(ranks, distributed):
    """With no callback as well, where nothing else would tell that ranks train apart."""
    def rank(engine):
        balancer = hvd.Balancer(8, engine=engine)
        if distributed:
            hvd.DistributedOptimizer(keras.optimizers.SGD(), balancer=balancer)
        for _ in make_dataset(balancer):
            pass  # a loop that applies the gradients of its own rank

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        World(ranks).run(rank)
    assert any("each rank has trained a model of its own" in str(each.message) for each in told) == (
        ranks == 2 and not distributed
    )


def test_a_model_with_nothing_to_train_may_be_fitted():
    balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
    model = make_model()
    model.trainable = False
    with pytest.warns(UserWarning, match="any trainable weights"):
        told = compiled(model, balancer).fit(
            make_dataset(balancer), verbose=0, callbacks=[hvd.callbacks.RebalanceCallback(balancer, verbose=0)]
        )
    assert told.history["share"] == [WHOLE]


def test_copies_of_callbacks_that_were_in_a_fit_are_of_the_same_job(tmp_path, monkeypatch):
    """KerasTuner copies them for each trial, also those of a fit before."""
    monkeypatch.setattr(hvd.backend.horovod, "size", lambda: 4)  # which the warm-up asks, of a job that is none
    engine = SoloEngine()
    balancer = hvd.Balancer(WHOLE, engine=engine)
    callbacks = [
        hvd.callbacks.MetricAverageCallback(engine=engine), hvd.callbacks.LocalSGDCallback(),
        hvd.callbacks.RebalanceCallback(balancer, verbose=0), hvd.callbacks.TraceCallback(tmp_path, balancer),
        hvd.callbacks.LatencyAwareLearningRate(balancer), hvd.callbacks.LearningRateWarmupCallback(0.01),
        keras.callbacks.EarlyStopping("loss"), hvd.callbacks.StopTogetherCallback(),
    ]  # fmt: skip
    for trial in range(3):
        callbacks = copy.deepcopy(callbacks)
        model = compiled(make_model(), balancer, strategy="local")
        history = model.fit(make_dataset(balancer), epochs=2, verbose=0, callbacks=callbacks).history
        assert set(history) >= {"share", "merges", "lr"} and balancer.step == 2 * BATCHES * (trial + 1) - 1
        assert all(each.balancer is balancer for each in callbacks if hasattr(each, "balancer"))
