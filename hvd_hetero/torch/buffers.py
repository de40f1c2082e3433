"""Merges the buffers of a model over the ranks, such as running statistics of normalisation layers."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.statistic import merged_statistics


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
            elif buffer.is_complex():
                floats.append(torch.view_as_real(buffer))
            elif buffer.is_floating_point():
                floats.append(buffer)
            else:
                whole.append(buffer)
    merged = merged_statistics(
        [_array(buffer) for buffer in floats],
        [(_array(mean), _array(variance)) for mean, variance in moments],
        [_array(buffer) for buffer in whole],
        weight=weight,
        otherwise=otherwise,
        engine=engine,
        name=name,
    )
    for buffer, value in zip([*floats, *chain.from_iterable(moments), *whole], merged, strict=True):
        # A tensor made in inference mode can be written to in inference mode alone.
        with torch.inference_mode(buffer.is_inference()), torch.no_grad():
            buffer.copy_(torch.from_numpy(value))


def _array(buffer: torch.Tensor) -> Any:
    """The buffer's values as a numpy array of float64, or of int64 if they are whole numbers or bools."""
    return (buffer.double() if buffer.is_floating_point() else buffer.long()).cpu().numpy()
