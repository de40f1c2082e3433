"""Merges the statistics that layers gather from their samples (as running means and variances) over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_hetero.engine.port import Engine


def merged_statistics(
    means: Sequence[np.ndarray],
    moments: Sequence[tuple[np.ndarray, np.ndarray]],
    numbers: Sequence[np.ndarray],
    *,
    weight: float,
    otherwise: float = 1.0,
    engine: Engine,
    name: str,
) -> list[np.ndarray]:
    """Merges this rank's statistics with those of all ranks. A collective call.

    Args:
        means: arrays of means; the result is their weighted mean. A value that is not finite on some ranks is the mean
            over the ranks on which it is finite, if there are any.
        moments: pairs (mean, variance); the result is those of all samples together. The merged variance is the
            weighted mean of E[x^2] = variance + mean^2, less the square of the merged mean.
        numbers: arrays of integers, such as counters; the result is the largest over the ranks.
        weight: the weight of this rank, its number of samples.
        otherwise: the weight of this rank if `weight` is 0 on all ranks; if it is 0 on all ranks as well, all weigh 1.
        engine: the ranks.
        name: prefix of the operations' names, the same on all ranks.

    Returns:
        The merged means, then mean and variance of each pair, then the numbers, the same on all ranks.
    """
    exact = [np.asarray(mean, dtype=np.float64) for mean in means]
    for mean, variance in moments:
        mean = np.asarray(mean, dtype=np.float64)
        exact += [mean, np.asarray(variance, dtype=np.float64) + mean**2]
    pairs = range(len(means), len(exact), 2)
    parts = _summed(exact, (weight, otherwise), engine, f"{name}.mean", pairs=pairs) if exact else []
    merged, rest = parts[: len(means)], parts[len(means) :]
    for mean, square in zip(rest[::2], rest[1::2], strict=True):
        merged += [mean, np.maximum(square - mean**2, 0.0)]
    largest: list[np.ndarray] = []
    if numbers:
        flat = np.concatenate([np.asarray(number, dtype=np.int64).reshape(-1) for number in numbers])
        largest = _in_shapes(engine.allreduce_async(flat, name=f"{name}.most", op="max").wait(), numbers)
    return [*merged, *largest]


def _summed(
    arrays: Sequence[np.ndarray], weights: tuple[float, ...], engine: Engine, name: str, *, pairs: Sequence[int]
) -> list[np.ndarray]:
    """Returns the weighted means over the ranks, which all weigh by the first of `weights` whose sum is above 0, or 1.
    `pairs`: indices of arrays whose next one is their second moment; both are averaged over the same ranks."""
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    choices = np.array([*weights, 1.0])
    wholes = engine.allreduce_async(choices.copy(), name=f"{name}.weight").wait()
    weight, whole = next((w, float(all_w)) for w, all_w in zip(choices.tolist(), wholes, strict=True) if all_w > 0)
    # A weight of 0 leaves nothing of what a rank has, not even a NaN.
    own = flat * weight if weight else np.zeros_like(flat)
    means = engine.allreduce_async(own, name=name).wait() / whole
    if not np.isfinite(means).all():  # the same on all ranks
        finite = list(map(np.isfinite, arrays))
        for index in pairs:
            finite[index] = finite[index + 1]  # the second moment is finite only where the mean is, too
        counts = np.concatenate([one.reshape(-1) for one in finite]) * weight
        sums = np.concatenate([counts, np.where(counts, flat, 0.0) * counts])
        counts, sums = engine.allreduce_async(sums, name=f"{name}.finite").wait().reshape(2, -1)
        means[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return _in_shapes(means, arrays)


def _in_shapes(flat: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    ends: np.ndarray = np.cumsum([np.size(array) for array in like])[:-1]
    return [part.reshape(np.shape(array)) for part, array in zip(np.split(flat, ends), like, strict=True)]
