"""One real rank of tests/test_keras_data_horovod.py: while TensorFlow reads ahead, on rank 1 a callback `raises` or is
`late`, or the process is `frozen`."""

from __future__ import annotations

import os
import signal
import sys
import time

import keras
import numpy as np

import hvd_hetero.keras as hvd


class SlowSamples:
    """Of which TensorFlow is always about to read one."""

    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(0.02)
        return np.full(3, index, "float32"), np.zeros(1, "float32")


class Lazy:
    """Which whoever looks at all objects must not touch."""

    @property
    def __class__(self):
        raise RuntimeError("touched")


class Ends(keras.callbacks.Callback):
    """On rank 1, after three batches."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and hvd.rank() == 1:
            self.end(sys.argv[1])

    def end(self, how):
        if how == "late":
            time.sleep(8.0)
            os._exit(7)
        if how == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("a callback raised")


hvd.init()
lazy = Lazy()
balancer = hvd.Balancer(8, adaptive=False)
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
hvd.broadcast_variables(model.weights)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-3), balancer=balancer), "mse", jit_compile=False)
model.fit(hvd.BalancedDataset(SlowSamples(), balancer=balancer), verbose=0, callbacks=[Ends()])
