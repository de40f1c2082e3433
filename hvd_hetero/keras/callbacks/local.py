"""The callback of a local strategy."""

from __future__ import annotations

from typing import Any

import keras


class LocalSGDCallback(keras.callbacks.Callback):
    """Brings ranks that train apart together: before each validation, at the end of epochs (as the strategy's
    `merge_each_epoch` says) and of training. Then all hold one model, and BatchNormalization's statistics are averaged.

    To be put before callbacks that save the model, and before Keras's SwapEMAWeights, which puts averages in the place
    of the weights that are merged here. Steps apart need no callback; without this one, call
    `optimizer.merge(model)` after `fit`. Collective: all ranks have it. The logs get "merges", counted over all epochs.

    Args:
        optimizer: a DistributedOptimizer with a local strategy (default: the model's).
    """

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self._given = self._optimizer = optimizer
        self._apart = False  # batches since the last merge

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks at the optimizer.

        Raises:
            ValueError: it has no local strategy.
        """
        self._optimizer = self.model.optimizer if self._given is None else self._given
        reducer = vars(self._optimizer).get("_reducer")
        if reducer is None or reducer.strategy is None:
            raise ValueError(
                f"optimizer: expected an hvd.DistributedOptimizer with a local strategy. Received: {self._optimizer}"
                f"{'' if reducer is None else ', synchronous'}. Pass it strategy=\"local\", or leave this callback out."
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes that there is something to merge."""
        self._apart = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Merges before a validation, and before an evaluation."""
        self._merge()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Merges, and logs how many merges there were."""
        reducer = self._optimizer._reducer
        if reducer.strategy.merge_each_epoch:
            self._merge()
        if logs is not None:
            logs["merges"] = reducer.merges

    def on_train_end(self, logs: Any = None) -> None:
        """Merges."""
        self._merge()

    def _merge(self) -> None:
        if self._apart:
            self._optimizer.merge(self.model)
            self._apart = False
