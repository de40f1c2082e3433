"""A callback that averages metrics over all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine import script
from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.agreement import agree_text

from .. import backend
from ..reducer import reducer_of
from ..tape import reduces_by_tapes
from .broadcast import optimizers_of


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

    If ranks are at the ends of different epochs, or have different metrics, all of them raise ValueError. It
    warns of a model that has plain optimizers alone, as one that was compiled anew, unless the script has used a
    `DistributedGradientTape`: ranks train apart then.

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
        if self._engine.size > 1:
            self._warn_of_plain_optimizers()

    def _warn_of_plain_optimizers(self) -> None:
        """Warns if an epoch was trained with plain optimizers alone, as of a model that was compiled anew."""
        optimizers = optimizers_of(self.model)
        if optimizers and not any(map(reducer_of, optimizers)) and not reduces_by_tapes():
            script.warn(
                "Expected hvd.DistributedOptimizer(...) as the model's optimizer, also when it is compiled anew. "
                f"Received: a plain {type(optimizers[0]).__name__}, and an epoch is over: unless the script averages "
                "gradients by itself, each rank has trained a model of its own.",
            )

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
