"""A device that is not the host's memory, on machines without one: what a GPU asks of the code that handles tensors.

A tensor of it holds one in host memory and is none: numpy refuses it, an operation on it and on tensors in host memory
is an error but for copies and indices, autograd runs its part of a backward pass in a thread of its own, and each look
at a value is counted, since it would wait for the device. PyTorch's means for back ends in Python make it; they are not
public, and `AVAILABLE` says whether they are there. Streams, events and NCCL are not emulated.
"""

from __future__ import annotations

import functools
from typing import Any

import horovod.torch.mpi_ops as mpi_ops
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hvd_hetero.engine import horovod as engine

NAME = "otherdevice"
AVAILABLE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
# What takes tensors of several devices, on a GPU as well.
BETWEEN = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_"}
DTYPE = torch.float32  # of what is compared
EXACT = True  # whether all results are those of the host, bit for bit
RANDOM = False  # whether it has random numbers
looks: list[str] = []  # operations that told the host a value
_libraries: list[Any] = []  # what is made known to PyTorch lasts as long as these


class OnDevice(torch.Tensor):
    """A tensor of the device."""

    __module__ = "torch"  # as of any device's
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )  # fmt: skip
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})

    # What PyTorch does with a tensor's memory beside its operations.

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: OnDevice) -> None:
        self.inner = other.inner

    def tolist(self) -> Any:
        looks.append("tolist")
        return self.inner.tolist()

    def __deepcopy__(self, memo: Any) -> OnDevice:
        return OnDevice(self.inner.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:  # where it is loaded, it is in host memory
        return self.inner.detach().__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner!r})"


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operation returns, of tensors on the device and in host memory."""
    name = func._schema.name.split("::")[1]
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    ours = [each for each in tensors if isinstance(each, OnDevice)]
    hosts = [each for each in tensors if not isinstance(each, OnDevice) and each.dim() > 0]
    if ours and hosts and name not in BETWEEN:
        raise RuntimeError(f"{name}: expected all tensors on one device. Received: host memory, {hosts[0].shape}.")
    if ours and name == "_local_scalar_dense":
        looks.append(name)
    stays = bool(ours)
    if kwargs.get("device") is not None:
        stays = torch.device(kwargs["device"]).type == NAME
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known = {id(each.inner): each for each in ours}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, OnDevice):
            return value
        if id(value) in known:  # an operation in place
            return known[id(value)]
        return OnDevice(value) if stays else value

    return tree_map(wrapped, func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs)))


def inner_of(value: Any) -> Any:
    """The tensor in host memory that one of the device holds; anything else as it is."""
    return value.inner if isinstance(value, OnDevice) else value


def index() -> int:
    """Which of the devices this rank has."""
    return 0


def alike(there: torch.Tensor, here: torch.Tensor) -> bool:
    """Whether two results are the same: bit for bit."""
    return torch.equal(there, here)


class Device(TorchDispatchMode):
    """Within it, tensors can be made on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def install() -> None:
    """Makes the device known to PyTorch, and lets Horovod take its tensors, as it takes those of a GPU."""
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME)
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def empty(size: Any, *, dtype: Any = None, **others: Any) -> OnDevice:
        return OnDevice(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **others: Any) -> OnDevice:
        return OnDevice(torch.empty_strided(size, stride, dtype=dtype))

    def copied(source: Any, target: Any, non_blocking: bool = False) -> Any:
        inner_of(target).copy_(inner_of(source))
        return target

    for name, made in {"empty.memory_format": empty, "empty_strided": empty_strided, "_copy_from": copied}.items():
        library.impl(name, made, "PrivateUse1")

    tensor_of, wait = engine.HorovodEngine._tensor, engine.HorovodHandle.wait

    def passed(self: Any, array: Any) -> Any:
        return inner_of(tensor_of(self, array))

    def waited(self: Any) -> Any:
        result = wait(self)
        if not isinstance(self._like, OnDevice):
            return result
        return self._like if result is self._like.inner else OnDevice(result)

    broadcast = mpi_ops._broadcast_async
    mpi_ops._broadcast_async = functools.wraps(broadcast)(lambda *arguments: broadcast(*map(inner_of, arguments)))
    engine.HorovodEngine._tensor, engine.HorovodHandle.wait = passed, waited  # type: ignore[method-assign]

