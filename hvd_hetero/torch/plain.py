"""Horovod's own `DistributedOptimizer`, for who asks for nothing of ours, with its repairs."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
import torch


class _Widened:
    """Horovod has no bfloat16: those gradients travel as float32, the others as `compression` says."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if tensor.dtype == torch.bfloat16:
            return tensor.float(), torch.bfloat16
        wire, context = self._compression.compress(tensor)
        return wire, (context,)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        if context is torch.bfloat16:
            return tensor.to(torch.bfloat16)
        return self._compression.decompress(tensor, context[0])  # type: ignore[no-any-return]


def plain_optimizer(optimizer: torch.optim.Optimizer, *, compression: Any, **arguments: Any) -> torch.optim.Optimizer:
    """Horovod's own, with three repairs: bfloat16, zero_grad(set_to_none), and a state that survives wrapping."""
    if any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"]):
        compression = _Widened(compression)
    distributed = horovod.DistributedOptimizer(optimizer, compression=compression, **arguments)
    distributed.state = optimizer.state  # Horovod starts with none, which loses a loaded state
    cls: Any = type(distributed)  # made by Horovod for this optimizer alone
    original_zero_grad = cls.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if self._handles:
            original_zero_grad(self)  # raises: gradients are under way
        super(cls, self).zero_grad(set_to_none)

    cls.zero_grad = zero_grad
    return distributed  # type: ignore[no-any-return]
