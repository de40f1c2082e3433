"""One rank of tests/test_keras_elastic_horovod.py: `model.fit` while ranks die and join, and a job that is resumed.

`elastic FOLDER KIND`: the rank alone on its host gets that signal at batch 12, once; another one follows it.
`resume FOLDER`: stopped by SIGTERM at a batch, and resumed. `RESULT` is printed by rank 0 at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import hvd_hetero.keras as hvd
from hvd_hetero.optimizers.dealer import Dealer

SAMPLES, WHOLE, EPOCHS, DIES_AT, WAITS_AT = 250, 20, 3, 12, 26
BATCHES = -(-SAMPLES // WHOLE)


def make_data():
    draw = np.random.RandomState(1)
    x = draw.standard_normal((SAMPLES, 6))
    return x, (x @ draw.standard_normal((6, 3))).argmax(1)


def make_model(optimizer, *, hidden=8, dropout=0.0):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(hidden, activation="tanh"), keras.layers.Dropout(dropout, seed=3)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def flat(model):
    return np.concatenate([np.asarray(w, np.float64).reshape(-1) for w in model.get_weights()])


def by_one_process():
    """The weights of one process that takes the same global batches."""
    x, y = make_data()
    model = make_model(keras.optimizers.SGD(0.1, momentum=0.9))
    dealer = Dealer(SAMPLES, global_batch_size=WHOLE, shuffle=True, seed=5, drop_last=False)
    for epoch in range(EPOCHS):
        dealer.epoch = epoch
        for batch in dealer.batches():
            model.train_on_batch(x[batch], y[batch])
    return flat(model)


class Fate(keras.callbacks.Callback):
    """What happens to the ranks."""

    def __init__(self, state, folder, kind):
        super().__init__()
        self.state, self.died, self.kind = state, folder / "died", kind

    def on_train_batch_end(self, batch, logs=None):
        state = self.state
        done = state.epoch * BATCHES + state.batch
        if done == DIES_AT and hvd.local_size() == 1 and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), getattr(signal, f"SIG{self.kind}"))
        while done > WAITS_AT and hvd.size() < 3:
            time.sleep(0.1)  # for the rank that is to join
            state.commit()


def elastic(folder, kind):
    balancer = hvd.Balancer(WHOLE, rule=hvd.ReplanRule(minimum_observations=4, warmup_steps=2))
    dataset = hvd.BalancedDataset(*make_data(), balancer=balancer, seed=5)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), balancer=balancer)
    model = make_model(optimizer)

    @hvd.elastic.run
    def train(state):
        state.sizes = [*state.sizes, hvd.size()]
        state.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LatencyAwareLearningRate(balancer),
            Fate(state, folder, kind),
            hvd.callbacks.CommitStateCallback(state, batches_per_commit=5),
        ])  # fmt: skip

    state = hvd.elastic.KerasState(model, epoch=0, batch=0, sizes=[])
    train(state)
    found = flat(model)
    every = hvd.allgather(found[None])
    return {
        "sizes": state.sizes,
        "alike": all(np.array_equal(row, every[0]) for row in every),
        "off": float(np.abs(found - by_one_process()).max()),
        "batches": int(model.optimizer.iterations),
        "epochs": state.epoch,
    }


class Stop(keras.callbacks.Callback):
    """SIGTERM on one rank, at a batch."""

    def __init__(self, at, who):
        super().__init__()
        self.at, self.who = at, who

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.at and hvd.rank() == self.who:
            os.kill(os.getpid(), signal.SIGTERM)


def resumed(path, stop_at=None, who=0):
    """The weights at the end, None where SIGTERM came first; and after how many batches it ended."""
    balancer = hvd.Balancer(WHOLE, shares={2: (13, 7), 3: (10, 6, 4)}[hvd.size()], adaptive=False)
    dataset = hvd.BalancedDataset(*make_data(), balancer=balancer, seed=5)
    codec = hvd.Compression.int8  # of what it could not send, nothing is lost either
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), balancer=balancer, compression=codec)
    model = make_model(optimizer, hidden=200, dropout=0.3)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    checkpoint = hvd.Checkpoint(path, state, every_steps=9)
    checkpoint.restore()
    callbacks = [*([Stop(stop_at, who)] if stop_at else []), hvd.callbacks.CheckpointCallback(checkpoint)]
    try:
        state.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=callbacks)
        return flat(model), int(model.optimizer.iterations)
    except SystemExit as left:
        assert left.code == 75
        return None, int(model.optimizer.iterations)
    finally:
        checkpoint.close()


def resume(folder):
    expected, batches = resumed(folder / "uninterrupted")
    assert batches == EPOCHS * BATCHES
    off = []
    for number, (stop_at, who) in enumerate([(4, 0), (BATCHES, 1), (BATCHES + 3, 1), (2 * BATCHES - 1, 0)]):
        nothing, left = resumed(folder / f"run.{number}", stop_at, who)
        assert nothing is None and stop_at <= left <= stop_at + 2, (stop_at, left)
        found, batches = resumed(folder / f"run.{number}")
        assert batches == EPOCHS * BATCHES, (batches, stop_at, left)
        off.append(float(np.abs(found - expected).max()))
    return {"off": off}


if __name__ == "__main__":
    keras.config.set_floatx("float64")
    hvd.init()
    what, where, *rest = sys.argv[1:]
    result = {"elastic": elastic, "resume": resume}[what](Path(where), *rest)
    if hvd.rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    hvd.barrier()
