"""Checks arguments of `DistributedOptimizer`, and describes them in texts that ranks compare."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import horovod.torch as horovod
import torch

from hvd_hetero.optimizers.argument import check_whole

from .layout import WIRE, Groups


def groups_of(groups: Any, num_groups: Any) -> Groups:
    """Which parameters travel together, from a user's `groups` and `num_groups`: a number of groups, lists of
    parameters, or None. Raises ValueError or TypeError for anything else."""
    if groups is None or isinstance(groups, Integral):
        name, number = ("num_groups", num_groups) if groups is None else ("groups", groups)
        check_whole(name, number, least=0)
        return int(number) or None
    listed = isinstance(groups, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in groups)
    if not listed or not all(isinstance(p, torch.Tensor) for group in groups for p in group):
        raise TypeError(f"groups: expected a whole number or lists of parameters. Received: {groups!r}.")
    ids = [id(parameter) for group in groups for parameter in group]
    if len(set(ids)) < len(ids):
        raise ValueError("groups: expected each parameter in one group. Received: one that is in several.")
    for group in groups:
        if len({(WIRE.get(p.dtype, p.dtype), p.device) for p in group if p.requires_grad}) > 1:
            raise ValueError("groups: expected one type and one device within a group. Received: a mixed group.")
    return groups  # type: ignore[no-any-return]


def numbered(groups: Groups, parameters: Sequence[torch.nn.Parameter]) -> str:
    """A text that describes groups of parameters by their numbers; equal on two ranks if their groups are."""
    if groups is None or isinstance(groups, int):
        return str(groups)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    members = [[numbers[id(p)] for p in group if id(p) in numbers] for group in groups]
    return f"{len(members)} lists ({zlib.crc32(str(members).encode()):08x})"


def check_devices(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Raises ValueError for parameters on a GPU if Horovod was built without GPU support."""
    if any(p.device.type == "cuda" for p in parameters) and not (horovod.cuda_built() or horovod.rocm_built()):
        raise ValueError(
            "Expected parameters in host memory, because Horovod was built for CPUs alone. Received: some on a GPU. "
            "Run `hvd-hetero build-horovod --gpu nccl` on a host with the CUDA toolkit, or `--gpu off` there: then "
            "gradients travel through host memory."
        )


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError for an `optimizer=` that is not an optimizer, but a model, say."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer. Received: a {type(optimizer).__name__}.")


def check_broadcast(params: Any) -> None:
    """Raises TypeError for `params` of a broadcast that are not tensors, but a model, say, or an optimizer's state."""
    items = params.items() if isinstance(params, Mapping) else params
    wrong = "" if isinstance(items, Iterable) else f"a {type(items).__name__}"
    for each in () if wrong else items:
        name, value = each if isinstance(each, tuple) and len(each) == 2 else ("", each)
        if not isinstance(value, torch.Tensor):
            wrong = f"a {type(value).__name__}" + (f" by the name of {name}" if name else " among them")
    if wrong:
        raise TypeError(
            "params: expected tensors, as of model.named_parameters(), model.parameters() or a model.state_dict() of "
            f"tensors. Received: {wrong}. Other objects take hvd.broadcast_object, and optimizers "
            "hvd.broadcast_optimizer_state."
        )


def check_named_parameters(named: Any) -> None:
    """Raises TypeError for what does not hold names and parameters, such as a model, which Horovod would iterate over.
    """
    if isinstance(named, torch.nn.Module) or not isinstance(named, Iterable):
        raise TypeError(
            "named_parameters: expected (name, parameter) tuples, as from model.named_parameters(). Received: a "
            f"{type(named).__name__}."
        )


def check_names(
    named: Sequence[tuple[str, torch.nn.Parameter]], parameters: Sequence[torch.nn.Parameter]
) -> None:
    """Raises as Horovod does, so that a mistake shows in the same way with a balancer and without."""
    if any(not isinstance(pair, tuple) for pair in named):
        raise ValueError("named_parameters: expected (name, parameter) tuples, as from model.named_parameters().")
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"named_parameters: expected unique names. Received twice: {', '.join(twice)}.")
    unnamed = {id(p) for p in parameters} - {id(p) for _, p in named}
    if unnamed:
        raise ValueError(
            f"named_parameters: expected every parameter of the optimizer. Received: {len(unnamed)} without a name."
        )


def described(parameters: Sequence[torch.nn.Parameter]) -> str:
    """A short text that stands for the parameters' shapes and types: their number, elements, and a CRC-32."""
    kinds = [(tuple(p.shape), p.dtype) for p in parameters]
    elements = sum(math.prod(shape) for shape, _ in kinds)
    return f"{len(kinds)} tensors of {elements} elements ({zlib.crc32(str(kinds).encode()):08x})"
