"""Averages a loss over the loss terms of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.argument import number_of


def mean_over_ranks(
    loss: Any, *, terms: float, engine: Engine, name: str, of_none: float = 0.0, kind: torch.dtype | None = None
) -> Any:
    """The mean loss over the loss terms of all ranks, from `loss`, this rank's mean over its `terms`.

    A collective call. Returns a tensor of the same shape, type and device for a tensor, and a float for a number. For a
    tensor of integers or bools the type is torch's default, which holds a fraction. The value is `of_none` if no rank
    has any term. A rank that gives None has no terms, and gets a tensor of type `kind` (default: torch's default), or
    None if no rank has any term. Raises TypeError for a tensor of several elements.
    """
    if loss is None:  # as of a closure that a rank without a sample leaves early
        terms = 0.0
    local = loss.detach() if isinstance(loss, torch.Tensor) else loss
    value = number_of("loss", local) * terms if terms else 0.0
    sums = engine.allreduce_async(torch.tensor([value, terms], dtype=torch.float64, device="cpu"), name=name).wait()
    mean = sums[0] / sums[1] if sums[1] else torch.full_like(sums[0], of_none)
    if loss is None:
        return mean.to(kind or torch.get_default_dtype()) if sums[1] else None
    if not isinstance(loss, torch.Tensor):
        return float(mean)
    kind = loss.dtype if loss.is_floating_point() or loss.is_complex() else torch.get_default_dtype()
    return mean.to(loss.device, kind).reshape(loss.shape)
