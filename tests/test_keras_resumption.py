"""`KerasState.fit` from within an epoch is, to optimizer and callbacks, the fit of a job that nothing happened to.

In one process: the job breaks off at a batch, goes back to what it had kept, and goes on.
"""

import random

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import SoloEngine
from hvd_hetero.keras.callbacks import schedule

WHOLE, BATCHES, EPOCHS = 4, 5, 3
ENDS = []  # calls of `finalize_variable_values`


class Averaging(keras.optimizers.SGD):
    """Notes when it overwrites weights by averages at the end of a fit."""

    def finalize_variable_values(self, var_list):
        ENDS.append(len(var_list))
        super().finalize_variable_values(var_list)


class Halt(Exception):
    pass


class HaltAt(keras.callbacks.Callback):
    """Ends `fit` after `at` batches of all epochs, and keeps the state there."""

    def __init__(self, state, at):
        super().__init__()
        self.state, self.at = state, at

    def on_train_batch_end(self, batch, logs=None):
        if self.state.epoch * BATCHES + self.state.batch == self.at:
            self.state.save()
            raise Halt


class Diary(keras.callbacks.Callback):
    """What callbacks are told, and the learning rate of each step."""

    def __init__(self):
        super().__init__()
        self.told, self.rates = [], []

    def on_train_begin(self, logs=None):
        self.told.append(("begin", self.params["steps"], self.params["epochs"]))

    def on_epoch_begin(self, epoch, logs=None):
        self.told.append(("epoch", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        self.told.append(("batch", batch))
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    def on_train_batch_end(self, batch, logs=None):
        self.told.append(("done", batch))

    def on_epoch_end(self, epoch, logs=None):
        self.told.append(("epoch's end", epoch))

    def on_train_end(self, logs=None):
        self.told.append(("end", tuple(sorted(logs))))


class Job:
    """A model with a state, and a diary of its last fit."""

    def __init__(self, optimizer=None):
        ENDS.clear()
        keras.utils.set_random_seed(0)
        balancer = hvd.Balancer(WHOLE, engine=SoloEngine())
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        self.model.compile(
            hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1), balancer=balancer), "mse",
            jit_compile=False,
        )  # fmt: skip
        draw = np.random.RandomState(1)
        x, y = (draw.standard_normal((WHOLE * BATCHES, columns)).astype("float32") for columns in (3, 2))
        self.data = hvd.BalancedDataset(x, y, balancer=balancer)
        self.state = hvd.elastic.KerasState(self.model, epoch=0, batch=0)

    def fit(self, *callbacks, **options):
        self.diary = Diary()
        callbacks = [*callbacks, self.diary]
        return self.state.fit(self.data, epochs=EPOCHS, verbose=0, callbacks=callbacks, **options)

    def halted(self, at, *callbacks):
        """The job, which has broken off after `at` batches, and gone back to there."""
        with pytest.raises(Halt):
            self.fit(*callbacks, HaltAt(self.state, at))
        self.state.restore()
        return self

    def weights(self):
        return [weight.tolist() for weight in self.model.get_weights()]


def averaging(**options):
    return Averaging(0.1, momentum=0.5, use_ema=True, ema_momentum=0.5, **options)


