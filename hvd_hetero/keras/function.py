"""Horovod's functions for Keras scripts, the same for both back ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np

from hvd_hetero.engine import binding
from hvd_hetero.engine.port import Engine
from hvd_hetero.optimizers.agreement import agree_on, agree_text

from . import backend
from .optimizer import DistributedOptimizer

_REDUCTIONS = {"Sum": "sum", "Min": "min", "Max": "max"}


def init(*args: Any, **kwargs: Any) -> None:
    """Initialises Horovod, with settings that suit ranks with little CPU where the user has set none."""
    binding.init(backend.NAME, *args, **kwargs)


def _array(value: Any) -> np.ndarray:
    """A copy of `value` that a collective may write into."""
    return np.array(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)


def _name(engine: Engine, name: str | None, kind: str) -> str:
    return f"hvd_hetero.{kind}.{name}" if name else engine.unique(f"hvd_hetero.{kind}.")


def allreduce(value: Any, name: str | None = None, op: Any = None, process_set: Any = None) -> Any:
    """The mean over ranks (or their sum, least or greatest, by `op`) as a numpy array. A collective call."""
    engine = backend.engine(process_set)
    horovod, array = backend.horovod, _array(value)
    op = horovod.Average if op is None else op
    words = {horovod.Average: "sum", **{getattr(horovod, key): word for key, word in _REDUCTIONS.items()}}
    if op not in words:
        raise ValueError(f"op: expected hvd.Average, Sum, Min or Max. Received: {op!r}.")
    if op == horovod.Average and array.dtype.kind != "f":
        array = array.astype(np.float64)
    # Horovod sums no array of no axes.
    name, word = _name(engine, name, "allreduce"), words[op]
    result = engine.allreduce_async(array.reshape(-1), name=name, op=word).wait()  # type: ignore[arg-type]
    result = result.reshape(array.shape)
    return result / engine.size if op == horovod.Average else result


def allgather(value: Any, name: str | None = None, process_set: Any = None) -> Any:
    """The values of all ranks along the first axis, whose length may differ, as a numpy array. A collective call."""
    engine = backend.engine(process_set)
    return engine.allgather_async(_array(value), name=_name(engine, name, "allgather")).wait()


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """The value of `root_rank` as a numpy array. A collective call."""
    engine = backend.engine(process_set)
    array = _array(value)
    _broadcast([array], root_rank, engine, _name(engine, name, "broadcast"))
    return array


def _broadcast(arrays: list[np.ndarray], root_rank: int, engine: Engine, name: str) -> None:
    """Overwrites the arrays with those of a global rank. As bytes: any type goes, and all of them at once."""
    if root_rank not in engine.ranks:
        raise ValueError(f"root_rank: expected one of {engine.ranks}. Received: {root_rank}.")
    parts: list[np.ndarray] = [array.reshape(-1).view(np.uint8) for array in arrays]
    whole = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    engine.broadcast_async(whole, root=engine.ranks.index(root_rank), name=name).wait()
    at = 0
    for part in parts:
        part[...] = whole[at : at + len(part)]
        at += len(part)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, **arguments: Any) -> Any:
    """The object of `root_rank`, pickled in between; the others may pass whatever they like. A collective call.

    Horovod's own pairs ranks by the type of what they pass where no name is given, and waits for ever where it differs.
    """
    with backend.tracked("horovod.broadcast_object", arguments.get("process_set")):
        return backend.horovod.broadcast_object(obj, root_rank, name=name or "broadcast_object", **arguments)


def allgather_object(obj: Any, name: str | None = None, **arguments: Any) -> Any:
    """The objects of all ranks, of any types, as a list. A collective call."""
    with backend.tracked("horovod.allgather_object", arguments.get("process_set")):
        return backend.horovod.allgather_object(obj, name=name or "allgather_object", **arguments)


def shutdown() -> None:
    """Shuts Horovod down. With a topology, once all ranks are through with the last step, or after ten seconds."""
    binding.shutdown(backend.NAME)


def barrier(process_set: Any = None) -> None:
    """Returns when all ranks have called it."""
    engine = backend.engine(process_set)
    engine.allreduce_async(np.zeros(1), name=engine.unique("hvd_hetero.barrier.")).wait()


def broadcast_variables(
    variables: Iterable[Any] | Mapping[str, Any], root_rank: int = 0, process_set: Any = None
) -> None:
    """Overwrites Keras variables (of a model, or `optimizer.variables`) on all ranks with those of `root_rank`.

    A collective call, with variables of the same number, shapes and types on all ranks.

    Raises:
        ValueError: on every rank, where these differ, as those of different optimizers do.
    """
    chosen = list(variables.values() if isinstance(variables, Mapping) else variables)
    engine = backend.engine(process_set)
    name = engine.unique("hvd_hetero.variables.")
    agree_on(engine, {"number of variables": len(chosen)}, name=f"{name}.number")
    agree_text(
        engine,
        lambda: ", ".join(f"{keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}" for v in chosen),
        title="variables",
        name=f"{name}.alike",
    )
    arrays = [_array(keras.ops.convert_to_numpy(v)).reshape(tuple(v.shape)) for v in chosen]
    _broadcast(arrays, root_rank, engine, name)
    if engine.ranks[engine.rank] != root_rank:
        for variable, array in zip(chosen, arrays, strict=True):
            variable.assign(array)


def load_model(filepath: Any, custom_objects: Mapping[str, Any] | None = None, **distributed: Any) -> Any:
    """The model saved at `filepath`, with its optimizer and the optimizer's state, distributed by the further arguments
    of `DistributedOptimizer`. A collective call."""
    model = keras.models.load_model(filepath, custom_objects=custom_objects)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, **distributed)
    return model
