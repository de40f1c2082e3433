"""A fit that goes on within an epoch: two of Keras's, and one to callbacks and to the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras


class Resumed(keras.callbacks.CallbackList):
    """The callbacks of a fit that begins within an epoch, in both its parts: the rest of that epoch, and the epochs
    after it. They are told what they are told in a job that nothing happened to: batches by their numbers in the epoch,
    how many there are in a whole one, how many epochs there are, and one beginning and one end of training.

    Args:
        epoch: the first one.
        done: its batches that were used before.
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
        self._more = False  # epochs, after the fit that there is now

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """For the fit of the first part. Keras ends each fit with averages for weights, where the optimizer keeps any
        (`use_ema`): here it does so only if training ends as well. And of several steps an execution, it takes all in
        the last one too, beyond the end of the epoch: here it is one step at a time, where they do not come out even.
        """
        model, optimizer = self.model, self.model.optimizer
        at_once = model.steps_per_execution
        uneven = (self._steps - self._done) % at_once > 0
        finalize = getattr(optimizer, "finalize_variable_values", None)  # a train_step may have others

        def finalize_at_the_end(variables: Sequence[Any]) -> None:
            if finalize is not None and not self._goes_on():
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
    """Says how many steps an execution takes."""
    model.steps_per_execution = steps
    model.train_function = model.test_function = None  # they are of as many
