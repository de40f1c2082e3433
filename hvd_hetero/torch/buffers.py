"""One model's buffers from those of all ranks: running statistics of normalisation layers."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch

from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.statistic import merged_statistics


def average_buffers(model: torch.nn.Module, *, weight: float, engine: Engine, name: str) -> None:
    """Gives all ranks the same buffers. A collective call.

    A floating-point buffer becomes the mean over ranks, weighted by `weight` (this rank's samples; equal where no rank
    has any). A `running_var` beside a `running_mean` becomes the variance of all samples together: the mean of
    E[x^2] = var + mean^2, less the square of the merged mean. Whole numbers (`num_batches_tracked`) become the largest.

    Raises:
        TypeError: on every rank, for a buffer that is neither.
    """
    floats: list[torch.Tensor] = []
    moments: list[tuple[torch.Tensor, torch.Tensor]] = []  # running_mean, running_var
    whole: list[torch.Tensor] = []
    for prefix, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for title, buffer in own.items():
            if title == "running_var" and own.get("running_mean") is not None:
                moments.append((own["running_mean"], buffer))
            elif title == "running_mean" and own.get("running_var") is not None:
                continue  # with its variance
            elif buffer.is_floating_point():
                floats.append(buffer)
            elif not buffer.dtype.is_complex and buffer.dtype != torch.bool:
                whole.append(buffer)
            else:
                path = f"{prefix}.{title}".lstrip(".")
                raise TypeError(
                    f"model: expected buffers of floating point or whole numbers, which ranks can agree on. Received: "
                    f"{path} of {buffer.dtype}. Register it with persistent=False on a module of its own, or merge "
                    "without the model and broadcast it yourself."
                )
    merged = merged_statistics(
        [_array(buffer) for buffer in floats],
        [(_array(mean), _array(variance)) for mean, variance in moments],
        [_array(buffer) for buffer in whole],
        weight=weight,
        engine=engine,
        name=name,
    )
    with torch.no_grad():
        for buffer, value in zip([*floats, *chain.from_iterable(moments), *whole], merged, strict=True):
            buffer.copy_(torch.from_numpy(value))


def _array(buffer: torch.Tensor) -> Any:
    """Its values on the host: double precision, or whole numbers."""
    return (buffer.double() if buffer.is_floating_point() else buffer.long()).cpu().numpy()
