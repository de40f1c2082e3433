"""Handwritten digits with Keras 3 on ranks of unequal speed.

    horovodrun -np 2 python examples/keras_digits.py
    horovodrun -np 4 -H fast:2,slow:2 python examples/keras_digits.py

KERAS_BACKEND chooses "tensorflow" (Keras' default) or "torch". Shares follow the speed of the ranks; `--shares 96 32`
sets them by hand instead. It needs scikit-learn, which brings the data.
"""

import argparse

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import hvd_hetero.keras as hvd


def make_model() -> keras.Model:
    """A small convolutional network."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--shares", type=int, nargs="+", help="samples of each rank in a global batch, fixed")
    arguments = parser.parse_args()
    hvd.init()

    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    x, x_test, y, y_test = train_test_split(images, digits.target, test_size=0.2, random_state=0)

    balancer = hvd.Balancer(
        arguments.global_batch_size, shares=arguments.shares, adaptive=arguments.shares is None
    )
    model = make_model()
    model.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3), balancer=balancer),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,
    )
    model.fit(
        hvd.BalancedDataset(x, y, balancer=balancer),
        validation_data=hvd.EvaluationDataset(x_test, y_test, balancer=balancer),
        epochs=arguments.epochs,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.RebalanceCallback(balancer),
        ],
        verbose=2 if hvd.rank() == 0 else 0,
    )
    accuracy = model.evaluate(x_test, y_test, verbose=0, return_dict=True)["accuracy"]
    print(f"rank {hvd.rank()}: test accuracy {accuracy:.4f}, share {balancer.share}", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
