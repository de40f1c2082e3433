"""The array operations ("verbs") that codecs use, so that each codec is written once for numpy and torch.

This module has them for numpy, `torch_verbs` for torch. Arrays are float32 or float64 unless a name says otherwise, and
a flat array has one axis. Operations that both libraries spell alike (`abs`, `@`, slices, `reshape`) are not among
them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

NOT_FINITE = 2000  # stands for the exponent of an infinity or a NaN; float16 holds it exactly
NOTHING = -2000  # stands for the exponent of zero
BLOCK = 1 << 16  # elements of a dot product in float32; one of many more loses digits


def exponent_of(largest: float) -> int:
    """Returns the least integer e with `largest` <= 2 ** e; `NOTHING` for 0, and `NOT_FINITE` for an infinity or a NaN.
    float16 holds all of these exactly."""
    if not math.isfinite(largest):
        return NOT_FINITE
    if largest == 0.0:
        return NOTHING
    mantissa, exponent = math.frexp(largest)
    return exponent - (mantissa == 0.5)


class Verbs(Protocol):
    """The array operations that codecs need, of any array library."""

    def zeros(self, shape: Sequence[int], like: Any) -> Any:
        """Returns zeros in the type and on the device of `like`."""

    def empty(self, like: Any) -> Any:
        """Returns an uninitialized array of the shape, the type and the device of `like`."""

    def seeded(self, shape: Sequence[int], seed: int, like: Any) -> Any:
        """Returns standard normal numbers, the same for the same seed on every rank and in every library."""

    def write(self, array: Any, values: Sequence[float]) -> None:
        """Copies numbers into a flat array, without waiting for work that is queued on its device."""

    def largest(self, array: Any) -> float:
        """Returns max |x|: 0 for an empty array, NaN if there is a NaN."""

    def exponent(self, array: Any) -> Any:
        """Returns `exponent_of(max |x|)`, as a number or as a scalar on the array's device."""

    def all_finite(self, arrays: Sequence[Any]) -> bool:
        """Whether no array holds an infinity or a NaN."""

    def inverse(self, numbers: Any, least: Any) -> Any:
        """Returns 1 / x for each number x, and 0 where x is at most `least`."""

    def squared_norm(self, array: Any) -> Any:
        """Returns the sum of squares of a flat array as a float64 scalar on its device. It needs that precision, since
        such sums are subtracted from each other."""

    def squares(self, array: Any) -> float:
        """Returns the sum of squares of a flat array, for float32 to about four digits, in a fifth of the time of
        `squared_norm`."""

    def difference_into(self, array: Any, left: Any, right: Any) -> None:
        """Writes `left` - `right` into `array`, which may be one of them."""

    def row_largest(self, rows: Any) -> Any:
        """Returns max |x| of each row; NaN if the row has a NaN."""

    def rounded(self, array: Any) -> Any:
        """Returns the nearest integers as int8, and 0 for an infinity or a NaN. May overwrite `array`."""

    def half(self, array: Any) -> Any:
        """Returns `array` as float16."""

    def nan_for_infinite(self, array: Any) -> Any:
        """Returns `array` with NaN in place of infinities."""

    def single(self, array: Any) -> Any:
        """Returns `array` as float32."""

    def widened(self, array: Any, like: Any) -> Any:
        """Returns `array` in the type of `like`."""

    def brain_bits(self, array: Any) -> Any:
        """Returns int16 with the bits of the nearest bfloat16 (ties to even). NaN stays NaN."""

    def from_brain_bits(self, bits: Any, like: Any) -> Any:
        """Returns the values of the bfloat16 bits from `brain_bits`, in the type of `like`."""

    def as_bytes(self, array: Any) -> Any:
        """Returns the bytes of an array of rows: uint8 of shape [rows, bytes of a row]."""

    def from_bytes(self, rows: Any, kind: str) -> Any:
        """Reverses `as_bytes`, for the type `kind`: "int8", "int16", "int32", "float32" or "float64"."""

    def beside(self, parts: Sequence[Any]) -> Any:
        """Concatenates arrays of rows along the second axis."""

    def joined(self, parts: Sequence[Any]) -> Any:
        """Concatenates flat arrays."""

    def top(self, array: Any, count: int) -> Any:
        """Returns the indices of the `count` largest |x| of a flat array, int32, ascending. NaN counts as largest."""

    def take(self, array: Any, indices: Any) -> Any:
        """Returns array[indices]."""

    def clear_at(self, array: Any, indices: Any) -> None:
        """array[indices] = 0."""

    def add_at(self, array: Any, indices: Any, values: Any) -> None:
        """array[indices] += values, where no index comes twice."""

    def product_into(self, matrix: Any, left: Any, right: Any) -> None:
        """matrix[...] = left @ right.T."""

    def subtract_product(self, matrix: Any, left: Any, right: Any) -> None:
        """matrix -= left @ right.T."""

    def copied(self, array: Any) -> Any:
        """Returns a copy."""

    def like(self, array: Any, like: Any) -> Any:
        """Returns a copy of `array`, of this library or of numpy, in the type and on the device of `like`."""


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
        bits = np.ascontiguousarray(self.single(array)).view(np.uint32)
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
    """Returns the operations for the type of `array`. Imports torch only if `array` is a torch tensor."""
    if isinstance(array, np.ndarray):
        return _NUMPY
    if type(array).__module__.split(".")[0] == "torch":
        return cast(Verbs, importlib.import_module("hvd_hetero.codecs.torch_verbs").VERBS)
    raise TypeError(f"Expected a numpy array or a torch tensor. Received: {type(array)}.")


def rows_of(array: Any, width: int) -> Any:
    """Returns a flat array as rows of `width` values, the last row padded with zeros."""
    missing = -len(array) % width
    if missing:
        verbs = verbs_of(array)
        array = verbs.joined([array, verbs.zeros([missing], array)])
    return array.reshape(-1, width)


def arrays_like(like: Any, state: Any) -> Any:
    """Returns `state` (a value, or nested mappings) with all arrays in the library, type and device of `like`."""
    if isinstance(state, Mapping):
        return {key: arrays_like(like, value) for key, value in state.items()}
    return verbs_of(like).like(state, like) if hasattr(state, "shape") else state
