"""Mean and variance over the rows of all ranks, and their gradient, for batch normalisation.

Rank i has n_i rows of C features, with mean m_i and sum of squared distances from it M2_i (two passes over its own
rows, so that nothing cancels there). One all-reduce in float64 gives the following; a mean of 1e4 standard deviations
costs 8 of its 16 digits.

    n = sum n_i,    mean = sum n_i m_i / n,    variance = sum (M2_i + n_i m_i^2) / n - mean^2

Rank i's loss is a mean over b_i terms (its samples, or as many as the balancer was told), and the gradient exchange
weights its gradient by b_i (see `weighted_exchange`). The backward pass through a sum over ranks therefore has to
weight the ranks' gradients g_j with respect to the sum in the same way. In units of rank i's loss, the result is

    sum_j b_j g_j / b_i

The formulae of weighted batch normalisation follow from these two by the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hvd_hetero.engine.port import Engine


class Merged(NamedTuple):
    """Mean and variance of each feature over the rows of all ranks."""

    mean: Any
    variance: Any  # biased: divided by the number of rows
    rows: Any  # the number of rows on all ranks, a scalar


def merged(sums: Any, features: int, *, at_least: Callable[[Any, float], Any]) -> Merged:
    """Mean and variance from the sum over the ranks; zeros if there is no row.

    Args:
        sums: the vector [n, n m, M2 + n m^2] of 1 + 2 `features` elements, summed over the ranks.
        features: the number of features C.
        at_least: `at_least(x, low)` is the larger of x and low, element by element.
    """
    divisor = at_least(sums[0], 1.0)
    mean = sums[1 : 1 + features] / divisor
    return Merged(mean, at_least(sums[1 + features :] / divisor - mean * mean, 0.0), sums[0])


class RowSum:
    """A sum of vectors over the ranks with its backward pass, for one layer. Both overwrite their argument. All ranks
    make those of all layers in the same order.

    Args:
        counts: returns whether this rank's rows count in the present batch; False if the batch is a placeholder of a
            rank without a sample, and holds another rank's.
        terms: returns the number of terms that this rank's loss is a mean over; None: as many as its samples. It is
            called in the backward pass.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        counts: Callable[[], bool] = lambda: True,
        terms: Callable[[], float | None],
    ) -> None:
        self._engine, self._counts, self._terms = engine, counts, terms
        self._name = engine.unique("hvd_hetero.sync_batch_norm.")

    def forth(self, vector: Any) -> Any:
        """The forward pass: the sum of `vector` over the ranks. A collective call."""
        if not self._counts():
            vector[...] = 0.0
        return self._engine.allreduce_async(vector, name=f"{self._name}.forth").wait()

    def back(self, gradient: Any, samples: float) -> Any:
        """The backward pass: the gradient of this rank's loss with respect to its vector. A collective call.

        Args:
            gradient: of this rank's loss, with respect to the sum.
            samples: the number of samples of this rank's batch.
        """
        told = self._terms()
        terms = samples if told is None else told
        if terms and self._counts():
            gradient *= terms
        else:
            terms, gradient[...] = 0.0, 0.0  # overwritten, as 0 times a NaN is a NaN
        total = self._engine.allreduce_async(gradient, name=f"{self._name}.back").wait()
        total *= 1.0 / terms if terms else 0.0
        return total
