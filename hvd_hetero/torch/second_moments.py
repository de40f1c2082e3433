"""Second moments of PyTorch's optimizers, as `optimizers.second_moments` asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hvd_hetero.optimizers.second_moments import Moments
from hvd_hetero.policy.second_moments import Mixture


def has_second_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of Adam's kind."""
    return "betas" in optimizer.defaults


def moments_of(optimizer: torch.optim.Optimizer) -> Iterator[Moments]:
    """Those of parameters with a gradient. Of Adam's kind is who keeps what Adam keeps under the same names. SparseAdam
    is not: rows without a gradient stay there as they are."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        return
    for group in optimizer.param_groups:
        betas = group.get("betas", ())
        if len(betas) != 2:
            continue
        for parameter in group["params"]:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            if parameter.grad is not None and {"exp_avg", "exp_avg_sq", "step"} <= state.keys():
                second = state["exp_avg_sq"]
                yield Moments(state["exp_avg"], second, second, (float(betas[0]), float(betas[1])), state["step"])


@torch.no_grad()
def mix(moments: Sequence[Moments], before: Sequence[torch.Tensor], mixtures: Sequence[Mixture]) -> list[torch.Tensor]:
    """Makes second moments their mixtures, and `before` copies of them."""
    copies = list(before)
    if copies:
        firsts, seconds = [each.first for each in moments], [each.second for each in moments]
        torch._foreach_mul_(copies, [each.before for each in mixtures])
        torch._foreach_addcmul_(copies, firsts, firsts, [each.first for each in mixtures])
        torch._foreach_mul_(seconds, [each.after for each in mixtures])
        torch._foreach_add_(seconds, copies)
        torch._foreach_copy_(copies, seconds)
    return copies
