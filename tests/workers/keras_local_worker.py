"""One real rank of tests/test_keras_horovod.py, with steps apart: prints `OK name` for each named check that holds."""

from __future__ import annotations

import dataclasses
import time

import keras
import numpy as np
from keras_law_worker import (
    UNEVEN,
    WHOLE,
    Share,
    data,
    dense_model,
    distance,
    main,
    mean_squared_error,
    plain_sgd,
    raises,
    same_on_all,
    weights_of,
)

import hvd_hetero.keras as hvd
from hvd_hetero.keras.local import averages_of
from hvd_hetero.keras.second_moments import moments_of

EVERY_STEP = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)


def momentum(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


def merging_every_step_is_synchronous_training(case, floatx, bound):
    """And steps that are merged more seldom are not, or that would say nothing: looked at in the plain case."""
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    arrays, found = data()[:2], []
    seldom = [hvd.LocalSGD(round_steps=4, warmup_steps=0)] if case == "sgd" else []
    for strategy in (EVERY_STEP, "synchronous", *seldom):
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        plain = momentum(gradient_accumulation_steps=2) if "accumulation" in case else momentum()
        if case == "averages_of_weights":
            plain = momentum(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7)
        if case.startswith("scaled_loss"):
            plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=8.0, dynamic_growth_steps=6)
        optimizer = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=strategy)
        model = dense_model()
        options = {"steps_per_execution": 4} if case == "many_steps_per_execution" else {}
        model.compile(optimizer=optimizer, loss=mean_squared_error, run_eagerly=case == "eager", **options)
        model.fit(Share(arrays, UNEVEN[hvd.size()], balancer), shuffle=False, verbose=0)
        optimizer.merge(model)
        found.append(weights_of(model))
        same_on_all(found[-1])
    error, *others = [distance(one, found[1]) for one in (found[0], *found[2:])]
    assert error <= bound and all(other > 1e-3 for other in others), (error, others)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def batches_of_an_update_count_by_their_shares():
    """Where Keras itself adds them up, as with loss scaling, and the plan changes between them; or a fit ends."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    arrays, found = data()[:2], []
    for strategy in (EVERY_STEP, "synchronous"):
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        first, *_ = plans = balancer.planner.plans
        plans += [
            dataclasses.replace(first, step=at, shares=first.shares[:: 1 - 2 * (at % 2)])
            for at in range(1, len(arrays[0]) // WHOLE)
        ]
        plain = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        plain = keras.optimizers.LossScaleOptimizer(plain, initial_scale=8.0)
        model = dense_model()
        optimizer = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=strategy)
        model.compile(optimizer=optimizer, loss=mean_squared_error)
        dataset = hvd.BalancedDataset(*arrays, balancer=balancer)
        for _ in range(2):
            broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            model.fit(dataset, verbose=0, steps_per_epoch=3, callbacks=[broadcast])
        optimizer.merge(model)
        found.append(weights_of(model))
        same_on_all(found[-1])
    assert distance(*found) <= 1e-11, distance(*found)
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def parts_of_updates_are_those_of_their_rates():
    """What a rank with a small share does apart: with a class of one's own, it is made of what the variables were."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    arrays, shares = data(12 * WHOLE)[:2], UNEVEN[hvd.size()]

    def scaled(plain):
        return keras.optimizers.LossScaleOptimizer(plain, initial_scale=8.0)

    def trained(kind, options, wrap=lambda plain: plain):
        balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
        strategy = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=4)
        optimizer = hvd.DistributedOptimizer(wrap(kind(0.01, **options)), balancer=balancer, strategy=strategy)
        model = dense_model()
        model.compile(optimizer=optimizer, loss=mean_squared_error)
        latency = hvd.callbacks.LatencyAwareLearningRate(balancer, base_batch_size=WHOLE // 2, warmup_steps=8)
        model.fit(Share(arrays, shares, balancer), shuffle=False, verbose=0, callbacks=[latency])
        optimizer.merge(model)
        assert float(optimizer.learning_rate) == 0.01
        return weights_of(model), len(optimizer._reducer.local.steps._before)

    for kind, options, *wrap in [
        (keras.optimizers.AdamW, {"weight_decay": 0.1}), (keras.optimizers.SGD, {}, scaled),
        (keras.optimizers.RMSprop, {"gradient_accumulation_steps": 2}),
    ]:  # fmt: skip
        (by_rate, copies), (afterwards, kept) = (
            trained(one, options, *wrap) for one in (kind, type("Own", (kind,), {}))
        )
        assert (copies, kept) == (0, int(shares[hvd.rank()] * hvd.size() < WHOLE)), (kind, copies, kept)
        assert distance(by_rate, afterwards) <= 1e-12, (kind, distance(by_rate, afterwards))
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


class Watch(keras.callbacks.Callback):
    """Notes what the model is in each validation, and when batches end; one rank sleeps after one of them."""

    def __init__(self, sleep_s=0.0, after=20):
        super().__init__()
        self.sleep_s, self.after, self.moments = sleep_s, after, []

    def on_test_begin(self, logs=None):
        same_on_all(weights_of(self.model), "in a validation")

    def on_train_batch_end(self, batch, logs=None):
        self.moments.append(time.monotonic())
        if batch == self.after:
            time.sleep(self.sleep_s)

    def longest_s(self):
        return max(np.diff(self.moments[self.after :]))


def fit_ends_with_one_model():
    """`fit` on a BalancedDataset, with a validation, a codec, fragments, and BatchNormalization."""
    x, y, _ = data(WHOLE * 10 + 5)
    x, y = x.astype("float32"), y.astype("float32")
    for optimizer, options in (
        (keras.optimizers.SGD(1e-3, momentum=0.9), {"strategy": "local"}),
        (keras.optimizers.Adam(1e-2), {"strategy": hvd.LocalSGD(warmup_steps=2, merge_each_epoch=False)}),
        (keras.optimizers.Adam(1e-2), {
            "strategy": hvd.LocalSGD(round_steps=2, warmup_steps=2, fragments=2), "compression": hvd.Compression.int8,
        }),
    ):  # fmt: skip
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(200), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        model.compile(optimizer=hvd.DistributedOptimizer(optimizer, balancer=balancer, **options), loss="mse")
        history = model.fit(
            hvd.BalancedDataset(x, y, balancer=balancer), epochs=3, verbose=0, validation_data=(x[:9], y[:9]),
            callbacks=[hvd.callbacks.LocalSGDCallback(), Watch()],
        ).history  # fmt: skip
        same_on_all(weights_of(model), str(options))
        assert history["loss"][-1] < history["loss"][0] and history["merges"][-1] >= 3, history


def fits_end_with_the_averages_of_all_ranks(*which):
    """With `use_ema`, `fit` ends with averages of the weights for weights: these are merged, with the callback and
    without, and the next `fit` goes on from one model."""
    x, y, _ = data(WHOLE * 6)
    x, y = x.astype("float32"), y.astype("float32")
    cases = (None, True, True, False), (None, False, False, False), (4, True, False, True), (3, False, True, False)
    for frequency, each_epoch, callback, wrap in [cases[number] for number in which]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization(),
                                  keras.layers.Dense(3)])  # fmt: skip
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=frequency)
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0) if wrap else optimizer
        strategy = hvd.LocalSGD(round_steps=2, warmup_steps=1, merge_each_epoch=each_epoch)
        optimizer = hvd.DistributedOptimizer(optimizer, balancer=balancer, strategy=strategy)
        model.compile(optimizer=optimizer, loss="mse")
        what = f"{frequency}, {each_epoch}, {callback}"
        for _ in range(2):
            model.fit(
                hvd.BalancedDataset(x, y, balancer=balancer), epochs=2, verbose=0,
                callbacks=[hvd.callbacks.LocalSGDCallback()] if callback else [],
            )  # fmt: skip
            same_on_all([keras.ops.convert_to_numpy(w) for w in model.trainable_weights], what)
        balancer.begin(4)
        model.train_on_batch(x[4 * hvd.rank() :][:4], y[4 * hvd.rank() :][:4])
        optimizer.merge(model)
        kept = [keras.ops.convert_to_numpy(v) for v in averages_of(optimizer)]
        assert len(kept) == len(model.trainable_weights)
        same_on_all([*weights_of(model), *kept], what)


