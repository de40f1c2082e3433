"""Callbacks that give all ranks the same variables and metrics, and that save the best model once."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.agreement import agree_text

from .. import backend
from ..function import broadcast_variables
from ..normalization import take_in_statistics


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Overwrites the weights of the model and the variables of its optimizers with those of `root_rank`.

    Its optimizers are the one that it was compiled with, and others that are attributes of the model, as of a GAN, or
    are in lists, tuples and dicts that are. This happens before the first step, or right after it for a model that is
    built by that step. Each rank keeps its own random seeds, so that dropout and augmentation differ between ranks,
    unless a script gives all the same seed.

    Args:
        root_rank: the rank whose variables all get.
        device: an argument of Horovod without effect.
        local_variables: a variable, or several, that are not overwritten.
        process_set: the ranks (default: all).
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None, process_set: Any = None
    ) -> None:
        super().__init__()
        self.root_rank, self._process_set = root_rank, process_set
        given = [local_variables] if isinstance(local_variables, keras.Variable) else local_variables
        self._local = {id(variable) for variable in given or ()}
        self.broadcast_done = False

    def register_local_var(self, var: Any) -> None:
        """Excludes one more variable from the broadcast: each rank keeps its own value."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts the variables, if the model has any. A collective call then."""
        self.broadcast_done = False
        if self.model.built or self.model.weights:  # a model without a `call`, as a GAN, may consist of built models
            # A subclass of keras.Model without its own `build()` may be built without its layers, and a layer may also
            # never be called. So the variables that exist are broadcast now, and all of them after the first step.
            self._broadcast(whole=all(layer.built for layer in self.model._flatten_layers()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first step, if the model was not completely built before it. A collective call then."""
        if not self.broadcast_done:
            self._broadcast(whole=True)

    def _broadcast(self, *, whole: bool) -> None:
        """Broadcasts the variables that exist. `whole`: all do, and the optimizer is built if need be."""
        optimizer = self.model.optimizer
        if whole and optimizer is not None and not optimizer.built:  # None if a custom train_step has the optimizers
            optimizer.build(self.model.trainable_variables)
        # Those of a train_step as well, each once.
        optimizers = {id(each): each for each in [optimizer, *_optimizers_in(vars(self.model))]}
        every = [*self.model.weights, *(v for each in optimizers.values() for v in getattr(each, "variables", ()))]
        variables = [v for v in every if id(v) not in self._local]
        broadcast_variables(variables, self.root_rank, self._process_set)
        take_in_statistics(self.model)
        self.broadcast_done = whole


def _optimizers_in(value: Any) -> Iterator[keras.optimizers.Optimizer]:
    """The optimizers that a value is or, of dicts, lists and tuples, holds, those within such containers included."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _optimizers_in(each)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of each epoch over all ranks, weighted by the samples that each rank has seen.

    It should come before callbacks that decide by metrics, such as EarlyStopping and ReduceLROnPlateau.

    The mean is exact for metrics that are means over samples, such as losses and accuracies; not for AUC, precision or
    R2. Three cases need care:

    - In a short batch, a rank without a sample gets one of another rank's, which counts as well.
    - A `Mean` that a `train_step` updates with the loss of a batch counts batches: pass it
      `sample_weight=keras.ops.shape(x)[0]`.
    - With the TensorFlow back end and several outputs, Keras takes the loss of each output as a mean over batches. Its
      mean over ranks is exact if a rank's batches have equal sizes.

    Metrics of a validation are weighted by its samples: those that an `hvd.EvaluationDataset` deals to each rank, or
    all, if each rank validates on all.

    If ranks are at the ends of different epochs, or have different metrics, all of them raise ValueError.

    Args:
        device: an argument of Horovod without effect.
        process_set: the ranks (default: all).
    """

    def __init__(self, device: str = "", process_set: Any = None, *, engine: Engine | None = None) -> None:
        super().__init__()
        self._process_set, self._engine = process_set, engine
        # Results of `_counts`. Kept, as later callbacks may reset the metrics; None: not taken yet.
        self._trained: dict[str, float] | None = None  # of the epoch
        self._validated: dict[str, float] | None = None  # of the validation in this epoch
        self._name = ""
        self._batches = self._test_batches = range(0)  # see `_done`: in the epoch, and in its validation
        self._first: int | None = None  # index of the epoch's first batch, not 0 if the epoch is resumed

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets the name of this callback's operations: after an elastic reset, a new one is needed."""
        self._name = ""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forgets the sample counts of the last epoch."""
        self._trained = self._validated = self._first = None
        self._batches = range(0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the index of the batch with which the epoch begins, or is resumed."""
        self._first = batch if self._first is None else self._first

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batches of the epoch; after its last one, notes the sample counts of its metrics."""
        first, steps = self._first or 0, (self.params or {}).get("steps")
        self._batches = self._done(batch - first)
        if steps is not None and steps - first in self._batches:
            self._trained = self._counts(self._batches)

    def on_test_begin(self, logs: Any = None) -> None:
        """Notes the sample counts of the epoch's metrics, which the validation resets."""
        if self._trained is None:
            self._trained = self._counts(self._batches)
        self._test_batches = range(0)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batches of the validation."""
        self._test_batches = self._done(batch)

    def on_test_end(self, logs: Any = None) -> None:
        """Notes the sample counts of the validation's metrics."""
        self._validated = self._counts(self._test_batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replaces the numbers in `logs` by their weighted means over ranks. A collective call.

        Raises:
            ValueError: on every rank, if ranks are at different epochs or have different metrics.
        """
        if logs is None:
            return
        if self._engine is None:
            self._engine = backend.engine(self._process_set)
        self._name = self._name or self._engine.unique("hvd_hetero.metrics.")
        trained = self._counts(self._batches) if self._trained is None else self._trained
        validated = self._counts(self._test_batches) if self._validated is None else self._validated
        self._trained = self._validated = None
        own = {key: np.asarray(value, "float64") for key, value in sorted(logs.items()) if is_numeric(value)}
        named = ", ".join(key + (str(list(value.shape)) if value.ndim else "") for key, value in own.items())
        # Compared in each epoch: a rank cannot know whether the metrics of others have changed. The epoch may differ,
        # too, as Keras's BackupAndRestore may make ranks begin at different epochs.
        what = f"epoch {epoch + 1} with {named}"
        agree_text(self._engine, lambda: what, title="epoch and metrics", name=f"{self._name}.keys")
        weights = [
            _weight(validated, key.removeprefix("val_")) if key.startswith("val_") else _weight(trained, key)
            for key in own
        ]
        weighted = [
            np.ravel(value * weight if weight else np.zeros_like(value))
            for value, weight in zip(own.values(), weights, strict=True)
        ]
        total = self._engine.allreduce_async(np.concatenate([*weighted, weights]), name=self._name).wait()
        sums = np.split(total, np.cumsum([value.size for value in own.values()], dtype=int))
        for (key, value), summed, weight in zip(own.items(), sums[:-1], sums[-1].tolist(), strict=True):
            mean = summed.reshape(value.shape) / weight if weight else np.full(value.shape, math.nan)
            logs[key] = mean if mean.ndim else float(mean)

    def _done(self, batch: int) -> range:
        """How many batches there may have been when Keras ends one of this number, which is that of the last one of an
        execution or, in Keras 3.10, of the first: with `steps_per_execution` the last execution may have fewer."""
        at_once = getattr(self.model, "steps_per_execution", 1)
        before = batch - batch % at_once
        return range(before + 1, before + at_once + 1)

    def _counts(self, batches: Collection[int] = ()) -> dict[str, float]:
        """The number of samples that each metric is a mean over since it was reset, by the metric's name.

        Metrics that are no means over samples are left out, and get the weight of the loss. So are those that have
        counted batches, as if a function returns one number for a batch: batches of ranks differ in size.

        Args:
            batches: the number of batches so far is one of these. A metric with such a count, other than the loss, has
                counted batches.
        """
        every = [each for metric in self.model.metrics for each in (metric, *getattr(metric, "metrics", ()))]
        # If the number of rows is not known while TensorFlow traces, Keras counts batches for the loss of each of
        # several outputs. These get the weight of the whole loss.
        parts = {id(each) for each in getattr(getattr(self.model, "_compile_loss", None), "metrics", ())}
        named = {each.name: each for each in every if id(each) not in parts}
        named |= _by_key(getattr(self.model, "_compile_metrics", None))
        counts = {key: getattr(each, "count", None) for key, each in named.items()}
        found = {
            key: float(keras.ops.convert_to_numpy(count))
            for key, count in counts.items()
            if isinstance(count, keras.Variable) and len(count.shape) == 0  # R2Score has one for each class
        }
        if batches and not found.get("loss", 1.0):
            del found["loss"]  # Keras's own, which a `train_step` that has its losses itself leaves at 0
        alone = "loss" not in found
        return {key: count for key, count in found.items() if key == "loss" or count not in batches or alone}


def _by_key(compiled: Any) -> dict[str, Any]:
    """The metrics that a model was compiled with, by their keys in its logs.

    Keras makes the keys, from output names and "weighted_", when it collects the results of its metrics. So this lets
    it collect stand-ins, each of which returns the metric itself as its result.

    Args:
        compiled: the `CompileMetrics` of a model, or None.
    """
    if not getattr(compiled, "built", False):
        return {}

    def stand_ins(lists: Iterable[Any]) -> list[Any]:
        return [
            each and SimpleNamespace(
                output_name=each.output_name,
                metrics=[SimpleNamespace(name=one.name, result=functools.partial(_same, one)) for one in each.metrics],
            )
            for each in lists
        ]

    lists = {name: stand_ins(getattr(compiled, name)) for name in ("_flat_metrics", "_flat_weighted_metrics")}
    found: dict[str, Any] = type(compiled).result(SimpleNamespace(built=True, **lists))
    return found


def _same(metric: Any) -> Any:
    return metric


def is_numeric(value: Any) -> bool:
    """Whether a log value is a number, or an array of numbers, as of a metric with a value for each class; not a text,
    a date or a list, which a callback may have put into the logs."""
    if isinstance(value, (list, tuple)):  # of which numpy makes no array where its parts differ in length
        return False
    if np.ndim(value) == 0:
        return np.asarray(value).dtype.kind not in "OSUMm"
    return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.number)


def _weight(counts: Mapping[str, float], name: str) -> float:
    """The weight of this rank's metric: its count, or if it has none, that of the loss, or else the largest one, as a
    `train_step` may log a metric under another name; 1 where there is none."""
    return counts.get(name, counts.get("loss", max(counts.values(), default=1.0)))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far, only on rank 0 or on the first rank of the optimizer's process set.

    It should come after `MetricAverageCallback`.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as of `keras.callbacks.ModelCheckpoint`, in the order of
            `horovod.tensorflow.keras`; `horovod.keras` has no `save_weights_only`.
        filepath: the file (default: "best.keras"; with `save_weights_only`, "best.weights.h5").

    Raises:
        TypeError: `save_weights_only` is no bool, as if the arguments are in the order of `horovod.keras`.
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
        reducer = getattr(getattr(self.model, "optimizer", None), "__dict__", {}).get("_reducer")
        first = 0 if reducer is None else reducer.balancer.engine.ranks[0]
        if backend.horovod.rank() == first:
            super()._save_model(epoch, batch, logs)
