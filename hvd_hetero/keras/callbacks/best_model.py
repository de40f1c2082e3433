"""A callback that saves the best model, once for all ranks."""

from __future__ import annotations

from typing import Any

import keras

from .. import backend
from ..reducer import reducer_of


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far, only on rank 0 or on the first rank of the optimizer's process set.

    It should come after `MetricAverageCallback`.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as of `keras.callbacks.ModelCheckpoint`, in the order of
            `horovod.tensorflow.keras`; `horovod.keras` has no `save_weights_only`.
        filepath: the file (default: "best.keras"; with `save_weights_only`, "best.weights.h5").

    Raises:
        TypeError: `monitor` is no name, or `save_weights_only` is no bool, as if the arguments are in the order of
            `horovod.keras`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        if not isinstance(monitor, str):
            raise TypeError(f'monitor: expected the name of a metric, as "val_loss". Received: {monitor!r}.')
        if not isinstance(save_weights_only, bool):
            raise TypeError(
                f"save_weights_only: expected True or False. Received: {save_weights_only!r}. Pass mode= and "
                "save_freq= by their names, since horovod.keras and horovod.tensorflow.keras have them in other places."
            )
        super().__init__(
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        reducer = reducer_of(getattr(self.model, "optimizer", None))
        first = 0 if reducer is None else reducer.balancer.engine.ranks[0]
        if backend.horovod.rank() == first:
            super()._save_model(epoch, batch, logs)
