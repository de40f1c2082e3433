"""Tensors as statistics that ranks merge: of optimizers, and of layers."""

from __future__ import annotations

from typing import Any

import torch

from hvd_hetero.optimizers.statistic import Statistic

IN_PLACE = (torch.float32, torch.float64, torch.int64)  # types that are merged as they are


def statistic_of(tensor: torch.Tensor, kind: torch.dtype | None = None) -> Statistic:
    """A tensor's values, for `merge_statistics`.

    The array that is overwritten is the tensor's own memory if that is dense, on the host and of one of the types
    `IN_PLACE`. Otherwise it is a copy, of float64 or int64 if of another type. Complex numbers are pairs of real ones.

    Args:
        kind: the type of the array; None: as above.
    """

    def read() -> Any:
        dense = tensor.detach().to_dense()
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        wide = torch.float64 if real.is_floating_point() else torch.int64
        found = real.to("cpu", kind or (real.dtype if real.dtype in IN_PLACE else wide)).reshape(-1)
        return found.numpy()

    def write(merged: Any) -> None:
        # A tensor made in inference mode can be written to in inference mode alone.
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            values = torch.from_numpy(merged)
            values = torch.view_as_complex(values.view(-1, 2)) if tensor.is_complex() else values
            values = values.view(tensor.shape)
            tensor.copy_(values.to_sparse(tensor.sparse_dim()) if tensor.is_sparse else values)

    return Statistic(tensor.numel() * (2 if tensor.is_complex() else 1), read, write)