def ranks_meet_elsewhere():
    """One rank is done with an epoch and waits for its metrics, and the other has many batches before it."""
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.01 * hvd.rank())

    x, y = data(WHOLE * 110)[:2]
    model = dense_model()
    balancer = hvd.Balancer(WHOLE)
    strategy = hvd.LocalSGD(warmup_steps=2, merge_each_epoch=False)
    optimizer = hvd.DistributedOptimizer(plain_sgd(), balancer=balancer, strategy=strategy)
    model.compile(optimizer=optimizer, loss="mse")
    metrics = hvd.callbacks.MetricAverageCallback()
    history = model.fit(hvd.BalancedDataset(x, y, balancer=balancer), verbose=0, callbacks=[metrics, Slow()])
    optimizer.merge(model)
    same_on_all(weights_of(model))
    same_on_all([np.array(history.history["loss"])])


def nobody_waits_for_a_rank_that_stops():
    """One rank stops for two seconds, and the other makes its steps – which it does not in synchronous training."""
    arrays = data(WHOLE * 40)[:2]
    longest = {}
    for name, strategy in (
        ("local", hvd.LocalSGD(round_steps=4, bound_rounds=40, warmup_steps=3)), ("synchronous", "synchronous"),
    ):  # fmt: skip
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        model, watch = dense_model(), Watch(2.0 if hvd.rank() == 1 else 0.0)
        model.compile(
            optimizer=hvd.DistributedOptimizer(plain_sgd(), balancer=balancer, strategy=strategy), loss="mse"
        )
        merging = [hvd.callbacks.LocalSGDCallback(model.optimizer)] if name == "local" else []
        model.fit(
            Share(arrays, UNEVEN[hvd.size()], balancer), shuffle=False, verbose=0, callbacks=[watch, *merging]
        )
        same_on_all(weights_of(model))
        longest[name] = watch.longest_s()
    if hvd.rank() == 0:
        assert longest["local"] < 1.0 < longest["synchronous"], longest


