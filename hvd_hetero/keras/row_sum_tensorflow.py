"""A differentiable sum over ranks, in host memory, for `SyncBatchNormalization` on the TensorFlow back end."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvd_hetero.optimizers.row_sum import RowSum

at_least = tf.maximum  # element-wise; unlike Keras' own maximum, it keeps float64


def summed(vector: Any, samples: Any, rows: RowSum) -> Any:
    """Sums a vector over the ranks; its gradient is summed over them as well, weighted by loss terms: see `RowSum`.

    Args:
        vector: a float64 tensor of known length.
        samples: the number of rows of this rank's batch, a scalar tensor.
        rows: does both sums, on the host.
    """

    def on_host(function: Any, *tensors: Any) -> Any:
        result = tf.numpy_function(function, tensors, tf.float64)
        result.set_shape(vector.shape)
        return result

    @tf.custom_gradient
    def back(gradient: Any) -> Any:
        return on_host(lambda g, n: rows.back(np.array(g), float(n)), gradient, samples), _second

    @tf.custom_gradient
    def forth(value: Any) -> Any:
        return on_host(lambda v: rows.forth(np.array(v)), value), back

    return forth(vector)


def _second(*gradients: Any) -> Any:
    raise NotImplementedError(
        "Expected first derivatives of SyncBatchNormalization. Received: a gradient of its gradient, in which the sums "
        "over ranks would be missing. Use another normalisation with a gradient penalty."
    )
