"""The control vector of a merge: what ranks tell each other with what they have done, at no message of its own.

It is summed over the ranks, as `control`'s is, which it carries at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_hetero.policy.staleness import Contribution, factor

from . import control

WEIGHT, REACH, SPREAD, FINISHING, HEAD = range(5)
ROWS = 4  # of each rank: steps, samples, and its position in two parts, which float32 holds exactly
PART = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Said:
    """The sum of all ranks' vectors, taken apart; in lists, index i is rank i."""

    sums: tuple[float, float, float]  # of weights, of reaches, and of `Contribution.spread`
    finishing: int  # ranks that are
    steps: list[float]
    samples: list[float]
    positions: list[float]  # the global batch that each was at
    balancer: list[float]


def length(ranks: int) -> int:
    """The number of elements."""
    return HEAD + ROWS * ranks + control.length(ranks)


def pack(
    contribution: Contribution,
    *,
    spread: float,
    finishing: bool,
    own: tuple[float, float, int],
    rank: int,
    ranks: int,
    balancer: Sequence[float],
) -> list[float]:
    """One rank's vector; `own`: its steps, samples and position, `balancer`: what its balancer has to say."""
    vector = [*contribution.beside, spread, float(finishing)]
    steps, samples, position = own
    for value in (steps, samples, *divmod(position, PART)):
        row = [0.0] * ranks
        row[rank] = float(value)
        vector += row
    return [*vector, *balancer]


def unpack(total: Sequence[float], *, ranks: int) -> Said:
    """Takes the sum of all ranks' vectors apart."""
    rows = [list(total[HEAD + row * ranks : HEAD + (row + 1) * ranks]) for row in range(ROWS)]
    return Said(
        sums=(total[WEIGHT], total[REACH], total[SPREAD]),
        finishing=round(total[FINISHING]),
        steps=rows[0],
        samples=rows[1],
        positions=[PART * above + below for above, below in zip(rows[2], rows[3], strict=True)],
        balancer=list(total[HEAD + ROWS * ranks :]),
    )


def scale(total: Sequence[float]) -> float:
    """The factor that makes the merged delta of the sum of weighted deltas."""
    return factor(total[WEIGHT : REACH + 1])
