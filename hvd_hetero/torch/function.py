"""Horovod's functions where they need a repair: initialisation, waiting, bfloat16, names that ranks are paired by."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import horovod.torch
import horovod.torch.functions
import horovod.torch.mpi_ops
import horovod.torch.optimizer
import horovod.torch.sync_batch_norm
import torch

from hvd_hetero.engine import binding
from hvd_hetero.engine.environment import waits_without_spinning
from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.engine.sleep import wait_until

_synchronize = horovod.torch.mpi_ops.synchronize
# Where Horovod's own functions wait: each of these modules has the name for itself.
_WAITING: tuple[Any, ...] = (
    horovod.torch.mpi_ops, horovod.torch.functions, horovod.torch.optimizer, horovod.torch.sync_batch_norm
)  # fmt: skip
# What all of Horovod's operations are started by.
_STARTING = (
    "_allreduce_async", "_grouped_allreduce_async", "_allgather_async", "_grouped_allgather_async", "_broadcast_async",
    "_alltoall_async", "_reducescatter_async", "_grouped_reducescatter_async",
)  # fmt: skip


def init(*args: Any, **kwargs: Any) -> None:
    """Initialises Horovod, with settings that suit ranks with little CPU where the user has set none."""
    for module in _WAITING:
        module.synchronize = synchronize
    for name in _STARTING:
        start = getattr(horovod.torch.mpi_ops, name)
        if not hasattr(start, "__wrapped__"):
            setattr(horovod.torch.mpi_ops, name, _named(start))
    binding.init("torch", *args, **kwargs)


def _named(start: Callable[..., Any]) -> Callable[..., Any]:
    """`start`, which gives operations a name that have none: so many such operations of these ranks came before.

    Horovod numbers all operations that a process has started. Ranks start unlike numbers of our own, with a topology
    and with local steps, and an operation would wait for ever for others of its number.
    """
    places = list(inspect.signature(start).parameters)
    at_name, at_set = places.index("name"), places.index("process_set")

    @functools.wraps(start)
    def named(*args: Any) -> Any:
        if args[at_name] is None:
            name = HorovodEngine.next_of(args[at_set], f"{start.__name__.strip('_')}.")
            args = (*args[:at_name], name, *args[at_name + 1 :])
        return start(*args)

    return named


def shutdown() -> None:
    """Shuts Horovod down. With a topology, once all ranks are through with the last step, or after ten seconds."""
    binding.shutdown("torch")


def synchronize(handle: Any) -> Any:
    """The result of an asynchronous operation; sleeps until it is there, where Horovod's own spins. Long waits are
    explained, and ended at last."""
    with HorovodEngine.tracked(*_caller()).waiting(horovod.torch.HorovodInternalError):
        if isinstance(handle, int) and not waits_without_spinning():
            wait_until(functools.partial(horovod.torch.poll, handle))
        return _synchronize(handle)


synchronize.__wrapped__ = _synchronize  # type: ignore[attr-defined]


def _caller() -> tuple[str, Any]:
    """The function of Horovod's that the script has called, and its process set."""
    frame, name, process_set = sys._getframe(2), "synchronize", None
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith(("horovod.", "torch.")):
        if module.startswith("horovod."):  # and not autograd's, between a function and its forward()
            name, process_set = frame.f_code.co_name, frame.f_locals.get("process_set", process_set)
        frame = frame.f_back  # type: ignore[assignment]
    return f"horovod.{name}", process_set


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], root_rank: int
) -> None:
    """Overwrites `params` on all ranks with those of `root_rank`. What Horovod lacks travels in another form: bfloat16
    as bits, and what is not contiguous, such as the weights of a model in channels_last, as a copy."""
    pairs: list[tuple[str, Any]] = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    copies: dict[str, torch.Tensor] = {
        name: tensor.data.contiguous() for name, tensor in pairs if not _is_contiguous(tensor)
    }
    sent = [(name, copies.get(name, tensor)) for name, tensor in pairs]
    as_bits = [(name, tensor.data.view(torch.int16) if _is_bfloat16(tensor) else tensor) for name, tensor in sent]
    horovod.torch.broadcast_parameters(as_bits, root_rank)
    given = dict(pairs)
    for name, received in copies.items():
        given[name].data.copy_(received)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrites the optimizer's state and options on all ranks with those of `root_rank`. `model`: tells which of its
    embeddings have sparse gradients, where the optimizer has no state yet."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(_is_contiguous(p) and not _is_bfloat16(p) for p in parameters):
        horovod.torch.broadcast_optimizer_state(optimizer, root_rank, model)
        return
    # Horovod would broadcast such tensors one by one, and cannot; pickled they travel as bytes.
    mine = optimizer.state_dict() if horovod.torch.rank() == root_rank else None
    optimizer.load_state_dict(horovod.torch.broadcast_object(mine, root_rank, name="hvd_hetero.optimizer_state"))


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = horovod.torch.global_process_set
) -> Any:
    """The object of `root_rank`, pickled in between; the others may pass whatever they like. A collective call.

    Where no name is given, Horovod's own pairs ranks by the type of what they pass, and None on one rank waits for ever
    for a dict on another.
    """
    return horovod.torch.broadcast_object(obj, root_rank, name or "broadcast_object", process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, of any types, pickled in between. A collective call."""
    found: list[Any] = horovod.torch.allgather_object(obj, name or "allgather_object")
    return found


def _is_contiguous(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.is_contiguous()


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
