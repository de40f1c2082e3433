"""Replaces functions of Horovod's that need a repair: initialisation, waiting, bfloat16, names of operations."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import horovod.torch
import horovod.torch.functions
import horovod.torch.mpi_ops
import horovod.torch.optimizer
import horovod.torch.sync_batch_norm
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hvd_hetero.engine import binding, payload
from hvd_hetero.engine.environment import waits_without_spinning
from hvd_hetero.engine.horovod import HorovodEngine
from hvd_hetero.engine.sleep import wait_until

from .argument import check_broadcast, check_optimizer
from .plain import load_in_place

_pickle: Any = horovod.torch.functions.cloudpickle
_synchronize = horovod.torch.mpi_ops.synchronize
# Modules in which Horovod's own functions wait: each has imported the name `synchronize` for itself.
_WAITING: tuple[Any, ...] = (
    horovod.torch.mpi_ops, horovod.torch.functions, horovod.torch.optimizer, horovod.torch.sync_batch_norm
)  # fmt: skip
# The functions by which all of Horovod's operations are started.
_STARTING = (
    "_allreduce_async", "_grouped_allreduce_async", "_allgather_async", "_grouped_allgather_async", "_broadcast_async",
    "_alltoall_async", "_reducescatter_async", "_grouped_reducescatter_async",
)  # fmt: skip
SENDS = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64
}  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # sent for other types, by bytes per element
SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}  # the methods that return the tensors of which a sparse one consists, by its layout
INLINE = 16  # elements: a tensor of at most so many, such as a count of steps, is pickled with the other descriptions


def init(*args: Any, **kwargs: Any) -> None:
    """Initialises Horovod, with settings that suit ranks with little CPU unless the user has set them. A collective
    call. The arguments are Horovod's own; a topology needs `process_sets="dynamic"`."""
    for module in _WAITING:
        module.synchronize = synchronize
    for name in _STARTING:
        start = getattr(horovod.torch.mpi_ops, name)
        if not hasattr(start, "__wrapped__"):
            setattr(horovod.torch.mpi_ops, name, _named(start))
    binding.init("torch", *args, **kwargs)


def _named(start: Callable[..., Any]) -> Callable[..., Any]:
    """`start`, with a name given to operations that have none: their number among such operations of this process set.

    Horovod itself numbers all operations that a process has started. With a topology or local steps, ranks start unlike
    numbers of this package's own operations, so an operation would wait for ever for one of its number elsewhere.
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
    """The result of an asynchronous operation. Sleeps until it is there, while Horovod's own function spins. Long waits
    are explained in messages, and end with an error at last."""
    with HorovodEngine.tracked(*_caller()).waiting(horovod.torch.HorovodInternalError):
        if isinstance(handle, int) and not waits_without_spinning():
            wait_until(functools.partial(horovod.torch.poll, handle))
        return _synchronize(handle)


synchronize.__wrapped__ = _synchronize  # type: ignore[attr-defined]


def _caller() -> tuple[str, Any]:
    """The name of the outermost Horovod function on the stack, which the script has called, and its process set."""
    frame, name, process_set = sys._getframe(2), "synchronize", None
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith(("horovod.", "torch.")):
        if module.startswith("horovod."):  # skips autograd's frames, between a function and its forward()
            name, process_set = frame.f_code.co_name, frame.f_locals.get("process_set", process_set)
        frame = frame.f_back  # type: ignore[assignment]
    return f"horovod.{name}", process_set


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor] | torch.Tensor], root_rank: int
) -> None:
    """Overwrites `params` on all ranks with those of `root_rank`: a `state_dict()`, `named_parameters()` or
    `parameters()`. What Horovod cannot send travels in another form: types such as bfloat16 and bool as bits, complex
    numbers as pairs, tensors that are not contiguous, such as the weights of a model in channels_last, as copies, and
    those that consist of several, such as sparse ones or 8-bit codes with their scales, as these.

    Raises:
        TypeError: `params` are no tensors, as a model itself, or the state of an optimizer.
    """
    params = params if isinstance(params, Mapping) or not isinstance(params, Iterable) else list(params)
    check_broadcast(params)
    pairs: list[Any] = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    given = [pair if isinstance(pair, tuple) else (None, pair) for pair in pairs]
    named = [part for name, value in given for part in _parts(name, value)]
    plain = [(name, _plain(value)) for name, value in named]
    horovod.torch.broadcast_parameters([(name, _as_sent(value)) for name, value in plain], root_rank)
    for (_, value), (_, received) in zip(named, plain, strict=True):
        if received is not value:
            value.data.copy_(received)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrites the optimizer's state and options on all ranks with those of `root_rank`. `model` is Horovod's
    argument, and of no effect.

    No step is made. Horovod makes a step with gradients of zero on each rank that has no state yet, to have tensors to
    receive into. In it, weight decay moves those ranks' parameters: if rank 0 alone has loaded a checkpoint, they would
    then differ from rank 0's. Adam, which counts its steps, begins here as in one process; after Horovod's function the
    first step of a job counts as the second, and is shorter.
    """
    check_optimizer(optimizer)
    tensors: list[torch.Tensor] = []
    places = {p.device.type: p.device for group in optimizer.param_groups for p in group["params"]}

    def described(value: torch.Tensor) -> Any:
        # Horovod's broadcast takes neither sparse tensors, such as momenta of sparse gradients, nor subclasses that
        # consist of several tensors, such as 8-bit codes with their scales.
        whole = value.numel() <= INLINE or value.is_sparse or type(value) not in (torch.Tensor, torch.nn.Parameter)
        inline = value.detach().cpu() if whole else None
        if inline is None:
            tensors.append(value.detach())
        # The strides keep the memory format, which fused optimizers depend on.
        strides = () if inline is not None else torch.empty_like(value, device="meta").stride()
        return _Described(value.shape, strides, value.dtype, value.device.type, value.device.type in places, inline)

    def received(value: _Described) -> torch.Tensor:
        # Ranks may be of unlike devices. A count of steps that is on the host stays there.
        beside = next(iter(places.values())) if value.beside and value.shape else "cpu"
        device = places.get(value.device, beside)
        if value.inline is not None:
            return value.inline.to(device)
        tensors.append(torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=device))
        return tensors[-1]

    is_root, name = horovod.torch.rank() == root_rank, "hvd_hetero.optimizer_state"
    mine = _mapped(optimizer.state_dict(), torch.Tensor, described) if is_root else None
    state = broadcast_object(mine, root_rank, name=name)
    if not is_root:
        state = _mapped(state, _Described, received)
    broadcast_parameters([(f"{name}.{index}", tensor) for index, tensor in enumerate(tensors)], root_rank)
    if not is_root:
        _load_as_it_is(optimizer, state)


