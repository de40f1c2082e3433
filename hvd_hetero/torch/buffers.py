"""Merges the buffers of a model over the ranks, such as running statistics of normalisation layers."""

from __future__ import annotations

import torch

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.statistic import merge_statistics

from .statistic import statistic_of


def average_buffers(
    model: torch.nn.Module, *, weight: float, otherwise: float = 1.0, engine: Engine, name: str
) -> None:
    """Gives all ranks the same buffers. A collective call.

    A floating-point buffer becomes the mean over ranks, weighted by `weight` (this rank's samples; where no rank has
    any, by `otherwise`). A `running_var` beside a `running_mean` becomes the variance of all samples together: the mean
    of E[x^2] = var + mean^2, less the square of the merged mean. Complex numbers become means as well, whole numbers
    (`num_batches_tracked`) the largest, and a truth (a mask) is one where it is one on any rank. Sparse ones stay.
    """
    floats: list[torch.Tensor] = []
    moments: list[tuple[torch.Tensor, torch.Tensor]] = []  # running_mean, running_var
    whole: list[torch.Tensor] = []
    for module in model.modules():
        own = dict(module.named_buffers(recurse=False))
        for title, buffer in own.items():
            if title == "running_var" and own.get("running_mean") is not None:
                moments.append((own["running_mean"], buffer))
            elif title == "running_mean" and own.get("running_var") is not None:
                continue  # with its variance
            elif buffer.layout is not torch.strided:
                continue  # sparse, such as a graph's edges: no layer gathers statistics in such a tensor
            elif buffer.is_floating_point() or buffer.is_complex():
                floats.append(buffer)
            else:
                whole.append(buffer)
    merge_statistics(
        list(map(statistic_of, floats)),
        [(statistic_of(mean), statistic_of(variance)) for mean, variance in moments],
        list(map(statistic_of, whole)),
        weight=weight,
        otherwise=otherwise,
        engine=engine,
        name=name,
    )
