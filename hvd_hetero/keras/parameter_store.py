"""Reads and writes variables as flat fragments, for merges of local steps and for the guard of equal parameters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvd_hetero.policy.fragments import fragments_by_kind

from .layout import Spec


class ParameterStore:
    """Reads and writes a rank's variables as flat fragments. All variables of a fragment have one type, and go through
    a codec all or none.

    Args:
        form: what is particular to the back end, `gradient_tensorflow` or `gradient_torch`.
        count: fragments of each kind; None: many small ones.
        lossy: whether a variable of a shape goes through a codec.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        form: Any,
        *,
        count: int | None = None,
        lossy: Callable[..., bool] = lambda shape: False,
    ) -> None:
        self._form = form
        specs = [Spec(tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]
        kinds = [(spec.wire, lossy(spec.shape)) for spec in specs]
        fragments = fragments_by_kind(kinds, [spec.length for spec in specs], count)
        self._members = [[variables[index] for index in chosen] for chosen in fragments]
        self._specs = [[specs[index] for index in chosen] for chosen in fragments]
        self.lossy: list[bool] = [kinds[chosen[0]][1] for chosen in fragments]
        self.narrow = any(spec.dtype != spec.wire for spec in specs)

    def shapes(self, index: int) -> list[tuple[int, ...]]:
        return [spec.shape for spec in self._specs[index]]

    def empty(self, index: int, tail: int) -> Any:
        specs = self._specs[index]
        return self._form.zeros(sum(spec.length for spec in specs) + tail, specs[0].wire)

    def control(self, length: int) -> Any:
        return self._form.zeros(length, "float64")

    def checksum(self, index: int) -> int:
        found = 0
        for variable in self._members[index]:
            found = zlib.crc32(bits_of(variable), found)
        return found

    def read(self, index: int, into: Any = None) -> Any:
        return self._form.flat(self._members[index], self._specs[index][0].wire, into)

    def write(self, index: int, flat: Any) -> None:
        at = 0
        for variable, spec in zip(self._members[index], self._specs[index], strict=True):
            self._form.assign(variable, flat[at : at + spec.length].reshape(spec.shape))
            at += spec.length

    def shift(self, index: int, by: Any) -> None:
        at = 0
        for variable, spec in zip(self._members[index], self._specs[index], strict=True):
            by[at : at + spec.length] += self._form.flat([variable], spec.wire)
            at += spec.length
        self.write(index, by)

    def blend(self, index: int, flat: Any, part: float) -> None:
        own = self.read(index)
        own -= flat
        own *= part
        own += flat
        self.write(index, own)


def bits_of(variable: Any) -> memoryview:
    """The bytes of a variable's values."""
    values: np.ndarray = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
    return values.reshape(-1).view(np.uint8).data