def a_checkpoint_has_what_merges_keep():
    """New objects that load it go on as those that were saved: the outer momentum, and what the codec has not sent. The
    strategy is made with the first gradients only, so all of it has to wait for that."""
    random = np.random.RandomState(0)
    x, y = random.randn(16 * WHOLE, 6).astype("float32"), random.randn(16 * WHOLE, 200).astype("float32")
    rule = hvd.LocalSGD(
        round_steps=1, bound_rounds=0, warmup_steps=0, outer=hvd.Outer(learning_rate=0.5, momentum=0.5)
    )

    def job():
        keras.utils.set_random_seed(0)
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        optimizer = hvd.DistributedOptimizer(
            plain_sgd(), balancer=balancer, strategy=rule, compression=hvd.Compression.topk(0.05, warmup_steps=0)
        )
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(200)])
        model.compile(optimizer=optimizer, loss="mse")
        return model, hvd.elastic.KerasState(model, epoch=0, batch=0)

    def train(model, first, last):
        arrays = x[first * WHOLE : last * WHOLE], y[first * WHOLE : last * WHOLE]
        model.fit(Share(arrays, UNEVEN[hvd.size()], model.optimizer._reducer.balancer), shuffle=False, verbose=0)
        model.optimizer.merge()

    model, state = job()
    train(model, 0, 8)
    state.merge_models()
    shared, own = state.shared_content(), state.own_content()
    train(model, 8, 16)
    ended = []
    for loads_own in (True, False):
        again, resumed = job()
        resumed.load_shared_content(shared)
        if loads_own:
            resumed.load_own_content(own)
        train(again, 8, 16)
        same_on_all(weights_of(again))
        ended.append(distance(weights_of(again), weights_of(model)))
    assert ended[0] == 0.0 < ended[1], ended


