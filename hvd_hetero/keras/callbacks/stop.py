"""The callback that lets ranks stop within an epoch."""

from __future__ import annotations

from typing import Any

import keras

from hvd_hetero.optimizers.balancer import Balancer


class StopTogetherCallback(keras.callbacks.Callback):
    """Makes all ranks stop after the same batch, where a callback of one of them stops training within an epoch.

    As `TerminateOnNaN` does, or one that ends with the job's time: what they look at are a rank's own batches and its
    own clock, and the other ranks would wait for the one that has stopped. The wish travels with the gradients of the
    next batch, with local steps with the next merge, and all stop after it.

    To be put last. All ranks have it.

    Args:
        optimizer: a DistributedOptimizer that is trained with (default: the model's).
    """

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self._given = optimizer

    def _balancer(self) -> Balancer:
        optimizer = self.model.optimizer if self._given is None else self._given
        reducer = vars(optimizer).get("_reducer")
        if reducer is None:
            raise ValueError(
                f"optimizer: expected a model compiled with an hvd.DistributedOptimizer. Received: {optimizer}. Where "
                "a train_step has the optimizers, pass one of them: StopTogetherCallback(optimizer)."
            )
        balancer: Balancer = reducer.balancer
        return balancer

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets who wanted to stop before.

        Raises:
            ValueError: the optimizer is no distributed one.
        """
        self._balancer().go_on()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells the others, and stops once all have heard it."""
        balancer = self._balancer()
        if self.model.stop_training:
            balancer.ask_to_stop()
        self.model.stop_training = bool(balancer.stopping)
