"""Callbacks that keep an elastic state: any object with `commit()`, `batch` and `epoch`."""

from __future__ import annotations

from typing import Any

import keras


class _Counting(keras.callbacks.Callback):
    """Counts batches: Keras tells of as many at once as `steps_per_execution` says."""

    _first = 0  # of the present execution
    _tells = False  # Keras tells with which batch an execution ends; older ones tell the first one twice

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes where an execution begins."""
        self._first = batch

    def _batches(self, batch: int) -> int:
        """The batches of the execution that ends with this one."""
        found, self._first = batch + 1 - self._first, batch + 1
        self._tells = self._tells or found > 1
        return found if self._tells or self.model is None else int(self.model.steps_per_execution)


class CommitStateCallback(_Counting):
    """Commits `state` every `batches_per_commit` batches and at the end of each epoch; with `steps_per_execution`, at
    the end of an execution in which it is due.

    To be put after the callbacks that update the state. Committing is collective: all ranks do it at the same batch.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit: expected at least 1. Received: {batches_per_commit}.")
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts counting anew: after a reset all ranks commit at the same batches."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits when it is time."""
        self.batches_remaining -= self._batches(batch)
        if self.batches_remaining <= 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit + self.batches_remaining % -self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits."""
        self.state.commit()


class UpdateBatchStateCallback(_Counting):
    """Keeps `state.batch`: how many batches of the epoch are done; 0 between epochs.

    The first epoch of a fit that was resumed goes on counting where the state was. `fit(steps_per_epoch=...)` says how
    many batches are left of it; `KerasState.fit` does that.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._before = 0  # batches of this epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes where the state is: it counts on from there."""
        super().on_train_batch_begin(batch, logs)
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batch."""
        self.state.batch = self._before + self._batches(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The next epoch begins at its first batch."""
        self.state.batch = 0


class CheckpointCallback(_Counting):
    """Takes a step of an `hvd.Checkpoint` after each batch (with `steps_per_execution`, of all in an execution): it
    saves when it is due, and before the job has to end.

    To be put after the callbacks that update the state.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self.checkpoint = checkpoint

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves when it is time."""
        self.checkpoint.step(self._batches(batch))


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps `state.epoch`: how many epochs are done over all fits. Each counts from 0, or from its `initial_epoch`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes where the state is."""
        self.initial_epoch = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
