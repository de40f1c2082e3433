"""What `MetricAverageCallback` weighs metrics by: each by what it is itself a mean over; and ranks with unlike ones."""

import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.callbacks import metrics

X, Y, WEIGHTS = np.ones((8, 3), "float32"), np.ones((8, 2), "float32"), np.linspace(0, 1, 8).astype("float32")


def counts_of(outputs, targets, **compiled):
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [keras.layers.Dense(2, name=name)(inputs) for name in outputs])
    model.compile("sgd", "mse", jit_compile=False, **compiled)
    model.train_on_batch(X, targets, sample_weight=WEIGHTS)
    callback = hvd.callbacks.MetricAverageCallback()
    callback.set_model(model)
    return {key: round(count, 4) for key, count in callback._counts().items()}, model.get_metrics_result()


def test_a_metric_and_the_same_one_weighted():
    counts, logs = counts_of(["a"], Y, metrics=["mae"], weighted_metrics=["mae"])
    assert counts == {"loss": 8, "mae": 8, "weighted_mae": 4} and set(logs) == set(counts)


def test_metrics_of_several_outputs():
    counts, logs = counts_of(
        ["a", "b"], [Y, Y], metrics=[["mae"], ["mae"]], weighted_metrics=[["mse"], ["mae"]]
    )
    expected = {"a_mae": 8, "b_mae": 8, "a_mse": 4, "b_weighted_mae": 4}
    assert {key: counts[key] for key in expected} == expected and set(expected) < set(logs)


def test_a_metric_with_a_count_that_is_no_number_weighs_what_the_loss_does():
    counts, logs = counts_of(["a"], Y, metrics=[keras.metrics.R2Score()])
    assert "r2_score" not in counts and counts["loss"] == 8 and "r2_score" in logs


def test_metrics_with_a_number_for_each_class_are_those_of_all_ranks_and_others_are_left():
    def program(engine):
        callback = hvd.callbacks.MetricAverageCallback(engine=engine)
        loss = SimpleNamespace(name="loss", count=keras.Variable(3.0 - engine.rank))
        callback.set_model(SimpleNamespace(metrics=[loss]))
        callback.on_train_begin()
        own = np.array([[0.0, 1.0], [3.0, 1.0]], "float32")[engine.rank]
        texts = np.array(["own"])
        logs = {"loss": float(engine.rank), "f1_score": own, "val_f1_score": own, "texts": texts, "ended": "at 12:00"}
        logs["worst"] = [[7], [7, 8]]  # of each class, say
        callback.on_epoch_end(0, logs)
        assert logs["loss"] == pytest.approx(0.4) and logs["texts"] is texts and logs["ended"] == "at 12:00"
        assert logs["worst"] == [[7], [7, 8]]
        for key in ("f1_score", "val_f1_score"):
            np.testing.assert_allclose(logs[key], [1.2, 1.0])
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


