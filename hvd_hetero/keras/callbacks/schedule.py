"""Horovod's schedules of the learning rate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from .. import backend


def inner(optimizer: Any) -> Any:
    """The optimizer that a LossScaleOptimizer is around, or itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def learning_rate(optimizer: Any) -> float:
    """The learning rate now."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Sets the learning rate.

    Raises:
        TypeError: where a LearningRateSchedule decides it.
    """
    try:
        inner(optimizer).learning_rate = value
    except TypeError as error:
        raise TypeError(
            "optimizer: expected one with a number as its learning rate, which callbacks can change. Received: "
            f"{type(optimizer).__name__} with a LearningRateSchedule. Use either the schedule or the callback."
        ) from error


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier` from epoch `start_epoch` until before `end_epoch`.

    Args:
        initial_lr: what the multiplier multiplies.
        multiplier: a function of the epoch; or a number, whose power the epochs since `start_epoch` are.
        staircase: at the beginning of each epoch alone. Otherwise before each batch, and the epoch is a fraction.
        momentum_correction: SGD's velocity, in Keras a sum of steps already multiplied by learning rates, is brought to
            the new one, which is what a corrected momentum does. Of no effect on other optimizers.
        steps_per_epoch: default: what `fit` says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr: expected a learning rate. Received: None.")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks whether the learning rate can be set, and how many steps an epoch has."""
        set_learning_rate(self.model.optimizer, learning_rate(self.model.optimizer))
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "steps_per_epoch: expected a number where `fit` knows none. Received: None. Pass it to "
                    f"{type(self).__name__}."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate of the next step, where it is time."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._adjust(self.current_epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the learning rate as "lr"."""
        if logs is not None:
            logs["lr"] = learning_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = learning_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        set_learning_rate(optimizer, new)
        updates = inner(optimizer)
        # Muon has momentums as well, which are sums of gradients.
        if self.momentum_correction and old > 0 and new != old and isinstance(updates, keras.optimizers.SGD):
            for velocity in getattr(updates, "momentums", ()):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr` over the first epochs, batch by batch.

    See Goyal and others, 2017 (1706.02677).

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: how long it takes.
        momentum_correction, steps_per_epoch: as of `LearningRateScheduleCallback`.
        verbose: 1 says on rank 0 when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            size = backend.horovod.size()
            # The last batch of an epoch is at the round number.
            done = min((epoch + 1.0 / self.steps_per_epoch) / warmup_epochs, 1.0)
            return float((1.0 + (size - 1) * done) / size)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the learning rate as "lr", and says so after the warm-up."""
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        if epoch == self.end_epoch - 1 and self.verbose > 0:
            with contextlib.suppress(ValueError):  # Horovod not initialised: there is one rank
                if backend.horovod.rank():
                    return
            print(f"\nEpoch {epoch + 1}: the learning rate is warm at {learning_rate(self.model.optimizer):g}.")
