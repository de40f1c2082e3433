"""The few array verbs that the codecs are written on, so that each codec is written once for all frameworks.

Here for numpy; `torch_verbs` has the same for torch. Arrays are float32 or float64 unless a name says otherwise, and
"flat" means of one axis. What both libraries spell alike (`abs`, `@`, slices, `reshape`) the codecs write directly.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

NOT_FINITE = 2000  # what stands for the exponent of an infinity or a NaN; float16 holds it exactly
NOTHING = -2000  # the exponent of zero
BLOCK = 1 << 16  # elements; a dot product in single precision of many more loses digits


def exponent_of(largest: float) -> int:
    """The least e with `largest` <= 2 ** e, an integer that float16 holds exactly."""
    if not math.isfinite(largest):
        return NOT_FINITE
    if largest == 0.0:
        return NOTHING
    mantissa, exponent = math.frexp(largest)
    return exponent - (mantissa == 0.5)


class Verbs(Protocol):
    """The array operations that codecs need, of any array library."""

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        """Zeros of the type and on the device of `like`."""

    def empty(self, like: Any) -> Any:
        """An array like `like`, whatever is in it."""

    def seeded(self, shape: Sequence[int], seed: int, like: Any) -> Any:
        """Standard normal numbers, the same for the same seed on every rank and in every library."""

    def write(self, array: Any, values: Sequence[float]) -> None:
        """Copies numbers into a flat array, without waiting for what its device is at."""

    def largest(self, array: Any) -> float:
        """max |x|; 0 of nothing; NaN where there is a NaN."""

    def exponent(self, array: Any) -> Any:
        """`exponent_of` max |x|, a number or a scalar on the array's device."""

    def all_finite(self, arrays: Sequence[Any]) -> bool:
        """Whether no array holds an infinity or a NaN."""

    def inverse(self, numbers: Any, least: Any) -> Any:
        """1 / x, and 0 where x is at most `least`."""

    def squared_norm(self, array: Any) -> Any:
        """The sum of squares of a flat array in float64, a scalar where the array is: differences of such are small."""

    def squares(self, array: Any) -> float:
        """The sum of squares of a flat array, to about four digits where it is of float32, for a fifth of what
        `squared_norm` costs."""

    def difference_into(self, array: Any, left: Any, right: Any) -> None:
        """array = left - right; it may be one of them."""

    def row_largest(self, rows: Any) -> Any:
        """max |x| of each row; NaN where there is a NaN."""

    def rounded(self, array: Any) -> Any:
        """int8 of the nearest integers; 0 where there is none. May overwrite `array`."""

    def half(self, array: Any) -> Any:
        """float16."""

    def nan_for_infinite(self, array: Any) -> Any:
        """`array`, NaN where it was infinite."""

    def single(self, array: Any) -> Any:
        """float32."""

    def widened(self, array: Any, like: Any) -> Any:
        """`array`, in the type of `like`."""

    def brain_bits(self, array: Any) -> Any:
        """int16 with the bits of the nearest bfloat16 (ties to even), NaN kept."""

    def from_brain_bits(self, bits: Any, like: Any) -> Any:
        """The values that bf16 bits from `brain_bits` stand for, in the type of `like`."""

    def as_bytes(self, array: Any) -> Any:
        """The bytes of an array of rows: uint8 of shape [rows, bytes of a row]."""

    def from_bytes(self, rows: Any, kind: str) -> Any:
        """The reverse of `as_bytes`, for `kind` "int8", "int16", "int32", "float32" or "float64"."""

    def beside(self, parts: Sequence[Any]) -> Any:
        """Rows of all parts, one beside the other."""

    def joined(self, parts: Sequence[Any]) -> Any:
        """Flat arrays, one after the other."""

    def top(self, array: Any, count: int) -> Any:
        """int32 indices of the `count` largest |x| of a flat array, ascending; NaN counts as largest."""

    def take(self, array: Any, indices: Any) -> Any:
        """array[indices]."""

    def clear_at(self, array: Any, indices: Any) -> None:
        """array[indices] = 0."""

    def add_at(self, array: Any, indices: Any, values: Any) -> None:
        """array[indices] += values, no index twice."""

    def product_into(self, matrix: Any, left: Any, right: Any) -> None:
        """matrix = left @ right.T."""

    def subtract_product(self, matrix: Any, left: Any, right: Any) -> None:
        """matrix -= left @ right.T."""

    def copied(self, array: Any) -> Any:
        """A copy."""

    def like(self, array: Any, like: Any) -> Any:
        """`array`, of this library or of numpy, in the type and on the device of `like`."""


