"""One model's statistics from those of all ranks: what layers gather from the samples that they see."""

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
    """The merged `means`, `moments` (one after the other) and `numbers`, in this order, the same on all ranks.
    A collective call.

    Means are weighted by `weight` (this rank's samples), where no rank has any by `otherwise`, and are of the ranks on
    which they are finite, if there is any. Moments are pairs of a mean and a variance; the variance becomes that of all
    samples together: the mean of E[x^2] = variance + mean^2, less the square of the merged mean. Whole numbers become
    the largest.
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
    """Weighted means over the ranks. After an array of `pairs` comes its second moment, and both are of the same ranks.
    """
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
            finite[index] = finite[index + 1]  # which is finite where the mean is, or nowhere
        counts = np.concatenate([one.reshape(-1) for one in finite]) * weight
        sums = np.concatenate([counts, np.where(counts, flat, 0.0) * counts])
        counts, sums = engine.allreduce_async(sums, name=f"{name}.finite").wait().reshape(2, -1)
        means[counts > 0] = sums[counts > 0] / counts[counts > 0]
    return _in_shapes(means, arrays)


def _in_shapes(flat: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    ends: np.ndarray = np.cumsum([np.size(array) for array in like])[:-1]
    return [part.reshape(np.shape(array)) for part, array in zip(np.split(flat, ends), like, strict=True)]
