"""Mean and variance over the rows of all ranks, and their gradient; for batch normalisation.

Rank i has n_i rows of C features, with mean m_i and sum of squared distances from it M2_i (two passes over its own
rows, so that nothing cancels there). One all-reduce of float64, in which a mean of 1e4 standard deviations costs 8 of
16 digits, brings

    n = sum n_i,    mean = sum n_i m_i / n,    variance = sum (M2_i + n_i m_i^2) / n - mean^2

A rank's loss is a mean over b_i terms (its samples, or as many as the balancer was told), and its gradient will be
weighted by b_i (see `weighted`). What goes back through a sum over ranks is therefore weighted in the same way: in
units of rank i's loss it is

    sum_j b_j g_j / b_i

FORMULAE of weighted batch normalisation follow from these two by the chain rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hvd_hetero.engine.port import Engine


class Merged(NamedTuple):
    """The moments of all ranks' rows."""

    mean: Any
    variance: Any  # biased: divided by the number of rows
    rows: Any


def merged(sums: Any, features: int, *, at_least: Callable[[Any, float], Any]) -> Merged:
    """Mean and variance from the vector [n, n m, M2 + n m^2] summed over the ranks; zeros where there is no row.

    `at_least(x, low)` is the larger of x and low, element by element.
    """
    divisor = at_least(sums[0], 1.0)
    mean = sums[1 : 1 + features] / divisor
    return Merged(mean, at_least(sums[1 + features :] / divisor - mean * mean, 0.0), sums[0])


class RowSum:
    """Sums vectors over the ranks, forth, and weighted gradients with respect to them, back. Both in place.

    Args:
        name: of the operations; the same on all ranks, and different for each layer.
        counts: whether this rank's rows count now; False for a batch that holds another rank's sample.
        terms: over how many terms this rank's loss is a mean, asked on the way back; None: its samples.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        counts: Callable[[], bool] = lambda: True,
        terms: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._engine, self._name, self._counts, self._terms = engine, name, counts, terms

    def forth(self, vector: Any) -> Any:
        """`vector` summed over the ranks."""
        if not self._counts():
            vector[...] = 0.0
        return self._engine.allreduce_async(vector, name=f"{self._name}.forth").wait()

    def back(self, gradient: Any, samples: float) -> Any:
        """The gradient with respect to this rank's vector, from that with respect to the sum on all ranks.

        `samples`: of this rank's batch.
        """
        told = self._terms()
        terms = samples if told is None else told
        if terms and self._counts():
            gradient *= terms
        else:
            terms, gradient[...] = 0.0, 0.0  # not even a NaN
        total = self._engine.allreduce_async(gradient, name=f"{self._name}.back").wait()
        total *= 1.0 / terms if terms else 0.0
        return total
