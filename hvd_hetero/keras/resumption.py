"""Resumes a fit within an epoch: by two fits of Keras's, which look like one to callbacks and to the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras


class Resumed(keras.callbacks.CallbackList):
    """The callbacks of a fit that begins within an epoch, for both its parts: the rest of that epoch, and the epochs
    after it. Callbacks are called as in an uninterrupted job: with batches by their numbers in the epoch, the number of
    batches of a whole epoch, the number of epochs, and one beginning and one end of training.

    Args:
        epoch: the first one.
        done: batches of it that were used before.
        steps: batches of a whole epoch.
        epochs: where training ends.
        verbose: as of `model.fit`.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        *,
        model: keras.Model,
        epoch: int,
        done: int,
        steps: int,
        epochs: int,
        verbose: Any,
    ) -> None:
        of_fit = {"verbose": verbose, "epochs": epochs, "steps": steps}
        super().__init__(callbacks, add_history=True, add_progbar=verbose != 0, model=model, **of_fit)
        self._steps, self._done, self._is_last = steps, done, epoch + 1 >= epochs
        self._begun = False
        self._more = False  # whether there are further epochs after the present fit of Keras's

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """A context for the fit of the first part, in which two habits of Keras's are changed.

        At the end of each fit Keras replaces the weights by their averages, if the optimizer keeps any (`use_ema`):
        here it does so only if training ends as well. With `steps_per_execution`, Keras makes all steps of the last
        execution, beyond the end of the epoch: here it makes one step at a time, if they do not divide the rest.
        """
        model, optimizer = self.model, self.model.optimizer
        at_once = model.steps_per_execution
        uneven = (self._steps - self._done) % at_once > 0
        finalize: Any = getattr(optimizer, "finalize_variable_values", None)  # None: train_step has its own

        def finalize_at_the_end(variables: Sequence[Any]) -> None:
            if not self._goes_on():
                finalize(variables)

        self._more = not self._is_last
        if finalize is not None:
            vars(optimizer)["finalize_variable_values"] = finalize_at_the_end
        if uneven:
            _execute(model, 1)
        try:
            yield
        finally:
            self._more = False
            if uneven:
                _execute(model, at_once)
            if finalize is not None:
                del vars(optimizer)["finalize_variable_values"]

    def _goes_on(self) -> bool:
        return self._more and not self.model.stop_training

    def on_train_begin(self, logs: Any = None) -> None:
        if not self._begun:
            self._begun = True
            super().on_train_begin(logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_begin(self._done + batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(self._done + batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._done = 0
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        if not self._goes_on():
            super().on_train_end(logs)


def _execute(model: keras.Model, steps: int) -> None:
    """Sets how many steps an execution makes."""
    model.steps_per_execution = steps
    model.train_function = model.test_function = None  # those that there are were made for another number
