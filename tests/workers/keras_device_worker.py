"""One real rank of tests/test_device_horovod.py: `fit` on another device than the host's memory, and there as well.

Prints `OK name` for each way of training that ends with the same parameters, bit for bit, and the same losses.
"""

from __future__ import annotations

import contextlib
import sys

import keras
import numpy as np
import other_device
import torch
from checks import run_checks

import hvd_hetero.keras as hvd

other_device.install()

WHOLE = 8
DEVICE, HOST = other_device.NAME, "cpu"
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(26, 6)).astype("float32"), RANDOM.integers(0, 3, size=26)
Generator = torch.Generator


def in_host_memory(device="cpu"):
    """A generator of random numbers, of which the device has none."""
    return Generator("cpu")


def trained(device, *, kind=keras.optimizers.SGD, merges=False, **options):
    """What `fit` leaves, and the losses that it tells."""
    with keras.device(f"{device}:0") if device == DEVICE else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        balancer = hvd.Balancer(WHOLE, shares=(6, 2), adaptive=False)
        norm = keras.layers.BatchNormalization() if merges else hvd.SyncBatchNormalization()
        dense = keras.layers.Dense
        model = keras.Sequential([keras.Input((6,)), dense(64), norm, dense(64, activation="tanh"), dense(3)])
        optimizer = hvd.DistributedOptimizer(kind(0.05), balancer=balancer, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        history = model.fit(hvd.BalancedDataset(X, Y, balancer=balancer), epochs=3, verbose=0, callbacks=callbacks)
        if merges:
            optimizer.merge(model)
        assert all(variable.value.device.type == device for variable in model.weights), "the model is elsewhere"
        return [*model.get_weights(), np.array(history.history["loss"]), np.array(history.history["accuracy"])]


def alike(**options):
    """A check that training with these options is the same on both devices; with a codec, other than without."""

    def check():
        there, here = trained(DEVICE, **options), trained(HOST, **options)
        differ = [index for index, pair in enumerate(zip(there, here, strict=True)) if not np.array_equal(*pair)]
        assert not differ, f"arrays {differ}"
        if options.pop("compression", None) is not None:
            assert not all(map(np.array_equal, trained(HOST, **options), here)), "the codec did nothing"

    return check


CHECKS = {
    "sgd": alike(),
    "adamw": alike(kind=keras.optimizers.AdamW),
    "int8": alike(compression=hvd.Compression.int8),
    "local": alike(strategy=hvd.LocalSGD(round_steps=2, bound_rounds=0), merges=True),
}


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.Generator = in_host_memory
    with other_device.Device():
        run_checks(hvd, sys.argv[1:] or CHECKS, CHECKS)
    hvd.shutdown()


if __name__ == "__main__":
    main()
