"""A loss that all ranks agree on."""

from __future__ import annotations

from typing import Any

import torch

from hvd_hetero.engine.port import Engine


def mean_over_ranks(loss: Any, *, terms: float, engine: Engine, name: str, of_none: float = 0.0) -> Any:
    """The mean over all ranks' loss terms of `loss`, this rank's mean over `terms` of them; None for None.

    A collective call. A tensor gives a tensor of its shape, type and device, a number a float; `of_none` where no rank
    has any term.
    """
    if loss is None:
        return None
    local = loss.detach() if isinstance(loss, torch.Tensor) else loss
    value = float(local) * terms if terms else 0.0
    sums = engine.allreduce_async(torch.tensor([value, terms], dtype=torch.float64, device="cpu"), name=name).wait()
    mean = sums[0] / sums[1] if sums[1] else torch.full_like(sums[0], of_none)
    return mean.to(loss).reshape(loss.shape) if isinstance(loss, torch.Tensor) else float(mean)
