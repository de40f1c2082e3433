"""`LocalSGDCallback`: merges the models of ranks that train with a local strategy."""

from __future__ import annotations

from typing import Any

import keras

from ..reducer import reducer_of


class LocalSGDCallback(keras.callbacks.Callback):
    """Merges the ranks' models under a local strategy: before validations, and at the end of epochs and of training.

    At the end of epochs it merges if the strategy's `merge_each_epoch` is set. After a merge all ranks hold one model,
    and the statistics of BatchNormalization are averaged. The logs get "merges", the number of merges over all epochs.

    It should come before callbacks that save the model, and before Keras's SwapEMAWeights, which replaces the weights
    that are merged here by their averages. All ranks must have it, as merges are collective. Local steps do not need
    it: without it, call `optimizer.merge(model)` after `fit`.

    Args:
        optimizer: a DistributedOptimizer with a local strategy (default: the model's).
    """

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self._given = self._optimizer = optimizer
        self._unmerged = False  # whether there were batches since the last merge

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the optimizer, and checks it.

        Raises:
            ValueError: it is not distributed, or has no local strategy.
        """
        self._optimizer = self.model.optimizer if self._given is None else self._given
        reducer = reducer_of(self._optimizer)
        if reducer is None or reducer.strategy is None:
            raise ValueError(
                f"optimizer: expected an hvd.DistributedOptimizer with a local strategy. Received: {self._optimizer}"
                f"{'' if reducer is None else ', synchronous'}. Pass it strategy=\"local\", or leave this callback out."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes that there are local steps to merge."""
        self._unmerged = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Merges before a validation, and before an evaluation."""
        self._merge()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Merges, if the strategy asks for it at the end of epochs, and logs the number of merges."""
        reducer = self._optimizer._reducer
        if reducer.strategy.merge_each_epoch:
            self._merge()
        if logs is not None:
            logs["merges"] = reducer.merges

    def on_train_end(self, logs: Any = None) -> None:
        """Merges at the end of training."""
        self._merge()

    def _merge(self) -> None:
        if self._unmerged:
            self._optimizer.merge(self.model)
            self._unmerged = False
