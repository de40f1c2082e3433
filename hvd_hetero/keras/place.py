"""Where a job is in its epochs, and with it in its random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from .randomness import Aside, load_random_state


class Place(keras.callbacks.Callback):
    """Keeps where a state's job is.

    Args:
        random: where its random numbers were, in a job that was resumed.
    """

    def __init__(self, state: Any, random: Mapping[str, Any] | None) -> None:
        super().__init__()
        self._state, self._random = state, random

    def on_train_begin(self, logs: Any = None) -> None:
        """Keras has drawn before this, where it tried a model that was not trained in this process."""
        if self._random is not None:
            load_random_state(self._random)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        stopped = self.model.stop_training and self._state.batch < (self.params.get("steps") or 0)
        if not stopped:  # else it goes on from here, as its data does
            self._state.epoch, self._state.batch = epoch + 1, 0


class EndOfBatch(keras.callbacks.Callback):
    """After all other callbacks: what is drawn until the dataset is asked for something is set aside."""

    def __init__(self, aside: Aside) -> None:
        super().__init__()
        self._aside = aside

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._aside.begin()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._aside.forget()  # training was stopped within an epoch
