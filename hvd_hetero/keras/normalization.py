"""`SyncBatchNormalization`: batch normalisation over the rows of all ranks, however many each has.

Also `take_in_statistics`, which keeps Keras's `Normalization` consistent when its variables are overwritten.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras
from keras import ops

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.balancer import check_balancer
from hvd_hetero.optimizers.row_sum import RowSum, merged

from . import backend
from .balancer import Balancer


def take_in_statistics(model: keras.Model) -> None:
    """Makes the `Normalization` layers of a model use their present variables.

    Must be called after the variables of `model` were written, as by a broadcast. Such a layer computes with values
    that it has derived from its variables at its last `adapt()`; here it derives them again.
    """
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


@keras.saving.register_keras_serializable(package="hvd_hetero")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation over the rows of all ranks: what BatchNormalization of one process does on the global batch.

    Statistics are weighted by the number of rows (with a mask: of rows that are not masked), so ranks may have unequal
    batches. In training each call is collective. The layer has first derivatives only. Further arguments are those of
    `keras.layers.BatchNormalization`.

    Args:
        balancer: knows over how many terms each rank's loss is a mean, by which gradients through the statistics are
            weighted. It also knows whether this rank has no sample in a batch, and got one of another rank's from
            `BalancedDataset`, which is then left out of the statistics. A rank with rows but without a loss term takes
            part in the statistics, but gets no gradients through them. Without a balancer, gradients are weighted by
            the samples of each rank.
        process_set: the ranks (default: the balancer's, or all).

    Raises:
        TypeError: `balancer` is not a balancer.
        ValueError: `synchronized` or `renorm` is set.
    """

    def __init__(
        self,
        *args: Any,
        balancer: Balancer | None = None,
        process_set: Any = None,
        engine: Engine | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if balancer is not None:
            check_balancer(balancer)
        renorm = getattr(self, "renorm", False)  # which Keras has had since 3.14
        if self.synchronized or renorm:
            raise ValueError(
                "synchronized, renorm: expected False: synchronizing is what this layer does, and the corrections of "
                f"renorm are for batches that are not whole. Received: {self.synchronized}, {renorm}."
            )
        self._balancer, self._process_set, self._engine = balancer, process_set, engine
        self._rows: RowSum | None = None
        self._form: Any = importlib.import_module(f"{__package__}.row_sum_{backend.NAME}")

    def take(self, balancer: Balancer | None = None, process_set: Any = None) -> None:
        """Sets the balancer and the process set of a layer that was made from a configuration, as by `load_model`."""
        self._balancer, self._process_set, self._rows = balancer, process_set, None

    def _sum(self, vector: Any, samples: Any) -> Any:
        """`vector` summed over ranks, with gradients; `samples`: the rows of this rank's batch. A collective call."""
        if self._rows is None:  # not in the constructor, as a model may be made before hvd.init()
            balancer, engine = self._balancer, self._engine
            if engine is None and balancer is not None and self._process_set is None:
                engine = balancer.engine
            engine = engine or backend.engine(self._process_set)
            self._rows = RowSum(
                engine,
                counts=lambda: balancer is None or not balancer.idle,
                terms=lambda: None if balancer is None else balancer.terms_due,
            )
            engine.on_reset_begin(self._forget_ranks)
        return self._form.summed(vector, samples, self._rows)

    def _forget_ranks(self) -> None:
        """Makes the next sum use the present ranks; the engine calls it after an elastic reset."""
        self._rows = None

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        """The mean and the biased variance of all ranks' rows; the base class takes those of this rank's rows."""
        axes, features = self._reduction_axes, inputs.shape[self.axis]
        if mask is None:
            kept, count = inputs, ops.cast(ops.size(inputs), "float64") / features
        else:
            mask = ops.broadcast_to(ops.expand_dims(ops.cast(mask, "bool"), -1), ops.shape(inputs))
            kept, count = ops.where(mask, inputs, ops.zeros_like(inputs)), ops.sum(ops.cast(mask, "float64")) / features
        mean = ops.sum(kept, axes, keepdims=True) / ops.cast(self._form.at_least(count, 1.0), inputs.dtype)
        distance = inputs - mean if mask is None else ops.where(mask, inputs - mean, ops.zeros_like(inputs))
        squares = ops.cast(ops.sum(ops.square(distance), axes), "float64")
        mean = ops.cast(ops.reshape(mean, (-1,)), "float64")
        vector = ops.concatenate([ops.reshape(count, (1,)), count * mean, squares + count * mean * mean])
        whole = merged(self._sum(vector, ops.shape(inputs)[0]), features, at_least=self._form.at_least)
        return ops.cast(whole.mean, inputs.dtype), ops.cast(whole.variance, inputs.dtype)
