"""One real rank of tests/test_keras_horovod.py: draws training scripts at random, and compares what ranks learn with
what one process learns from the same script."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import layers, optimizers
from keras_law_worker import TENSORFLOW, Dense, distance, main, same_on_all, weights_of, with_dense_gradients

import hvd_hetero.keras as hvd

# With the torch back end, Keras computes some means in float32, also of float64.
TOLERANCE = 1e-9 if TENSORFLOW else 3e-5
RATE, WORDS, CLASSES = 0.02, 7, 3
OPTIMIZERS = {
    "SGD": optimizers.SGD,
    "momentum": lambda *args, **options: optimizers.SGD(*args, momentum=0.9, nesterov=True, **options),
    "Adam": optimizers.Adam,
    "AdamW": optimizers.AdamW,
    "RMSprop": optimizers.RMSprop,
    "Adagrad": optimizers.Adagrad,
    "Adamax": optimizers.Adamax,
    "Nadam": optimizers.Nadam,
    "Ftrl": optimizers.Ftrl,
}


@dataclass(frozen=True)
class Script:
    """What a training script does, and on which ranks."""

    seed: int
    ranks: int
    whole: int  # samples of a global batch
    short: int  # how many fewer the last one of an epoch has
    batches: int  # of an epoch
    epochs: int
    fits: int
    thaws: bool  # the first layer is frozen in the first fit, and each has an optimizer of its own
    form: str  # of the data: "arrays", "PyDataset", "tf.data"
    words: bool  # an embedding
    normalised: bool
    outputs: int
    classes: bool  # labels, with weights of their classes; else vectors
    sample_weights: bool
    regularized: bool
    kind: str
    options: dict[str, Any]  # of the optimizer
    schedule: bool
    scaled: bool  # in a LossScaleOptimizer
    apart: bool  # local steps, which are merged each time
    bucket_bytes: int | None
    at_once: int  # steps_per_execution
    eager: bool
    own_step: bool  # a `train_step` of the script
    validated: bool

    @property
    def valid(self) -> bool:
        """Whether docs/keras.md says that ranks do what one process does."""
        accumulates = self.options.get("gradient_accumulation_steps")
        linear = self.kind == "SGD" and not (
            self.normalised or self.schedule or self.options.keys() - {"gradient_accumulation_steps", "weight_decay"}
        )
        return not (
            (accumulates and self.short)
            or (self.apart and not linear)
            or (self.classes and (self.sample_weights or self.outputs > 1))
            or (self.own_step and (self.classes or self.sample_weights or self.scaled or self.outputs > 1))
            or (self.eager and self.at_once > 1)
            or (not TENSORFLOW and (self.form == "tf.data" or self.at_once > 1 or self.own_step))
        )

    @property
    def length(self) -> int:
        return self.whole * self.batches - self.short

    @property
    def all_take_part(self) -> bool:
        """Whether each rank has a sample of each batch: one without looks at a sample of another, which counts in its
        losses."""
        return self.seed % 2 == 1 and not self.short

    def shares(self, step: int) -> tuple[int, ...]:
        """Of the ranks, of one of its batches."""
        draw, least = random.Random(self.seed * 1000 + step), int(self.all_take_part)
        cuts = sorted(draw.randint(0, self.whole - least * self.ranks) for _ in range(self.ranks - 1))
        ends = [0, *cuts, self.whole - least * self.ranks]
        return tuple(b - a + least for a, b in zip(ends, ends[1:], strict=False))


def drawn(seed: int, ranks: int) -> Script:
    draw = random.Random(seed)

    def seldom(choices: list[Any], likely: Any) -> Any:
        return draw.choice(choices) if draw.random() < 0.4 else likely

    while True:
        whole = draw.randint(4, 12)
        averages = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": draw.choice([None, 2])}
        script = Script(
            seed=seed,
            ranks=ranks,
            whole=whole,
            short=seldom([draw.randint(1, whole - 1)], 0),
            batches=draw.randint(2, 5),
            epochs=seldom([1, 2, 3], 1),
            fits=seldom([1, 2], 1),
            thaws=seldom([True, False], False),
            form=draw.choice(["arrays", "PyDataset", "tf.data"]),
            words=seldom([True], False),
            normalised=seldom([True], False),
            outputs=seldom([1, 2], 1),
            classes=seldom([True, False], False),
            sample_weights=seldom([True], False),
            regularized=seldom([True], False),
            kind=draw.choice(list(OPTIMIZERS)),
            options={
                **seldom([{"clipnorm": 0.05}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}], {}),
                **seldom([averages, {}], {}),
                **seldom([{"gradient_accumulation_steps": count} for count in (2, 3)], {}),
                **seldom([{"weight_decay": 0.01}], {}),
            },
            schedule=seldom([True, False], False),
            scaled=seldom([True, False], False),
            apart=seldom([True], False),
            bucket_bytes=seldom([8, 64, 8 << 20], None),
            at_once=seldom([1, 2, 3], 1),
            eager=seldom([True, False], False),
            own_step=seldom([True, False], False),
            validated=seldom([True], False),
        )
        if script.valid:
            return script


class OwnStep(keras.Model):
    def train_step(self, data):
        import tensorflow as tf

        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def mean_squares(y, predicted):
    """For each sample, in the type of its arguments."""
    return keras.ops.sum(keras.ops.square(y - predicted), axis=-1) / 2.0


def model_of(script: Script, balancer: hvd.Balancer | None) -> keras.Model:
    keras.utils.set_random_seed(script.seed)
    inputs = {"x": keras.Input((3,), name="x")}
    regularizer = keras.regularizers.L2(0.01) if script.regularized else None
    hidden = Dense(5, activation="tanh", kernel_regularizer=regularizer, name="first")(inputs["x"])
    if script.words:
        inputs["words"] = keras.Input((2,), dtype="int32", name="words")
        hidden = layers.Concatenate()([hidden, layers.Flatten()(layers.Embedding(WORDS, 2)(inputs["words"]))])
    if script.normalised and balancer is not None:
        hidden = hvd.SyncBatchNormalization(momentum=0.8, balancer=balancer)(hidden)
    elif script.normalised:
        hidden = layers.BatchNormalization(momentum=0.8)(hidden)
    width, activation = (CLASSES, "softmax") if script.classes else (2, None)
    outputs = [Dense(width, activation=activation)(hidden) for _ in range(script.outputs)]
    made = OwnStep if script.own_step else keras.Model
    return made(inputs, outputs if script.outputs > 1 else outputs[0])


def optimizer_of(script: Script, balancer: hvd.Balancer | None) -> keras.optimizers.Optimizer:
    rate = optimizers.schedules.ExponentialDecay(RATE, 2, 0.8) if script.schedule else RATE
    optimizer = OPTIMIZERS[script.kind](rate, **script.options)
    if script.scaled:
        optimizer = optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=3)
    if balancer is None:
        optimizer.__class__ = with_dense_gradients(type(optimizer))
        return optimizer
    apart = hvd.LocalSGD(round_steps=1, bound_rounds=0, warmup_steps=0)
    strategy = apart if script.apart else "synchronous"
    return hvd.DistributedOptimizer(
        optimizer, balancer=balancer, bucket_bytes=script.bucket_bytes, strategy=strategy
    )


def data_of(script: Script, rows: int) -> tuple[Any, ...]:
    """Inputs, outputs, and sample weights if the script has them."""
    draw = np.random.RandomState(script.seed)
    inputs = {"x": draw.standard_normal((rows, 3))}
    if script.words:
        inputs["words"] = draw.randint(0, WORDS, (rows, 2)).astype("int32")
    outputs = range(script.outputs)
    labels = [draw.randint(0, CLASSES, rows) if script.classes else draw.standard_normal((rows, 2)) for _ in outputs]
    weights = [draw.uniform(0.1, 2.0, rows) for _ in outputs] if script.sample_weights else []
    return (inputs, *(tuple(part) if len(outputs) > 1 else part[0] for part in (labels, weights) if part))


class Batches(keras.utils.PyDataset):
    """Global batches."""

    def __init__(self, script: Script, arrays: tuple[Any, ...]) -> None:
        super().__init__()
        self.script, self.arrays = script, arrays

    def __len__(self) -> int:
        return self.script.batches

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self.script.whole, (index + 1) * self.script.whole)
        return keras.tree.map_structure(lambda array: array[rows], self.arrays)


def dealt(script: Script, arrays: tuple[Any, ...], balancer: hvd.Balancer) -> Any:
    whole = (Batches(script, arrays),) if script.form == "PyDataset" else arrays
    dataset = hvd.BalancedDataset(*whole, balancer=balancer, shuffle=False)
    return dataset.as_tf_dataset() if script.form == "tf.data" else dataset


def trained(script: Script, balancer: hvd.Balancer | None) -> list[np.ndarray]:
    """The weights in the end, and the losses of epochs, of validations as well; of one process without `balancer`."""
    model, arrays, losses = model_of(script, balancer), data_of(script, script.length), []
    options: dict[str, Any] = {"epochs": script.epochs, "verbose": 0}
    if script.classes:
        options["class_weight"] = {0: 0.5, 1: 2.0, 2: 1.25}  # Keras makes them float32
    if balancer is not None:
        options["callbacks"] = [hvd.callbacks.MetricAverageCallback()]
        if script.apart:
            options["callbacks"].insert(0, hvd.callbacks.LocalSGDCallback())
    if script.validated:
        parts = data_of(script, 3 * script.ranks)[:2]
        options["validation_data"] = parts if balancer is None else hvd.EvaluationDataset(*parts, balancer=balancer)
    for fit in range(script.fits):
        if not fit or script.thaws:
            model.get_layer("first").trainable = not script.thaws or fit > 0
            model.compile(
                optimizer_of(script, balancer),
                "sparse_categorical_crossentropy" if script.classes else [mean_squares] * script.outputs,
                loss_weights=[0.3, 1.7] if script.outputs > 1 else None,
                steps_per_execution=script.at_once,
                run_eagerly=script.eager,
                jit_compile=False,
            )
        if balancer is None:
            x, y, weights = (*arrays, None)[:3]
            history = model.fit(x, y, script.whole, sample_weight=weights, shuffle=False, **options)
        else:
            history = model.fit(dealt(script, arrays, balancer), **options)
        losses += [np.array(history.history[name]) for name in ("loss", "val_loss") if name in history.history]
    return [*weights_of(model), *(losses if script.all_take_part else [])]


def drawn_scripts(first, end):
    """Of seeds from `first` to before `end`. The shares change from batch to batch."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    for seed in range(first, end):
        script = drawn(seed, hvd.size())
        balancer = hvd.Balancer(script.whole, adaptive=False, min_share=0)
        plan = balancer.planner.plan_at(0)
        balancer.planner.plan_at = lambda step, plan=plan, script=script: replace(plan, shares=script.shares(step))
        found = trained(script, balancer)
        same_on_all(found, script)
        expected = trained(script, None)
        assert distance(found, expected) <= TOLERANCE, (distance(found, expected), script)
        keras.backend.clear_session()


if __name__ == "__main__":
    main(globals())
