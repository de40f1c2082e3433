"""One rank of the Keras job that `ci/chaos --framework keras` disturbs; see `chaos_worker`.

Which samples `fit` uses nobody sees, so at the end the weights are compared with those of one process that takes the
same global batches: a sample lost or doubled would show.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from chaos_diary import COMMIT_EVERY, SAMPLES, WHOLE, Diary, sample_seconds

import hvd_hetero.keras as hvd
from hvd_hetero.optimizers.dealer import Dealer

BATCHES = SAMPLES // WHOLE
LEARNING_RATE = 0.01


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Inputs and classes that a model can learn."""
    draw = np.random.RandomState(1)
    x = draw.standard_normal((SAMPLES, 8))
    return x, (x @ draw.standard_normal((8, 4))).argmax(1)


def make_model(optimizer: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    # Large enough for what Horovod does with several megabytes at a time, in several operations.
    hidden = [keras.layers.Dense(512, activation="tanh") for _ in range(2)]
    model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def flat(model: keras.Model) -> np.ndarray:
    return np.concatenate([np.asarray(w, np.float64).reshape(-1) for w in model.get_weights()])


def by_one_process(epochs: int) -> np.ndarray:
    """The weights of one process."""
    x, y = make_data()
    model = make_model(keras.optimizers.SGD(LEARNING_RATE, momentum=0.9))
    dealer = Dealer(SAMPLES, global_batch_size=WHOLE, shuffle=True, seed=5, drop_last=False)
    for epoch in range(epochs):
        dealer.epoch = epoch
        for batch in dealer.batches():
            model.train_on_batch(x[batch], y[batch])
    return flat(model)


class Disturbed(keras.callbacks.Callback):
    """Computes for as long as the share asks, keeps the diary, and ends when it is enough."""

    def __init__(self, state: Any, balancer: hvd.Balancer, diary: Diary, folder: Path) -> None:
        super().__init__()
        self.state, self.balancer, self.diary, self.folder = state, balancer, diary, folder

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(sample_seconds(self.folder) * self.balancer.share)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done, shares = self.state.epoch * BATCHES + self.state.batch, self.balancer.plan.shares
        self.diary("step", batch=done, shares=shares, sample_s=sample_seconds(self.folder))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.losses = [*self.state.losses, float(logs["loss"])]
        self.model.stop_training = hvd.broadcast_object((self.folder / "enough").exists(), 0, name="over")


def main(folder: Path, topology: str) -> None:
    keras.config.set_floatx("float64")
    hvd.init(**({"process_sets": "dynamic"} if topology != "flat" else {}))
    diary = Diary(folder, hvd)
    diary("began")
    balancer = hvd.Balancer(WHOLE, run=str(folder / "trace"))
    dataset = hvd.BalancedDataset(*make_data(), balancer=balancer, seed=5)
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=0.9)
    model = make_model(hvd.DistributedOptimizer(optimizer, balancer=balancer, topology=topology))

    class Committed(hvd.elastic.KerasState):
        """Notes each commit, also one at which the ranks change."""

        def check_host_updates(self) -> None:
            diary("commit", batch=self.epoch * BATCHES + self.batch)
            super().check_host_updates()

    @hvd.elastic.run
    def train(state: Any) -> None:
        diary("ranks", batch=state.epoch * BATCHES + state.batch)
        disturbed = Disturbed(state, balancer, diary, folder)
        commit = hvd.callbacks.CommitStateCallback(state, COMMIT_EVERY)
        callbacks = [hvd.callbacks.MetricAverageCallback(), disturbed, commit]
        state.fit(dataset, epochs=10**6, callbacks=callbacks, verbose=0)

    state = Committed(model, epoch=0, batch=0, losses=[])
    train(state)
    found = flat(model)
    every = hvd.allgather(found[None])
    if hvd.rank() == 0:
        alike = all(np.array_equal(row, every[0]) for row in every)
        off = float(np.abs(found - by_one_process(state.epoch)).max())
        result = {"alike": alike, "off": off, "losses": state.losses, "epochs": state.epoch}
        (folder / "result.json").write_text(json.dumps(result))
        print("RESULT", flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
