"""Whether ranks have the same data, without sending it.

What is dealt by number has to be the same samples on all ranks. A part of them on each rank, or a split that each rank
drew by itself, goes unnoticed where lengths agree: then samples are used twice, or never, or in validation as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

ROWS, BYTES = 1024, 1 << 20  # of one array, at most: a look at the data is to cost no time


def checksum(arrays: Iterable[Any]) -> int:
    """A checksum of whole numbers such as labels, tokens and indices, in arrays with samples along the first axis, or
    of evenly spaced rows of them.

    Fractions are left out, and so are pictures (bytes in two dimensions and more): hosts may have computed or decoded
    them in other versions of a library, which round differently.
    """
    value = 0
    for array in map(np.asarray, arrays):
        picture = array.dtype.itemsize == 1 and array.ndim > 2
        if array.dtype.kind not in "biu" or picture or not array.size:
            continue
        rows = max(1, min(len(array), ROWS, BYTES * len(array) // array.nbytes))
        some = array[np.linspace(0, len(array) - 1, rows).astype(np.int64)]
        value = zlib.crc32(some.astype(some.dtype.newbyteorder("<")).tobytes(), value)
    return value
