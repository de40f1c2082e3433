"""`StopTogetherCallback`: makes all ranks stop training at the same batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_hetero.engine.port import rotating_name
from hvd_hetero.optimizers.balancer import Balancer

from ..reducer import reducer_of


class StopTogetherCallback(keras.callbacks.Callback):
    """Makes all ranks stop after the same batch if a callback on any of them stops training.

    `TerminateOnNaN` does that, for example, or a callback that watches the job's time limit. They look at one rank's
    batches and clock, so only that rank would stop, and the others would wait for it. With this callback, the request
    to stop travels with the gradients of the next batch (with local steps: with the next merge), and all ranks stop
    after that. At the end of an epoch ranks ask each other, and all stop there.

    It should be the last callback, and all ranks must have it.

    Args:
        optimizer: a DistributedOptimizer that is used in training (default: the model's).
    """

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self._given = optimizer

    def _balancer(self) -> Balancer:
        """The balancer of the optimizer; raises ValueError if that is not a distributed one."""
        optimizer = self.model.optimizer if self._given is None else self._given
        reducer = reducer_of(optimizer)
        if reducer is None:
            raise ValueError(
                f"optimizer: expected a model compiled with an hvd.DistributedOptimizer. Received: {optimizer}. Where "
                "a train_step has the optimizers, pass one of them: StopTogetherCallback(optimizer)."
            )
        return reducer.balancer

    def on_train_begin(self, logs: Any = None) -> None:
        """Clears requests to stop from an earlier fit.

        Raises:
            ValueError: the optimizer is not a distributed one.
        """
        self._balancer().go_on()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Passes on this rank's request to stop, and stops training once all ranks know of a request."""
        balancer = self._balancer()
        if self.model.stop_training:
            balancer.ask_to_stop()
        self.model.stop_training = bool(balancer.stopping)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops all ranks where one wants to by now. A collective call."""
        balancer = self._balancer()
        wish = np.array([float(self.model.stop_training or balancer.departure.stopping.said)])
        name = rotating_name(balancer.engine, "hvd_hetero.stop.")
        self.model.stop_training = bool(balancer.engine.allreduce_async(wish, name=name, op="max").wait()[0])
