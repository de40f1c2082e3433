"""Callbacks that update and save the state of an elastic job: an object with `commit()`, `batch` and `epoch`."""

from __future__ import annotations

from typing import Any

import keras

from hvd_hetero.optimizers.argument import check_whole

STATE = "an elastic state"


def check_has(name: str, value: Any, attribute: str, expected: str) -> None:
    """Raises TypeError, naming the argument, for a `value` without the attribute that a callback uses."""
    if not hasattr(value, attribute):
        raise TypeError(f"{name}: expected {expected}. Received: {value!r}.")


class _Counting(keras.callbacks.Callback):
    """Base class that counts batches. With `steps_per_execution`, Keras calls callbacks once for several batches."""

    _first = 0  # index of the first batch of the present execution
    _tells = False  # whether Keras passes the last batch of an execution at its end; older versions pass the first one

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the first batch of an execution."""
        self._first = batch

    def _batches(self, batch: int) -> int:
        """The number of batches in the execution that has ended; `batch`: what Keras has passed at its end."""
        found, self._first = batch + 1 - self._first, batch + 1
        self._tells = self._tells or found > 1
        return found if self._tells or self.model is None else int(self.model.steps_per_execution)


class CommitStateCallback(_Counting):
    """Commits `state` every `batches_per_commit` batches, and at the end of each epoch.

    With `steps_per_execution`, it commits at the end of the execution in which a commit is due. It should come after
    the callbacks that update the state. A commit is a collective call: all ranks make it at the same batch.

    Args:
        state: the elastic state, for example a `KerasState`.
        batches_per_commit: the number of batches from one commit to the next.

    Raises:
        TypeError: `state` has no `commit()`.
        ValueError: `batches_per_commit` is no integer, or below 1.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        check_has("state", state, "commit", STATE)
        check_whole("batches_per_commit", batches_per_commit, least=1)
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Restarts the count, so that after an elastic reset all ranks commit at the same batches."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, if a commit is due."""
        self.batches_remaining -= self._batches(batch)
        if self.batches_remaining <= 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit + self.batches_remaining % -self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits the state."""
        self.state.commit()


class UpdateBatchStateCallback(_Counting):
    """Sets `state.batch` to the number of batches of the epoch that are done; 0 between epochs.

    In the first epoch of a resumed fit, it counts on from the value of the state. That epoch has fewer batches, which
    `fit(steps_per_epoch=...)` has to be told; `KerasState.fit` does that.

    Args:
        state: the elastic state, with an attribute `batch`.

    Raises:
        TypeError: `state` has none.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        check_has("state", state, "batch", f"{STATE} with a batch, as of KerasState(model, epoch=0, batch=0)")
        self.state = state
        self._before = 0  # batches of this epoch before the present execution

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the value of the state, from which the batch counts on."""
        super().on_train_batch_begin(batch, logs)
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batches of the execution."""
        self.state.batch = self._before + self._batches(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Sets the count to 0 for the next epoch."""
        self.state.batch = 0


class CheckpointCallback(_Counting):
    """Calls `hvd.Checkpoint.step` after each batch, which saves when a checkpoint is due, and before the job must end.

    With `steps_per_execution`, it is called after each execution, with the number of batches. This callback should come
    after those that update the state.

    Args:
        checkpoint: an `hvd.Checkpoint`.

    Raises:
        TypeError: `checkpoint` has no `step()`.
    """

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        check_has("checkpoint", checkpoint, "step", "an hvd.Checkpoint")
        self.checkpoint = checkpoint

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves, if a checkpoint is due."""
        self.checkpoint.step(self._batches(batch))


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets `state.epoch` to the number of epochs that are done, over all fits.

    Args:
        state: the elastic state, with an attribute `epoch`.

    Raises:
        TypeError: `state` has none.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        check_has("state", state, "epoch", f"{STATE} with an epoch, as of KerasState(model, epoch=0, batch=0)")
        self.state = state
        self.initial_epoch = state.epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the difference between the epochs of the state and those of this fit."""
        self.initial_epoch = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch that ends."""
        self.state.epoch = self.initial_epoch + epoch + 1
