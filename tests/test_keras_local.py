"""Where a Keras update is in proportion to its rate, a part of it is one at that part of the rate."""

import threading

import keras
import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

import hvd_hetero.keras as hvd
from hvd_hetero.engine import payload
from hvd_hetero.engine.local import SoloEngine, World
from hvd_hetero.keras.factor import PROPORTIONAL, in_proportion
from hvd_hetero.keras.local import merge_variables

DECAYS = {"AdamW": {"weight_decay": 0.1}, "Adam": {"amsgrad": True, "weight_decay": 0.1}, "RMSprop": {"centered": True}}
RATE = 0.01


def optimizer_of(name):
    return distributed(getattr(keras.optimizers, name)(RATE, **DECAYS.get(name, {})))


def distributed(optimizer):
    balancer = hvd.Balancer(4, engine=SoloEngine())
    return hvd.DistributedOptimizer(optimizer, balancer=balancer)


def moved(optimizer, part):
    """How far the third update goes, of which a part is to be made."""
    balancer = optimizer._reducer.balancer
    variable = keras.Variable(np.linspace(1.0, 2.0, 6).reshape(2, 3), dtype="float64")
    optimizer.build([variable])
    for step in range(3):
        before = variable.numpy().copy()
        if step == 2:
            optimizer._factor.make_part(part)
        balancer.begin(4)
        optimizer.apply([keras.ops.convert_to_tensor(np.cos(np.arange(6.0) + step).reshape(2, 3))])
    return variable.numpy() - before


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_a_part_of_an_update_is_one_at_that_part_of_the_rate(name):
    whole, part = (optimizer_of(name) for _ in range(2))
    assert whole._factor.makes_parts() and part._factor.makes_parts()
    expected = 0.25 * moved(whole, 1.0)
    # Of a decay Keras rounds what is left of a weight, 1 - decay * rate, to single precision.
    np.testing.assert_allclose(moved(part, 0.25), expected, rtol=1e-4 if "decay" in str(DECAYS.get(name)) else 1e-7)
    assert abs(expected).min() > 0


class Own(keras.optimizers.Adam):
    pass


def test_of_others_nothing_is_known():
    for optimizer in (Own(RATE), type("Adam", (Own,), {})(RATE), keras.optimizers.Ftrl(RATE),
                      keras.optimizers.SGD(RATE, momentum=0.9), keras.optimizers.RMSprop(RATE, momentum=0.9),
                      keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE, momentum=0.9))):  # fmt: skip
        factor = distributed(optimizer)._factor
        assert not factor.makes_parts() and factor._part is None, optimizer
    assert in_proportion(distributed(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(RATE))))


def test_weights_that_are_alike_on_all_ranks_do_not_travel_with_a_merge():
    """As frozen ones are, which may be most of a model."""

    def program(engine):
        sent, plain = [], engine.allreduce_async
        engine.allreduce_async = lambda array, **options: (sent.append(array.size), plain(array, **options))[1]
        frozen = keras.Variable(np.arange(1000.0))
        quantized = keras.Variable(np.arange(1000) % 100, dtype="int8", trainable=False)
        mean = keras.Variable([1.0, 4.0 * engine.rank])
        count = keras.Variable(engine.rank, dtype="int32", trainable=False)
        merge_variables([frozen, quantized, mean, count], weight=3.0 - 2.0 * engine.rank, engine=engine, name="merge")
        assert sum(sent) < 50, sent
        read = keras.ops.convert_to_numpy
        return [read(frozen).sum(), read(quantized).sum(), *read(mean), int(count)]

    assert World(2).run(program, timeout_s=10) == [[499500.0, 49500, 1.0, 1.0, 1]] * 2


def test_variables_of_any_type_are_merged_in_pieces(monkeypatch):
    monkeypatch.setattr(payload, "PIECE_BYTES", 24)
    kinds = ("bfloat16", "float16", "float32", "float64", "int8", "int64")

    def program(engine):
        variables = [keras.Variable(np.full((2, 4), 4 * engine.rank), dtype=kind, trainable=False) for kind in kinds]
        scalar = keras.Variable(4.0 * engine.rank)
        moments = keras.Variable([1.0, 2.0 * engine.rank]), keras.Variable([1.0, 1.0])
        merge_variables([*variables, scalar], [moments], weight=3.0 - 2.0 * engine.rank, engine=engine, name="merge")
        found = [keras.ops.convert_to_numpy(each).astype(float).tolist() for each in (*variables, scalar, *moments)]
        return found, [each.dtype for each in variables]

    expected = [[[1.0] * 4] * 2] * 4 + [[[4.0] * 4] * 2] * 2 + [1.0, [1.0, 0.5], [1.0, 1.75]]
    assert World(2).run(program, timeout_s=10) == [(expected, list(kinds))] * 2


