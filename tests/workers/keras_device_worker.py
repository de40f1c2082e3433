"""One real rank of tests/test_device_horovod.py: `fit` on another device than the host's memory, and there as well.

Prints `OK name` for each way of training that ends with the same parameters and the same losses: bit for bit on an
emulated device, but for rounding on a GPU (HVD_HETERO_TEST_DEVICE=cuda).
"""

from __future__ import annotations

import importlib
import os
import sys

import keras
import numpy as np
import torch
from checks import run_checks

import hvd_hetero.keras as hvd

there = importlib.import_module(os.environ.get("HVD_HETERO_TEST_DEVICE", "other") + "_device")
there.install()

WHOLE = 8
DEVICE, HOST = there.NAME, "cpu"
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(26, 6)).astype("float32"), RANDOM.integers(0, 3, size=26)
Generator = torch.Generator


def in_host_memory(device="cpu"):
    """A generator of random numbers, of which the device has none."""
    return Generator("cpu")


def trained(device, *, kind=keras.optimizers.SGD, merges=False, **options):
    """What `fit` leaves, and the losses that it tells."""
    with keras.device(f"{device}:{there.index()}" if device == DEVICE else device):
        keras.utils.set_random_seed(1)
        balancer = hvd.Balancer(WHOLE, shares=(6, 2), adaptive=False)
        norm = keras.layers.BatchNormalization() if merges else hvd.SyncBatchNormalization()
        dense = keras.layers.Dense
        layers = dense(64, use_bias=False), norm, dense(64, activation="tanh"), dense(3)
        model = keras.Sequential([keras.Input((6,)), *layers])
        start = np.random.default_rng(1)  # a device's own random numbers may be others
        for variable in model.trainable_variables:
            variable.assign(start.normal(size=variable.shape, scale=0.3).astype("float32"))
        optimizer = hvd.DistributedOptimizer(kind(0.05), balancer=balancer, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        history = model.fit(hvd.BalancedDataset(X, Y, balancer=balancer), epochs=3, verbose=0, callbacks=callbacks)
        if merges:
            optimizer.merge(model)
        assert all(variable.value.device.type == device for variable in model.weights), "the model is elsewhere"
        return [*model.get_weights(), np.array(history.history["loss"]), np.array(history.history["accuracy"])]


def alike_arrays(a, b):
    return there.alike(torch.as_tensor(a.astype("float32")), torch.as_tensor(b.astype("float32")))


def alike(**options):
    """A check that training with these options is the same on both devices; with a codec, other than without."""

    def check():
        moved, here = trained(DEVICE, **options), trained(HOST, **options)
        differ = [index for index, pair in enumerate(zip(moved, here, strict=True)) if not alike_arrays(*pair)]
        assert not differ, f"arrays {differ}"
        if options.pop("compression", None) is not None and there.EXACT:
            assert not all(map(alike_arrays, trained(HOST, **options), here)), "the codec did nothing"

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
    if not there.RANDOM:
        torch.Generator = in_host_memory
    with there.Device():
        run_checks(hvd, sys.argv[1:] or CHECKS, CHECKS)
    hvd.shutdown()


if __name__ == "__main__":
    main()