class NumpyVerbs:
    """The operations that codecs need, for numpy arrays."""

    def zeros(self, shape: Sequence[int], like: np.ndarray) -> np.ndarray:
        return np.zeros(tuple(shape), dtype=like.dtype)

    def empty(self, like: np.ndarray) -> np.ndarray:
        return np.empty_like(like)

    def seeded(self, shape: Sequence[int], seed: int, like: np.ndarray) -> np.ndarray:
        return np.random.RandomState(seed).standard_normal(tuple(shape)).astype(like.dtype)

    def write(self, array: np.ndarray, values: Sequence[float]) -> None:
        array[...] = values

    def exponent(self, array: np.ndarray) -> int:
        return exponent_of(self.largest(array))

    def all_finite(self, arrays: Sequence[np.ndarray]) -> bool:
        return all(math.isfinite(self.largest(array)) for array in arrays)

    def inverse(self, numbers: np.ndarray, least: np.ndarray) -> np.ndarray:
        inverse = np.zeros_like(numbers)
        np.divide(1.0, numbers, out=inverse, where=~(numbers <= least))
        return inverse

    def largest(self, array: np.ndarray) -> float:
        return float(np.abs(array).max()) if array.size else 0.0

    def squared_norm(self, array: np.ndarray) -> float:
        return float(np.einsum("i,i->", array, array, dtype=np.float64))

    def squares(self, array: np.ndarray) -> float:
        blocks = [array[at : at + BLOCK] for at in range(0, len(array), BLOCK)]
        return sum(float(np.dot(block, block)) for block in blocks)

    def difference_into(self, array: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        np.subtract(left, right, out=array)

    def row_largest(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(np.abs(rows).max(axis=1))

    def rounded(self, array: np.ndarray) -> np.ndarray:
        return np.nan_to_num(np.rint(array), nan=0.0, posinf=0.0, neginf=0.0).astype(np.int8)

    def half(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return array.astype(np.float16)

    def nan_for_infinite(self, array: np.ndarray) -> np.ndarray:
        return np.where(np.isinf(array), array.dtype.type(np.nan), array)

    def single(self, array: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return array.astype(np.float32)

    def widened(self, array: np.ndarray, like: np.ndarray) -> np.ndarray:
        return array.astype(like.dtype)

    def brain_bits(self, array: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        return np.where(np.isnan(array), 0x7FC0, nearest).astype(np.uint16).view(np.int16)

    def from_brain_bits(self, bits: np.ndarray, like: np.ndarray) -> np.ndarray:
        wide = bits.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(like.dtype, copy=False)

    def as_bytes(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).view(np.uint8)

    def from_bytes(self, rows: np.ndarray, kind: str) -> np.ndarray:
        return np.ascontiguousarray(rows).view(np.dtype(kind))

    def beside(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=1)

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def top(self, array: np.ndarray, count: int) -> np.ndarray:
        if count >= array.size:
            return np.arange(array.size, dtype=np.int32)
        return np.sort(np.argpartition(np.abs(array), array.size - count)[array.size - count :]).astype(np.int32)

    def take(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return np.asarray(array[indices])

    def clear_at(self, array: np.ndarray, indices: np.ndarray) -> None:
        array[indices] = 0

    def add_at(self, array: np.ndarray, indices: np.ndarray, values: np.ndarray) -> None:
        array[indices] += values

    def product_into(self, matrix: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        np.matmul(left, right.T, out=matrix)

    def subtract_product(self, matrix: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        matrix -= left @ right.T

    def copied(self, array: np.ndarray) -> np.ndarray:
        return array.copy()

    def like(self, array: Any, like: np.ndarray) -> np.ndarray:
        return np.array(array, dtype=like.dtype)


_NUMPY = NumpyVerbs()


def verbs_of(array: Any) -> Verbs:
    """The verbs for `array`, found from its type; no framework is imported that is not there already."""
    if isinstance(array, np.ndarray):
        return _NUMPY
    if type(array).__module__.split(".")[0] == "torch":
        return cast(Verbs, importlib.import_module("hvd_hetero.codecs.torch_verbs").VERBS)
    raise TypeError(f"Expected a numpy array or a torch tensor. Received: {type(array)}.")


def rows_of(array: Any, width: int) -> Any:
    """A flat array as rows of `width`, zeros filling the last one."""
    missing = -len(array) % width
    if missing:
        verbs = verbs_of(array)
        array = verbs.joined([array, verbs.zeros([missing], array)])
    return array.reshape(-1, width)


def arrays_like(like: Any, state: Any) -> Any:
    """A state whose arrays, at any depth, are of the library, the type and the device of `like`."""
    if isinstance(state, Mapping):
        return {key: arrays_like(like, value) for key, value in state.items()}
    return verbs_of(like).like(state, like) if hasattr(state, "shape") else state