def a_model_compiled_anew_goes_on():
    """With the outer momentum and what the codec has not sent: as one that was not compiled anew, as its optimizer has
    no state. With TensorFlow the strategy is made while a function is traced."""
    random = np.random.RandomState(0)
    x, y = random.randn(4 * WHOLE, 6).astype("float32"), random.randn(4 * WHOLE, 200).astype("float32")
    outer, ended = hvd.Outer(learning_rate=0.5, momentum=0.5), []
    for anew in (False, True):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(200)])
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        for fit in range(2):
            if anew or fit == 0:
                optimizer = hvd.DistributedOptimizer(
                    plain_sgd(), balancer=balancer, strategy=dataclasses.replace(EVERY_STEP, outer=outer),
                    compression=hvd.Compression.topk(0.05, warmup_steps=0),
                )  # fmt: skip
                model.compile(optimizer=optimizer, loss="mse")
            model.fit(Share((x, y), UNEVEN[hvd.size()], balancer), shuffle=False, verbose=0)
            optimizer.merge(model)
        same_on_all(weights_of(model))
        ended.append(weights_of(model))
    assert distance(*ended) == 0.0, distance(*ended)


def my_rows(step):
    """Of this rank, in a global batch of all samples."""
    start = step * WHOLE + sum(UNEVEN[hvd.size()][: hvd.rank()])
    return slice(start, start + UNEVEN[hvd.size()][hvd.rank()])


def a_checkpoint_has_averages_and_what_statistics_weigh():
    """The averages of the weights are those of all ranks, also where steps go on; and statistics are weighted by all
    samples since they were merged, of which a short last batch is a part."""
    x, y, _ = data(WHOLE * 8 + UNEVEN[hvd.size()][0] + 1)
    x, y = x.astype("float32"), y.astype("float32")
    rule = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0, merge_each_epoch=False)

    def job():
        keras.utils.set_random_seed(0)
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        plain = keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=rule)
        layers = [keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(optimizer=optimizer, loss="mse")
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)
        return model, state, balancer

    def train(model, balancer, first, last):
        for step in range(first, last):
            mine = my_rows(step)
            balancer.begin(len(x[mine]))
            model.train_on_batch(x[mine], y[mine])

    model, state, balancer = job()
    train(model, balancer, 0, 7)
    state.merge_models()
    shared, own = state.shared_content(), state.own_content()
    train(model, balancer, 7, 9)
    again, resumed, other = job()
    resumed.load_shared_content(shared)
    resumed.load_own_content(own)
    train(again, other, 7, 9)
    for each in (model, again):
        each.optimizer.merge(each)
        same_on_all([*weights_of(each), *map(keras.ops.convert_to_numpy, averages_of(each.optimizer))])
    assert distance(weights_of(model), weights_of(again)) == 0.0
    for one, other in zip(averages_of(model.optimizer), averages_of(again.optimizer), strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), keras.ops.convert_to_numpy(other))


def going_back_ends_what_is_under_way():
    """What ranks have done apart since, and the merges that they have sent for, move no model that is gone back to."""
    x, y, _ = data(WHOLE * 12)
    x, y = x.astype("float32"), y.astype("float32")
    outer = hvd.Outer(learning_rate=0.7, momentum=0.5)
    for rule in (
        hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=5, outer=outer),
        hvd.LocalSGD(round_steps=2, warmup_steps=0, outer=outer),
    ):
        ended = []
        for goes_back in (False, True):
            keras.utils.set_random_seed(0)
            balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
            optimizer = hvd.DistributedOptimizer(plain_sgd(), balancer=balancer, strategy=rule)
            model = dense_model()
            model.compile(optimizer=optimizer, loss="mse")
            state = hvd.elastic.KerasState(model, epoch=0, batch=0)

            def train(first, last, model=model, balancer=balancer):
                for step in range(first, last):
                    balancer.begin(UNEVEN[hvd.size()][hvd.rank()])
                    model.train_on_batch(x[my_rows(step)], y[my_rows(step)])

            train(0, 3)
            state.commit()
            if goes_back:
                train(3, 8)
                state.restore()
            train(3, 12)
            optimizer.merge(model)
            same_on_all(weights_of(model))
            ended.append(weights_of(model))
        assert rule.round_steps > 1 or distance(*ended) == 0.0  # longer rounds depend on timing


