"""`LatencyAwareLearningRate` in Keras: the factor is in updates alone, never in what others see, set or save."""

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import SoloEngine

RATE, WHOLE, BATCHES = 0.5, 4, 6
WARM = [1, 2, 3, 4, 4, 4]  # base_batch_size=1, warmup_steps=3


class One(keras.layers.Layer):
    """Gives its weight, whose gradient is 1 where the loss is the mean."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, inputs):
        return inputs * 0.0 + self.weight


class Rates(keras.callbacks.Callback):
    """Notes the rate of each update, and the learning rates that others see."""

    def __init__(self):
        super().__init__()
        self.used, self.shown, self.before = [], [], None

    def on_train_begin(self, logs=None):
        self.before = self.weight()

    def weight(self):
        return float(keras.ops.convert_to_numpy(self.model.trainable_variables[0])[0])

    def on_train_batch_begin(self, batch, logs=None):
        self.shown.append(float(self.model.optimizer.learning_rate))

    def on_train_batch_end(self, batch, logs=None):
        before, self.before = self.before, self.weight()
        self.used.append(before - self.before)
        self.shown.append(float(self.model.optimizer.learning_rate))


def mean(y, p):
    return keras.ops.mean(p)


def make(optimizer=None, *, balancer=None, **options):
    balancer = balancer or hvd.Balancer(WHOLE, engine=SoloEngine())
    model = keras.Sequential([keras.Input((1,)), One()])
    optimizer = hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(RATE), balancer=balancer, **options)
    model.compile(optimizer, mean, jit_compile=False)
    x = np.zeros((WHOLE * BATCHES, 1), "float32")
    return model, hvd.BalancedDataset(x, x, balancer=balancer), balancer


def latency_of(balancer, **options):
    return hvd.callbacks.LatencyAwareLearningRate(balancer, **{"base_batch_size": 1, "warmup_steps": 3, **options})


def fitted(made, *callbacks, **options):
    """The rates of the updates, and those that others see."""
    model, data, _ = made
    rates = Rates()
    model.fit(data, verbose=0, callbacks=[*callbacks, rates], **options)
    return rates.used, rates.shown


def test_an_update_sees_the_learning_rate_times_the_factor_and_others_the_scripts():
    made = make()
    latency = latency_of(made[2])
    used, shown = fitted(made, latency)
    assert used == [RATE * factor for factor in WARM] and set(shown) == {RATE} and latency.factor == 4.0
    assert fitted(made)[0] == [RATE] * BATCHES, "a fit without the callback is one without the factor"
    assert fitted(made, latency)[0] == [RATE * 4.0] * BATCHES


@pytest.mark.parametrize("first", [True, False])
def test_a_callback_may_set_the_learning_rate_before_and_after_this_one(first):
    class Sets(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 2.0 ** -batch

    made = make()
    callbacks = [latency_of(made[2]), Sets()]
    used, shown = fitted(made, *(callbacks if first else callbacks[::-1]))
    assert used == [2.0**-batch * factor for batch, factor in enumerate(WARM)]
    assert shown == [2.0 ** -(at // 2) for at in range(2 * BATCHES)]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("within", [True, False])
def test_a_fit_that_breaks_off_leaves_the_learning_rate_alone(kind, within):
    """Between batches and within the update."""
    made = make()
    latency, optimizer = latency_of(made[2], warmup_steps=0), made[0].optimizer

    class Breaks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2 and within:
                vars(optimizer)["update_step"] = vars(optimizer)["_backend_update_step"] = self.fail
            elif batch == 2:
                raise kind

        def fail(self, *arguments):
            raise kind

    with pytest.raises(kind):
        fitted(made, latency, Breaks())
    assert float(optimizer.learning_rate) == RATE
    for name in ("update_step", "_backend_update_step"):
        vars(optimizer).pop(name, None)
    used, shown = fitted(made, latency)
    assert used == [RATE * 4.0] * BATCHES and set(shown) == {RATE}


OPTIMIZERS = {
    "accumulates": lambda: keras.optimizers.SGD(RATE, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=8.0),
    "decays": lambda: keras.optimizers.SGD(RATE, weight_decay=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_than_the_plain_one(name):
    made = make(OPTIMIZERS[name]())
    used, shown = fitted(made, latency_of(made[2]))
    expected, weight = [], 0.0
    for batch, factor in enumerate(WARM):
        if name == "accumulates":  # steps are exchanges
            expected.append(RATE * WARM[batch // 2] * (batch % 2))
        else:
            decay = 1e-3 * weight * RATE * factor if name == "decays" else 0.0
            expected.append(RATE * factor + decay)
            weight -= expected[-1]
    assert used == pytest.approx(expected, rel=1e-5) and set(shown) == {RATE}


def test_steps_apart_are_told_the_rate_that_they_are_made_with():
    made = make(strategy=hvd.LocalSGD(round_steps=2, warmup_steps=0))
    seen, latency = [], latency_of(made[2], warmup_steps=0)

    class Watches(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            local = self.model.optimizer._reducer.local
            if local is not None and "after_step" not in vars(local.steps):
                after = local.steps.after_step
                local.steps.after_step = lambda terms, *, lr: seen.append(lr) or after(terms, lr=lr)

    used, shown = fitted(made, latency, Watches())
    assert len(seen) == BATCHES - 1 and used[:4] == [RATE * 4.0] * 4 and set(shown) == {RATE}
    assert seen == pytest.approx(used[1:], rel=1e-6), "what is merged late counts less"


def test_a_model_is_saved_with_the_scripts_learning_rate_and_no_other_variable(tmp_path):
    class Saves(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.save(tmp_path / f"{batch}.keras")

    made = make()
    fitted(made, Saves(), latency_of(made[2]))
    assert [v.name for v in made[0].optimizer.variables] == ["iteration", "learning_rate"]
    loaded = hvd.load_model(tmp_path / "5.keras", custom_objects={"One": One, "mean": mean}, balancer=made[2])
    assert float(loaded.optimizer.learning_rate) == RATE and int(loaded.optimizer.iterations) == 6


def test_a_second_callback_on_an_optimizer_takes_the_place_of_the_first():
    made = make()
    first = latency_of(made[2], warmup_steps=0)
    fitted(made, first)
    progress = first.state_dict()["progress"]
    assert fitted(made, latency_of(made[2], base_batch_size=2, warmup_steps=0))[0] == [RATE * 2.0] * BATCHES
    assert first.state_dict()["progress"] == progress


def test_another_balancer_is_an_error():
    made = make()
    with pytest.raises(ValueError, match=r"expected the balancer that the DistributedOptimizer has. Received: another"):
        fitted(made, latency_of(hvd.Balancer(WHOLE, engine=SoloEngine())))


def test_an_optimizer_whose_gradients_something_else_reduces_asks_as_well():
    """As where a `train_step` uses a tape. And it may be distributed later."""
    made = make()
    model, data, balancer = made
    plain = keras.optimizers.SGD(RATE)
    model.compile(plain, mean, jit_compile=False)
    latency = latency_of(balancer, warmup_steps=0)
    assert fitted(made)[0] == [RATE] * BATCHES
    used, shown = fitted(made, latency)
    assert used == [RATE * 4.0] * BATCHES and set(shown) == {RATE}
    with pytest.raises(ValueError, match="where a tape reduces the gradients, whose noise is not measured"):
        fitted(made, latency_of(balancer, rule="adascale"))
    model.compile(hvd.DistributedOptimizer(plain, balancer=balancer), mean, jit_compile=False)
    assert fitted(made, latency)[0] == [RATE * 4.0] * BATCHES
