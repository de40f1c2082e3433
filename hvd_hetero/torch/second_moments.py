"""Reads and mixes the second moments of PyTorch's optimizers, for `optimizers.second_moments`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_hetero.optimizers.second_moments import Moments
from hvd_hetero.policy.second_moments import Mixture

# Other optimizers use the same names for other moments: of another shape, or not linear in the squares of gradients.
KIND = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def has_second_moments(optimizer: Any) -> bool:
    """Whether an optimizer is of Adam's kind (Adam, AdamW, NAdam or RAdam), with a group without `amsgrad`. With
    `amsgrad`, steps are divided by the largest second moment so far, which cannot be mixed."""
    return isinstance(optimizer, KIND) and not all(group.get("amsgrad", False) for group in optimizer.param_groups)


def moments_of(optimizer: Any) -> Iterator[Moments]:
    """The moments of all parameters that have been updated, from groups without `amsgrad`."""
    if not has_second_moments(optimizer):
        return
    kept: list[tuple[dict[str, Any], tuple[float, float]]] = []
    for group in optimizer.param_groups:
        if group.get("amsgrad", False):
            continue
        betas = float(group["betas"][0]), float(group["betas"][1])
        kept += [(state, betas) for p in group["params"] if "exp_avg_sq" in (state := optimizer.state.get(p, {}))]
    for (state, betas), steps in zip(kept, _numbers([state["step"] for state, _ in kept]), strict=True):
        yield Moments(state["exp_avg"], state["exp_avg_sq"], betas, steps)


def _numbers(steps: Sequence[Any]) -> list[float]:
    """Counts of steps as floats. Those on a GPU are read in one transfer, so that it is waited for once."""
    distant = [s for s in steps if isinstance(s, torch.Tensor) and s.device.type != "cpu"]
    told = iter(torch.stack([s.to(distant[0].device) for s in distant]).tolist() if distant else [])
    return [float(next(told)) if isinstance(s, torch.Tensor) and s.device.type != "cpu" else float(s) for s in steps]


@torch.no_grad()
def mix(moments: Sequence[Moments], before: Sequence[torch.Tensor], mixtures: Sequence[Mixture]) -> list[torch.Tensor]:
    """Replaces each second moment by its mixture, and each of `before` by a copy of that. Returns `before`."""
    alike: dict[Mixture, list[int]] = {}
    for index, mixture in enumerate(mixtures):
        alike.setdefault(mixture, []).append(index)
    for mixture, members in alike.items():
        copies, seconds = [before[index] for index in members], [moments[index].second for index in members]
        if (part := 1.0 - mixture.after) > 0.0:
            firsts = [moments[index].first for index in members]
            torch._foreach_mul_(copies, mixture.before / part)
            torch._foreach_addcmul_(copies, firsts, firsts, mixture.first / part)
            torch._foreach_lerp_(seconds, copies, part)
        torch._foreach_copy_(copies, seconds)
    return list(before)
