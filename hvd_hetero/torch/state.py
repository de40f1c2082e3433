"""One state of an optimizer from those of all ranks, where they go on together after steps apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from hvd_hetero.engine.port import Engine, gather_text
from hvd_hetero.optimizers.statistic import merged_statistics

Place = tuple[int, str]  # a parameter's number and the name of what is kept for it


@torch.no_grad()
def average_state(optimizer: torch.optim.Optimizer, *, weight: float, engine: Engine, name: str) -> None:
    """Gives all ranks the same moments. A collective call.

    Tensors become the mean over ranks, weighted by `weight` (this rank's samples), and counts of steps the largest.
    What a rank does not have yet, because it never had a sample, it gets. Whatever is no tensor stays.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept: dict[Place, torch.Tensor] = {
        (index, key): value
        for index, p in enumerate(parameters)
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    }
    mine = [[*place, list(value.shape), str(value.dtype)] for place, value in kept.items()]
    said = [json.loads(line) for line in gather_text(engine, json.dumps(mine), name=f"{name}.places")]
    for index, key, shape, dtype in max(said, key=len):
        if (index, key) not in kept:
            device = parameters[index].device if shape else "cpu"
            kept[index, key] = torch.zeros(shape, dtype=getattr(torch, dtype.split(".")[1]), device=device)
            optimizer.state[parameters[index]][key] = kept[index, key]
    counts = [value for (_, key), value in sorted(kept.items()) if key == "step"]
    means = [value for (_, key), value in sorted(kept.items()) if key != "step" and value.is_floating_point()]
    merged = merged_statistics(
        _arrays(means, torch.float64), [], _arrays(counts, torch.int64), weight=weight, engine=engine, name=name
    )
    for tensor, array in zip([*means, *counts], merged, strict=True):
        tensor.copy_(torch.from_numpy(array).view(tensor.shape))


def _arrays(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[Any]:
    return [tensor.to("cpu", dtype).numpy() for tensor in tensors]
