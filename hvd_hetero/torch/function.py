"""Horovod's functions where they need a repair: initialisation, waiting, and broadcasts of bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as horovod
import horovod.torch.optimizer as horovod_optimizer
import torch

from hvd_hetero.engine import binding
from hvd_hetero.engine.environment import waits_without_spinning
from hvd_hetero.engine.horovod import wait_until


def init(*args: Any, **kwargs: Any) -> None:
    """Initialises Horovod, with settings that suit ranks with little CPU where the user has set none."""
    if not waits_without_spinning():
        horovod_optimizer.synchronize = synchronize  # what Horovod's own DistributedOptimizer waits with
    binding.init("torch", *args, **kwargs)


def synchronize(handle: Any) -> Any:
    """The result of an asynchronous operation; sleeps until it is there, where Horovod's own spins."""
    if isinstance(handle, int) and not waits_without_spinning():
        wait_until(functools.partial(horovod.poll, handle))
    return horovod.synchronize(handle)


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Overwrites `params` on all ranks with those of `root_rank`; bfloat16, which Horovod lacks, travels as bits."""
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    as_bits = [
        (name, tensor.data.view(torch.int16) if _is_bfloat16(tensor) else tensor) for name, tensor in pairs
    ]
    horovod.broadcast_parameters(as_bits, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Overwrites the optimizer's state and options on all ranks with those of `root_rank`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(_is_bfloat16(parameter) for parameter in parameters):
        horovod.broadcast_optimizer_state(optimizer, root_rank)
        return
    # Horovod would broadcast bfloat16 tensors one by one, and cannot; pickled they travel as bytes.
    mine = optimizer.state_dict() if horovod.rank() == root_rank else None
    optimizer.load_state_dict(horovod.broadcast_object(mine, root_rank, name="hvd_hetero.optimizer_state"))


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
