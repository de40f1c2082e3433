"""Checksums of data sets, by which ranks find out whether they all have the same data.

A rank is dealt samples by their index, so an index has to mean the same sample on all ranks. If each rank has another
part of the data, or has drawn its own split, and lengths agree, samples are used twice, or never, or in validation as
well. The loaders of PyTorch and Keras compare these checksums when they are made.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

ROWS, BYTES = 1024, 1 << 20  # a checksum covers so much of one array at most, as it is to cost no time


def rows_covered(rows: int, nbytes: int = 0) -> list[int]:
    """Returns the evenly spaced indices of the rows that a checksum covers.

    Args:
        rows: the number of rows.
        nbytes: the bytes of all rows together; 0: unknown.
    """
    some = min(rows, ROWS, BYTES * rows // nbytes if nbytes else ROWS)
    return np.linspace(0, rows - 1, max(1, some)).astype(np.int64).tolist() if rows else []


def checksum(arrays: Iterable[Any], start: int = 0) -> int:
    """Returns a checksum (CRC-32) of the integers in `arrays`, such as labels, tokens and indices.

    Floating-point arrays are left out, and so are images (bytes with two or more dimensions per sample): hosts may have
    computed or decoded them with different versions of a library, which round differently.

    Args:
        arrays: arrays with samples along the first axis, or lists of samples. Of many rows, evenly spaced ones count.
        start: the checksum to go on from.
    """
    for some in map(_some_rows, arrays):
        picture = some.dtype.itemsize == 1 and some.ndim > 2
        if some.dtype.kind in "biu" and not picture:
            start = zlib.crc32(some.astype(some.dtype.newbyteorder("<")).tobytes(), start)
    return start


def checksum_of_one(leaf: Any, start: int = 0) -> int:
    """Returns a checksum of one array, number, text or bytes of a single sample, which goes on from `start`.

    Of an array of floating-point numbers the shape counts. Anything else changes nothing: `start` is returned.
    """
    if isinstance(leaf, int):  # integers and text take a short way: a sample may be a list of thousands
        leaf = b"%d " % leaf
    elif isinstance(leaf, str):
        leaf = leaf.encode(errors="replace")
    if isinstance(leaf, bytes):
        return zlib.crc32(leaf, start)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "biu":
        leaf = np.array(leaf.shape)
    return checksum([np.asarray(leaf)[None]], start) if isinstance(leaf, (np.ndarray, np.generic)) else start


def _some_rows(rows: Any) -> np.ndarray:
    """Returns the rows that a checksum covers, as an array; an empty one if they make none.

    Rows are chosen before they become an array, as `rows` may be a range of a billion indices.
    """
    if isinstance(rows, np.ndarray):
        return rows[rows_covered(len(rows), rows.nbytes)]
    try:
        return np.asarray([rows[place] for place in rows_covered(len(rows))])
    except (TypeError, ValueError, LookupError):  # such as rows of different lengths
        return np.empty(0)
