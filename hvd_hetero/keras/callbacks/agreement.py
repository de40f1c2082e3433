"""Callbacks that make all ranks hold the same: variables, metrics, and one file of the best model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
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
    """Overwrites the weights of the model and the variables of its optimizer with those of `root_rank`.

    Before the first step; for a model that is built only by that step, right after it. Random seeds stay those of each
    rank, so that ranks drop out and augment differently unless a script seeds them alike.

    Args:
        root_rank: who sends.
        device: of no effect; Horovod's argument.
        local_variables: a variable, or several, that stay each rank's own.
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
        """Leaves one more variable as it is on each rank."""
        self._local.add(id(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcasts, where the model is built."""
        self.broadcast_done = False
        if self.model.built:
            # `build()` of a subclass without one of its own leaves its layers as they are. Of a model with a layer that
            # is never called nobody can tell: what there is travels now, and all of it after the first step.
            self._broadcast(whole=all(layer.built for layer in self.model._flatten_layers()))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first step of a model that it has built."""
        if not self.broadcast_done:
            self._broadcast(whole=True)

    def _broadcast(self, *, whole: bool) -> None:
        optimizer = self.model.optimizer
        if whole and optimizer is not None and not optimizer.built:  # none: a train_step has others
            optimizer.build(self.model.trainable_variables)
        variables = [v for v in [*self.model.weights, *getattr(optimizer, "variables", ())] if id(v) not in self._local]
        broadcast_variables(variables, self.root_rank, self._process_set)
        take_in_statistics(self.model)
        self.broadcast_done = whole


class MetricAverageCallback(keras.callbacks.Callback):
    """Makes the metrics of each epoch those of all ranks: their mean, weighted by the samples that each rank has seen.

    To be put before callbacks that decide by metrics, such as EarlyStopping and ReduceLROnPlateau. Exact for metrics
    that are means over samples, as losses and accuracies are, but for the sample of another rank that one without any
    looks at in a short batch; AUC, precision or R2 are not. A `Mean` that a `train_step` updates with the loss of a
    batch counts batches: pass it `sample_weight=keras.ops.shape(x)[0]`. With the TensorFlow back end the loss of each
    of several outputs is a mean over a rank's batches, in Keras itself: it is exact where these are of one size.
    Metrics of a validation are weighted by its samples: with an `hvd.EvaluationDataset`, which deals them out, or with
    all of them on each rank.

    Ranks that are at the ends of unlike epochs, or have unlike metrics there, all raise.

    Args:
        device: of no effect; Horovod's argument.
        process_set: the ranks (default: all).
    """

    def __init__(self, device: str = "", process_set: Any = None, *, engine: Engine | None = None) -> None:
        super().__init__()
        self._process_set, self._engine = process_set, engine
        # See `_counts`; None: these are the present ones, which a callback before this one may have begun anew.
        self._trained: dict[str, float] | None = None  # of the epoch
        self._validated: dict[str, float] | None = None  # of its validation
        self._name = ""
        self._batches = self._test_batches = 0  # of the epoch, and of the validation
        self._first: int | None = None  # of the epoch, which may go on from within

    def on_train_begin(self, logs: Any = None) -> None:
        """Names its operations anew: the ranks may have become others."""
        self._name = ""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forgets the samples of the last epoch."""
        self._trained = self._validated = self._first = None
        self._batches = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes with which batch the epoch begins, or goes on."""
        self._first = batch if self._first is None else self._first

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the samples of the epoch with its last batch."""
        self._batches = batch + 1 - (self._first or 0)
        if batch + 1 == (self.params or {}).get("steps"):
            self._trained = self._counts(self._batches)

    def on_test_begin(self, logs: Any = None) -> None:
        """Notes the samples of the epoch, before the validation counts its own."""
        if self._trained is None:
            self._trained = self._counts(self._batches)
        self._test_batches = 0

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batches of the validation."""
        self._test_batches = batch + 1

    def on_test_end(self, logs: Any = None) -> None:
        """Notes the samples of the validation."""
        self._validated = self._counts(self._test_batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages `logs` in place. A collective call."""
        if logs is None:
            return
        if self._engine is None:
            self._engine = backend.engine(self._process_set)
        self._name = self._name or self._engine.unique("hvd_hetero.metrics.")
        trained = self._counts(self._batches) if self._trained is None else self._trained
        validated = self._counts(self._test_batches) if self._validated is None else self._validated
        self._trained = self._validated = None
        own = {key: np.asarray(value, "float64") for key, value in sorted(logs.items()) if _is_numeric(value)}
        named = ", ".join(key + (str(list(value.shape)) if value.ndim else "") for key, value in own.items())
        # In each epoch: a rank whose metrics are the ones it had before cannot know that another's are not.
        # And one that began at another epoch, as Keras's BackupAndRestore makes it, ends before or after the others.
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

    def _counts(self, batches: int = 0) -> dict[str, float]:
        """What metrics are means over, as far as they are: samples seen since they were reset, by their names. Not of
        those that have counted these `batches`, as where a function makes one number of a batch: they weigh what the
        loss does, as ranks have batches of unlike sizes."""
        every = [each for metric in self.model.metrics for each in (metric, *getattr(metric, "metrics", ()))]
        # Where the number of rows is not known while TensorFlow traces, Keras counts batches for the loss of each of
        # several outputs. They are parts of the loss, and weigh what it weighs.
        parts = {id(each) for each in getattr(getattr(self.model, "_compile_loss", None), "metrics", ())}
        named = {each.name: each for each in every if id(each) not in parts}
        named |= _by_key(getattr(self.model, "_compile_metrics", None))
        counts = {key: getattr(each, "count", None) for key, each in named.items()}
        found = {
            key: float(keras.ops.convert_to_numpy(count))
            for key, count in counts.items()
            if isinstance(count, keras.Variable) and len(count.shape) == 0  # R2Score has one for each class
        }
        return {key: count for key, count in found.items() if key == "loss" or count != batches or "loss" not in found}


def _by_key(compiled: Any) -> dict[str, Any]:
    """The metrics that a model was compiled with, by their keys in its logs: Keras names them with the output and
    "weighted_" as it puts their results together, so here each has itself for a result."""
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


def _is_numeric(value: Any) -> bool:
    """Whether it is a number, or an array of numbers, as of a metric that has one for each class."""
    return np.ndim(value) == 0 or isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.number)


def _weight(counts: Mapping[str, float], name: str) -> float:
    """The weight of a rank's metric: the number that it is a mean over, or else that of the loss."""
    return counts.get(name, counts.get("loss", 1.0))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the best model so far, on rank 0 alone, or the first of its process set. To be put after
    `MetricAverageCallback`.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: as of `keras.callbacks.ModelCheckpoint`, in the order of
            `horovod.tensorflow.keras`; `horovod.keras` has no `save_weights_only`.
        filepath: where to (default: "best.keras"; of weights only: "best.weights.h5").

    Raises:
        TypeError: `save_weights_only` is no bool: it is a `mode` that was meant.
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
