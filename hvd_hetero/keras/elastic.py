"""Elastic training with Keras, as `hvd.elastic`: the state of a job whose ranks come and go, and what runs it.

Everything made with a balancer goes on with the ranks that there are after a change: the balancer itself (ranks whose
hardware it knows keep their speeds), datasets (each sample of an epoch once in the committed history), the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import keras

from hvd_hetero.engine import binding
from hvd_hetero.engine.job_state import JobState
from hvd_hetero.engine.process_set import says_removed
from hvd_hetero.optimizers.departure import PeerError

from . import absent, backend, content
from .callbacks.elastic import CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
from .dataset import BalancedDataset
from .function import allgather_object, broadcast_object, broadcast_variables
from .position import EndOfBatch, UpdatePositionCallback
from .randomness import load_random_state, random_state
from .reducer import reducer_of
from .resumption import Resumed
from .variables import Variables, check_built

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

T = TypeVar("T")
GONE = ("HorovodInternalError", "PeerError")  # by their names: TensorFlow passes on the text of an error alone


class KerasState(JobState):
    """The state of an elastic job: what it commits, goes back to after a failure, and sends to ranks that join.

        state = hvd.elastic.KerasState(model, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state):
            state.fit(dataset, epochs=EPOCHS, callbacks=[hvd.callbacks.CommitStateCallback(state, 50)])

    Args:
        model: compiled and built, with a DistributedOptimizer; its optimizer is kept with it.
        optimizer: the optimizer, if it is not the model's own.
        values: more models and optimizers, built as well; objects with `state_dict()` and `load_state_dict()`; and
            plain values. They are attributes of this object. What was made with the optimizer's balancer is kept
            without being named, even if it is made after this state; with a `DistributedGradientTape`, name its
            balancer.

    Raises:
        TypeError: `model` is not a keras.Model, or `optimizer` is not a Keras optimizer.
        ValueError: a model, or an optimizer among the values, is not built yet, so its variables are not known. A
            subclass of keras.Model is built by calling it on a batch: `model(x[:1])`.
    """

    epoch: int  # where there are such values, for `fit`: epochs done, and batches of the next one
    batch: int

    def __init__(self, model: keras.Model, optimizer: Any = None, **values: Any) -> None:
        if not isinstance(model, keras.Model):
            raise TypeError(f"model: expected a keras.Model. Received: {model!r}.")
        if optimizer is not None and not isinstance(optimizer, keras.optimizers.Optimizer):
            raise TypeError(f"optimizer: expected a keras.optimizers.Optimizer. Received: {optimizer!r}.")
        check_built("model", model)
        for name, value in values.items():
            if isinstance(value, (keras.Model, keras.optimizers.Optimizer)):
                check_built(name, value)
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        given = {"model": model}
        if optimizer is not None:
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            given["optimizer"] = optimizer
        self._random: Any = None  # where it was when what is restored was kept, until training goes on
        super().__init__({**given, **values}, horovod=backend.horovod, content=content)

    def fit(self, x: Any, *, epochs: int, callbacks: Any = (), **arguments: Any) -> Any:
        """The history of `model.fit(x, ...)`, run from where this state is to the end of epoch number `epochs`.

        It is empty if all epochs are done already, as in a finished job that is started again. The state needs `epoch`
        and `batch` among its values; they are updated before `callbacks` are called.

        If the state is within an epoch, the rest of that epoch is trained by a `fit` of its own, as Keras has one
        length for all epochs of a `fit`. Callbacks and the optimizer see one `fit` of whole epochs all the same.

        Args:
            x: an `hvd.BalancedDataset`.
            epochs: the number of epochs of the whole job, those done before included.
            arguments: of `model.fit`, except `initial_epoch` and `steps_per_epoch`.
        """
        for name in ("initial_epoch", "steps_per_epoch"):
            if name in arguments:
                raise TypeError(f"{name}: expected none, because this state knows it. Received: {arguments[name]!r}.")
        if not {"epoch", "batch"} <= set(self._plain):
            raise ValueError(
                f"Expected a state with epoch and batch: KerasState(model, epoch=0, batch=0). Received: {self._plain}."
            )
        model = self.model
        if self.batch >= len(x):  # kept after the last batch of an epoch, and before its end
            self.epoch, self.batch = self.epoch + 1, 0
        if self.epoch >= epochs:
            history = keras.callbacks.History()
            history.on_train_begin()
            optimizer = getattr(model, "optimizer", None)
            if optimizer is not None and optimizer.built:  # what a state keeps is from before the end of a fit
                optimizer.finalize_variable_values(model.trainable_weights)
            return history
        random, self._random = self._random, None
        ends = [EndOfBatch(x.aside)] if isinstance(x, BalancedDataset) else []
        told: Any = [UpdatePositionCallback(self, random), *keras.tree.flatten(callbacks or ()), *ends]
        if self.batch:
            verbose = arguments.get("verbose", "auto")
            told = Resumed(
                told, model=model, epoch=self.epoch, done=self.batch, steps=len(x), epochs=epochs, verbose=verbose
            )
            part = {"initial_epoch": self.epoch, "epochs": self.epoch + 1, "steps_per_epoch": len(x) - self.batch}
            with told.rest():
                history = model.fit(x, callbacks=told, **part, **arguments)
            if model.stop_training or self.epoch >= epochs:
                return history
        return model.fit(x, initial_epoch=self.epoch, epochs=epochs, callbacks=told, **arguments)

    def _part(self, value: Any) -> Any:
        if isinstance(value, (keras.Model, keras.optimizers.Optimizer)):
            return Variables(value)
        return super()._part(value)

    def _balancer_of(self, part: Any) -> Any:
        if not isinstance(part, Variables):
            return super()._balancer_of(part)
        reducer = reducer_of(part.owner)
        return None if reducer is None else reducer.balancer

    def _merge(self, part: Any) -> None:
        if isinstance(part, Variables) and (reducer := reducer_of(part.owner)) is not None:
            part.owner.merge()
            reducer.merge_averages(part.owner)

    def _sync_part(self, part: Any, root: int) -> None:
        if isinstance(part, Variables):
            broadcast_variables(part.variables, root)
            part.written()
        else:
            super()._sync_part(part, root)

    def _of_root(self, value: Any, root: int, *, name: str) -> Any:
        return broadcast_object(value, root, name=name)

    def _of_all(self, value: Any, *, name: str) -> list[Any]:
        return allgather_object(value, name=name)  # whose waits are explained, unlike those of Horovod's for TensorFlow

    def reset(self) -> None:
        """Forgets functions that were traced for the ranks before."""
        for part in self._parts.values():
            if isinstance(part, Variables) and isinstance(part.owner, keras.Model):
                part.owner.train_function = part.owner.test_function = part.owner.predict_function = None

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _own_state(self) -> dict[str, Any]:
        parts = {name: part for name, part in self._parts.items() if isinstance(part, Variables)}
        return {"random": random_state(), "variables": {name: part.own_state() for name, part in parts.items()}}

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._random = state["random"]
        load_random_state(self._random)
        for name, values in state["variables"].items():
            self._parts[name].load_own_state(values)


class TensorFlowKerasState(KerasState):
    """`KerasState`, as `horovod.tensorflow.elastic` has it.

    Args:
        backend: Horovod's; of no effect.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        super().__init__(model, optimizer, **values)


def _is_gone(error: Exception) -> bool:
    """Whether an error says that a peer is gone, also as TensorFlow passes it on: of one of Horovod's own operations
    that has failed (and was not called wrongly) it makes an UnknownError."""
    if isinstance(error, (backend.horovod_error(), PeerError)):
        return True
    if not type(error).__module__.startswith("tensorflow"):
        return False
    failed = type(error).__name__ == "UnknownError" and "Horovod" in str(error)
    return failed or says_removed(str(error)) or any(name in str(error) for name in GONE)


def run(train: Callable[..., T]) -> Callable[..., T]:
    """Decorates `train(state, ...)`: it is called anew, with the state of the last commit, whenever ranks have died,
    joined or left.

    Before it is called, every rank makes the same objects (balancer, datasets, optimizers) in the same order, keeps
    them, and makes no other collective call: a rank that joins makes its objects while the others rebuild theirs.
    Callbacks are made within `train`. A `tf.function` that reduces gradients is traced anew for other ranks.
    """
    return binding.elastic_run(backend.NAME, train, gone=_is_gone)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise AttributeError(absent.absent(__name__, name))
