"""One model's buffers from those of all ranks: running statistics of normalisation layers."""

from __future__ import annotations

import torch

from hvd_hetero.engine.port import Engine


def average_buffers(model: torch.nn.Module, *, weight: float, engine: Engine, name: str) -> None:
    """Gives all ranks the same buffers. A collective call.

    A floating-point buffer becomes the mean over ranks, weighted by `weight` (this rank's samples; equal where no rank
    has any). A `running_var` beside a `running_mean` becomes the variance of all samples together: the mean of
    E[x^2] = var + mean^2, less the square of the merged mean. Whole numbers (`num_batches_tracked`) become the largest.

    Raises:
        TypeError: on every rank, for a buffer that is neither.
    """
    floats: list[torch.Tensor] = []
    squares: list[tuple[torch.Tensor, torch.Tensor]] = []  # running_var, running_mean
    whole: list[torch.Tensor] = []
    for prefix, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        for title, buffer in own.items():
            if title == "running_var" and own.get("running_mean") is not None:
                squares.append((buffer, own["running_mean"]))
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
    with torch.no_grad():
        parts = [b.double() for b in floats] + [var.double() + mean.double() ** 2 for var, mean in squares]
        flat = torch.cat([torch.tensor([weight], dtype=torch.float64), *[p.reshape(-1).cpu() * weight for p in parts],
                          torch.tensor([1.0], dtype=torch.float64), *[p.reshape(-1).cpu() for p in parts]])
        total = engine.allreduce_async(flat, name=f"{name}.mean").wait()
        half = len(total) // 2
        chosen = total[:half] if total[0] > 0 else total[half:]
        merged = (chosen[1:] / chosen[0]).split([p.numel() for p in parts])
        for buffer, value in zip(floats, merged, strict=False):
            buffer.copy_(value.view(buffer.shape))
        for (variance, mean), value in zip(squares, merged[len(floats) :], strict=True):
            variance.copy_((value.view(variance.shape) - mean.double().cpu() ** 2).clamp(min=0.0))
        if whole:
            numbers = torch.cat([b.reshape(-1).cpu().long() for b in whole])
            engine.allreduce_async(numbers, name=f"{name}.most", op="max").wait()
            parts = list(numbers.split([b.numel() for b in whole]))
            for buffer, value in zip(whole, parts, strict=True):
                buffer.copy_(value.view(buffer.shape))
