"""Handwritten digits in mixed precision: float16 where it is fast, float32 where it matters, and one loss scale.

    horovodrun -np 2 python examples/keras_mixed_precision.py
    horovodrun -np 2 python examples/keras_mixed_precision.py --policy mixed_bfloat16

The loss scale goes inside: `DistributedOptimizer(LossScaleOptimizer(optimizer))`. Gradients are summed first and looked
at afterwards, so an overflow on one rank is one on all, and all of them skip that step and lower the scale alike.
bfloat16 has float32's range and needs no scale.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvd_hetero.keras as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=["mixed_float16", "mixed_bfloat16"], default="mixed_float16")
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    hvd.init()
    keras.config.set_dtype_policy(arguments.policy)

    digits = load_digits()
    images = (digits.data / 16.0).astype("float32")
    x, x_test, y, y_test = train_test_split(images, digits.target, test_size=0.2, random_state=0)

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax", dtype="float32"),  # the loss needs the digits
        ]
    )
    optimizer = keras.optimizers.Adam(2e-3)
    if arguments.policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    balancer = hvd.Balancer(128)
    model.compile(
        optimizer=hvd.DistributedOptimizer(optimizer, balancer=balancer, compression=hvd.Compression.fp16),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
        auto_scale_loss=False,
    )
    model.fit(
        hvd.BalancedDataset(x, y, balancer=balancer),
        epochs=arguments.epochs,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.RebalanceCallback(balancer),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )
    accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
    largest = max(float(np.abs(weight).max()) for weight in model.get_weights())
    print(f"rank {hvd.rank()}: test accuracy {accuracy:.4f}, largest weight {largest:.6f}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
