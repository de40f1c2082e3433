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


def places(rows: int, nbytes: int = 0) -> list[int]:
    """Which of so many rows, of so many bytes together, are looked at: evenly spaced ones."""
    some = min(rows, ROWS, BYTES * rows // nbytes if nbytes else ROWS)
    return np.linspace(0, rows - 1, max(1, some)).astype(np.int64).tolist() if rows else []


def checksum(arrays: Iterable[Any], start: int = 0) -> int:
    """A checksum of whole numbers such as labels, tokens and indices, in arrays with samples along the first axis, or
    in lists of samples; where there are many, of evenly spaced rows of them. It goes on from `start`.

    Fractions are left out, and so are pictures (bytes in two dimensions and more): hosts may have computed or decoded
    them in other versions of a library, which round differently.
    """
    for some in map(_some_rows, arrays):
        picture = some.dtype.itemsize == 1 and some.ndim > 2
        if some.dtype.kind not in "biu" or picture or not some.size:
            continue
        start = zlib.crc32(some.astype(some.dtype.newbyteorder("<")).tobytes(), start)
    return start


def checksum_of_one(leaf: Any, start: int = 0) -> int:
    """The same of a single sample's array, number or text; of an array of fractions, its shape. Others have none."""
    if isinstance(leaf, int):  # this and text quickly: a sample may be a list of thousands
        leaf = b"%d " % leaf
    elif isinstance(leaf, str):
        leaf = leaf.encode(errors="replace")
    if isinstance(leaf, bytes):
        return zlib.crc32(leaf, start)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biu":
        leaf = np.array(leaf.shape)
    return checksum([np.asarray(leaf)[None]], start) if isinstance(leaf, (np.ndarray, np.generic)) else start


def _some_rows(rows: Any) -> np.ndarray:
    """Those that are looked at; none of what makes no array. Chosen first: a range may be of a billion indices."""
    if isinstance(rows, np.ndarray):
        return rows[places(len(rows), rows.nbytes)]
    try:
        return np.asarray([rows[place] for place in places(len(rows))])
    except (TypeError, ValueError, LookupError):  # as of rows of unlike lengths
        return np.empty(0)