def back_to_synchronous_steps():
    """With "auto" ranks come back to synchronous steps with one model and one momentum, and stay alike."""
    x, y, _ = data(WHOLE * 30)
    balancer = hvd.Balancer(WHOLE, adaptive=False)
    model = dense_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(momentum(), initial_scale=8.0), balancer=balancer, strategy="auto"
    )
    model.compile(optimizer=optimizer, loss="mse")
    for step in range(24):
        samples = UNEVEN[hvd.size()][hvd.rank()]
        mine = slice(step * WHOLE + 5 * hvd.rank(), step * WHOLE + 5 * hvd.rank() + samples)
        balancer.begin(samples)
        model.train_on_batch(x[mine], y[mine])
        optimizer._reducer.local.steps._phase = lambda step: step < 10  # what a plan would say
        if step == 5:
            optimizer.dynamic_scale.assign(2.0 ** hvd.rank())  # as overflows on one rank leave it
        if step >= 9:
            same_on_all([*weights_of(model), *[np.array(keras.ops.convert_to_numpy(v)) for v in optimizer.variables]])
    sums = hvd.allgather(np.array([optimizer._reducer.merges]))
    assert sums[0] >= 2 and len(set(sums.tolist())) == 1, sums


def statistics_are_those_of_all_samples():
    x = data(WHOLE)[0].astype("float32")
    shares = UNEVEN[hvd.size()]
    ends = np.cumsum([0, *shares])
    parts = [x[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    layer = keras.layers.BatchNormalization(momentum=0.0)
    model = keras.Sequential([keras.Input((6,)), layer])
    balancer = hvd.Balancer(WHOLE, shares=shares, adaptive=False)
    strategy = hvd.LocalSGD(warmup_steps=0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0), balancer=balancer, strategy=strategy)
    model.compile(optimizer=optimizer, loss="mse")
    balancer.begin(shares[hvd.rank()])
    model.train_on_batch(parts[hvd.rank()], parts[hvd.rank()])
    assert not np.allclose(keras.ops.convert_to_numpy(layer.moving_mean), x.mean(0), atol=1e-3)
    optimizer.merge(model)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.moving_mean), x.mean(0), atol=1e-5)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer.moving_variance), x.var(0), atol=1e-5)


def second_moments_are_those_of_synchronous_training():
    """Of a gradient that is nearly all noise, at a rate of 0, on unlike batches; and their own would not be."""
    batches, shares = 80, tuple(6 * share for share in UNEVEN[hvd.size()])
    whole = sum(shares)
    generator, found = np.random.default_rng(0), []
    x, y = (generator.standard_normal((batches * whole, width)).astype("float32") for width in (6, 3))
    for strategy in ("synchronous", *(hvd.LocalSGD(warmup_steps=4, second_moments=kind) for kind in ("global", "own"))):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, kernel_initializer="zeros")])
        balancer = hvd.Balancer(whole, shares=shares, adaptive=False)
        plain = keras.optimizers.Adam(0.0)
        optimizer = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=strategy)
        model.compile(optimizer=optimizer, loss="mse")
        data = hvd.BalancedDataset(x, y, balancer=balancer)
        model.fit(data, shuffle=False, verbose=0, callbacks=[hvd.callbacks.LocalSGDCallback()] if found else [])
        kept = [v for v in optimizer.variables if "velocity" in v.path]
        found.append(sum(float(keras.ops.sum(v)) for v in kept))
    together, is_local, own = found
    assert len(kept) == 2 and 0.75 < is_local / together < 1.33, found
    assert 0.75 < own / together * shares[hvd.rank()] / whole < 1.33, found