class _Described(NamedTuple):
    """Describes a tensor of an optimizer's state; `inline` is the tensor itself if it is small, else it is broadcast
    separately."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of one that is broadcast separately
    dtype: torch.dtype
    device: str
    beside: bool  # whether parameters of the rank that sends are on such a device
    inline: torch.Tensor | None


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which `change` has been applied to each value of type `kind`."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, kind, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_mapped(each, kind, change) for each in value]
    if isinstance(value, tuple):
        return tuple(_mapped(each, kind, change) for each in value)
    return value


def _load_as_it_is(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads a state with its own types, while PyTorch's `load_state_dict` would cast it to the parameters' types."""
    base = next(each for each in type(optimizer).__mro__ if each.__module__ != "horovod.torch.optimizer")
    if getattr(base, "load_state_dict", None) is not torch.optim.Optimizer.load_state_dict:  # its own method
        optimizer.load_state_dict(state)
        return
    groups, sent = optimizer.param_groups, state["param_groups"]
    mine, theirs = ([len(group["params"]) for group in each] for each in (groups, sent))
    if mine != theirs:
        raise ValueError(f"Expected an optimizer of groups of {theirs} parameters, as on the root. Received: {mine}.")
    keys = [key for given in sent for key in given["params"]]
    parameters = dict(zip(keys, (p for group in groups for p in group["params"]), strict=True))

    def load() -> None:
        optimizer.state = defaultdict(dict, {parameters.get(key, key): value for key, value in state["state"].items()})
        optimizer.param_groups = [{**new, "params": old["params"]} for old, new in zip(groups, sent, strict=True)]

    load_in_place(optimizer, load)


def keep_types(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Gives the optimizer's tensors the types of `state` again, after `optimizer.load_state_dict(state)` has cast them
    to the parameters' types."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, p in zip((key for group in state["param_groups"] for key in group["params"]), parameters, strict=True):
        for name, value in state["state"].get(key, {}).items():
            loaded = optimizer.state[p].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[p][name] = value.to(loaded.device)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = horovod.torch.global_process_set
) -> Any:
    """The object of `root_rank`, sent pickled; what other ranks pass is ignored. A collective call.

    Horovod's own function, without a name, pairs ranks by the type of what they pass: a rank that passes None waits for
    ever for one that passes a dict. And it takes objects of up to 2 GiB only.
    """
    engine, name = HorovodEngine(process_set), name or "broadcast_object"
    return payload.broadcast_object(engine, obj, root_rank=root_rank, name=name, pickle=_pickle)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks, of any types, as a list; sent pickled. A collective call."""
    return payload.gather_objects(HorovodEngine(), obj, name=name or "allgather_object", pickle=_pickle)


def _parts(name: str | None, value: Any) -> Iterator[tuple[str | None, Any]]:
    """The tensors with memory of their own that a value consists of, with names; the value itself, if it is one."""
    parts: dict[str, Any] = {}
    if is_traceable_wrapper_subclass(value):
        parts = {each: getattr(value, each) for each in value.__tensor_flatten__()[0]}
    elif isinstance(value, torch.Tensor):
        parts = {each: getattr(value, each)() for each in SPARSE.get(value.layout, ())}
    if not parts:
        yield name, value
    for each, part in parts.items():
        yield from _parts(None if name is None else f"{name}.{each}", part)


def _plain(value: Any) -> Any:
    """`value` itself, or a copy if it is a tensor whose memory is not its elements in order."""
    if not isinstance(value, torch.Tensor) or value.is_contiguous() and not value.is_conj() and not value.is_neg():
        return value
    return value.data.resolve_conj().resolve_neg().contiguous()


def _as_sent(value: Any) -> Any:
    """A view of a contiguous tensor in a type that Horovod can send."""
    if not isinstance(value, torch.Tensor) or value.dtype in SENDS:
        return value
    tensor = torch.view_as_real(value.data) if value.is_complex() else value.data
    return tensor if tensor.dtype in SENDS else tensor.view(BITS[tensor.dtype.itemsize])
