"""Merges over all ranks what is gathered from their samples: statistics of layers (running means and variances), and
the moments of optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hvd_hetero.engine import payload
from hvd_hetero.engine.port import Engine


@dataclass(frozen=True)
class Statistic:
    """The values of one tensor, as `merge_statistics` reads and overwrites them.

    Attributes:
        length: how many there are, the same on all ranks.
        read: returns them as a flat array, which is overwritten piece by piece; it may share the tensor's memory.
        write: takes that array, when all of it is overwritten.
    """

    length: int
    read: Callable[[], np.ndarray]
    write: Callable[[np.ndarray], object]


Piece = list[tuple[np.ndarray, ...]]  # flat views of equal lengths; of each statistic, or pair of them, one tuple


def merge_statistics(
    means: Sequence[Statistic],
    moments: Sequence[tuple[Statistic, Statistic]],
    numbers: Sequence[Statistic],
    *,
    weight: float,
    otherwise: float = 1.0,
    engine: Engine,
    name: str,
) -> None:
    """Replaces this rank's statistics by those of all ranks together, the same on all of them. A collective call.

    What is exchanged, and the memory that this takes, are pieces of `payload.PIECE_BYTES`; and one tensor at a time is
    held as an array. If an operation fails, a part of the statistics may be merged.

    Args:
        means: floating-point statistics that are means; the result is their weighted mean. A value that is not finite
            on some ranks is the mean over the ranks on which it is finite, if there are any.
        moments: pairs (mean, variance); the result is those of all samples together. The merged variance is the
            weighted mean of E[x^2] = variance + mean^2, less the square of the merged mean.
        numbers: integers, such as counters; the result is the largest over the ranks.
        weight: the weight of this rank, its number of samples.
        otherwise: the weight of this rank if `weight` is 0 on all ranks; if it is 0 on all ranks as well, all weigh 1.
        engine: the ranks.
        name: prefix of the operations' names, the same on all ranks.

    Raises:
        `engine.failure`: on every rank, if the lengths of the statistics differ.
    """
    averaged = [*((each,) for each in means), *moments]
    # An empty array whose shape holds the lengths: the ranks compare shapes, and cut at the same places.
    lengths = [sum(each.length for each in statistics) for statistics in (chain.from_iterable(averaged), numbers)]
    engine.broadcast_async(np.zeros((0, *lengths)), root=0, name=f"{name}.lengths").wait()
    if averaged:
        own, whole = _weights((weight, otherwise), engine, f"{name}.mean.weight")
        for piece in _pieces(averaged):
            _average(piece, own, whole, engine, f"{name}.mean")
    for piece in _pieces([(each,) for each in numbers]):
        flat = np.concatenate([values for (values,) in piece]).astype(np.int64, copy=False)
        _put(engine.allreduce_async(flat, name=f"{name}.most", op="max").wait(), piece)


def _weights(weights: tuple[float, ...], engine: Engine, name: str) -> tuple[float, float]:
    """Returns this rank's weight, and the sum over the ranks: all weigh by the first of `weights` whose sum is above 0,
    or 1."""
    choices = np.array([*weights, 1.0])
    wholes = engine.allreduce_async(choices.copy(), name=name).wait()
    return next((w, float(all_w)) for w, all_w in zip(choices.tolist(), wholes, strict=True) if all_w > 0)


def _pieces(groups: Sequence[tuple[Statistic, ...]]) -> Iterator[Piece]:
    """Yields the values of statistics piece by piece, as views which the caller overwrites. Those of one group are of
    equal lengths.

    A piece holds what one operation carries, at eight bytes each. What is read is written back after the last piece
    that holds any of it.
    """
    most = max(payload.PIECE_BYTES // 8, 2)
    piece: Piece = []
    room, ended = most, list[tuple[Statistic, np.ndarray]]()
    for group in groups:
        arrays, at = [each.read() for each in group], 0
        while at < group[0].length:
            if room < len(group):
                yield piece
                _write(ended)
                piece, room, ended = [], most, []
            end = min(at + room // len(group), group[0].length)
            piece.append(tuple(array[at:end] for array in arrays))
            room -= (end - at) * len(group)
            at = end
        ended += zip(group, arrays, strict=True)
    if piece:
        yield piece
    _write(ended)


def _write(ended: Sequence[tuple[Statistic, np.ndarray]]) -> None:
    for statistic, array in ended:
        statistic.write(array)


def _average(piece: Piece, weight: float, whole: float, engine: Engine, name: str) -> None:
    """Overwrites a piece with the weighted means over the ranks; of two arrays, the second is the variance.

    Args:
        weight: of this rank.
        whole: the sum of all ranks' weights.
    """
    flat = np.empty(sum(len(values) for group in piece for values in group))
    parts = list(_parts(flat, piece))
    for views, group in zip(parts, piece, strict=True):
        for view, values in zip(views, group, strict=True):
            view[...] = values
        for square in views[1:]:
            square += views[0] ** 2
    # A weight of 0 leaves nothing of what a rank has, not even a NaN.
    own = flat * weight if weight else np.zeros_like(flat)
    means = engine.allreduce_async(own, name=name).wait() / whole
    if not np.isfinite(means).all():  # the same on all ranks
        finite = np.isfinite(flat)
        for views in _parts(finite, piece):
            for square in views[1:]:
                views[0][...] = square  # the second moment is finite only where the mean is, too
        mine = finite * weight
        sums = np.where(mine, flat, 0.0) * mine
        counts = engine.allreduce_async(mine, name=f"{name}.finite").wait()
        sums = engine.allreduce_async(sums, name=f"{name}.finite.sum").wait()
        means[counts > 0] = sums[counts > 0] / counts[counts > 0]
    for views in _parts(means, piece):
        for square in views[1:]:
            square[...] = np.maximum(square - views[0] ** 2, 0.0)
    _put(means, piece)


def _parts(flat: np.ndarray, piece: Piece) -> Iterator[tuple[np.ndarray, ...]]:
    """Yields views of a flat array that has as many values as a piece, in the form of the piece."""
    at = 0
    for group in piece:
        length = len(group[0])
        yield tuple(flat[at + index * length : at + (index + 1) * length] for index in range(len(group)))
        at += length * len(group)


def _put(flat: np.ndarray, piece: Piece) -> None:
    """Writes a flat array into a piece, rounded to its types."""
    with np.errstate(over="ignore"):  # of a variance, that a narrow type cannot hold
        for views, group in zip(_parts(flat, piece), piece, strict=True):
            for view, values in zip(views, group, strict=True):
                values[...] = view