def a_rank_gets_over_what_was_not_finite():
    """Of what its optimizer keeps as well, or it would give up all that follows; Adam's second moments stay."""
    x, y, _ = data(WHOLE * 40)
    x, y = x.astype("float32"), y.astype("float32")
    rule = hvd.LocalSGD(warmup_steps=20, round_steps=1, bound_rounds=0)  # longer rounds depend on timing
    for plain in (
        momentum(), keras.optimizers.Nadam(1e-3), keras.optimizers.RMSprop(1e-3),
        keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9),
    ):  # fmt: skip
        balancer = hvd.Balancer(WHOLE, shares=UNEVEN[hvd.size()], adaptive=False)
        optimizer = hvd.DistributedOptimizer(plain, balancer=balancer, strategy=rule)
        model, given_up, kept = dense_model(), [], []
        model.compile(optimizer=optimizer, loss="mse")
        event = balancer.record.event
        balancer.record.event = lambda kind, event=event, dropped=given_up, **fields: (
            dropped.append(fields.get("dropped_steps")), event(kind, **fields)
        )  # fmt: skip
        begin, samples = sum(UNEVEN[hvd.size()][: hvd.rank()]), UNEVEN[hvd.size()][hvd.rank()]
        for step in range(40):
            mine = slice(step * WHOLE + begin, step * WHOLE + begin + samples)
            spoilt = np.float32("nan") if hvd.rank() == 1 and step == 25 else np.float32(1.0)
            balancer.begin(samples)
            model.train_on_batch(x[mine] * spoilt, y[mine])
            seconds = [v for v in optimizer.variables if "velocity" in v.path and "hat" not in v.path]
            kept.append(sum(float(keras.ops.sum(v)) for v in seconds))
        optimizer.merge(model)
        same_on_all(weights_of(model))
        assert [n for n in given_up if n] == ([1] if hvd.rank() == 1 else []), given_up
        for variable in optimizer.variables:
            assert np.isfinite(keras.ops.convert_to_numpy(variable)).all(), variable.path
        assert not list(moments_of(optimizer)) or min(kept[25:]) > 0.9 * kept[24] > 0, kept


def others_hear_of_a_rank_that_fails():
    """A rank whose data raise: it ends with that error, and the others at the next merge."""

    class Torn:
        def __len__(self):
            return 40 * WHOLE

        def __getitem__(self, index):
            if hvd.rank() == 1 and balancer.step >= 12:
                raise OSError("torn page")
            return np.zeros(6, "float32"), np.zeros(3, "float32")

    balancer = hvd.Balancer(WHOLE, adaptive=False)
    model = dense_model()
    strategy = hvd.LocalSGD(round_steps=2, warmup_steps=2)
    model.compile(optimizer=hvd.DistributedOptimizer(plain_sgd(), balancer=balancer, strategy=strategy), loss="mse")
    raises(
        "torn page" if hvd.rank() == 1 else "rank 1 could not",
        lambda: model.fit(hvd.BalancedDataset(Torn(), balancer=balancer), verbose=0),
    )


def local_errors_say_what_to_do():
    x, y, _ = data(WHOLE)
    model = dense_model()
    raises(
        "expected the same on every rank",
        lambda: train(model, hvd.LocalSGD(round_steps=3 + hvd.rank(), warmup_steps=0), x, y),
    )
    if hvd.rank() == 1:
        model.set_weights([w + 1e-3 for w in weights_of(model)])
    raises("others than rank 0's on rank 1", lambda: train(model, hvd.LocalSGD(warmup_steps=0), x, y))
    model.compile(optimizer=hvd.DistributedOptimizer(plain_sgd()), loss="mse")
    raises(
        "a local strategy",
        lambda: model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.LocalSGDCallback()]),
        kind=ValueError,
    )


def train(model, strategy, x, y):
    model.compile(optimizer=hvd.DistributedOptimizer(plain_sgd(), strategy=strategy), loss="mse")
    model.train_on_batch(x, y)


if __name__ == "__main__":
    main(globals())