OPTIMIZERS = {
    "averages": averaging,
    "averages now and then": lambda: averaging(gradient_accumulation_steps=3, ema_overwrite_frequency=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(averaging(), initial_scale=8.0),
}
WITHIN = (1, 7, 11)  # batches of the first epoch, the second, and the last


@pytest.mark.parametrize("at", [*WITHIN, BATCHES, EPOCHS * BATCHES])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_averages_take_the_place_of_weights_at_the_end_alone(name, at):
    undisturbed = Job(OPTIMIZERS[name]())
    undisturbed.fit()
    assert ENDS == [2]
    job = Job(OPTIMIZERS[name]()).halted(at)
    assert ENDS == [], "it was broken off"
    job.fit()
    assert ENDS == [2] and job.weights() == undisturbed.weights()


@pytest.mark.parametrize("within", [True, False])
def test_a_job_that_is_stopped_in_the_rest_of_an_epoch_ends_with_averages(within):
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = within and job.state.batch == 4

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    job = Job(averaging())
    job.fit(Stops())
    expected = job.weights()
    job = Job(averaging()).halted(2)
    history = job.fit(Stops())
    assert ENDS == [2] and job.weights() == expected and history.epoch == [0]
    assert [what for what, *_ in job.diary.told].count("end") == 1


@pytest.mark.parametrize("at", [2, 7, BATCHES])
def test_a_job_that_is_stopped_within_an_epoch_goes_on_there(at):
    """As one that ends with its time: the state says where its data is, and nothing is left out."""
    class StopsAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = int(self.model.optimizer.iterations) == at

    undisturbed, job = Job(), Job()
    undisturbed.fit()
    job.fit(StopsAt())
    place = job.data.state_dict()
    assert (job.state.epoch, job.state.batch) == (place["epoch"], place["position"]) == divmod(at, BATCHES)
    job.fit()
    assert job.weights() == undisturbed.weights() and (job.state.epoch, job.state.batch) == (EPOCHS, 0)


@pytest.mark.parametrize("at", WITHIN)
def test_random_numbers_of_python_go_on_where_they_were(at):
    class Draws(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            drawn.append(random.random())

    undisturbed, drawn = Job(), []
    undisturbed.fit(Draws())
    expected, drawn = drawn[at:], []
    state = Job().halted(at, Draws()).state
    shared, own = state.shared_content(), state.own_content()
    resumed = Job()
    resumed.state.load_shared_content(shared)
    resumed.state.load_own_content(own)
    drawn.clear()
    resumed.fit(Draws())
    assert drawn == expected


def test_callbacks_may_be_none_or_one_as_in_a_fit_of_keras():
    job, diary = Job(), Diary()
    job.state.fit(job.data, epochs=1, verbose=0, callbacks=None)
    job.state.fit(job.data, epochs=2, verbose=0, callbacks=diary)
    assert diary.told[-1][0] == "end"


def test_a_model_may_have_its_optimizers_in_its_train_step_alone(monkeypatch):
    class Trains(keras.Sequential):
        def train_step(self, data):
            return {"loss": 0.0}

    sent = []
    monkeypatch.setattr("hvd_hetero.keras.callbacks.broadcast.broadcast_variables", lambda v, *_: sent.extend(v))
    model, data = Trains([keras.Input((3,)), keras.layers.Dense(2)]), Job().data
    model.compile(None, "mse", jit_compile=False)
    state = hvd.elastic.KerasState(model, epoch=0, batch=2)
    state.fit(data, epochs=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert state.epoch == 2 and len(sent) == len(model.weights)


def test_a_fit_after_that_ends_as_any():
    job = Job(averaging()).halted(7)
    job.fit()
    ENDS.clear()
    trained = job.model.fit(job.data, epochs=2, verbose=0)
    assert ENDS == [2] and trained.epoch == [0, 1]
    job = Job(averaging()).halted(7)
    with pytest.raises(Halt):
        job.fit(HaltAt(job.state, 9))
    assert ENDS == []
    job.model.fit(job.data, verbose=0)
    assert ENDS == [2], "also where the rest of an epoch was broken off"


@pytest.mark.parametrize("at", WITHIN)
def test_weights_that_are_swapped_for_averages_at_the_end_of_epochs_come_back(at):
    """Keras's callback looks for the last epoch in what it is told of the fit."""
    def swaps():
        return keras.callbacks.SwapEMAWeights(swap_on_epoch=True)

    jobs = [Job(averaging()), Job(averaging()).halted(at, swaps())]
    for job in jobs:
        job.fit(swaps())
    assert jobs[0].weights() == jobs[1].weights()


def test_callbacks_are_told_of_one_fit():
    undisturbed, job = Job(), Job().halted(7)
    history = undisturbed.fit()
    found = job.fit()
    begin, *told = undisturbed.diary.told
    at = told.index(("epoch", 1))
    assert begin == ("begin", BATCHES, EPOCHS)
    assert job.diary.told == [begin, ("epoch", 1), *told[at + 1 + 2 * 2 :]]
    assert found.epoch == [1, 2] and found.history["loss"][-1] == history.history["loss"][-1]


@pytest.mark.parametrize("at", WITHIN)
def test_states_that_callbacks_keep_as_well_are_not_counted_twice(at):
    job = Job().halted(at)
    counted = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            counted.append(job.state.epoch * BATCHES + job.state.batch)

    keeps = hvd.callbacks.UpdateBatchStateCallback(job.state), hvd.callbacks.UpdateEpochStateCallback(job.state)
    job.fit(*keeps, Looks())
    assert counted == list(range(at + 1, EPOCHS * BATCHES + 1)) and (job.state.epoch, job.state.batch) == (EPOCHS, 0)


def test_epochs_and_batches_are_counted_where_a_script_calls_fit_itself():
    """Each fit counts from 0, or from where it begins."""
    class State:
        epoch, batch = 1, 2

    job, state = Job(), State()
    keeps = [hvd.callbacks.UpdateBatchStateCallback(state), hvd.callbacks.UpdateEpochStateCallback(state)]
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(state.batch))
    for begin in (0, 3):
        found = []
        job.model.fit(
            job.data, verbose=0, callbacks=[*keeps, seen], initial_epoch=begin, epochs=begin + 1, steps_per_epoch=3
        )
        assert found == ([3, 4, 5] if begin == 0 else [1, 2, 3])
    assert (state.epoch, state.batch) == (3, 0)


SCHEDULES = {
    "warm-up": lambda: hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2),
    "warm-up of given epochs": lambda: hvd.callbacks.LearningRateWarmupCallback(0.1, 2, steps_per_epoch=BATCHES),
    "function": lambda: hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 / (1 + epoch), staircase=False),
    "power": lambda: hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1, staircase=False),
    "other epochs": lambda: hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, staircase=False, steps_per_epoch=8),
    "uncorrected": lambda: hvd.callbacks.LearningRateScheduleCallback(
        0.1, 0.5, staircase=False, momentum_correction=False
    ),
    "staircase": lambda: hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5),
}


