"""Horovod's own `DistributedOptimizer`, with repairs, for scripts that use no balancer, topology or codec of ours."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import horovod.torch as horovod
import torch

from hvd_hetero.optimizers.unused_balancer import UnusedBalancerCheck

# Horovod's optimizer around each optimizer that a script made.
_MADE_OF: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class _Widened:
    """A Horovod compressor that sends bfloat16, which Horovod cannot sum, as float32, and others by `compression`."""

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


def load_in_place(optimizer: torch.optim.Optimizer, load: Callable[[], None]) -> None:
    """Calls `load`, which gives an optimizer a new state and new groups, and moves them into its former dicts, which it
    shares with the optimizer that it wraps and with schedulers."""
    if not {"state", "param_groups"} <= vars(optimizer).keys():
        load()  # both dicts belong to another optimizer that this one wraps
        return
    state, groups = optimizer.state, optimizer.param_groups
    load()
    if optimizer.state is not state:
        loaded, optimizer.state = optimizer.state, state
        state.clear()
        state.update(loaded)
    for group, new in zip(groups, optimizer.param_groups, strict=True):
        if new is not group:
            options = dict(new)
            group.clear()
            group.update(options)
    optimizer.param_groups = groups


def release_plain(optimizer: torch.optim.Optimizer) -> None:
    """Removes the hooks of Horovod's own `DistributedOptimizer` around this one, if there was one. They would stay on
    the parameters, and exchange gradients, as long as it holds their autograd nodes, also once the script has no use
    for it any more."""
    made = _MADE_OF.pop(optimizer, None)
    if made is not None and (distributed := made()) is not None:
        distributed._grad_accs.clear()
        # A graph that the script keeps still has the hooks: with this count they never start an exchange.
        distributed._allreduce_delay = dict.fromkeys(distributed._allreduce_delay, math.inf)


def plain_optimizer(optimizer: torch.optim.Optimizer, *, compression: Any, **arguments: Any) -> Any:
    """Horovod's own `DistributedOptimizer`, with four repairs: it takes bfloat16; it takes zero_grad(set_to_none); the
    optimizer's state survives wrapping; schedulers go on changing the learning rates after a state was loaded."""
    release_plain(optimizer)
    if any(p.dtype == torch.bfloat16 for group in optimizer.param_groups for p in group["params"]):
        compression = _Widened(compression)
    distributed = horovod.DistributedOptimizer(optimizer, compression=compression, **arguments)
    distributed.state = optimizer.state  # Horovod starts with none, which loses a loaded state
    cls: Any = type(distributed)  # made by Horovod for this optimizer alone
    original_zero_grad, original_load_state_dict = cls.zero_grad, cls.load_state_dict
    original_synchronize, forgotten = cls.synchronize, UnusedBalancerCheck()

    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if self._handles:
            original_zero_grad(self)  # raises: gradients are under way
        super(cls, self).zero_grad(*args, **kwargs)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        load_in_place(self, lambda: original_load_state_dict(self, state_dict))

    def synchronize(self: Any) -> None:
        forgotten.check()
        original_synchronize(self)

    cls.zero_grad, cls.load_state_dict, cls.synchronize = zero_grad, load_state_dict, synchronize
    _MADE_OF[optimizer] = weakref.ref(distributed)
    return distributed
