"""A sum over ranks that gradients flow through, on the torch back end."""

from __future__ import annotations

from typing import Any

import torch

from hvd_hetero.optimizers.moments import RowSum

at_least = torch.clamp_min  # unlike Keras' own maximum, it keeps float64


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vector: torch.Tensor, count: float, rows: RowSum) -> torch.Tensor:
        ctx.count, ctx.rows = count, rows
        return rows.forth(vector.clone())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.rows.back(gradients[0].clone(), ctx.count), None, None


def summed(vector: torch.Tensor, count: torch.Tensor, rows: RowSum) -> torch.Tensor:
    """`vector` summed over the ranks; `count`: this rank's rows."""
    if vector.device.type == "meta":  # Keras asks for shapes
        return vector
    return _Summed.apply(vector, float(count), rows)  # type: ignore[no-any-return]
