"""`allreduce` and `reducescatter` of arrays, the same for both back ends."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvd_hetero.engine.port import Engine, rotating_name
from hvd_hetero.optimizers.compression import Compression

from . import backend
from .argument import op_of

_WORDS = {"Average": "sum", "Sum": "sum", "Min": "min", "Max": "max"}


def array_to_send(value: Any) -> np.ndarray:
    """A copy of `value` that a collective may write into: its elements lie in order, also where those of `value` do
    not, as in a transposed array and in what some initializers make.

    Raises:
        TypeError: a tensor without a value, as in a `tf.function`; or what is no array, such as a dict of them.
    """
    try:
        array = np.array(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value, order="C")
    except NotImplementedError as error:  # TensorFlow's, in words that name neither what was called nor what to do
        raise TypeError(
            f"Expected a value that is there, outside of a tf.function. Received: {value}, in one that is traced. "
            "Return it from the function, and call Horovod's function on that; gradients and hvd.broadcast_variables "
            "may be within it."
        ) from error
    if array.dtype.hasobject:
        raise TypeError(
            f"Expected a number, an array or a tensor. Received: a {type(value).__name__}. Of a structure, such as "
            "several outputs, take each part: keras.tree.map_structure(hvd.allgather, outputs). For any object there "
            "are hvd.allgather_object and hvd.broadcast_object."
        )
    return array


def name_of(engine: Engine, name: str | None, kind: str) -> str:
    """The name of an operation: of the name that the user gave it, or else numbered in turn."""
    return f"hvd_hetero.{kind}.{name}" if name else rotating_name(engine, f"hvd_hetero.{kind}.")


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    *,
    process_set: Any = None,
) -> Any:
    """The mean over ranks (or their sum, minimum or maximum, by `op`) as a numpy array; of a number, a numpy scalar.
    A collective call.

    Args:
        value: a number, an array or a tensor, of the same shape on all ranks. Whole numbers that are averaged or
            multiplied come back as float64.
        name: the name of the operation, the same on all ranks.
        average: Horovod's older argument for `op`: True is hvd.Average, False is hvd.Sum.
        prescale_factor, postscale_factor: multiply before the reduction and after it.
        op: hvd.Average (default), Sum, Min or Max.
        compression: hvd.Compression.none; or fp16: floating values are reduced as float16, and come back in their own
            type.
        process_set: the ranks (default: all).

    Raises:
        ValueError, TypeError: on the rank that passed them, wrong arguments.
    """
    word, half = _op_of(average, op), _is_half(compression)
    engine, array = backend.engine(process_set), array_to_send(value)
    floating = _is_floating(array)
    if not floating and (word == "Average" or (prescale_factor, postscale_factor) != (1.0, 1.0)):
        array = array.astype(np.float64)
    # Flat, as Horovod cannot sum an array without axes.
    flat = _times(_sent(array).reshape(-1), prescale_factor)
    wire = flat.astype(np.float16) if half and floating else flat
    handle = engine.allreduce_async(wire, name=name_of(engine, name, "allreduce"), op=_WORDS[word])  # type: ignore[arg-type]
    result = handle.wait().astype(flat.dtype, copy=False).reshape(array.shape)
    result = _times(result / engine.size if word == "Average" else result, postscale_factor)
    return result.astype(array.dtype, copy=False)[()]


def reducescatter(value: Any, name: str | None = None, op: Any = None, *, process_set: Any = None) -> Any:
    """This rank's rows of the mean over ranks (or of their sum, by `op`) as a numpy array. A collective call.

    Ranks get as many rows each; what is left of n rows, n % size, goes to the first ranks, one each.

    Args:
        value: an array or a tensor, of the same shape on all ranks. Whole numbers that are averaged come back as
            float64.
        name, process_set: as of `allreduce`.
        op: hvd.Average (default) or Sum.

    Raises:
        ValueError: on the rank that passed them, wrong arguments.
    """
    word = "Average" if op is None else op_of(op, "Average", "Sum")
    engine, array = backend.engine(process_set), array_to_send(value)
    if array.ndim == 0:
        raise ValueError(f"value: expected an array of at least one axis, whose rows ranks share. Received: {array}.")
    if not _is_floating(array) and word == "Average":
        array = array.astype(np.float64)
    result = engine.reducescatter_async(_sent(array), name=name_of(engine, name, "reducescatter")).wait()
    return (result / engine.size if word == "Average" else result).astype(array.dtype, copy=False)


def _is_floating(array: np.ndarray) -> bool:
    return bool(array.dtype.kind == "f" or keras.backend.is_float_dtype(str(array.dtype)))


def _sent(array: np.ndarray) -> np.ndarray:
    """The array in a type that Horovod can send: bfloat16, which Horovod lacks and numpy knows as kind "V", as float32.
    """
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _op_of(average: Any, op: Any) -> str:
    """The name of the reduction that `average` or `op` asks for."""
    if average is None:
        return "Average" if op is None else op_of(op, *_WORDS)
    if op is not None:
        raise ValueError(f"average: expected None with op, which takes its place. Received: {average!r} and op={op!r}.")
    if not isinstance(average, (bool, np.bool_)):
        raise ValueError(f"average: expected True, False or None. Received: {average!r}. Pass a reduction as op=.")
    return "Average" if average else "Sum"


def _is_half(compression: Any) -> bool:
    """Whether values travel as float16."""
    wire = Compression.named(compression)
    if wire is None:
        raise TypeError(f"compression: expected hvd.Compression.none or fp16. Received: {compression!r}.")
    if wire not in (Compression.none, Compression.fp16):
        wire.compress(None)  # raises what is wrong
    return bool(wire == Compression.fp16)


def _times(array: np.ndarray, factor: float) -> Any:
    """The array times `factor`, in the array's own type."""
    return array if factor == 1.0 else array * array.dtype.type(factor)