@pytest.mark.parametrize("at", WITHIN)
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_are_those_of_the_same_batches(name, at, monkeypatch):
    monkeypatch.setattr(schedule.backend.horovod, "size", lambda: 4)
    undisturbed = Job(keras.optimizers.SGD(0.1, momentum=0.9))
    undisturbed.fit(SCHEDULES[name]())
    expected = undisturbed.diary.rates
    assert len(set(expected)) > 2 and len(expected) == EPOCHS * BATCHES
    job = Job(keras.optimizers.SGD(0.1, momentum=0.9)).halted(at, SCHEDULES[name]())
    job.fit(SCHEDULES[name]())
    assert job.diary.rates == expected[at:], "each of its batch, and not of its place in the rest of an epoch"
    assert job.weights() == undisturbed.weights(), "so is the velocity that follows it"


def test_velocities_follow_the_rate_where_they_are_sums_of_steps():
    """Those of Muon are sums of gradients."""
    for optimizer, factor in ((keras.optimizers.SGD(0.1, momentum=0.9), 0.5), (keras.optimizers.Muon(0.1), 1.0)):
        model = Job(optimizer).model
        velocities = [v for v in model.optimizer.variables if "momentum" in v.path]
        assert velocities
        for velocity in velocities:
            velocity.assign(keras.ops.ones(velocity.shape))
        callback = hvd.callbacks.LearningRateScheduleCallback(0.05, 1.0)
        callback.set_model(model)
        callback.on_train_begin()
        callback.on_train_batch_begin(0)
        assert all(np.all(keras.ops.convert_to_numpy(v) == factor) for v in velocities), optimizer