@pytest.mark.parametrize(("how", "told"), [
    ("plain", True), ("distributed", False), ("of a train_step", False), ("by tapes", False), ("not compiled", False),
])  # fmt: skip
def test_an_epoch_of_a_plain_optimizer_is_told_of(how, told, monkeypatch):
    """As of a model that was compiled anew, without `DistributedOptimizer`, to train further layers."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD()
    distributed = hvd.DistributedOptimizer(keras.optimizers.SGD(), balancer=hvd.Balancer(4, engine=SoloEngine()))
    if how != "not compiled":
        model.compile(distributed if how == "distributed" else optimizer, "mse", jit_compile=False)
    if how == "of a train_step":
        model.of_parts = {"generator": distributed}
    monkeypatch.setattr(metrics, "reduces_by_tapes", lambda: how == "by tapes")

    def program(engine):
        callback = hvd.callbacks.MetricAverageCallback(engine=engine)
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_epoch_end(0, {"loss": 1.0})

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        World(2).run(program, timeout_s=10)
    assert any("a plain SGD, and an epoch is over" in str(each.message) for each in found) == told


@pytest.mark.parametrize("who", [0, 1])
def test_a_metric_that_one_rank_alone_has_later_on_raises_on_every_rank(who):
    def program(engine):
        callback = hvd.callbacks.MetricAverageCallback(engine=engine)
        callback.set_model(SimpleNamespace(metrics=[]))
        callback.on_train_begin()
        callback.on_epoch_end(0, logs := {"loss": float(engine.rank)})
        assert logs == {"loss": 0.5}
        with pytest.raises(ValueError, match="metrics: expected the same on every rank.*rank 0: .*loss.*rank 1: "):
            callback.on_epoch_end(1, {"loss": 1.0, "accuracy": 1.0} if engine.rank == who else {"loss": 1.0})
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


def test_ranks_that_began_at_other_epochs_hear_of_it_at_the_end_of_the_first():
    """As with a BackupAndRestore that one of them has: that one would end before the others."""

    def program(engine):
        callback = hvd.callbacks.MetricAverageCallback(engine=engine)
        callback.set_model(SimpleNamespace(metrics=[]))
        callback.on_train_begin()
        with pytest.raises(ValueError, match="rank 0: epoch 3 with loss; rank 1: epoch 1 with loss"):
            callback.on_epoch_end(0 if engine.rank else 2, {"loss": 1.0})
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


def test_a_metric_that_is_one_number_for_a_batch_is_told_in_an_epoch_that_goes_on_as_well():
    """Batches have their numbers in the epoch there, and metrics count those of its rest."""
    callback = hvd.callbacks.MetricAverageCallback()
    loss, one = (SimpleNamespace(name=name, count=keras.Variable(0.0)) for name in ("loss", "one"))
    callback.set_model(SimpleNamespace(metrics=[loss, one]))
    callback.set_params({"steps": 5})
    callback.on_epoch_begin(1)
    for batch in range(2, 5):
        callback.on_train_batch_begin(batch)
        loss.count.assign_add(8.0)
        one.count.assign_add(1.0)
        callback.on_train_batch_end(batch)
    assert callback._trained == {"loss": 24.0}


@pytest.mark.parametrize("tells", ["first", "last"])  # of an execution, as Keras 3.10 does, or later ones
def test_a_metric_that_is_one_number_for_a_batch_is_told_where_executions_have_several(tells):
    """Of 5 batches, the second execution of 4 has one."""
    callback = hvd.callbacks.MetricAverageCallback()
    loss, one = (SimpleNamespace(name=name, count=keras.Variable(0.0)) for name in ("loss", "one"))
    callback.set_model(SimpleNamespace(metrics=[loss, one], steps_per_execution=4))
    callback.set_params({"steps": 5})
    callback.on_epoch_begin(0)
    for begin, batches in ((0, 4), (4, 1)):
        callback.on_train_batch_begin(begin)
        loss.count.assign_add(8.0 * batches)
        one.count.assign_add(1.0 * batches)
        callback.on_train_batch_end(begin if tells == "first" else begin + 3)
    assert callback._trained == {"loss": 40.0}
    for metric in (loss, one):
        metric.count.assign(0.0)
    callback.on_test_begin()
    loss.count.assign_add(8.0)
    one.count.assign_add(1.0)
    callback.on_test_batch_end(0 if tells == "first" else 3)
    callback.on_test_end()
    assert callback._validated == {"loss": 8.0}


@pytest.mark.parametrize("validates", [False, True])
def test_what_another_callback_evaluates_at_the_end_of_an_epoch_weighs_nothing(validates):
    def program(engine):
        callback = hvd.callbacks.MetricAverageCallback(engine=engine)
        loss = SimpleNamespace(name="loss", count=keras.Variable(0.0))
        callback.set_model(SimpleNamespace(metrics=[loss]))
        callback.set_params({"steps": 2})
        callback.on_train_begin()
        callback.on_epoch_begin(0)
        for batch in range(2):
            loss.count.assign_add(3.0 - 2.0 * engine.rank)
            callback.on_train_batch_end(batch)
        logs = {"loss": float(engine.rank)}
        if validates:
            callback.on_test_begin()
            loss.count.assign(1.0 + engine.rank)
            callback.on_test_end()
            logs["val_loss"] = float(engine.rank)
        loss.count.assign(50.0)  # of all samples, on each rank
        callback.on_epoch_end(0, logs)
        assert logs["loss"] == pytest.approx(0.25) and (not validates or logs["val_loss"] == pytest.approx(2 / 3))
        return True

    assert World(2).run(program, timeout_s=10) == [True, True]


def test_a_model_whose_layers_are_not_built_yet_is_broadcast_after_its_first_step(monkeypatch):
    class TwoLayers(keras.Model):
        def __init__(self):
            super().__init__()
            self.one, self.two = keras.layers.Dense(4), keras.layers.Dense(2)

        def call(self, inputs):
            return self.two(self.one(inputs))

    sent = []
    monkeypatch.setattr("hvd_hetero.keras.callbacks.broadcast.broadcast_variables", lambda v, *_: sent.append(len(v)))
    model = TwoLayers()
    model.build((None, 3))
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(X, Y, batch_size=4, epochs=2, callbacks=[callback], verbose=0)
    whole = len(model.weights) + len(model.optimizer.variables)
    assert len(model.weights) == 4 and sent[-1] == whole and sent.count(whole) == 1, "once, with all of them"


def test_a_model_of_models_that_are_built_is_broadcast_before_its_first_step(monkeypatch):
    """As a GAN, which has no `call`: Keras says that it is not built."""
    sent = []
    monkeypatch.setattr("hvd_hetero.keras.callbacks.broadcast.broadcast_variables", lambda v, *_: sent.append(len(v)))
    model = keras.Model()
    model.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    assert not model.built and sent == [2 + len(model.optimizer.variables)]


@pytest.mark.parametrize("held", [lambda one: one, lambda one: [one], lambda one: {"own": (one, one)}])
def test_optimizers_that_a_train_step_has_are_broadcast_as_well(monkeypatch, held):
    """Rank 0 may have loaded their state."""
    sent = []
    monkeypatch.setattr("hvd_hetero.keras.callbacks.broadcast.broadcast_variables", lambda v, *_: sent.extend(v))
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("sgd", jit_compile=False)
    own = keras.optimizers.Adam()
    own.build(model.trainable_variables)
    model.own = held(own)
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    expected = [*model.weights, *model.optimizer.variables, *own.variables]
    assert [id(variable) for variable in sent] == [id(variable) for variable in expected]


def test_a_metric_that_is_one_number_for_a_batch_weighs_what_the_loss_does():
    """Keras counts batches for it, which are as many on all ranks."""

    def one_number(y, prediction):
        return keras.ops.mean(keras.ops.abs(y - prediction))

    def program(engine):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.compile("sgd", "mse", metrics=["mae", one_number], jit_compile=False)
        callback = hvd.callbacks.MetricAverageCallback(engine=engine)
        mine = slice(0, 6) if engine.rank == 0 else slice(6, 8)
        x = np.arange(24, dtype="float32").reshape(8, 3)
        logs = model.fit(
            x[mine], Y[mine], batch_size=8, validation_data=(x[mine], Y[mine]), verbose=0, callbacks=[callback]
        ).history
        assert logs["one_number"] == pytest.approx(logs["mae"])
        assert logs["val_one_number"] == pytest.approx(logs["val_mae"])
        return True

    assert World(2).run(program, timeout_s=60) == [True, True]


@pytest.mark.parametrize("key", ["g_loss", "loss"])
@pytest.mark.parametrize("counts, expected", [((2.0, 2.0), 0.5), ((3.0, 1.0), 0.25), (None, 0.5)])
def test_metrics_of_a_train_step_that_has_its_losses_itself(key, counts, expected):
    """Keras has a metric of the loss all the same, which stays at 0; and the script's may have another name than in
    the logs. They count batches or samples, or there are none, but numbers of the last batch."""

    def program(engine):
        own = [] if counts is None else [SimpleNamespace(name="generator_loss", count=keras.Variable(0.0))]
        callback = hvd.callbacks.MetricAverageCallback(engine=engine)
        callback.set_model(SimpleNamespace(metrics=[SimpleNamespace(name="loss", count=keras.Variable(0.0)), *own]))
        callback.set_params({"steps": 2})
        callback.on_train_begin()
        callback.on_epoch_begin(0)
        for batch in range(2):
            for metric in own:
                metric.count.assign_add(counts[engine.rank] / 2)
            callback.on_train_batch_end(batch)
        logs = {key: float(engine.rank)}
        callback.on_epoch_end(0, logs)
        return logs[key]

    assert World(2).run(program, timeout_s=10) == [expected] * 2
