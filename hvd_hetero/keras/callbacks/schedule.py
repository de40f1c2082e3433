"""Horovod's callbacks that schedule the learning rate, for Keras 3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from .. import backend
from ..factor import inner


def learning_rate(optimizer: Any) -> float:
    """The present learning rate of an optimizer.

    Raises:
        TypeError: the optimizer has none of its own, as a MultiOptimizer.
    """
    rate = getattr(optimizer, "learning_rate", None)
    if rate is None:
        raise TypeError(
            "optimizer: expected one with a learning rate of its own. Received: "
            f"{type(optimizer).__name__}. Set the rates of the optimizers within it instead."
        )
    return float(keras.ops.convert_to_numpy(rate))


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Sets the learning rate of an optimizer.

    Raises:
        TypeError: the optimizer has a LearningRateSchedule, or a function that returns its learning rate.
    """
    try:
        inner(optimizer).learning_rate = value
    except (TypeError, AttributeError) as error:  # Keras's words for a schedule, and a slip of it for a function
        held = "LearningRateSchedule" if isinstance(error, TypeError) else "function"
        raise TypeError(
            "optimizer: expected one with a number as its learning rate, which callbacks can change. Received: "
            f"{type(optimizer).__name__} with a {held}. Use either that or the callback."
        ) from error


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr * multiplier` from epoch `start_epoch` until before `end_epoch`.

    Args:
        initial_lr: the learning rate that is multiplied.
        multiplier: a function of the epoch that returns a factor; or a number m, for the factor
            m ** (epoch - start_epoch).
        start_epoch: the first epoch in which the learning rate is set.
        end_epoch: the first epoch in which it is not set any more; None: it is set to the end.
        staircase: whether to set it only at the beginning of each epoch. If False, it is set before each batch, and
            the epoch is a fraction.
        momentum_correction: whether to scale SGD's velocity by new over old learning rate. In Keras the velocity is a
            sum of steps that are already multiplied by learning rates, so this is what a corrected momentum does. Of no
            effect on other optimizers.
        steps_per_epoch: batches of an epoch (default: as `fit` knows them), where the rate changes within an epoch.

    Raises:
        ValueError: no `initial_lr`.
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
        """Checks that the learning rate can be set, and finds the number of steps of an epoch.

        Raises:
            TypeError: the optimizer has a LearningRateSchedule.
            ValueError: the number of steps is needed, and not known.
        """
        set_learning_rate(self.model.optimizer, learning_rate(self.model.optimizer))
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "steps_per_epoch: expected a number where `fit` knows none. Received: None. Pass it to "
                    f"{type(self).__name__}."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the number of the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the learning rate for the next step, if this epoch and batch are due."""
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
        """Sets the learning rate for `epoch`, which may be a fraction, and scales the velocities of SGD."""
        optimizer = self.model.optimizer
        old, new = learning_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        set_learning_rate(optimizer, new)
        updates = inner(optimizer)
        # Only SGD's: the momentums of Muon are sums of gradients, without learning rates.
        if self.momentum_correction and old > 0 and new != old and isinstance(updates, keras.optimizers.SGD):
            for velocity in getattr(updates, "momentums", ()):
                velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / hvd.size()` to `initial_lr` over the first epochs, batch by batch.

    See Goyal et al. 2017, arXiv:1706.02677.

    Args:
        initial_lr: the learning rate after the warm-up.
        warmup_epochs: the number of epochs of the warm-up.
        verbose: 1 prints on rank 0 when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warm,  # a method, and no function within this one, which would be of this callback in a copy as well
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def _warm(self, epoch: float) -> float:
        """The factor at `epoch`, which may be a fraction."""
        assert self.steps_per_epoch is not None and self.end_epoch is not None
        size = backend.horovod.size()
        # Counted so that the last batch of an epoch has the factor of a whole number of epochs, as with Horovod.
        done = min((epoch + 1.0 / self.steps_per_epoch) / self.end_epoch, 1.0)
        return float((1.0 + (size - 1) * done) / size)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the learning rate as "lr"; with `verbose`, prints it after the last epoch of the warm-up."""
        super().on_epoch_end(epoch, logs)
        assert self.end_epoch is not None
        if epoch == self.end_epoch - 1 and self.verbose > 0:
            with contextlib.suppress(ValueError):  # Horovod not initialised: there is one rank
                if backend.horovod.rank():
                    return
            print(f"\nEpoch {epoch + 1}: the learning rate is warm at {learning_rate(self.model.optimizer):g}.")
