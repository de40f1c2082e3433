"""Normalises a batch over the rows of all ranks, as an autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvd_hetero.optimizers.row_sum import RowSum, merged


class Normalised(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps), with mean and variance over all ranks' rows. Returns y, the mean, the
    variance and the number of rows.

    Backward, with g the gradient of y, n the number of rows, S and Q the weighted sums of g and g y over all rows:
    dx = (g - S / n - y Q / n) / sqrt(variance + eps).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, rows: RowSum) -> tuple[torch.Tensor, ...]:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        count = x.numel() // x.shape[1]
        if count:
            variance, mean = (part.double() for part in torch.var_mean(x, dim=axes, correction=0))
        else:
            variance = mean = x.new_zeros(x.shape[1], dtype=torch.float64)
        own = torch.cat([mean.new_tensor([count]), count * mean, count * (variance + mean**2)])
        whole = merged(rows.forth(own), x.shape[1], at_least=torch.clamp_min)
        shape = [1, -1] + [1] * (x.dim() - 2)
        scale = (whole.variance + eps).rsqrt().to(x.dtype).view(shape)
        y = (x - whole.mean.to(x.dtype).view(shape)) * scale
        ctx.save_for_backward(y, scale)
        ctx.axes, ctx.rows, ctx.samples, ctx.whole_count = axes, rows, len(x), whole.rows
        moments = whole.mean.to(x.dtype), whole.variance.to(x.dtype), whole.rows.to(x.dtype)
        ctx.mark_non_differentiable(*moments)
        return y, *moments

    @staticmethod
    @once_differentiable  # the sums over ranks are not seen by autograd
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        y, scale = ctx.saved_tensors
        gradient = gradients[0]
        own = torch.cat([gradient.sum(ctx.axes), (gradient * y).sum(ctx.axes)]).double()
        sums = ctx.rows.back(own, ctx.samples) / ctx.whole_count.clamp_min(1.0)
        of_ones, of_y = (part.to(y.dtype).view(scale.shape) for part in sums.chunk(2))
        return (gradient - of_ones - y * of_y) * scale, None, None


@torch.compiler.disable  # a compiler breaks its graph at the sums over ranks, and loses what forward() has saved
def normalised(x: torch.Tensor, eps: float, rows: RowSum) -> tuple[torch.Tensor, ...]:
    """`Normalised`, as a function of `x`, shape (rows, features, ...). `rows` makes the sums over ranks."""
    return Normalised.apply(x, eps, rows)  # type: ignore[no-any-return]
