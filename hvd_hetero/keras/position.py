"""Callbacks of `KerasState.fit` that keep the job's position: its epoch, its batch, and its random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from .callbacks.elastic import UpdateBatchStateCallback
from .randomness import Aside, load_random_state


class UpdatePositionCallback(UpdateBatchStateCallback):
    """Keeps `epoch` and `batch` of a state up to date, by the numbers that batches have in their epoch.

    Args:
        state: the `KerasState` of the job.
        random: the states of the random number generators to restore, in a job that was resumed; else None.
    """

    def __init__(self, state: Any, random: Mapping[str, Any] | None) -> None:
        super().__init__(state)
        self._random = random

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the random state here, as Keras may draw before: it tries out a model not yet trained in this
        process."""
        if self._random is not None:
            load_random_state(self._random)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(batch, logs)
        self._before = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        stopped = self.model.stop_training and self.state.batch < (self.params.get("steps") or 0)
        if not stopped:  # else a later fit goes on within this epoch, as its data does
            self.state.epoch, self.state.batch = epoch + 1, 0


class EndOfBatch(keras.callbacks.Callback):
    """Sets aside the random draws between the end of a batch and the next request to the dataset. To be the last
    callback."""

    def __init__(self, aside: Aside) -> None:
        super().__init__()
        self._aside = aside

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._aside.begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._aside.forget()  # only if training was stopped within an epoch is something set aside here
