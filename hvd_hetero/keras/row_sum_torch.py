"""A differentiable sum over ranks, for `SyncBatchNormalization` on the torch back end."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvd_hetero.optimizers.row_sum import RowSum

at_least = torch.clamp_min  # element-wise maximum; unlike Keras' own, it keeps float64


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: torch.Tensor, samples: int, rows: RowSum) -> torch.Tensor:
        ctx.samples, ctx.rows = samples, rows
        return rows.forth(vector.clone())  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.rows.back(gradients[0].clone(), ctx.samples), None, None


def summed(vector: torch.Tensor, samples: int, rows: RowSum) -> torch.Tensor:
    """Sums a vector over the ranks; its gradient is summed over them as well, weighted by loss terms: see `RowSum`.

    Args:
        vector: a float64 tensor.
        samples: the number of rows of this rank's batch.
        rows: does both sums.
    """
    if vector.device.type == "meta":  # Keras only infers shapes
        return vector
    return _Summed.apply(vector, int(samples), rows)  # type: ignore[no-any-return]
