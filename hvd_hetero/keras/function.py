"""Horovod's functions for Keras scripts, the same for both back ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import cloudpickle
import keras
import numpy as np

from hvd_hetero.engine import binding, payload
from hvd_hetero.engine.port import Engine, rotating_name
from hvd_hetero.optimizers.agreement import agree_on, agree_text

from . import backend
from .reduction import array_to_send, name_of

_FORM: Any = backend.form()


def init(*args: Any, **kwargs: Any) -> None:
    """Initialises Horovod, with settings that suit ranks with little CPU where the user has set none."""
    binding.init(backend.NAME, *args, **kwargs)


def allgather(value: Any, name: str | None = None, process_set: Any = None) -> Any:
    """The values of all ranks along the first axis, whose length may differ, as a numpy array. A collective call.

    Raises:
        ValueError: `value` is a single number, which has no first axis.
    """
    array = array_to_send(value)
    if array.ndim == 0:
        raise ValueError(
            f"value: expected an array, as those of all ranks are put one after another. Received: {array[()]!r}, a "
            "single value. Give a list of it: hvd.allgather([value])."
        )
    engine = backend.engine(process_set)
    name = name_of(engine, name, "allgather")
    if array.dtype.kind not in "bV":
        return engine.allgather_async(array, name=name).wait()
    width = math.prod(array.shape[1:])  # Horovod has no such type with every back end: rows travel as bytes
    rows = engine.allgather_async(array.reshape(len(array), width).view(np.uint8), name=name).wait()
    return np.ascontiguousarray(rows).view(array.dtype).reshape(len(rows), *array.shape[1:])


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = None) -> Any:
    """The value of `root_rank` as a numpy array; of a number, a numpy scalar. A collective call."""
    engine = backend.engine(process_set)
    array = array_to_send(value)
    _broadcast([array], root_rank, engine, name_of(engine, name, "broadcast"))
    return array[()]  # a script may look a number up, and add to it


def _broadcast(arrays: list[np.ndarray], root_rank: int, engine: Engine, name: str) -> None:
    """Overwrites the arrays with those of a global rank. As bytes: any type goes, and all of them at once."""
    root = payload.place_of(engine, root_rank)
    parts: list[np.ndarray] = [array.reshape(-1).view(np.uint8) for array in arrays]
    whole = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    payload.broadcast_in_pieces(engine, whole, root=root, name=name)
    at = 0
    for part in parts:
        part[...] = whole[at : at + len(part)]
        at += len(part)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None, *, session: Any = None
) -> Any:
    """The object of `root_rank`, sent pickled; what other ranks pass is ignored. A collective call.

    Horovod's own function, without a name, pairs ranks by the type of what they pass, and waits for ever if types
    differ.

    Args:
        session: Horovod's; of no effect.
    """
    engine, name = backend.engine(process_set), name or "broadcast_object"
    return payload.broadcast_object(engine, obj, root_rank=root_rank, name=name, pickle=cloudpickle)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None, *, session: Any = None) -> Any:
    """The objects of all ranks, of any types, as a list; sent pickled. A collective call.

    Args:
        session: Horovod's; of no effect.
    """
    engine, name = backend.engine(process_set), name or "allgather_object"
    return payload.gather_objects(engine, obj, name=name, pickle=cloudpickle)


def shutdown() -> None:
    """Shuts Horovod down. With a topology, once all ranks are through with the last step, or after ten seconds."""
    binding.shutdown(backend.NAME)


def barrier(process_set: Any = None) -> None:
    """Returns when all ranks have called it."""
    engine = backend.engine(process_set)
    engine.allreduce_async(np.zeros(1), name=rotating_name(engine, "hvd_hetero.barrier.")).wait()


@backend.as_written
def broadcast_variables(
    variables: Iterable[Any] | Mapping[str, Any], root_rank: int = 0, process_set: Any = None, inplace: bool = False
) -> None:
    """Overwrites Keras variables (of a model, or `optimizer.variables`) on all ranks with those of `root_rank`.

    A collective call, with variables of the same number, shapes and types on all ranks. In a `tf.function` it is
    made at each run, in order with what else the function does with these variables.

    Args:
        inplace: Horovod's; of no effect.

    Raises:
        TypeError: `variables` are not Keras variables, but a model, say, or its weights as arrays.
        ValueError: on every rank, if number, shapes or types differ between ranks, as those of different optimizers do.
            In a `tf.function`, an error of TensorFlow's with this text.
    """
    chosen = _chosen(variables)
    if _FORM.tracing():
        _FORM.afterwards(lambda _: _overwrite(chosen, root_rank, process_set), [*chosen, _FORM.turn()], 0.0)
    else:
        _overwrite(chosen, root_rank, process_set)


def _chosen(variables: Any) -> list[Any]:
    given: Any = variables.values() if isinstance(variables, Mapping) else variables
    chosen = list(given) if isinstance(given, Iterable) else [given]
    for one in chosen:
        if not (hasattr(one, "assign") and hasattr(one, "shape")):
            raise TypeError(
                "variables: expected Keras variables, as model.variables or optimizer.variables. Received: a "
                f"{type(one).__name__}. For a value there is hvd.broadcast."
            )
    return chosen


def _overwrite(chosen: list[Any], root_rank: int, process_set: Any) -> None:
    engine = backend.engine(process_set)
    name = rotating_name(engine, "hvd_hetero.variables.")
    agree_on(engine, {"number of variables": len(chosen)}, name=f"{name}.number")
    agree_text(
        engine,
        lambda: ", ".join(f"{keras.backend.standardize_dtype(v.dtype)}{list(v.shape)}" for v in chosen),
        title="variables",
        name=f"{name}.alike",
    )
    arrays = [array_to_send(keras.ops.convert_to_numpy(v)).reshape(tuple(v.shape)) for v in chosen]
    _broadcast(arrays, root_rank, engine, name)
    if engine.ranks[engine.rank] != root_rank:
        for variable, array in zip(chosen, arrays, strict=True):
            variable.assign(array)