def test_an_outer_momentum_goes_with_the_variables_to_the_optimizer_that_trains_them_next():
    """As of a model that is compiled anew; and not to one of other variables, or of other ones beside them."""
    rule = hvd.LocalSGD(warmup_steps=0, round_steps=1, bound_rounds=0, outer=hvd.Outer(momentum=0.9))

    def program(engine):
        balancer = hvd.Balancer(4, engine=engine)
        one, other = (keras.Variable(np.zeros(width), dtype="float64") for width in (3, 5))

        def trained(*variables, steps):
            plain = keras.optimizers.SGD(0.1)
            optimizer = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=rule)
            optimizer.build(variables)
            for _ in range(steps):
                balancer.begin(2)
                optimizer.apply([keras.ops.ones_like(variable) for variable in variables])
            optimizer.merge()
            state = optimizer._reducer.local.steps.rounds.state_dict()
            return state["merges"], state["outer"][0]["momentum"].tolist()

        found = [trained(one, steps=3), trained(one, steps=1), trained(other, steps=1), trained(one, other, steps=1)]
        return found, one.numpy().tolist()

    momenta = -0.1 * np.cumsum(0.9 ** np.arange(4))
    for (three, fourth, another, both), at in World(2).run(program, timeout_s=60):
        assert three[1] == pytest.approx([momenta[2]] * 3)
        assert fourth[0] > three[0] > another[0] and fourth[1] == pytest.approx([momenta[3]] * 3), (three, fourth)
        assert another[1] == pytest.approx([-0.1] * 5) and both[1] == pytest.approx([-0.1] * 8)
        assert at == pytest.approx([momenta.sum() - 0.1] * 3)


def test_a_broadcast_after_the_first_step_leaves_what_local_steps_have_made(monkeypatch):
    """As of a GAN, which has no `call`: Keras says that it is not built, in each fit."""
    sent = threading.local()
    monkeypatch.setattr(
        "hvd_hetero.keras.callbacks.broadcast.broadcast_variables", lambda v, *_: sent.ids.append(set(map(id, v)))
    )
    rule = hvd.LocalSGD(warmup_steps=0, round_steps=4)

    def program(engine):
        sent.ids = []
        balancer = hvd.Balancer(4, engine=engine)
        model = keras.Model()
        model.net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
        model.own = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), balancer=balancer, strategy=rule)
        model.own.build(model.net.trainable_variables)
        model.compile()
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(model)
        for _ in range(2):
            callback.on_train_begin()
            balancer.begin(2)
            model.own.apply([(1.0 + engine.rank) * keras.ops.ones_like(v) for v in model.net.trainable_variables])
            callback.on_train_batch_end(0)
            model.own.merge()
        changes = {id(variable) for variable in [*model.net.trainable_variables, *model.own.variables]}
        return [changes <= ids for ids in sent.ids], [bool(changes & ids) for ids in sent.ids]

    assert World(2).run(program, timeout_s=60) == [([True, False] * 2, [True, False] * 2)] * 2


def test_batches_that_keras_adds_up_count_by_their_loss_terms_in_local_steps():
    """Where all ranks together have as many in each batch, that is what synchronous steps do, in which batches count
    alike; a short one counts as much as the others."""
    shares = (6, 2)
    samples = [shares, shares, shares, (3, 1), shares, shares]
    terms = [(1, 15), (14, 2), (12, 4), (6, 2), (16, 0), (8, 8)]

    def program(engine):
        ended = []
        for strategy in ("synchronous", hvd.LocalSGD(warmup_steps=0, round_steps=1, bound_rounds=0)):
            balancer = hvd.Balancer(8, engine=engine, shares=shares, adaptive=False)
            plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
            plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=8.0)
            optimizer = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=strategy)
            weight = keras.Variable(np.zeros(3), dtype="float64")
            optimizer.build([weight])
            for step, counted in enumerate(terms):
                balancer.begin(samples[step][engine.rank])
                balancer.count(counted[engine.rank])
                gradient = np.cos(3 * step + engine.rank + np.arange(3)) + weight.numpy()
                optimizer.apply([optimizer.scale_loss(keras.ops.convert_to_tensor(gradient))])
            optimizer.merge()
            ended.append(weight.numpy().tolist())
        return ended

    for synchronous, apart in World(2).run(program, timeout_s=60):
        np.testing.assert_allclose(apart, synchronous, atol=1e-6)
