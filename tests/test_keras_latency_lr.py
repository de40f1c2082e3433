"""`LatencyAwareLearningRate` in Keras: the factor is in updates alone, never in what others see, set or save."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from workers.rates import One, Rates

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.keras as hvd
from hvd_hetero.engine.local import SoloEngine, World

RATE, WHOLE, BATCHES = 0.5, 4, 6
WARM = [1, 2, 3, 4, 4, 4]  # base_batch_size=1, warmup_steps=3


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


@pytest.mark.parametrize("name, factor", [("SGD", 4.0), ("AdamW", 2.0), ("ScheduleFreeAdamW", 2.0)])
def test_auto_takes_the_rule_of_the_optimizer(name, factor):
    made = make(getattr(keras.optimizers, name, keras.optimizers.Adam)(RATE))
    latency = latency_of(made[2], warmup_steps=0)
    fitted(made, latency)
    assert latency.factor == factor


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
                local.steps.after_step = lambda terms, *, lr, **more: seen.append(lr) or after(terms, lr=lr, **more)

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


# What a job goes on with ----------------------------------------------------------------------------------------------


def passed_on(balancer, state):
    """To a balancer of another process, as a checkpoint does."""
    balancer.load_state_dict(json.loads(json.dumps(state)))


def test_a_callback_that_is_made_anew_goes_on_where_the_optimizer_was():
    """In the same process, and in another one; the balancer's state has it."""
    made, expected = make(), [RATE * (1 + min(step, 9) / 3) for step in range(12)]
    found = fitted(made, latency_of(made[2], warmup_steps=9))[0]
    saved = made[2].state_dict()
    assert found + fitted(made, latency_of(made[2], warmup_steps=9))[0] == pytest.approx(expected)
    other = make()
    passed_on(other[2], saved)
    assert other[2].state_dict()["factors"] == saved["factors"] and len(saved["factors"]) == 1
    assert fitted(other, latency_of(other[2], warmup_steps=9))[0] == pytest.approx(expected[6:])


def test_so_does_one_whose_gradients_something_else_reduces():
    made, other = make(), make()
    for model, _, _ in (made, other):
        model.compile(keras.optimizers.SGD(RATE), mean, jit_compile=False)
    latency = latency_of(made[2])
    fitted(made, latency)
    latency.load_state_dict({**latency.state_dict(), "factor": 3.0})
    passed_on(other[2], made[2].state_dict())
    assert fitted(other, latency_of(other[2]))[0] == [RATE * 3.0] * BATCHES


def test_going_back_goes_back():
    """To what was kept in the middle, and before the first fit."""
    made = make()
    began = made[2].state_dict()
    latency = latency_of(made[2], warmup_steps=9)
    used = fitted(made, latency)[0]
    kept = json.dumps(made[2].state_dict())
    later = fitted(made, latency)[0]
    for state, expected in ((json.loads(kept), later), (began, used)):
        made[2].load_state_dict(state)
        assert fitted(made, latency)[0] == pytest.approx(expected, rel=1e-5)


def test_going_back_within_a_fit():
    made, kept = make(), {}
    latency = latency_of(made[2], warmup_steps=9)

    class Returns(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                kept.update(latency.state_dict())
            if batch == 3:
                latency.load_state_dict(kept)

    used, _ = fitted(made, latency, Returns())
    assert used[4:] == pytest.approx(used[2:4], rel=1e-5)


def test_a_state_may_be_loaded_before_the_first_fit_and_for_another_global_batch():
    """The learning rate is still tuned for the batch that it was, also where nobody named it."""
    made = make()
    first = latency_of(made[2], base_batch_size=None, warmup_steps=0)
    assert first.state_dict() == {} and fitted(made, first)[0] == [RATE] * BATCHES
    state = json.loads(json.dumps(first.state_dict()))
    balancer = hvd.Balancer(2 * WHOLE, engine=SoloEngine())
    second = latency_of(balancer, base_batch_size=None, warmup_steps=0, ramp_steps=2)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert fitted(make(balancer=balancer), second)[0] == [RATE * factor for factor in (1.5, 2.0, 2.0)]
    assert second.state_dict()["base_batch_size"] == WHOLE


def test_a_job_that_goes_on_with_a_rate_tuned_for_another_batch_is_an_error():
    made = make()
    fitted(made, latency_of(made[2]))
    second = make()
    passed_on(second[2], made[2].state_dict())
    with pytest.raises(ValueError, match="tuned for base_batch_size 2. Received: one for 1"):
        fitted(second, latency_of(second[2], base_batch_size=2))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has none")
def test_several_rates_on_one_rank_are_an_error_on_both():
    def program(engine):
        optimizer = keras.optimizers.SGD(RATE)
        if engine.rank == 1:
            optimizer = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(optimizer))
        callback = hvd.callbacks.LatencyAwareLearningRate(hvd.Balancer(WHOLE, engine=engine), rule="linear")
        callback.set_model(SimpleNamespace(optimizer=optimizer))
        with pytest.raises((TypeError, ValueError), match="Received: MultiOptimizer|wrong arguments"):
            callback.on_train_begin()
        return True

    assert World(2).run(program, timeout_s=20) == [True, True]


@pytest.mark.parametrize(
    "rate", [keras.optimizers.schedules.ExponentialDecay(RATE, 10, 0.5), lambda: RATE], ids=["schedule", "function"]
)
def test_what_sets_the_rate_itself_on_one_rank_is_an_error_on_both(rate):
    """What decides the learning rate there leaves nothing to multiply; nobody waits for the rank that says so."""

    def program(engine):
        optimizer = keras.optimizers.SGD(rate if engine.rank == 1 else RATE)
        balancer = hvd.Balancer(WHOLE, engine=engine)
        callback = hvd.callbacks.LatencyAwareLearningRate(balancer, rule="linear", base_batch_size=1)
        callback.set_model(SimpleNamespace(optimizer=optimizer))
        with pytest.raises((TypeError, ValueError), match="with a (LearningRateSchedule|function)|wrong arguments"):
            callback.on_train_begin()
        return True

    assert World(2).run(program) == [True, True]
